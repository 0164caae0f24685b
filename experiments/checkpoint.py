"""Checkpoints that are whole or are passed over: orbax behind a digest of every leaf."""

import contextlib
import logging
import os
from pathlib import Path
import sys
from typing import Any, Callable, Iterator

from absl import logging as absl_logging
import jax
from jax import Array
import jax.numpy as jnp
import orbax.checkpoint as ocp

from experiments import processes
from experiments.config import Config, UserError
from experiments.step import State
from experiments.workdir import check_same, identity


def silence_orbax() -> None:
  """For a program's start: what goes wrong in orbax is told in one line instead.

  When it cannot read one array it leaves the reads of the others to themselves, and each complains
  that nobody waits for it.
  """
  absl_logging.set_verbosity(absl_logging.FATAL)
  logging.getLogger('asyncio').setLevel(logging.CRITICAL)
  if sys.unraisablehook is sys.__unraisablehook__:
    sys.unraisablehook = _show_unraisable


def _show_unraisable(unraisable: Any) -> None:
  if str(unraisable.exc_value) != 'Event loop is closed':
    sys.__unraisablehook__(unraisable)


class CheckpointError(UserError):
  """A checkpoint could not be written."""
  exit_status = 1


def digest(leaf: Array) -> Array:
  """A [] uint32 that any change of a single element changes, however the leaf is sharded.

  It is the sum of the elements' bits, each times an odd number that depends on its index, modulo
  2**32.
  """
  bits = leaf if leaf.dtype == bool else jax.lax.bitcast_convert_type(
      leaf, jnp.dtype(f'uint{8 * min(leaf.dtype.itemsize, 4)}'))
  bits = bits.reshape(-1).astype(jnp.uint32)
  return jnp.sum(bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def describe(state: State) -> dict[str, list]:
  """Each leaf's path -> [shape, dtype], what a checkpoint must agree with to be read at all."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  return {jax.tree_util.keystr(path): [list(x.shape), str(x.dtype)] for path, x in leaves}


@jax.jit
def _snapshot(state: State) -> tuple[State, list[Array]]:
  """A copy that later steps, which donate their state, cannot overwrite while it is written."""
  return jax.tree.map(jnp.copy, state), [digest(leaf) for leaf in jax.tree.leaves(state)]


class Checkpoints:
  """The checkpoints of one run, newest kept. Use as a context manager: leaving it waits.

  read_only leaves the directory as it is, so that another process may write to it meanwhile.
  """

  def __init__(self,
               directory: Path,
               config: Config,
               warn: Callable[[str], None],
               read_only: bool = False):
    options = ocp.CheckpointManagerOptions(max_to_keep=config.keep_checkpoints,
                                           cleanup_tmp_directories=not read_only,
                                           create=not read_only,
                                           read_only=read_only)
    self._manager = ocp.CheckpointManager(directory, options=options, item_names=('state', 'meta'))
    self._directory, self._config, self._warn = directory, config, warn
    self._read_only = read_only
    self._saving: int | None = None

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    try:
      self.wait()
    except CheckpointError as failure:
      if error is None:
        raise
      self._warn(str(failure))
    finally:
      self._manager.close()

  def save(self, state: State) -> None:
    """Starts writing a state; an error of the one before shows here, or in wait().

    Raises:
      CheckpointError: this state or the one before it cannot be written.
    """
    self.wait()
    step = self._saving = int(state.step)
    copy, digests = _snapshot(state)
    meta = dict(config=identity(self._config),
                leaves=describe(state),
                digests=[int(value) for value in digests])
    args = ocp.args.Composite(state=ocp.args.StandardSave(copy), meta=ocp.args.JsonSave(meta))
    with _reported(step):
      if not self._manager.save(step, args=args, force=True):
        raise FileExistsError(f'{self._directory} holds this step or a later one already')

  def wait(self) -> None:
    """Waits until all that was saved is on the disk.

    Raises:
      CheckpointError: the last state could not be written.
    """
    with _reported(self._saving):
      self._manager.wait_until_finished()
      self._manager.check_for_errors()

  def latest_step(self) -> int | None:
    """The step of the newest checkpoint, or None."""
    return self._manager.latest_step()

  def restore(self, abstract: State) -> State | None:
    """The newest state that is whole, or None; damaged ones are moved aside with a warning.

    Reading only, those are passed over, and so are those that a run deletes meanwhile.

    Args:
      abstract: jax.ShapeDtypeStruct leaves, as of jax.eval_shape.

    Raises:
      UserError: a checkpoint was made with another configuration, or for another model.
    """
    state, tried = None, set[int]()
    while steps := set(self._manager.all_steps(read=True)) - tried:
      step = max(steps)
      tried.add(step)
      problem = None
      try:
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
        self._check(step, meta['meta'], abstract)
        state = self._read(step, meta['meta'], abstract)
      except UserError:
        raise
      except Exception as error:  # Whatever orbax raises for files it cannot read.
        problem = error
      if not processes.any_of(problem is not None):
        break
      state = None
      self._put_aside(step, problem)
    self._manager.reload()
    return state

  def _check(self, step: int, meta: dict[str, Any], abstract: State) -> None:
    where = self._directory / str(step)
    check_same(meta['config'], self._config, where)
    theirs, ours = meta['leaves'], describe(abstract)
    for name in sorted(set(theirs) | set(ours)):
      if theirs.get(name) != ours.get(name):
        raise UserError(f'{where} is of another model: {name} is {theirs.get(name, "absent")} '
                        f'there, {ours.get(name, "absent")} now. Give another --workdir')

  def _read(self, step: int, meta: dict[str, Any], abstract: State) -> State:
    args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
    state = self._manager.restore(step, args=args)['state']
    state, digests = _snapshot(state)
    for name, found, wanted in zip(meta['leaves'], digests, meta['digests'], strict=True):
      if int(found) != wanted:
        raise ValueError(f'the bits of {name} have changed')
    return state

  def _put_aside(self, step: int, error: Exception | None) -> None:
    """error: what this process met; None where another one did."""
    if not processes.is_first():
      return
    reason = ' '.join(str(error or 'as another process says').split())[:200]
    if self._read_only:
      self._warn(f'checkpoint of step {step} cannot be read ({reason}); it is passed over')
      return
    aside = self._directory.with_name('damaged') / str(step)
    aside.parent.mkdir(exist_ok=True)
    while aside.exists():
      aside = aside.with_name(aside.name + '_')
    os.replace(self._directory / str(step), aside)
    self._warn(f'checkpoint of step {step} is damaged ({reason}); moved to {aside}')


@contextlib.contextmanager
def _reported(step: int | None) -> Iterator[None]:
  """Turns what goes wrong inside into a CheckpointError."""
  try:
    yield
  except Exception as error:
    reason = ' '.join(str(error).split())
    if len(reason) > 300:  # Orbax puts what happened first and why last.
      reason = f'{reason[:100]} ... {reason[-190:]}'
    raise CheckpointError(f'checkpoint of step {step} could not be written: {reason}') from error
