"""The contract of attention: every row of attn.VARIANTS, every point, forward and gradient.

A point that a row does not support must be refused with NotImplementedError naming variant and
option; none is skipped. `python -m tests.conformance_count` runs this and the other conformance
modules and counts.
"""

import contextlib

import attn
import jax
import numpy as np
import pytest

from tests import harness
from tests.points import POINTS
from tests.rows import ROWS

CELLS = [
    pytest.param(row, name, id=f'{row.id}-{name}')
    for row in ROWS
    for name in POINTS
    if row.primary or POINTS[name].every_row
]
OPTIONS = [
    pytest.param(row, options, id=f'{row.id}-{options}')
    for row in ROWS
    for options in row.alternatives
]


def x64(case: harness.Case):
  return jax.enable_x64(True) if case.dtype == 'float64' else contextlib.nullcontext()


class TestConformance:

  @pytest.mark.parametrize('row, point', CELLS)
  @pytest.mark.parametrize('direction', ['forward', 'gradient'])
  def test_point(self, row, point, direction, record_property):
    case = POINTS[point].build(row)
    with x64(case):
      outcome = harness.check(case, direction)
    record_property('contract', (row.id, point, direction, outcome))

  @pytest.mark.parametrize('row, options', OPTIONS)
  def test_options(self, row, options, record_property):
    """Window, stride and block sizes: smaller and larger than the input, dividing nothing."""
    case = POINTS['padding mask [B, 1, 1, S]'].build(row)._replace(options=options)
    outcome = harness.check(case, 'gradient')  # and the output beside it
    for direction in ('forward', 'gradient'):
      record_property('contract', (row.id, f'options {options}', direction, outcome))


def test_rows_cover_the_table():
  assert {row.name for row in ROWS} == set(attn.VARIANTS)
  for name, variant in attn.VARIANTS.items():
    rows = [row for row in ROWS if row.name == name]
    assert any(not row.is_causal for row in rows)
    assert any(row.is_causal for row in rows) or 'causal' not in variant.supports
    used = set().union(
        *[set(row.options) | set(row.params(np.random.default_rng(0), 5, 4, 8)) for row in rows])
    assert set(variant.options) <= used | {'block_size'}, f'{name}: an option is never tried'
