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

SOME = {True: pytest.mark.sampled(3), False: pytest.mark.sampled(6)}  # False: another form of a row
CELLS = [
    pytest.param(row, name, id=f'{row.id}-{name}', marks=SOME[row.primary])
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


def note(record_property, row, point: str, outcome: str) -> None:
  for direction in ('forward', 'gradient'):
    record_property('contract', (row.id, point, direction, outcome))


class TestConformance:

  @pytest.mark.parametrize('row, point', CELLS)
  def test_point(self, row, point, record_property):
    case = POINTS[point].build(row)
    with x64(case):
      note(record_property, row, point, harness.check(case))

  @pytest.mark.sampled(8)
  @pytest.mark.parametrize('row, options', OPTIONS)
  def test_options(self, row, options, record_property):
    """Window, stride and block sizes: smaller and larger than the input, dividing nothing."""
    case = POINTS['padding mask [B, 1, 1, S]'].build(row)._replace(options=options)
    note(record_property, row, f'options {options}', harness.check(case))

  @pytest.mark.sampled(3)
  @pytest.mark.parametrize('row', ROWS, ids=lambda row: row.id)
  def test_output_without_a_gradient_is_the_same(self, row):
    """The program above computes both; this is the one that a caller without jax.grad runs."""
    case = POINTS['padding mask [B, 1, 1, S]'].build(row)
    both, _ = harness.backward(case, harness.random_dout(case))
    np.testing.assert_allclose(harness.forward(case), both, rtol=1e-6, atol=1e-6)


def test_rows_cover_the_table():
  assert {row.name for row in ROWS} == set(attn.VARIANTS)
  for name, variant in attn.VARIANTS.items():
    rows = [row for row in ROWS if row.name == name]
    assert any(not row.is_causal for row in rows)
    assert any(row.is_causal for row in rows) or 'causal' not in variant.supports
    used = set().union(
        *[set(row.options) | set(row.params(np.random.default_rng(0), 5, 4, 8)) for row in rows])
    assert set(
        variant.options) <= used | set(variant.cost_options), f'{name}: an option is never tried'
