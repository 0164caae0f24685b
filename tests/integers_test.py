"""Integers of any width mean the number they hold: positions, segment ids, windows and strides."""

import sys

import attn
import jax.numpy as jnp
import numpy as np
import pytest

from tests.harness import jit

T = 7
OPTIONS = {'local': {'window': 2}, 'strided': {'stride': 3}, 'fixed': {'stride': 3},
           'longformer': {'window': 2, 'num_global': 1}}  # yapf: disable
DTYPES = ('int8', 'uint8', 'int16', 'uint32', 'int64')


def query():
  return jnp.asarray(np.random.default_rng(0).normal(size=(T, 2, 8)), jnp.float32)


def forms(dtype):
  """The same positions as a constant and as an array."""
  positions = np.arange(T).astype(dtype)
  return (positions, jnp.asarray(positions)) if dtype != 'int64' else (positions,)


@pytest.mark.sampled(4)
@pytest.mark.parametrize('name', [*OPTIONS, 'vanilla', 'blockwise', 'performer'])
@pytest.mark.parametrize('dtype', DTYPES)
def test_positions_and_segments_of_any_dtype(name, dtype):
  x, ids = query(), np.array([0, 0, 0, 1, 1, 1, 1])
  features = jnp.asarray(np.random.default_rng(1).normal(size=(5, 8)), jnp.float32)
  params = {'features': features} if name == 'performer' else {}
  apply = lambda positions, ids: jit(lambda x: attn.VARIANTS[name].apply(
      params, x, x, x, is_causal=True, query_positions=positions, key_positions=positions,
      segment_ids=ids, **OPTIONS.get(name, {})))(x)  # yapf: disable
  wanted = apply(np.arange(T, dtype=np.int32), ids.astype(np.int32))
  for positions in forms(dtype):
    np.testing.assert_allclose(apply(positions, ids.astype(dtype)), wanted, atol=2e-6)


@pytest.mark.parametrize('dtype', DTYPES)
def test_distances_of_any_dtype(dtype):
  slopes = np.ones(2, np.float32)
  distance = np.abs(np.arange(T)[:, None] - np.arange(T))
  for positions in forms(dtype):
    np.testing.assert_array_equal(attn.positions.ALiBi(slopes)(positions, positions)[0], -distance)
    seen = attn.masks.window(2, 1).dense(positions, positions)
    np.testing.assert_array_equal(seen, np.tril(np.triu(np.ones((T, T), bool), -2), 1))
    table = jnp.arange(600., dtype=jnp.float32).reshape(300, 2)
    np.testing.assert_array_equal(attn.positions.learned(table, positions), table[:T])


@pytest.mark.parametrize('name', OPTIONS)
@pytest.mark.parametrize('is_causal', [False, True])
def test_no_limit(name, is_causal):
  """A window or stride larger than any position is dense attention."""
  options = {option: sys.maxsize for option in OPTIONS[name]}
  x = query()
  output = attn.VARIANTS[name].apply({}, x, x, x, is_causal=is_causal, **options)
  np.testing.assert_allclose(output,
                             attn.vanilla_attention(x, x, x, is_causal=is_causal),
                             atol=2e-6)


def test_a_position_that_does_not_fit_is_refused():
  x, far = query(), np.arange(T) + 2**40
  with pytest.raises(ValueError, match=f'int32; got {2**40}'):
    attn.local_attention(x, x, x, window=2, query_positions=far, key_positions=far)
