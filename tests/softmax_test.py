"""The masked softmax against the oracle, and the algebra of partial-softmax states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn import softmax
from tests import oracles
from tests import tolerances

T, S, Hv = 5, 12, 3
TOLERANCE = tolerances.FORWARD['float32']


def _logits(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  rng = np.random.default_rng(seed)
  mask = rng.random((2, T, S)) < .6
  mask[0, 1] = False
  return (4 * rng.normal(size=(2, T, S)).astype(np.float32), mask,
          rng.normal(size=(2, S, Hv)).astype(np.float32))


def _state(logits, mask, value) -> softmax.State:
  """The definition: maximum, sum and weighted values of the visible keys; the neutral state for
  none.
  """
  hidden = np.where(mask, logits, -np.inf)
  top = hidden.max(-1, initial=-np.inf)
  shift = np.where(np.isfinite(top), top, 0.)
  weights = np.where(mask, np.exp(hidden - shift[..., None]), 0.)
  neutral = softmax.empty(top.shape, Hv)
  seen = mask.any(-1)
  return softmax.State(jnp.where(jnp.asarray(seen), jnp.asarray(top, jnp.float32), neutral.max),
                       jnp.asarray(weights.sum(-1), jnp.float32),
                       jnp.asarray(weights @ value, jnp.float32))


def _assert_same(a: softmax.State, b: softmax.State) -> None:
  for name, found, expected in zip(a._fields, a, b):
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def _parts(seed: int = 0) -> list[softmax.State]:
  logits, mask, value = _logits(seed)
  cuts = [slice(0, 3), slice(3, 4), slice(4, 12)]
  return [_state(logits[..., c], mask[..., c], value[:, c]) for c in cuts]


def test_masked_softmax_equals_the_oracle():
  logits, mask, _ = _logits()
  expected = oracles.masked_softmax(logits.astype(np.float64), mask)
  found = softmax.masked_softmax(jnp.asarray(logits), jnp.asarray(mask))
  tolerances.assert_close(found, expected, TOLERANCE)
  np.testing.assert_array_equal(found[0, 1], np.zeros(S, np.float32))
  moved = softmax.masked_softmax(jnp.asarray(logits).swapaxes(1, 2),
                                 jnp.asarray(mask).swapaxes(1, 2),
                                 axis=1)
  tolerances.assert_close(moved.swapaxes(1, 2), expected, TOLERANCE)
  everything = softmax.masked_softmax(jnp.asarray(logits))
  tolerances.assert_close(everything, oracles.masked_softmax(logits, np.ones_like(mask)), TOLERANCE)


def test_masked_softmax_ignores_what_is_hidden():
  """NaN and inf in hidden logits reach neither the weights nor the gradient."""
  logits, mask, _ = _logits()
  poisoned = np.where(mask, logits,
                      np.array([np.nan, np.inf, -np.inf], np.float32)[np.arange(S) % 3])
  loss = lambda x: jnp.sum(softmax.masked_softmax(x, jnp.asarray(mask))**2)
  for function in (lambda x: softmax.masked_softmax(x, jnp.asarray(mask)), jax.grad(loss)):
    found = function(jnp.asarray(poisoned))
    np.testing.assert_array_equal(found, function(jnp.asarray(logits)))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[0, 1], np.zeros(S, np.float32))


def test_a_visible_infinity_is_not_hidden():
  """-inf as a visible logit has weight 0 beside finite ones."""
  found = softmax.masked_softmax(jnp.asarray([[0., -jnp.inf, 0.]]))
  np.testing.assert_allclose(found, [[.5, 0., .5]])


def test_merge_of_parts_finishes_to_attention():
  logits, mask, value = _logits()
  expected = oracles.masked_softmax(logits.astype(np.float64), mask) @ value
  a, b, c = _parts()
  tolerances.assert_close(softmax.finish(softmax.merge(softmax.merge(a, b), c)), expected,
                          TOLERANCE)


def test_merge_is_associative():
  a, b, c = _parts()
  _assert_same(softmax.merge(softmax.merge(a, b), c), softmax.merge(a, softmax.merge(b, c)))


def test_merge_is_commutative():
  a, b, _ = _parts()
  _assert_same(softmax.merge(a, b), softmax.merge(b, a))


def test_empty_is_neutral_on_both_sides():
  neutral = softmax.empty((2, T), Hv)
  for state in (*_parts(), neutral):
    _assert_same(softmax.merge(state, neutral), state)
    _assert_same(softmax.merge(neutral, state), state)


def test_empty_finishes_to_zeros():
  for dtype in (jnp.float32, jnp.bfloat16):
    found = softmax.finish(softmax.empty((2, T), Hv), dtype)
    assert found.dtype == dtype and found.shape == (2, T, Hv)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.zeros((2, T, Hv), np.float32))


def test_gradients_through_merge_are_finite():
  """Also where one side, or both, saw nothing, and where maxima are far apart."""
  a, b, _ = _parts()
  neutral = softmax.empty((2, T), Hv)
  far = a._replace(max=a.max + 1e4)
  for first, second in ((a, b), (a, neutral), (neutral, a), (neutral, neutral), (a, far)):
    loss = lambda x, y: jnp.sum(softmax.finish(softmax.merge(x, y))**2)
    for leaf in jax.tree.leaves(jax.grad(loss, argnums=(0, 1))(first, second)):
      assert np.isfinite(leaf).all()


def test_maxima_far_apart_do_not_overflow():
  a, b, _ = _parts()
  far = a._replace(max=a.max + 1e4)
  seen = np.asarray(far.sum) > 0
  merged = softmax.finish(softmax.merge(far, b))
  np.testing.assert_allclose(np.asarray(merged)[seen],
                             np.asarray(softmax.finish(far))[seen],
                             rtol=1e-6)


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_empty_has_the_dtype_asked_for(dtype):
  with jax.enable_x64(True):
    state = softmax.empty((2, T), Hv, jnp.dtype(dtype))
  assert {leaf.dtype for leaf in state} == {jnp.dtype(dtype)}
  assert [leaf.shape for leaf in state] == [(2, T), (2, T), (2, T, Hv)]
