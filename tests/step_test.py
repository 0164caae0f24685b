"""The train step: what it depends on, how pieces of a batch add up, what a NaN may touch."""

import dataclasses

from experiments.step import init_state, make_train_step, split, stream
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny

PLAIN = dataclasses.replace(tiny.CONFIG, dropout=0., warmup_steps=0)


def after(config, task=tiny.TASK, model=tiny.Model(0.), steps=2):
  """State and last metrics after some steps, on the host."""
  state, metrics = tiny.new_state(config, task, model), None
  step = make_train_step(config, task, model)
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
  other = dataclasses.replace(tiny.CONFIG, seed=1)
  assert after(PLAIN)[1]['loss'] != after(dataclasses.replace(other, dropout=0.))[1]['loss']


@pytest.mark.parametrize('pieces', [2, 3, 4, 5])
def test_pieces_of_a_batch_add_up_to_the_whole(pieces):
  whole = after(PLAIN)
  cut = after(dataclasses.replace(PLAIN, micro_batches=pieces))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), whole, cut)


def test_the_loss_is_the_mean_over_tokens_not_over_pieces():
  batch = jax.device_get(tiny.sample(stream(PLAIN, 'data', 0), PLAIN.batch_size))
  params = tiny.new_state(PLAIN).params
  logits = np.asarray(tiny.Model().apply({'params': params}, batch), np.float64)
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  picked = np.take_along_axis(log_probs, batch['targets'][..., None], -1)[..., 0]
  wanted = -(picked * batch['weights']).sum() / batch['weights'].sum()
  for pieces in (1, 2):
    config = dataclasses.replace(PLAIN, micro_batches=pieces)
    np.testing.assert_allclose(after(config, steps=1)[1]['loss'], wanted, rtol=1e-5)


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
  assert_equal(state, jax.device_get(tiny.new_state(config)))


def test_the_step_compiles_once():
  config, model = tiny.CONFIG, tiny.Model()
  step, state = make_train_step(config, tiny.TASK, model), tiny.new_state()
  for _ in range(3):
    state, _ = step(state)
  assert step._cache_size() == 1


def test_features_are_redrawn_by_step_alone():
  seen = []

  class Spy(tiny.Model):

    def __call__(self, batch, *, deterministic=True, draw=0):
      jax.debug.callback(lambda value: seen.append(int(value)), jnp.asarray(draw), ordered=False)
      return super().__call__(batch, deterministic=deterministic, draw=draw)

  after(dataclasses.replace(PLAIN, redraw_steps=2), model=Spy(0.), steps=5)
  jax.effects_barrier()
  assert [draw for index, draw in enumerate(seen) if index][-5:] == [0, 0, 1, 1, 2]


def test_state_is_all_there_is():
  shapes = jax.eval_shape(lambda: init_state(tiny.CONFIG, tiny.TASK, tiny.Model()))
  assert shapes._fields == ('step', 'params', 'opt_state') and shapes.step.dtype == jnp.int32
