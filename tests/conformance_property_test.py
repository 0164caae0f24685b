"""Contract points that need no oracle: independence, causality, determinism, finiteness, exact
zeros.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import harness
from tests.points import lengths
from tests.points import make
from tests.points import qkv
from tests.points import T
from tests.points import uniform
from tests.rows import ROWS

by_row = pytest.mark.parametrize('row', ROWS, ids=lambda row: row.id)
DIRECTIONS = ('forward', 'gradient')
CAUSAL = [row for row in ROWS if row.is_causal]


@pytest.fixture
def done(request, record_property):
  """Notes for the count which point of which row ran, and whether it compared or asserted a
  refusal.
  """

  def note(row, point, *directions, outcome='compared'):
    for direction in directions:
      record_property('contract', (row.id, point, direction, outcome))

  return note


def results(case: harness.Case, fresh: bool = False) -> list[np.ndarray]:
  """The output, without and with gradients, and those in query, key and value.

  fresh: compiled anew.
  """
  out, grads = harness.backward(case, harness.random_dout(case), fresh)
  grads = [grads[name] for name in ('query', 'key', 'value')]
  return [np.asarray(x) for x in (harness.forward(case, fresh), out, *grads)]


def changed(case: harness.Case, **arrays) -> harness.Case:
  return case._replace(arrays=case.arrays | arrays)


@pytest.mark.sampled(3)
@by_row
def test_batch_rows_do_not_touch_each_other(row, done):
  """Row 0 keeps every bit when row 1 has another mask, other numbers, or NaN."""
  mask = uniform((2, 1, 1, T), .7)
  case = make(row, qkv() | {'mask': mask}, 'key_mask')
  other = np.stack([mask[0], ~mask[1]])
  numbers = {name: np.stack([a[0], 3 * a[1] + 1]) for name, a in qkv().items()}
  broken = {name: np.stack([a[0], np.full_like(a[1], np.nan)]) for name, a in qkv().items()}
  before = results(case)
  for arrays in ({'mask': other}, numbers, broken, broken | {'mask': other}):
    for found, expected in zip(results(changed(case, **arrays)), before):
      np.testing.assert_array_equal(found[0], expected[0])
  done(row, 'batch rows independent', *DIRECTIONS)


@pytest.mark.parametrize('row', CAUSAL, ids=lambda row: row.id)
def test_no_row_reads_later_keys(row, done):
  """By perturbation: rows before t keep every bit when key and value t and later change, hugely
  too.
  """
  case = make(row)
  before = np.asarray(harness.forward(case))
  for t in range(1, T):
    for change in (lambda a: -a, lambda a: 1e4 * np.sign(a)):
      moved = {name: case.arrays[name].copy() for name in ('key', 'value')}
      for array in moved.values():
        array[:, t:] = change(array[:, t:])
      after = np.asarray(harness.forward(changed(case, **moved)))
      np.testing.assert_array_equal(after[:, :t], before[:, :t])
  done(row, 'causality by perturbation', 'forward')


@pytest.mark.parametrize('row', CAUSAL, ids=lambda row: row.id)
def test_no_gradient_reaches_later_keys(row, done):
  """By gradient: output row t sends exactly nothing to keys and values after t, and something to
  its own value.
  """
  case = make(row)
  dout = harness.random_dout(case)
  for t in range(T):
    only = np.zeros_like(dout)
    only[:, t] = dout[:, t]
    grads = harness.backward(case, only)[1]
    for name in ('key', 'value'):
      grad = np.asarray(grads[name])
      np.testing.assert_array_equal(grad[:, t + 1:], np.zeros_like(grad[:, t + 1:]))
    assert np.abs(np.asarray(grads['value'])[:, t]).min() > 0.
    others = np.delete(np.asarray(grads['query']), t, axis=1)
    np.testing.assert_array_equal(others, np.zeros_like(others))
  done(row, 'causality by gradient', 'gradient')


@pytest.mark.parametrize('row', [row for row in ROWS if not row.is_causal], ids=lambda row: row.id)
def test_an_encoder_sees_the_future(row, done):
  case = make(row)
  dout = harness.random_dout(case)
  only = np.zeros_like(dout)
  only[:, 3] = dout[:, 3]
  grads = harness.backward(case, only)[1]
  for name in ('key', 'value'):
    assert np.abs(np.asarray(grads[name])[:, 4]).max() > 1e-6
  done(row, 'not causal is not causal', 'gradient')


@pytest.mark.sampled(3)
@by_row
def test_same_call_same_bits(row, done):
  """Two compilations of one call agree in every bit."""
  case = make(row)
  first, second = results(case), results(case, fresh=True)
  for found, expected in zip(second, first):
    np.testing.assert_array_equal(found, expected)
  done(row, 'deterministic', *DIRECTIONS)


@by_row
def test_queries_that_see_nothing_get_exact_zeros(row, done):
  """Also where their keys hold NaN; the other queries are as if those rows were not there."""
  mask = np.ones((2, 1, 1, T), bool)
  mask[1] = False
  arrays = qkv()
  for name in ('key', 'value'):
    arrays[name][1] = np.nan
  case = make(row, arrays | {'mask': mask}, 'key_mask')
  for found in results(case):
    np.testing.assert_array_equal(found[1], np.zeros_like(found[1]))
    assert np.isfinite(found[0]).all() and np.abs(found[0]).max() > 0.
  done(row, 'sees nothing: exact zeros', *DIRECTIONS)


@pytest.mark.sampled(3)
@by_row
def test_zeros_for_queries_of_a_dense_mask(row, done):
  mask = np.ones((1, 1, T, T), bool)
  mask[:, :, [0, 4, 10]] = False
  case = make(row, qkv() | {'mask': mask}, 'dense_mask')
  if harness.missing(case):
    harness.assert_refused(case)
    done(row, 'some queries see nothing', *DIRECTIONS, outcome='refused')
    return
  found = results(case)
  for array in found[:3]:  # the output, twice, and the gradient of the query
    np.testing.assert_array_equal(array[:, [0, 4, 10]], np.zeros_like(array[:, [0, 4, 10]]))
  assert all(np.isfinite(array).all() for array in found)
  done(row, 'some queries see nothing', *DIRECTIONS)


@by_row
def test_extreme_inputs_stay_finite(row, done):
  """Logits of about +-1e4, and values of 1e4."""
  arrays = {name: 100. * array for name, array in qkv().items()}
  for found in results(make(row, arrays)):
    assert np.isfinite(found).all()
  done(row, 'extreme inputs finite', *DIRECTIONS)


@by_row
def test_lengths_that_differ_need_positions(row, done):
  """Causal, or a pattern of positions: which key is the query's own is not for us to guess."""
  case = lengths(row, 5, T)
  if not (row.is_causal or row.is_pattern):
    if not harness.missing(case):
      assert harness.forward(case).shape == (2, 5, 4, 5)
    done(row, 'T != S', 'forward')
    return
  arrays = {name: a for name, a in case.arrays.items() if not name.endswith('positions')}
  with pytest.raises(ValueError, match='positions'):
    harness.forward(case._replace(arrays=arrays))
  done(row, 'T != S', 'forward')


@by_row
def test_masks_of_another_rank_or_dtype_are_refused(row, done):
  square = qkv(lead=(T,))  # B = T: a [B, S] mask would fit [T, S]
  for mask in (np.ones((T, T), bool), np.ones((1, T, T), bool), np.ones((1, 1, 1, 1, T), bool)):
    with pytest.raises(ValueError, match='mask'):
      harness.forward(make(row, square | {'mask': mask}))
  for dtype in (np.float32, np.int32):
    with pytest.raises(ValueError, match='mask.*bool'):
      harness.forward(make(row, qkv() | {'mask': np.ones((2, 1, 1, T), dtype)}))
  for shape in ((2, 1, 1, T - 1), (3, 1, 1, T), (2, 2, 1, T)):
    with pytest.raises(ValueError, match='mask') as error:
      harness.forward(make(row, qkv() | {'mask': np.ones(shape, bool)}))
    assert str(shape) in str(error.value)
  done(row, 'mask rank, dtype and shape', 'forward')


@by_row
def test_dtypes_must_be_one_float(row, done):
  for name in ('query', 'key', 'value'):
    mixed = qkv()
    mixed[name] = mixed[name].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match='dtype'):
      harness.forward(make(row, mixed))
  whole = {name: np.ones(array.shape, np.int32) for name, array in qkv().items()}
  with pytest.raises(ValueError, match='int32'):
    harness.forward(make(row, whole))
  done(row, 'one float dtype', 'forward')
