"""The loop on a tiny model: its rows, its checkpoints, and how it ends."""

import dataclasses
import functools

from experiments import loop
from experiments.checkpoint import Checkpoints
from experiments.evaluate import make_evaluate
from experiments.step import make_train_step
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.writer_test import rows

MODEL = tiny.Model()
POISONED = tiny.poisoned(tiny.CONFIG, 4)
# Compiled once for the many runs of this file; resume_test.py compiles anew.
train_step_of = functools.cache(lambda config, task: make_train_step(config, task, MODEL))
evaluate_of = functools.cache(lambda config, task: make_evaluate(config, task, MODEL))
new_state_of = functools.cache(lambda config: jax.device_get(tiny.new_state(config)))


def same_numbers(config):
  """The config without what no number depends on."""
  return dataclasses.replace(config, checkpoint_every=0, eval_every=0, log_every=1)


def train(path, config=tiny.CONFIG, task=tiny.TASK, stop_at=None, die_at=None):
  """Runs or resumes a run in path; returns (state, scores). die_at: raises, as a kill would."""
  path.mkdir(exist_ok=True)
  asked, seen = [], []

  def should_stop():
    asked.append(0)
    if first + len(asked) == die_at:
      raise KeyboardInterrupt
    return first + len(asked) == stop_at

  warnings = []
  with Checkpoints(path / 'checkpoints', config, warnings.append) as checkpoints:
    new = jax.tree.map(jnp.asarray, new_state_of(same_numbers(config)))
    state = checkpoints.restore(jax.eval_shape(lambda: new)) or new
    first = int(state.step)
    metrics = loop.MetricsFile(path / 'metrics.jsonl', first)
    try:
      return loop.run(config,
                      state,
                      train_step_of(same_numbers(config), task),
                      evaluate_of(same_numbers(config), task),
                      metrics,
                      checkpoints,
                      should_stop=should_stop,
                      report=seen.append)
    finally:
      metrics.close()
      assert not warnings


@pytest.fixture(name='whole', scope='module')
def fixture_whole(tmp_path_factory):
  """(directory, state) of a run of 6 steps that nothing stopped."""
  path = tmp_path_factory.mktemp('whole')
  state, _ = train(path)
  return path, jax.device_get(state)


def assert_same_end(path, state, whole):
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), whole[1])
  assert (path / 'metrics.jsonl').read_bytes() == (whole[0] / 'metrics.jsonl').read_bytes()


def test_rows(whole):
  found = rows(whole[0] / 'metrics.jsonl')
  assert [row['step'] for row in found] == [1, 2, 3, 4, 5, 6]
  assert ['eval_loss' in row for row in found] == [False, True] * 3
  assert set(found[0]) == {'step', 'loss', 'accuracy', 'grad_norm', 'learning_rate'}
  assert set(found[1]['baselines']) == {'same again', 'zero'}
  assert found[-1]['loss'] < found[0]['loss']
  np.testing.assert_allclose([row['learning_rate'] for row in found[:3]], [0, .05, .1], rtol=1e-6)


def test_a_stop_at_every_step_changes_nothing(whole, tmp_path):
  config = dataclasses.replace(tiny.CONFIG, checkpoint_every=0)
  for step in range(1, 6):
    state, scores = train(tmp_path, config, stop_at=step)
    assert scores is None and int(state.step) == step
  state, scores = train(tmp_path, config)
  assert scores
  assert_same_end(tmp_path, state, whole)


@pytest.mark.parametrize('step', [1, 2, 3, 5, 6])
def test_a_death_at_any_step_changes_nothing(whole, tmp_path, step):
  with pytest.raises(KeyboardInterrupt):
    train(tmp_path, die_at=step)
  state, _ = train(tmp_path)
  assert_same_end(tmp_path, state, whole)


def test_a_run_that_has_ended_is_only_scored(whole, tmp_path):
  state, scores = train(tmp_path)
  again, scores_again = train(tmp_path)
  assert scores == scores_again
  assert_same_end(tmp_path, again, whole)
  assert int(state.step) == 6


@pytest.mark.parametrize('checkpoint_every, last_good', [(2, 4), (3, 3), (0, None)])
def test_a_step_that_is_not_finite_ends_the_run(tmp_path, checkpoint_every, last_good):
  config = dataclasses.replace(tiny.CONFIG, checkpoint_every=checkpoint_every, log_every=3)
  task = POISONED
  for _ in range(2):
    with pytest.raises(loop.NonFinite, match='step 5 is not finite .loss nan.*nothing of it'):
      train(tmp_path, config, task)
    found = rows(tmp_path / 'metrics.jsonl')
    assert [row['step'] for row in found] == [2, 3, 4, 5]
    assert found[-1]['loss'] == 'nan' and 'eval_loss' not in found[-1]
    steps = [int(p.name) for p in (tmp_path / 'checkpoints').iterdir() if p.name.isdigit()]
    assert max(steps, default=None) == last_good


def test_only_what_is_due_is_written(tmp_path):
  config = dataclasses.replace(tiny.CONFIG, log_every=4, eval_every=0, checkpoint_every=5)
  train(tmp_path, config)
  found = rows(tmp_path / 'metrics.jsonl')
  assert [(row['step'], 'eval_loss' in row) for row in found] == [(4, False), (6, True)]
  assert {path.name for path in (tmp_path / 'checkpoints').iterdir()} == {'5', '6'}


class Number:
  """A metric that notes when it is read."""

  def __init__(self, events, step):
    self.events, self.step = events, step

  def __array__(self, dtype=None, copy=None):
    self.events.append(f'read {self.step}')
    return np.asarray(1., dtype)


class Nothing:
  """Takes every call."""

  def __getattr__(self, name):
    return lambda *_: None


def test_a_step_is_read_when_the_next_has_been_dispatched():
  events, config = [], dataclasses.replace(tiny.CONFIG, steps=4, eval_every=0, checkpoint_every=0)

  def step(state):
    number = int(state.step) + 1
    events.append(f'dispatch {number}')
    return state._replace(step=np.int32(number)), dict(
        dict.fromkeys(('loss', 'accuracy', 'grad_norm'), np.float32(1)),
        finite=Number(events, number))  # yapf: disable

  loop.run(config,
           tiny.new_state()._replace(step=np.int32(0)),
           step,
           lambda _: dict(model=loop.Score(1., 1., 1.)),
           Nothing(),
           Nothing(),
           should_stop=lambda: False,
           report=lambda _: None)
  assert events == ['dispatch 1', 'dispatch 2', 'read 1', 'dispatch 3', 'read 2', 'dispatch 4',
                    'read 3', 'read 4']  # yapf: disable


@pytest.mark.parametrize('every, due', [(0, [6]), (1, [1, 2, 3, 4, 5, 6]), (4, [4, 6])])
def test_what_is_due(every, due):
  assert [step for step in range(1, 7) if loop.is_due(step, every, 6)] == due
