"""attn.attention_weights: the effective weights of every row, against the oracle and against its
own output.
"""

import contextlib
import functools

import attn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import harness
from tests import tolerances
from tests.points import make
from tests.points import POINTS
from tests.points import qkv
from tests.rows import PRIMARY
from tests.rows import ROWS

NAMES = [
    'grouped heads', 'padding mask [B, 1, 1, S]', 'dense mask per head [B, N, T, S]', 'ALiBi',
    'positions as traced arrays', 'segments', 'keys masked up to a position', 'no leading axis',
    'all options together'
]
CELLS = [
    pytest.param(row, name, id=f'{row.id}-{name}')
    for row in ROWS
    for name in NAMES
    if row.primary or name in NAMES[:2]
]


def weights(case: harness.Case) -> jax.Array:
  arguments = harness.to_library(case)
  params = arguments.pop('params')
  del arguments['value']
  query, key = arguments.pop('query'), arguments.pop('key')
  call = lambda query, key, params, arguments: attn.attention_weights(
      case.row.name, query, key, params=params or None, **arguments, **case.get_options())
  return harness.jit(call)(query, key, params, arguments)


@pytest.mark.sampled(8)
@pytest.mark.parametrize('row, point', CELLS)
def test_weights_equal_the_oracle(row, point):
  case = POINTS[point].build(row)
  if harness.missing(case):
    with pytest.raises(NotImplementedError, match=row.name):
      weights(case)
    return
  found = weights(case)
  lead, T, S, N = case.sizes
  assert found.shape == lead + (N, T, S)
  tolerances.assert_close(found, harness.expected(case).weights, harness.tolerance(case, 'forward'))


@pytest.mark.parametrize('row', ROWS, ids=lambda row: row.id)
def test_rows_sum_to_one_or_zero(row):
  """Of softmax patterns and kernels: 1 where something is visible, exactly 0 where nothing is."""
  case = POINTS['keys masked up to a position'].build(row)
  found = np.asarray(weights(case))
  total = found.sum(-1)
  seen = harness.expected(case).weights.any(-1)
  np.testing.assert_array_equal(found[~seen], np.zeros_like(found[~seen]))
  if row.name != 'linformer':  # whose value projection has columns of any sum
    np.testing.assert_allclose(total[seen], 1., rtol=1e-5)
    assert (found >= 0.).all()


@pytest.mark.parametrize('row', PRIMARY, ids=lambda row: row.id)
def test_weights_times_values_is_the_output(row):
  case = make(row, qkv(K=4))
  out = np.einsum('bnts,bsnh->btnh', weights(case), case.arrays['value'])
  tolerances.assert_close(harness.forward(case), out, harness.tolerance(case, 'forward'))


@pytest.mark.parametrize('dtype', ['float64', 'bfloat16'])
def test_weights_of_other_dtypes(dtype):
  row = ROWS[0]
  with jax.enable_x64(True) if dtype == 'float64' else contextlib.nullcontext():
    case = make(row, qkv(dtype=dtype), dtype=dtype)
    found = weights(case)
  tolerances.assert_close(found, harness.expected(case).weights, tolerances.FORWARD[dtype])


@pytest.mark.parametrize('row', [row for row in ROWS if row.is_pattern], ids=lambda row: row.id)
def test_visibility_says_where_weights_are(row):
  """Also for lengths other than those of the other tests, and as VARIANTS[...].visibility."""
  for T in (1, 5, 14):
    case = make(row, qkv(T=T))
    visibility = functools.partial(attn.VARIANTS[row.name].visibility, T, T, **case.get_options())
    blocks = case.get_params().get('random_blocks')
    if blocks is None:
      visible = visibility()
    elif blocks.ndim == 2:
      visible = visibility(random_blocks=blocks)
    else:
      visible = np.stack([visibility(random_blocks=one) for one in blocks])
    visible = np.asarray(visible)
    assert visible.dtype == bool and visible.shape[-2:] == (T, T)
    expected = harness.expected(case).weights > 0
    np.testing.assert_array_equal(np.broadcast_to(visible, expected.shape), expected)


def test_visibility_of_what_is_no_pattern():
  for name in ('linformer', 'performer'):
    with pytest.raises(NotImplementedError, match=name):
      attn.VARIANTS[name].visibility(5, 5)
  for name in ('vanilla', 'blockwise'):
    np.testing.assert_array_equal(attn.VARIANTS[name].visibility(3, 5), np.ones((3, 5), bool))
    np.testing.assert_array_equal(attn.VARIANTS[name].visibility(4, 4, is_causal=True),
                                  np.tri(4, dtype=bool))


def test_gradients_flow_through_weights():
  case = make(ROWS[0])
  query, key = (jnp.asarray(case.arrays[name]) for name in ('query', 'key'))
  grad = jax.grad(lambda q: jnp.sum(attn.attention_weights('vanilla', q, key)[..., 0]))(query)
  assert np.isfinite(grad).all() and np.abs(grad).max() > 0
