"""Each cell of the capability table, both ways: what it promises works, what it denies is refused
by name.
"""

import pathlib

import attn
import jax
import numpy as np
import pytest

from experiments import capabilities
from tests import conformance_test
from tests import harness
from tests.points import make
from tests.points import POINTS
from tests.points import qkv
from tests.rows import Row
from tests.rows import ROWS

README = pathlib.Path(__file__).parents[1] / 'README.md'
START, END = '<!-- capabilities -->\n', '\n<!-- /capabilities -->'


def dropout(row: Row) -> harness.Case:
  arrays = qkv() | {'dropout_rng': jax.random.key(0)}
  return make(row, arrays, 'dropout', options={'dropout_rate': .25})


# What each capability means, as one call.
CALLS = {
    'causal': POINTS['grouped heads'].build,
    'cross': POINTS['more keys than queries'].build,
    'grouped_heads': POINTS['one key head'].build,
    'key_mask': POINTS['padding mask [B, 1, 1, S]'].build,
    'dense_mask': POINTS['dense mask [B, 1, T, S]'].build,
    'bias': POINTS['bias [2, 4, 11, 11]'].build,
    'position_bias': POINTS['ALiBi'].build,
    'query_positions': POINTS['positions of queries alone'].build,
    'key_positions': POINTS['positions as traced arrays'].build,
    'segment_ids': POINTS['segments'].build,
    'dropout': dropout,
}
CELLS = [(name, capability) for name in attn.VARIANTS for capability in attn.CAPABILITIES]
POINT_OF = {point.build: name for name, point in POINTS.items()}
CHECKED = {param.id for param in conformance_test.CELLS}


def test_every_capability_has_a_call():
  assert set(CALLS) == set(attn.CAPABILITIES)


def row_of(name: str, capability: str) -> Row:
  """The row that tells: the causal one for 'causal', the others as plain as they come."""
  rows = [row for row in ROWS if row.name == name and row.is_causal == (capability == 'causal')]
  assert rows, f'{name} has no row for {capability}'
  return rows[0]


@pytest.mark.parametrize('name, capability', CELLS)
def test_cell(name, capability):
  row = row_of(name, capability)
  case = CALLS[capability](row)
  if capability not in attn.VARIANTS[name].supports:
    harness.assert_refused(case)
  elif f'{row.id}-{POINT_OF.get(CALLS[capability])}' in CHECKED:
    # conformance_test.py compares this very call with the oracle; here: that it is this call, and
    # that the harness compares it and does not expect a refusal.
    _, T, S, _ = case.sizes
    assert not harness.missing(case)
    assert T != S if capability == 'cross' else capability in case.needs
  elif capability == 'dropout':  # against the oracle in conformance_dropout_test.py; here: it drops
    without = case._replace(arrays=qkv(), options={})
    assert not np.allclose(harness.forward(case), harness.forward(without), atol=1e-3)
  else:
    assert harness.check(case) == 'compared'


def test_readme_holds_the_table():
  text = README.read_text()
  assert START in text and END in text, 'README.md lost the markers of its capability table'
  found = text[text.index(START) + len(START):text.index(END)]
  assert found.strip() == capabilities.table(), 'run python -m experiments.capabilities and paste'


def test_table_has_a_line_per_variant_and_refuses_unknown_capabilities(monkeypatch):
  lines = capabilities.table().splitlines()
  assert [line.split('|')[1].strip() for line in lines[2:]] == list(attn.VARIANTS)
  variant = attn.VARIANTS['vanilla']
  monkeypatch.setitem(attn.VARIANTS, 'vanilla',
                      variant._replace(supports=variant.supports | {'magic'}))
  with pytest.raises(ValueError, match='magic'):
    capabilities.table()
