"""Dropout on attention weights: which weights were dropped is read off by values that are unit
vectors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import harness
from tests import oracles
from tests import tolerances
from tests.points import make
from tests.points import qkv
from tests.points import T
from tests.rows import PRIMARY
from tests.rows import ROWS

RATE = .25
OPTIONS = {'dropout_rate': RATE}
by_row = pytest.mark.parametrize('row', PRIMARY, ids=lambda row: row.id)


def rng(seed: int = 0) -> jax.Array:
  return jax.random.key(seed)


def probe(row, rng=None, block_size=None):
  """Weights of each key, or Linformer slot, [B, T, N, S]: values, and value projections, are unit
  vectors.
  """
  arrays = qkv(Hv=T)
  arrays['value'] = np.tile(np.eye(T, dtype=np.float32)[None, :, None], (2, 1, 2, 1))
  case = make(row, arrays, 'dropout')
  if row.name == 'linformer':
    params = case.get_params()
    shape = params['value_projection'].shape
    eye = np.broadcast_to(np.eye(*shape[-2:], dtype=np.float32), shape)
    case = case._replace(params=params | {'value_projection': eye})
  if rng is not None:
    case = case._replace(arrays=arrays | {'dropout_rng': rng}, options=OPTIONS)
  if block_size is not None:
    case = case._replace(options={**case.options, 'block_size': block_size})
  return case


def kept(row, rng, block_size=None) -> np.ndarray:
  """[B, T, N, S] float64: 0 where dropped, 1 / (1 - rate) where not, NaN where there was nothing
  to drop.
  """
  plain = np.asarray(harness.forward(probe(row)), np.float64)  # the same for all block sizes
  dropped = np.asarray(harness.forward(probe(row, rng, block_size)), np.float64)
  ratio = np.where(plain > 1e-9, dropped / np.where(plain > 1e-9, plain, 1.), np.nan)
  return np.round(ratio, 3)


def supported(row, record_property, point: str, directions=('forward',)) -> bool:
  """Notes the point for the count; where the row has no dropout, asserts that it says so."""
  case = probe(row, rng())
  for direction in directions:
    outcome = 'refused' if harness.missing(case) else 'compared'
    record_property('contract', (row.id, point, direction, outcome))
  if harness.missing(case):
    harness.assert_refused(case)
    return False
  return True


@pytest.mark.sampled(4)
@pytest.mark.parametrize('row', ROWS, ids=lambda row: row.id)
def test_weights_are_dropped_or_scaled(row, record_property):
  if not supported(row, record_property, 'dropout: dropped or scaled'):
    return
  keep = kept(row, rng())
  keep = keep[~np.isnan(keep)]
  assert (np.isclose(keep, 0., atol=1e-6) | np.isclose(keep, 1 / (1 - RATE), rtol=1e-3)).all()
  total = [kept(row, rng(seed)) for seed in range(20)]
  dropped = np.mean([np.mean(k[~np.isnan(k)] < .5) for k in total])
  assert abs(dropped - RATE) < tolerances.DROPOUT_FRACTION


@pytest.mark.sampled(3)
@by_row
def test_the_oracle_with_the_same_weights_dropped(row, record_property):
  """Forward and gradient: the derivative drops what the output dropped, and the normaliser drops
  nothing.
  """
  if not supported(row, record_property, 'dropout: oracle', ('forward', 'gradient')):
    return
  keep = np.moveaxis(np.nan_to_num(np.round(kept(row, rng()) * (1 - RATE)) / (1 - RATE)), -2, -3)
  if row.name == 'linformer' and not row.is_causal:
    keep = np.concatenate([np.zeros(keep.shape), keep[..., :5]], -1)
  # completed segments of 4 keys show their 3 slots at the first 3 keys
  elif row.name == 'linformer':
    keep = np.concatenate([keep, keep[..., 0:3], keep[..., 4:7]], -1)
  case = make(row, qkv(Hv=T) | {'dropout_rng': rng()}, options=OPTIONS)
  dout = harness.random_dout(case)
  out, grads = harness.backward(case, dout)
  result = harness.expected(case._replace(options={}), dout, keep=keep)
  tolerances.assert_close(out, result.out, harness.tolerance(case, 'forward'))
  tolerances.assert_close(harness.forward(case), result.out, harness.tolerance(case, 'forward'))
  for name in ('query', 'key', 'value'):
    tolerances.assert_close(grads[name], result.grads[name], harness.tolerance(case, 'gradient'),
                            name)


@by_row
def test_rate_0_is_no_dropout_and_a_key_decides_the_rest(row, record_property):
  if not supported(row, record_property, 'dropout: rate 0, determinism'):
    return
  plain = make(row)
  with_rng = plain._replace(arrays=plain.arrays | {'dropout_rng': rng()},
                            options={'dropout_rate': 0.})
  np.testing.assert_array_equal(harness.forward(with_rng), harness.forward(plain))
  np.testing.assert_array_equal(kept(row, rng(1)), kept(row, rng(1)))
  first, second = (np.nan_to_num(kept(row, rng(seed))) for seed in (1, 2))
  assert (first != second).any()


@by_row
def test_nothing_is_shared_across_batch_heads_or_queries(row, record_property):
  if not supported(row, record_property, 'dropout: not shared'):
    return
  keep = np.concatenate([kept(row, rng(seed)) for seed in range(4)], -1)
  for axis in (0, 1, 2):
    pairs = np.moveaxis(keep, axis, 0)
    for i in range(1, len(pairs)):
      both = ~np.isnan(pairs[i]) & ~np.isnan(pairs[i - 1])
      if both.any():
        assert (pairs[i][both] != pairs[i - 1][both]).any(), f'axis {axis}, index {i}'


@pytest.mark.sampled(3)
@by_row
def test_the_mean_over_keys_is_no_dropout(row, record_property):
  if not supported(row, record_property, 'dropout: mean'):
    return
  case = probe(row, rng())
  arguments = harness.to_library(case)
  del arguments['dropout_rng']
  options = case.get_options()

  @harness.jit
  def mean(rngs):
    call = lambda rng: harness.call(row.name, options, arguments | {'dropout_rng': rng})
    return jnp.mean(jax.vmap(call)(rngs), axis=0)

  found = mean(jax.random.split(rng(5), 4096))
  np.testing.assert_allclose(found, harness.forward(probe(row)), atol=tolerances.DROPOUT_MEAN)


TILED = [row for row in ROWS if 'block_size' in row.options and row.name != 'bigbird']


@pytest.mark.sampled(4)
@pytest.mark.parametrize('row', TILED, ids=lambda row: row.id)
def test_the_draw_does_not_depend_on_the_block_size(row, record_property):
  if not supported(row, record_property, 'dropout: block size'):
    return
  first = kept(row, rng(), row.options['block_size'])
  for block_size in (1, 7, 64):
    np.testing.assert_array_equal(kept(row, rng(), block_size), first)


def test_blockwise_drops_what_vanilla_drops():
  rows = {row.id: row for row in ROWS}
  for suffix in ('', '-causal'):
    pair = [kept(rows[name + suffix], rng(3)) for name in ('vanilla', 'blockwise')]
    np.testing.assert_array_equal(*pair)


@by_row
def test_wrong_rates_are_refused(row, record_property):
  if not supported(row, record_property, 'dropout: wrong rates'):
    return
  for rate in (1., 1.5, -.1, float('nan')):
    case = probe(row, rng())._replace(options={'dropout_rate': rate})
    with pytest.raises(ValueError, match='dropout_rate'):
      harness.forward(case)
  with pytest.raises(ValueError, match='dropout_rng'):
    harness.forward(probe(row)._replace(options=OPTIONS))


def test_oracle_of_dropout_keeps_the_normaliser():
  """The oracle itself: dropping key 1 leaves key 0's weight at its softmax value, scaled."""
  inputs = oracles.Inputs(np.zeros((1, 1, 2)),
                          np.zeros((2, 1, 2)),
                          np.eye(2)[:, None],
                          np.ones((1, 1, 2), bool),
                          keep=np.array([[[2., 0.]]]))
  np.testing.assert_array_equal(oracles.attend(inputs, np.zeros((1, 1, 2))).out, [[[1., 0.]]])
