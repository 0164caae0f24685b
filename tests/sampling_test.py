"""Filters on logits: beside oracles, at their edges, and refusing bad settings."""

import attn
from attn import sampling
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import decoding_oracles

V = 7
RNG = np.random.default_rng(0)
# Ties, and a token that cannot be drawn.
LOGITS = np.concatenate([RNG.normal(size=(3, V)), [[0.] * V], [[1., 3., 3., -np.inf, 3., 2., 1.]]])
ROWS = len(LOGITS)


def kept(logits):
  return np.asarray(logits) > -np.inf


def oracle(function, *arguments):
  return np.array([
      function(row, *(np.asarray(a)[i] if np.ndim(a) else a
                      for a in arguments))
      for i, row in enumerate(LOGITS)
  ])


def probabilities(logits):
  return np.array([decoding_oracles.softmax(row) for row in np.asarray(logits, np.float64)])


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


@pytest.mark.parametrize('k', [1, 2, 3, V, 100, np.array([1, 2, 3, 4, 5])], ids=str)
def test_top_k_keeps_the_k_largest_and_of_ties_the_lower_index(k):
  wanted = oracle(lambda row, k: decoding_oracles.top_k(row, k, 'index'), k)
  np.testing.assert_array_equal(kept(sampling.top_k(jnp.asarray(LOGITS), k)), wanted & kept(LOGITS))


@pytest.mark.parametrize(
    'p',
    [0., 1e-9, 0.3, 0.7, 0.999, 1., np.array([0., .2, .5, .9, 1.])], ids=str)
def test_top_p_keeps_the_nucleus(p):
  wanted = oracle(lambda row, p: decoding_oracles.top_p(decoding_oracles.softmax(row), p), p)
  np.testing.assert_array_equal(kept(sampling.top_p(jnp.asarray(LOGITS), p)), wanted & kept(LOGITS))


@pytest.mark.parametrize('p', [0., 0.1, 0.5, 1., np.array([0., .2, .5, .9, 1.])], ids=str)
def test_min_p_keeps_a_share_of_the_best(p):
  probs = probabilities(LOGITS)
  least = np.reshape(p, (-1, 1)) * probs.max(-1, keepdims=True)
  np.testing.assert_array_equal(kept(sampling.min_p(jnp.asarray(LOGITS), p)),
                                (probs >= least * (1 - 1e-12)) & kept(LOGITS))


def test_temperature_divides_and_0_is_argmax():
  values = np.array([0.5, 2., 0., 0., 0.])
  found = sampling.temperature(jnp.asarray(LOGITS), values)
  relative = LOGITS[:2] - LOGITS[:2].max(-1, keepdims=True)
  np.testing.assert_allclose(found[:2], relative / values[:2, None])
  np.testing.assert_array_equal(np.argmax(LOGITS[2:], -1), np.argmax(found[2:], -1))
  np.testing.assert_array_equal(kept(found[2:]).sum(-1), [1, 1, 1])
  np.testing.assert_array_equal(
      kept(sampling.temperature(jnp.asarray(LOGITS), 0))[3:].argmax(-1), [0, 1])


def test_filters_come_temperature_first_and_each_sees_what_is_left():
  found = sampling.filtered(jnp.asarray(LOGITS[:3]), temperature=0.5, top_k=4, top_p=0.8, min_p=0.2)
  for row, logits in zip(found, (LOGITS[:3] - LOGITS[:3].max(-1, keepdims=True)) / 0.5):
    keep = decoding_oracles.top_k(logits, 4, 'index')
    keep &= decoding_oracles.top_p(decoding_oracles.softmax(np.where(keep, logits, -np.inf)), 0.8)
    probs = decoding_oracles.softmax(np.where(keep, logits, -np.inf))
    keep &= probs >= 0.2 * probs.max()
    np.testing.assert_allclose(row, np.where(keep, logits, -np.inf))
  np.testing.assert_array_equal(sampling.filtered(jnp.asarray(LOGITS)), LOGITS)


def test_repetition_penalty():
  seen = RNG.random(LOGITS.shape) < 0.5
  penalty = np.array([1., 2., 0.5, 3., 1.5])
  found = sampling.repetition_penalty(jnp.asarray(LOGITS), jnp.asarray(seen), penalty)
  for (row, v), logit in np.ndenumerate(LOGITS):
    by = penalty[row] if seen[row, v] else 1.
    assert found[row, v] == pytest.approx(logit / by if logit > 0 else logit * by)


def test_draws_follow_the_probabilities_and_no_other_row():
  logits = jnp.asarray(LOGITS[[0, 4]])
  draw = jax.jit(jax.vmap(lambda rng: sampling.sample(rng, logits)))
  tokens = np.asarray(draw(jax.random.split(jax.random.key(0), 20000)))
  for row in range(2):
    share = np.bincount(tokens[:, row], minlength=V) / len(tokens)
    # Five standard errors of a share of at most 1/2.
    np.testing.assert_allclose(share, probabilities(logits)[row], atol=5 * 0.5 / 20000**0.5)
  assert not np.any(tokens[:, 1] == 3)
  rng = jax.random.key(1)
  alone, beside = (sampling.sample(rng, x) for x in (logits[:1], logits))
  assert alone.tolist() == beside[:1].tolist() and alone.dtype == jnp.int32


def test_narrow_logits_are_filtered_in_float32():
  found = sampling.top_p(jnp.asarray(LOGITS, jnp.bfloat16), 0.9)
  assert found.dtype == jnp.float32


@pytest.mark.parametrize('name, value', [('temperature', -1.), ('temperature', np.nan),
                                         ('temperature', np.inf), ('temperature', True),
                                         ('top_k', 0), ('top_k', 1.5),
                                         ('top_k', np.array([1, 2, 3, 4, 0])), ('top_p', 1.1),
                                         ('top_p', -0.1), ('top_p', 'x'), ('min_p', 2.),
                                         ('min_p', np.array([0.1, 0.2]))],
                         ids=str)
def test_bad_settings_are_refused(name, value):
  with pytest.raises(ValueError, match=f'{name} must be'):
    getattr(sampling, name)(jnp.asarray(LOGITS), value)


def test_bad_arrays_are_refused():
  logits = jnp.asarray(LOGITS)
  with pytest.raises(ValueError, match='repetition_penalty must be finite and greater than 0'):
    sampling.repetition_penalty(logits, logits > 0, 0.)
  with pytest.raises(ValueError, match=r'seen must be boolean .*\(5, 7\); got bool \(7,\)'):
    sampling.repetition_penalty(logits, (logits > 0)[0], 2.)
  for bad in (jnp.zeros((2, 3), jnp.int32), [1., 2.], jnp.zeros((3, 0))):
    with pytest.raises(ValueError, match='logits must be'):
      attn.sampling.sample(jax.random.key(0), bad)
