"""Compares variants on tasks: `python -m experiments.compare --tasks=copy,mqar --attention=...`.

Plans the runs, says how long they will take, runs what has not ended, and writes a report of what
has. The same command again goes on where it stopped.
"""

from collections.abc import Sequence
import fcntl
import os
from pathlib import Path
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

from absl import logging
import jax

from experiments import compare_report
from experiments import sweep
from experiments.bench_measure import matmul_rate
from experiments.bench_progress import Progress
from experiments.compare_request import help_text, parse, Request
from experiments.config import UserError
from experiments.sweep import Cell, FAILURE, Plan
from experiments.writer import write_json

_POLL = 0.2
_RETRY = 5.  # seconds until a run that another process holds is asked for again


class Running(NamedTuple):
  """A run that is going on, and the place among the workers that it takes."""
  cell: Cell
  process: subprocess.Popen
  place: int


class Stop:
  """Notes SIGTERM and SIGINT."""

  def __init__(self) -> None:
    self.signal: int | None = None
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._note)

  def _note(self, number: int, frame: Any) -> None:
    del frame
    self.signal = number


def _start(cell: Cell, place: int, workers: int) -> Running:
  cell.path.parent.mkdir(parents=True, exist_ok=True)
  cores = sorted(os.sched_getaffinity(0)) if sys.platform == 'linux' else []
  own = cores[place * len(cores) // workers:(place + 1) * len(cores) // workers] or cores
  command = [sys.executable, '-P', '-m', 'experiments.worker', ','.join(map(str, own)) or '-',
             str(os.getpid()), *sweep.arguments(cell), '--distributed=off']  # yapf: disable
  root = str(Path(__file__).parents[1])
  path = os.pathsep.join(filter(None, (root, os.environ.get('PYTHONPATH'))))
  with open(_log(cell), 'w', encoding='utf-8') as log:
    process = subprocess.Popen(command,
                               stdin=subprocess.DEVNULL,
                               stdout=log,
                               stderr=subprocess.STDOUT,
                               env=os.environ | {'PYTHONPATH': path},
                               start_new_session=True)  # so that Ctrl-C comes here alone
  return Running(cell, process, place)


def _log(cell: Cell) -> Path:
  """What a run says; beside its workdir, which is its own."""
  return cell.path.with_name(cell.path.name + '.log')


def _in_use(cell: Cell) -> bool:
  """Whether another process trains this run."""
  try:
    with open(cell.path / 'lock', 'r+', encoding='utf-8') as lock:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      return False
  except BlockingIOError:
    return True
  except OSError:
    return False


def _note_worker_failure(running: Running) -> None:
  lines = _log(running.cell).read_text(encoding='utf-8').strip().splitlines()
  errors = [line for line in lines if line.startswith('error: ')]
  said = (errors or lines or ['it said nothing'])[-1].removeprefix('error: ')
  _note_failure(running.cell, running.process.returncode, said)


def _note_failure(cell: Cell, status: int, said: str) -> None:
  write_json(_failure(cell), dict(status=status, said=said))


def _failure(cell: Cell) -> Path:
  return cell.path.with_name(f'{cell.path.name}.{FAILURE}')


def run(cells: Sequence[Cell], workers: int, progress: Progress, seconds: dict[Path, float],
        stop: Stop) -> None:
  """Runs what has not ended, `workers` at a time, until all have or it is told to stop.

  One that fails is noted and the others go on. One that another process trains is left to it.
  """
  left = [cell for cell in cells if not cell.is_done]
  for cell in left:
    _failure(cell).unlink(missing_ok=True)
  going: list[Running] = []
  asked: dict[Path, float] = {}
  while (left or going) and stop.signal is None:
    free = sorted(set(range(workers)) - {running.place for running in going})
    now = time.monotonic()
    ready = [cell for cell in left if now - asked.get(cell.path, -_RETRY) >= _RETRY]
    if free and ready:
      cell = ready[0]
      asked[cell.path] = now
      if cell.is_done:  # by another process
        left.remove(cell)
      elif not _in_use(cell):
        left.remove(cell)
        progress.cell(cell.name, seconds[cell.path])
        going.append(_start(cell, free[0], workers))
      continue
    time.sleep(_POLL)
    for running in [running for running in going if running.process.poll() is not None]:
      going.remove(running)
      if running.process.returncode:
        _note_worker_failure(running)
        print(f'failed: {running.cell.name}; see {_log(running.cell)}', file=sys.stderr)
  for running in going:
    running.process.terminate()
  for running in going:
    running.process.wait()
  progress.end()


def compare(request: Request) -> int:
  """Plans, runs and reports; returns the exit status.

  Raises:
    UserError: there is nothing to compare.
  """
  plan = sweep.plan(request.blocks, request.directory)
  if request.cell is not None:
    return _one(plan, request.cell)
  left = [cell for cell in plan.cells if not cell.is_done]
  jax.config.update('jax_platforms', 'cpu')  # other devices are for the runs
  rate = matmul_rate('float32') if left and not request.report_only else 1.
  seconds = {cell.path: sweep.guess_seconds(cell, rate) for cell in left}
  stop = Stop()
  _say_plan(plan, left, sum(seconds.values()) / request.workers, request)
  if request.dry_run:
    return 0
  request.directory.mkdir(parents=True, exist_ok=True)
  if not request.report_only:
    run(plan.cells, request.workers, Progress(len(left), sum(seconds.values())), seconds, stop)
  failures = [cell for cell in plan.cells if not cell.is_done and _failure(cell).exists()]
  files = compare_report.write(plan, {cell.path: _failure(cell) for cell in failures},
                               request.directory, request.command)
  print(compare_report.short(plan, request.directory))
  print(f'everything is in {request.directory}: {", ".join(files)}')
  if stop.signal is not None:
    print('stopped; the same command goes on from here')
    return 128 + stop.signal
  return 1 if failures else 0


def _one(plan: Plan, index: int) -> int:
  """Trains one run here, for who starts many of them: a Slurm array, a Kubernetes job."""
  if not 0 <= index < len(plan.cells):
    raise UserError(f'--cell={index} is none of the {len(plan.cells)} runs, 0 to '
                    f'{len(plan.cells) - 1}')
  from experiments import checkpoint, train  # only this needs the models
  checkpoint.silence_orbax()
  cell = plan.cells[index]
  _failure(cell).unlink(missing_ok=True)
  try:
    return train.train(cell.config)
  except Exception as error:
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    _note_failure(cell, getattr(error, 'exit_status', 1), str(error))
    raise


def _say_plan(plan: Plan, left: Sequence[Cell], seconds: float, request: Request) -> None:
  for index, cell in enumerate(plan.cells):
    if request.dry_run:
      print(f'{index:4} {"done" if cell.is_done else "    "} {cell.name}')
  for name, reason in plan.undefined:
    print(f'left out: {name}: {reason}')
  print(f'{len(plan.cells)} runs, {len(plan.cells) - len(left)} of them done; the others take '
        f'roughly {max(1, round(seconds / 60))} min with {request.workers} at a time'
        if left else f'{len(plan.cells)} runs, all done')
  sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
  """Returns the exit status: 0, 1 if a run failed, 2 if what was asked for cannot be done, 130 or
  143 if it was told to stop.
  """
  logging.set_verbosity(logging.FATAL)
  try:
    request = parse(argv)
    if request is None:
      print(help_text())
      return 0
    return compare(request)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return error.exit_status
  except OSError as error:
    print(f'error: {error}', file=sys.stderr)
    return 1


if __name__ == '__main__':
  sys.exit(main(sys.argv))
