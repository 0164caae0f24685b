"""The Performer's features, and that it estimates the attention it stands for."""

import attn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import harness
from tests.points import qkv


def features(seed: int, num_features: int, head_dim: int = 8) -> jax.Array:
  return attn.orthogonal_features(jax.random.key(seed), num_features, head_dim)


@pytest.mark.parametrize('num_features', [3, 8, 20])
def test_blocks_of_rows_are_orthogonal(num_features):
  """Choromanski et al. 2021, section 2.4: blocks of H rows, the last one cut short."""
  found = np.asarray(features(0, num_features), np.float64)
  assert found.shape == (num_features, 8)
  for start in range(0, num_features, 8):
    block = found[start:start + 8]
    products = block @ block.T
    np.testing.assert_allclose(products, np.diag(np.diag(products)), atol=1e-5)


def test_rows_have_the_norms_of_gaussian_rows():
  """Mean square H, and not all alike: squared norms of H Gaussians vary by 2 H."""
  squares = np.sum(np.asarray(features(1, 4096), np.float64)**2, -1)
  np.testing.assert_allclose(squares.mean(), 8., rtol=.05)
  np.testing.assert_allclose(squares.var(), 16., rtol=.2)


def test_directions_are_uniform():
  """Each column has mean 0 and variance 1: no sign or axis is preferred."""
  found = np.asarray(features(2, 8192), np.float64)
  np.testing.assert_allclose(found.mean(0), np.zeros(8), atol=.06)
  np.testing.assert_allclose(found.T @ found / len(found), np.eye(8), atol=.06)


def test_a_key_decides_the_features():
  np.testing.assert_array_equal(features(3, 20), features(3, 20))
  assert not np.allclose(features(3, 20), features(4, 20))
  assert features(3, 20).dtype == jnp.float32
  for shape in ((0, 8), (8, 0), (-1, 8)):
    with pytest.raises(ValueError):
      features(0, *shape)


@pytest.mark.parametrize('is_causal', [False, True])
def test_more_features_come_closer_to_softmax(is_causal):
  """Queries and keys of a size at which the estimate's spread is small."""
  arrays = {name: jnp.asarray(array) for name, array in qkv(T=7).items()}
  arrays |= {name: arrays[name] / 2 for name in ('query', 'key')}
  exact = attn.vanilla_attention(**arrays, is_causal=is_causal)
  estimate = harness.jit(
      lambda w: attn.performer_attention(**arrays, features=w, is_causal=is_causal))
  errors = [
      np.sqrt(np.mean([np.square(estimate(features(seed, M)) - exact)
                       for seed in range(8)]))
      for M in (16, 256)
  ]
  assert errors[1] < .05 and errors[1] < errors[0] / 2, errors


@pytest.mark.parametrize('size', [8., 14., 30.])
def test_large_keys_keep_their_part_in_one_pass(size):
  """Whose features are so far apart that products of them underflow; under vmap, and gradients."""
  rng, T, H = np.random.default_rng(0), 12, 64
  query, key, value = (rng.normal(size=(8, T, 2, H)) * x for x in (size, size, 1.))
  drawn = features(1, H, H)
  log = lambda x: np.einsum('btnh,mh->bntm', x * H**-0.25, np.asarray(drawn, np.float64)) - np.sum(
      np.moveaxis(x, 2, 1)**2, -1, keepdims=True) / 2 / H**0.5
  pairs = log(query)[..., :, None, :] + log(key)[..., None, :, :]
  top = pairs.max(-1)
  logits = top + np.log(np.exp(pairs - top[..., None]).sum(-1))
  logits = np.where(np.tril(np.ones((T, T), bool)), logits, -np.inf)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  expected = np.einsum('bnts,bsnh->btnh', weights, value)
  query, key, value = (jnp.asarray(x, jnp.float32) for x in (query, key, value))

  def attend(query, key, value):
    return attn.performer_attention(query, key, value, features=drawn, is_causal=True, block_size=5)

  @harness.jit
  def both(query, key, value):
    output, back = jax.vjp(attend, query, key, value)
    return output, jax.vmap(attend)(query, key, value), back(jnp.ones_like(output))[2]

  found, mapped, back = both(query, key, value)
  np.testing.assert_allclose(found, expected, atol=2e-3)
  np.testing.assert_allclose(mapped, found, atol=2e-3)
  np.testing.assert_allclose(back.sum(1), np.full((8, 2, H), float(T)), rtol=1e-3)
