"""One run by several processes: who joins it, who writes, and that all do the same.

Every process runs the same program on its own devices, and holds its part of the arrays. The first
one writes what is no array; checkpoints are written by all.
"""

import os
from typing import Any, Callable

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from experiments.config import UserError

_HEARTBEAT = 30  # seconds without a sign of a process after which the others end
# Who says that there are several processes, and how many: launchers that JAX knows. A batch script
# of Slurm has SLURM_NTASKS too, and is one process.
_COUNTS = ('JAX_NUM_PROCESSES', 'SLURM_STEP_NUM_TASKS', 'OMPI_COMM_WORLD_SIZE')


def join(mode: str) -> None:
  """Joins the other processes, if there are any: mode is 'on', 'off' or 'auto', as told by who
  started this one. Before anything else is asked of JAX.

  Raises:
    UserError: the others cannot be found or do not answer.
  """
  several = any(
      os.environ.get(name, '').isdecimal() and int(os.environ[name]) > 1
      for name in _COUNTS) or ',' in os.environ.get('TPU_WORKER_HOSTNAMES', '')
  if mode == 'off' or mode == 'auto' and not several:
    return
  number = lambda name: int(os.environ[name]) if name in os.environ else None
  try:
    jax.distributed.initialize(os.environ.get('JAX_COORDINATOR_ADDRESS'),
                               number('JAX_NUM_PROCESSES'),
                               number('JAX_PROCESS_ID'),
                               heartbeat_timeout_seconds=_HEARTBEAT)
  except (ValueError, RuntimeError) as error:
    reason = ' '.join(str(error).split())[:300]
    raise UserError(
        f'distributed={mode}: the processes cannot join ({reason}). Slurm, Open MPI and TPU pods '
        'say all that is needed; elsewhere set JAX_COORDINATOR_ADDRESS=HOST:PORT, '
        'JAX_NUM_PROCESSES and JAX_PROCESS_ID; or give --distributed=off') from None


def is_first() -> bool:
  """Whether this process is the one that writes."""
  return jax.process_index() == 0


def any_of(flag: bool) -> bool:
  """Whether any process says so; all of them must ask."""
  if jax.process_count() == 1:
    return flag
  return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def any_of_late(ask: Callable[[], bool]) -> Callable[[], bool]:
  """Whether ask() was true of any process when this was last called, so that nothing is waited for
  between two steps; of a single process, ask itself. All of them must call it alike.
  """
  if jax.process_count() == 1:
    return ask
  mesh = jax.make_mesh((jax.device_count(),), ('all',), axis_types=(jax.sharding.AxisType.Auto,))
  anyone = jax.jit(jnp.any, out_shardings=jax.NamedSharding(mesh, jax.P()))
  known: jax.Array | None = None

  def late() -> bool:
    nonlocal known
    here = np.full(jax.local_device_count(), ask())
    flags = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, jax.P('all')), here)
    known, before = anyone(flags), known
    return before is not None and bool(before)

  return late


def whole(x: jax.Array) -> Any:
  """All of an array, of which this process may hold a part; all of them must ask."""
  if x.is_fully_addressable or x.is_fully_replicated:
    return np.asarray(x)
  return multihost_utils.process_allgather(x, tiled=True)
