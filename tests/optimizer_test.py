"""The schedule against its formula, what weight decay leaves alone, and clipping."""

from experiments.config import Config
from experiments.optimizer import is_decayed, learning_rate, make_optimizer
import jax
import jax.numpy as jnp
import numpy as np
import pytest


def oracle(step, peak, warmup, total):
  if step < warmup:
    return peak * step / warmup
  return peak * (1 + np.cos(np.pi * min(1, (step - warmup) / (total - warmup)))) / 2


@pytest.mark.parametrize('warmup', [4, 0, -1])
def test_schedule(warmup):
  schedule = learning_rate(Config(steps=12, warmup_steps=warmup, learning_rate=1.))
  steps = [0, 1, 2, 4, 6, 8, 11, 12, 20]
  wanted = [oracle(step, 1., 1 if warmup < 0 else warmup, 12) for step in steps]
  np.testing.assert_allclose([schedule(step) for step in steps], wanted, atol=1e-6)


def test_schedule_of_a_warmup_of_4_in_12():
  schedule = learning_rate(Config(steps=12, warmup_steps=4, learning_rate=1.))
  wanted = [0, .25, .5, 1, .8535533906, .5, .0380602337, 0, 0]
  np.testing.assert_allclose([schedule(s) for s in (0, 1, 2, 4, 6, 8, 11, 12, 20)],
                             wanted,
                             atol=1e-6)


def test_decay_leaves_biases_norms_and_vectors_alone():
  params = dict(dense=dict(kernel=jnp.ones((2, 3)), bias=jnp.ones((2, 3))),
                norm=dict(scale=jnp.ones(3)),
                vector=jnp.ones(3))  # yapf: disable
  assert is_decayed(params) == dict(dense=dict(kernel=True, bias=False),
                                    norm=dict(scale=False),
                                    vector=False)


def test_decay_moves_only_what_is_decayed():
  config = Config(steps=10, warmup_steps=0, learning_rate=.5, weight_decay=.1)
  params = dict(kernel=jnp.ones((2, 2)), bias=jnp.ones((2, 2)))
  optimizer = make_optimizer(config)
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = optimizer.update(zeros, optimizer.init(params), params)
  np.testing.assert_allclose(updates['kernel'], -.05, rtol=1e-6)
  np.testing.assert_array_equal(updates['bias'], 0)


@pytest.mark.parametrize('clip_norm, factor', [(1., .2), (0., 1.), (9., 1.)])
def test_clipping_is_by_the_global_norm(clip_norm, factor):
  params = dict(a=jnp.zeros(1), b=jnp.zeros(1))
  optimizer = make_optimizer(Config(clip_norm=clip_norm))
  gradient = dict(a=jnp.full(1, 3.), b=jnp.full(1, 4.))
  _, state = optimizer.update(gradient, optimizer.init(params), params)
  first_moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (1,)][:2]
  np.testing.assert_allclose(np.ravel(first_moments), [.3 * factor, .4 * factor], rtol=1e-5)
