"""The train step: what it depends on, how pieces of a batch add up, what a NaN may touch."""

import dataclasses
import functools

from experiments.step import init_state, make_train_step, split, stream
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny

PLAIN = dataclasses.replace(tiny.CONFIG, dropout=0., warmup_steps=0)

# Compiling takes most of the time of these tests.
compiled = functools.cache(make_train_step)
first_state = functools.cache(lambda config: jax.device_get(tiny.new_state(config)))


def after(config, task=tiny.TASK, model=tiny.Model(0.), steps=2):
  """State and last metrics after some steps, on the host."""
  state = jax.tree.map(jnp.array, first_state(dataclasses.replace(PLAIN, seed=config.seed)))
  metrics, step = None, compiled(config, task, model)
  for _ in range(steps):
    state, metrics = step(state)
  return jax.device_get((state, metrics))


def assert_equal(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


def test_streams_differ_and_depend_on_seed_and_index():
  other = dataclasses.replace(tiny.CONFIG, seed=1)
  keys = [stream(tiny.CONFIG, 'data', 0), stream(tiny.CONFIG, 'data', 1),
          stream(tiny.CONFIG, 'eval', 0), stream(tiny.CONFIG, 'dropout', 0),
          stream(other, 'data', 0)]  # yapf: disable
  assert len({jax.random.key_data(key).tobytes() for key in map(jax.device_get, keys)}) == 5


def test_two_runs_are_equal_and_seeds_differ():
  assert_equal(after(tiny.CONFIG, model=tiny.Model()), after(tiny.CONFIG, model=tiny.Model()))
  other = dataclasses.replace(PLAIN, seed=1)
  assert after(PLAIN)[1]['loss'] != after(other)[1]['loss']


@pytest.mark.parametrize('pieces', [2, 4])
def test_pieces_of_a_batch_add_up_to_the_whole(pieces):
  whole = after(PLAIN)
  cut = after(dataclasses.replace(PLAIN, micro_batches=pieces))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), whole, cut)


def mean_loss_and_gradient_norm(params, batch):
  """tiny.Model's mean loss over scored tokens, and the norm of its gradient, in float64."""
  inputs, targets, weights = (batch[name].ravel() for name in ('inputs', 'targets', 'weights'))
  table, kernel, bias = (np.asarray(leaf, np.float64)
                         for leaf in (params['Embed_0']['embedding'], params['Dense_0']['kernel'],
                                      params['Dense_0']['bias']))  # yapf: disable
  hidden = table[inputs]
  probs = np.exp(hidden @ kernel + bias)
  probs /= probs.sum(-1, keepdims=True)
  loss = -(np.log(probs[np.arange(len(targets)), targets]) * weights).sum() / weights.sum()
  slope = (probs - np.eye(tiny.CLASSES)[targets]) * weights[:, None] / weights.sum()
  table_slope = np.zeros_like(table)
  np.add.at(table_slope, inputs, slope @ kernel.T)
  squares = [np.square(g).sum() for g in (table_slope, hidden.T @ slope, slope.sum(0))]
  return loss, np.sqrt(sum(squares))


@pytest.mark.parametrize('pieces', [1, 2])
def test_loss_and_gradient_are_means_over_tokens_not_over_pieces(pieces):
  batch = jax.device_get(tiny.sample(stream(PLAIN, 'data', 0), PLAIN.batch_size))
  loss, norm = mean_loss_and_gradient_norm(jax.device_get(tiny.new_state(PLAIN).params), batch)
  metrics = after(dataclasses.replace(PLAIN, micro_batches=pieces), steps=1)[1]
  np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-5)
  np.testing.assert_allclose(metrics['grad_norm'], norm, rtol=1e-5)


def test_split_keeps_every_row_once():
  batch = dict(targets=jnp.arange(7), weights=jnp.arange(7.) + 1, inputs=jnp.ones((7, 3)))
  pieces = split(batch, 3)
  assert pieces['inputs'].shape == (3, 3, 3)
  assert pieces['targets'].ravel()[:7].tolist() == list(range(7))
  assert pieces['weights'].ravel().tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 0]


@pytest.mark.parametrize('pieces', [1, 2])
def test_a_step_that_is_not_finite_changes_nothing(pieces):
  config = dataclasses.replace(PLAIN, micro_batches=pieces)
  task = tiny.poisoned(config, 2)
  good, metrics = after(config, task, steps=2)
  assert metrics['finite'] and good.step == 2
  for steps in (3, 4):
    state, metrics = after(config, task, steps=steps)
    assert not metrics['finite'] and np.isnan(metrics['loss'])
    assert_equal(state, good)


def test_parameters_that_would_overflow_are_not_taken():
  config = dataclasses.replace(PLAIN, learning_rate=1e38, weight_decay=1e38)
  state, metrics = after(config, steps=1)
  assert np.isfinite(metrics['loss']) and not metrics['finite']
  assert_equal(state, after(config, steps=0)[0])


def test_the_step_compiles_once():
  after(PLAIN, steps=3)
  assert compiled(PLAIN, tiny.TASK, tiny.Model(0.))._cache_size() == 1


def test_features_are_redrawn_by_step_alone():
  seen = []

  class Spy(tiny.Model):

    def __call__(self, batch, *, deterministic=True, draw=0):
      jax.debug.callback(lambda value: seen.append(int(value)), jnp.asarray(draw), ordered=False)
      return super().__call__(batch, deterministic=deterministic, draw=draw)

  after(dataclasses.replace(PLAIN, redraw_steps=2), model=Spy(0.), steps=5)
  jax.effects_barrier()
  assert seen == [0, 0, 1, 1, 2]


def test_state_is_all_there_is():
  shapes = jax.eval_shape(lambda: init_state(tiny.CONFIG, tiny.TASK, tiny.Model()))
  assert shapes._fields == ('step', 'params', 'opt_state') and shapes.step.dtype == jnp.int32
