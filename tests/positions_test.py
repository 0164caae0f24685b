"""Position schemes against the oracles; their relative nature; their behaviour as pytrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn import positions
from tests import position_oracles
from tests import tolerances

TOLERANCE = tolerances.FORWARD['float32']
AT = np.array([[0, 1, 2, 5], [7, 3, 30, 100]], np.int32)


def _x(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize('dim', [1, 2, 5, 8])
def test_sinusoidal_equals_the_oracle(dim):
  found = positions.sinusoidal(jnp.asarray(AT), dim)
  assert found.dtype == jnp.float32
  tolerances.assert_close(found, position_oracles.sinusoidal(AT, dim), 1e-5)  # angles of up to 100


def test_learned_looks_up_and_its_gradient_adds_up():
  table = _x(101, 3)
  np.testing.assert_array_equal(positions.learned(jnp.asarray(table), jnp.asarray(AT)), table[AT])
  grad = jax.grad(lambda t: jnp.sum(positions.learned(t, jnp.asarray([2, 2, 5]))))(
      jnp.asarray(table))
  expected = np.zeros((101, 3), np.float32)
  expected[2], expected[5] = 2., 1.
  np.testing.assert_array_equal(grad, expected)


@pytest.mark.parametrize('interleaved', [False, True])
@pytest.mark.parametrize('dim', [None, 4, 2])
@pytest.mark.parametrize('base', [10000., 500.])
def test_rope_equals_the_oracle(interleaved, dim, base):
  x = _x(2, 4, 3, 8)
  found = positions.rope(jnp.asarray(x),
                         jnp.asarray(AT),
                         base=base,
                         interleaved=interleaved,
                         dim=dim)
  expected = position_oracles.rope(x, AT, base, interleaved, dim)
  tolerances.assert_close(found, expected, 2e-5)  # angles of up to 100


def test_rope_shares_positions_among_leading_axes_and_has_none():
  x, at = _x(2, 4, 3, 8), np.arange(4, dtype=np.int32)
  tolerances.assert_close(positions.rope(jnp.asarray(x), jnp.asarray(at)),
                          position_oracles.rope(x, at), TOLERANCE)
  alone = positions.rope(jnp.asarray(x[0]), jnp.asarray(at))
  tolerances.assert_close(alone, position_oracles.rope(x[0], at), TOLERANCE)


@pytest.mark.parametrize('interleaved', [False, True])
def test_rope_scores_depend_on_the_distance_alone(interleaved):
  x, y = jnp.asarray(_x(1, 1, 2, 8)), jnp.asarray(_x(1, 1, 2, 8, seed=1))
  turn = lambda a, p: positions.rope(a, jnp.asarray([p]), interleaved=interleaved)
  scores = [jnp.sum(turn(x, p + 3) * turn(y, p), axis=-1) for p in (0, 11, 200)]
  for score in scores[1:]:
    np.testing.assert_allclose(score, scores[0], atol=2e-4)
  np.testing.assert_allclose(jnp.linalg.norm(turn(x, 9)), jnp.linalg.norm(x), rtol=1e-6)


def test_rope_keeps_dtype_and_does_not_round_positions():
  x = jnp.asarray(_x(1, 2, 1, 8), jnp.bfloat16)
  at = np.array([257, 4095], np.int32)
  found = positions.rope(x, jnp.asarray(at))
  assert found.dtype == jnp.bfloat16
  expected = position_oracles.rope(np.asarray(x, np.float64), at)
  tolerances.assert_close(found, expected, tolerances.FORWARD['bfloat16'])


@pytest.mark.parametrize('change', [{'dim': 3}, {'dim': 10}, {'dim': -2}])
def test_rope_refuses_impossible_dims(change):
  with pytest.raises(ValueError, match='dim'):
    positions.rope(jnp.asarray(_x(1, 2, 1, 8)), jnp.arange(2), **change)
  with pytest.raises(ValueError):
    positions.rope(jnp.asarray(_x(1, 2, 1, 7)), jnp.arange(2))


@pytest.mark.parametrize('num_heads', list(range(1, 20)) + [32, 33])
def test_alibi_slopes_equal_the_authors_rule(num_heads):
  np.testing.assert_allclose(positions.alibi_slopes(num_heads),
                             position_oracles.alibi_slopes(num_heads),
                             rtol=1e-6)


@pytest.mark.parametrize('bidirectional', [False, True])
@pytest.mark.parametrize('num_buckets, max_distance', [(32, 128), (4, 8), (8, 20), (16, 1000)])
def test_t5_buckets_equal_the_oracle(bidirectional, num_buckets, max_distance):
  relative = np.concatenate([np.arange(-300, 301), [-5000, 5000, -128, 128, -1000,
                                                    1000]]).astype(np.int32)
  found = positions.t5_bucket(jnp.asarray(relative),
                              bidirectional=bidirectional,
                              num_buckets=num_buckets,
                              max_distance=max_distance)
  expected = [
      position_oracles.t5_bucket(int(r), bidirectional, num_buckets, max_distance) for r in relative
  ]
  np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(
      jax.jit(lambda r: positions.t5_bucket(
          r, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance))(
              relative), expected)


QUERIES, KEYS = np.array([[4, 5], [0, 9]], np.int32), np.arange(11, dtype=np.int32)


def test_alibi_bias_equals_the_oracle():
  slopes = np.array([.5, .25, .1], np.float32)
  bias = positions.ALiBi(jnp.asarray(slopes))
  for queries in (QUERIES, QUERIES[0]):
    keys = np.broadcast_to(KEYS, queries.shape[:-1] + KEYS.shape)
    found = bias(jnp.asarray(queries), jnp.asarray(keys))
    tolerances.assert_close(found, position_oracles.alibi(slopes, queries, keys), TOLERANCE)


@pytest.mark.parametrize('bidirectional', [False, True])
def test_t5_bias_equals_the_oracle(bidirectional):
  table = _x(32, 3)
  bias = positions.T5Bias(jnp.asarray(table), bidirectional=bidirectional)
  for queries in (QUERIES, QUERIES[0]):
    keys = np.broadcast_to(KEYS, queries.shape[:-1] + KEYS.shape)
    found = bias(jnp.asarray(queries), jnp.asarray(keys))
    tolerances.assert_close(found, position_oracles.t5_bias(table, queries, keys, bidirectional),
                            TOLERANCE)


@pytest.mark.parametrize('bias', [
    positions.ALiBi(jnp.asarray([.5, .25])),
    positions.T5Bias(jnp.ones((8, 2)), bidirectional=True)
],
                         ids=['alibi', 't5'])
def test_biases_are_pytrees_that_jit_and_grad_take(bias):
  apply = lambda bias: bias(jnp.arange(3), jnp.arange(4))
  np.testing.assert_allclose(jax.jit(apply)(bias), apply(bias), rtol=1e-6)
  grad = jax.grad(lambda bias: jnp.sum(apply(bias)))(bias)
  assert type(grad) is type(bias)
  assert [leaf.shape for leaf in jax.tree.leaves(grad)
         ] == [leaf.shape for leaf in jax.tree.leaves(bias)]
  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grad))
