"""Checkpoints: bits come back, damage is passed over with a warning, differences are not."""

import dataclasses
import shutil

from experiments.checkpoint import CheckpointError, Checkpoints, digest
from experiments.config import UserError
from experiments.step import make_train_step
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny

MODEL = tiny.Model()
ABSTRACT = jax.eval_shape(tiny.new_state)


@pytest.fixture(name='states', scope='module')
def fixture_states():
  """The states of steps 1 to 4, on the host."""
  step, state, states = make_train_step(tiny.CONFIG, tiny.TASK, MODEL), tiny.new_state(), []
  for _ in range(4):
    state, _ = step(state)
    states.append(jax.tree.map(np.array, state))
  return states


@pytest.fixture(name='kept')
def fixture_kept(tmp_path, states):
  """A directory with the checkpoints of steps 2 and 3."""
  with open_(tmp_path) as checkpoints:
    for state in states[1:3]:
      checkpoints.save(jax.tree.map(jnp.asarray, state))
  return tmp_path / 'checkpoints'


def open_(tmp_path, config=tiny.CONFIG, warnings=None):
  return Checkpoints(tmp_path / 'checkpoints', config,
                     ([] if warnings is None else warnings).append)


def assert_restores(tmp_path, state, warnings_wanted=0, config=tiny.CONFIG):
  warnings = []
  with open_(tmp_path, config, warnings) as checkpoints:
    found = checkpoints.restore(ABSTRACT)
  jax.tree.map(np.testing.assert_array_equal, found, state)
  assert len(warnings) == warnings_wanted


def files_of(directory):
  """The files that hold arrays, largest first."""
  files = [path for path in (directory / 'state').rglob('*') if path.is_file()]
  return sorted(files, key=lambda path: -path.stat().st_size)


def test_nothing_there(tmp_path):
  assert_restores(tmp_path, None)


def test_the_newest_comes_back_bit_for_bit(tmp_path, kept, states):
  assert_restores(tmp_path, states[2])
  assert sorted(path.name for path in kept.iterdir()) == ['2', '3']


def test_only_the_newest_are_kept(tmp_path, kept, states):
  with open_(tmp_path) as checkpoints:
    checkpoints.save(jax.tree.map(jnp.asarray, states[3]))
  assert sorted(path.name for path in kept.iterdir()) == ['3', '4']


def test_later_steps_do_not_reach_into_a_save(tmp_path):
  step, state = make_train_step(tiny.CONFIG, tiny.TASK, MODEL), tiny.new_state()
  with open_(tmp_path) as checkpoints:
    state, _ = step(state)
    wanted = jax.tree.map(np.array, state)
    checkpoints.save(state)
    for _ in range(5):
      state, _ = step(state)
  assert_restores(tmp_path, wanted)


@pytest.mark.parametrize('damage', ['flipped', 'other', 'truncated', 'emptied', 'no meta', 'torn'])
def test_a_damaged_one_is_passed_over(tmp_path, kept, states, damage):
  newest = kept / '3'
  if damage == 'flipped':
    for path in files_of(newest):
      data = bytearray(path.read_bytes())
      for index in range(len(data) // 2, len(data), 97):
        data[index] ^= 1
      path.write_bytes(data)
  elif damage == 'other':  # Well-formed files of other numbers, which orbax would not notice.
    (newest / 'state').rename(tmp_path / 'gone')
    shutil.copytree(kept / '2' / 'state', newest / 'state')
  elif damage == 'truncated':
    for path in files_of(newest):
      path.write_bytes(path.read_bytes()[:-5])
  elif damage == 'emptied':
    newest.rename(tmp_path / 'gone')
    newest.mkdir()
  elif damage == 'no meta':
    (newest / 'meta').rename(tmp_path / 'gone')
  else:
    (newest / 'meta' / 'metadata').write_text('{"config":')
  assert_restores(tmp_path, states[1], 1)
  assert (tmp_path / 'damaged' / '3').is_dir()
  with open_(tmp_path) as checkpoints:  # The step can be saved again.
    checkpoints.save(jax.tree.map(jnp.asarray, states[2]))
  assert_restores(tmp_path, states[2])


def test_another_config_is_refused_not_passed_over(tmp_path, kept):
  other = dataclasses.replace(tiny.CONFIG, seed=5)
  with open_(tmp_path, other) as checkpoints:
    with pytest.raises(UserError, match='seed=0 there, 5 now'):
      checkpoints.restore(ABSTRACT)
  assert (kept / '3').is_dir()


def test_another_model_is_refused_not_passed_over(tmp_path, kept):
  abstract = ABSTRACT._replace(params={'Other': ABSTRACT.params['Dense_0']})
  with open_(tmp_path) as checkpoints:
    with pytest.raises(UserError, match='of another model: .*Dense_0'):
      checkpoints.restore(abstract)
  assert (kept / '3').is_dir()


def test_a_step_that_is_there_is_not_silently_skipped(tmp_path, kept, states):
  del kept
  with open_(tmp_path) as checkpoints:
    for state in states[1:3]:
      with pytest.raises(CheckpointError, match=f'step {int(state.step)} could not be written'):
        checkpoints.save(jax.tree.map(jnp.asarray, state))


def test_an_error_of_a_save_in_the_background_comes_out(tmp_path, states, monkeypatch):
  checkpoints = open_(tmp_path)
  manager = checkpoints._manager

  def full():
    raise OSError(28, 'No space left on device')

  checkpoints.save(jax.tree.map(jnp.asarray, states[0]))
  with monkeypatch.context() as patch:
    patch.setattr(manager, 'check_for_errors', full)
    with pytest.raises(CheckpointError, match='No space left'):
      checkpoints.wait()
  checkpoints.__exit__(None, None, None)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16', 'int32', 'uint8', 'bool'])
def test_any_change_of_one_element_changes_the_digest(dtype):
  leaf = jnp.arange(24).reshape(2, 3, 4).astype(dtype)
  if dtype == 'bool':
    leaf = leaf & (jnp.arange(24).reshape(2, 3, 4) % 2 == 0)
  before, seen = int(digest(leaf)), set()
  for index in np.ndindex(leaf.shape):
    other = leaf.at[index].set(~leaf[index] if dtype == 'bool' else jnp.asarray(99, dtype))
    seen.add(int(digest(other)))
  assert before not in seen
  assert int(digest(leaf[::-1])) != before
