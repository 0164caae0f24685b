"""Cross entropy against NumPy float64 loops and the conformance case."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.losses import cross_entropy
from experiments.tasks import next_token

CASE = np.load(os.path.join(os.path.dirname(__file__), 'data', 'conformance', '25_masked_loss.npz'))
LOGITS, LABELS = CASE['in_logits'], CASE['in_labels'].astype(np.int32)
WEIGHTS = (LABELS != -100).astype(np.float32)


def mean(logits, targets, weights, smoothing=0.):
  total, count = cross_entropy(logits, targets, weights, smoothing)
  return total / jnp.maximum(count, 1.)


def oracle(logits, targets, weights, smoothing):
  total = 0.
  for place in np.ndindex(targets.shape):
    if weights[place]:
      row = np.asarray(logits[place], np.float64)
      target = np.full(row.size, smoothing / row.size)
      target[targets[place]] += 1 - smoothing
      total -= weights[place] * np.sum(target *
                                       (row - row.max() - np.log(np.sum(np.exp(row - row.max())))))
  return total


@pytest.mark.parametrize('dtype, tolerance', [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_conformance_case(dtype, tolerance):
  with jax.enable_x64(dtype == np.float64):
    logits = jnp.asarray(LOGITS, dtype)
    smoothing = float(CASE['in_smoothing'])
    total, count = cross_entropy(logits, LABELS, WEIGHTS, smoothing)
    assert total.dtype == count.dtype == dtype
    np.testing.assert_allclose(total, CASE['out_sum'], rtol=tolerance)
    assert int(count) == CASE['out_count']
    loss, grad = jax.value_and_grad(mean)(logits, LABELS, WEIGHTS, smoothing)
    np.testing.assert_allclose(loss, CASE['out_mean'], rtol=tolerance)
    np.testing.assert_allclose(grad, CASE['out_grad'], atol=tolerance)
    plain = mean(logits, LABELS, WEIGHTS)
    np.testing.assert_allclose(plain, CASE['out_mean_plain'], rtol=tolerance)


def test_pieces_of_a_batch_add_up():
  pieces = [cross_entropy(LOGITS[i:i + 1], LABELS[i:i + 1], WEIGHTS[i:i + 1]) for i in range(2)]
  total, count = (sum(x) for x in zip(*pieces))
  np.testing.assert_allclose(total / count, CASE['out_mean_plain'], rtol=1e-6)


def test_logits_score_the_next_token():
  tokens = CASE['in_tokens'].astype(np.int32)
  shifted = next_token(tokens, np.ones(tokens.shape, bool))
  logits = CASE['in_lm_logits'][:, :shifted['inputs'].shape[1]]
  loss = mean(logits, shifted['targets'], shifted['weights'])
  np.testing.assert_allclose(loss, CASE['out_shift'], rtol=1e-6)


@pytest.mark.parametrize('smoothing', [0., 0.3])
def test_against_loops(smoothing):
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(2, 7, 5)).astype(np.float32) * 20
  targets = rng.integers(0, 5, (2, 7)).astype(np.int32)
  weights = rng.choice([0., 1., 0.5], (2, 7)).astype(np.float32)
  total, count = jax.jit(cross_entropy, static_argnums=3)(logits, targets, weights, smoothing)
  np.testing.assert_allclose(total, oracle(logits, targets, weights, smoothing), rtol=1e-6)
  assert count == weights.sum()


def test_nothing_scored_is_zero():
  loss, grad = jax.value_and_grad(mean)(jnp.asarray(LOGITS, jnp.float32), LABELS, WEIGHTS * 0, 0.1)
  assert loss == 0 and not grad.any()


def test_unscored_positions_are_not_looked_at():
  hidden = np.where(WEIGHTS[..., None] > 0, LOGITS, np.nan).astype(np.float32)
  loss, grad = jax.value_and_grad(mean)(hidden, LABELS, WEIGHTS, 0.125)
  np.testing.assert_allclose(loss, CASE['out_mean'], rtol=1e-5)
  np.testing.assert_allclose(grad, CASE['out_grad'], atol=1e-6)


@pytest.mark.parametrize('target', [-1, 5, -100])
def test_a_scored_target_out_of_range_shows(target):
  assert np.isnan(cross_entropy(LOGITS, np.full((2, 4), target, np.int32), WEIGHTS)[0])


def test_low_precision_logits_are_summed_in_float32():
  logits = jnp.asarray(LOGITS, jnp.bfloat16)  # Multiples of 1/16: exact.
  total, count = cross_entropy(logits, LABELS, WEIGHTS, 0.125)
  assert total.dtype == count.dtype == jnp.float32
  np.testing.assert_allclose(total, CASE['out_sum'], rtol=1e-6)


@pytest.mark.parametrize('message, args', [
    ('must agree; got .2, 4, 5., .2, 3.', (LOGITS, LABELS[:, :3], WEIGHTS)),
    ('must agree', (LOGITS, LABELS, WEIGHTS[:1])),
    ('targets must be integers; got float32', (LOGITS, WEIGHTS, WEIGHTS)),
    ('smoothing must be in .0, 1.; got 1.0', (LOGITS, LABELS, WEIGHTS, 1.)),
])
def test_bad_arguments_are_refused(message, args):
  with pytest.raises(ValueError, match=message):
    cross_entropy(*args)
