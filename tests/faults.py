"""What befalls a run and what becomes of it: `python -m tests.faults` prints the table.

Every fault is done to real runs of experiments.train, each a process of its own, and then the same
command is given again. It must end with the parameters and rows of a run to which nothing
happened, and must not go back behind a checkpoint that was whole.
"""

import argparse
from collections.abc import Callable, Sequence
import os
from pathlib import Path
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from tests.kill_resume import digests, last_step

OPTIONS = ('--model_dim=8', '--heads=2', '--num_layers=1', '--length=4', '--steps=40',
           '--batch_size=4', '--dropout=0.1', '--log_every=1', '--eval_every=20',
           '--eval_batches=2', '--checkpoint_every=5', '--nofree_running')
POISONED_STEP = 25
_POISON = ('import sys; from tests import faults; from experiments import train; '
           'faults.poison(train); sys.exit(train.main(["train", *sys.argv[1:]]))')


class Outcome(NamedTuple):
  """What a fault came to.

  Attributes:
    seen: what the program said of it.
    statuses: the exit statuses it ended with, and after the fault went on with.
    whole: the newest checkpoint that the fault left whole.
    resumed: where the next run went on.
  """
  seen: str
  statuses: tuple[int, ...]
  whole: int
  resumed: int


class Broken(AssertionError):
  """A fault cost what it must not."""


def poison(train) -> None:
  """Makes POISONED_STEP one whose loss is NaN, by the same program as the other steps."""
  import jax
  compile_step = train.compile_step

  def poisoned(*arguments):
    step, costs = compile_step(*arguments)

    def maybe(state):
      if int(state.step) == POISONED_STEP - 1:
        state = state._replace(params=jax.tree.map(lambda x: x * float('nan'), state.params))
      return step(state)

    return maybe, costs

  train.compile_step = poisoned


class Bench:
  """A place where runs are made and broken.

  Attributes:
    half: the workdir of a run that was killed with whole checkpoints of steps 15 and 20.
    wanted: the digests of a run to which nothing happened.
  """

  def __init__(self, directory: Path):
    self._directory, self._count = directory, 0
    whole = directory / 'whole'
    status, said = self.ended(whole)
    if status:
      raise SystemExit(f'the run without a fault failed: {said}')
    self.wanted = digests(whole)
    self.half = directory / 'half'
    process = self.start(self.half, '--keep_checkpoints=9')  # so that 15 stays beside 20
    until(process, (self.half / 'checkpoints' / '20').exists)
    process.kill()
    process.communicate()
    for other in self.half.glob('checkpoints/*'):
      if other.name not in ('15', '20'):
        shutil.rmtree(other)

  def new(self) -> Path:
    """A place for a run."""
    self._count += 1
    return self._directory / str(self._count)

  def broken(self, damage: Callable[[Path], None]) -> Path:
    """A copy of the half run with damage done to it."""
    workdir = self.new()
    shutil.copytree(self.half, workdir)
    damage(workdir)
    return workdir

  def start(self,
            workdir: Path,
            *more: str,
            program: Sequence[str] = ('-m', 'experiments.train'),
            before: str = '') -> subprocess.Popen:
    """Starts a run; `before` is shell that a file system of its own is made with."""
    command = [sys.executable, *program, *OPTIONS, f'--workdir={workdir}', *more]
    if before:
      command = ['unshare', '--user', '--map-root-user', '--mount', 'sh', '-ec',
                 before + '\n"$@" || exit', 'sh', *command]  # yapf: disable
    path = filter(None, (str(Path(__file__).parents[1]), os.environ.get('PYTHONPATH')))
    environment = os.environ | dict(PYTHONPATH=os.pathsep.join(path),
                                    PYTHONUNBUFFERED='1',
                                    JAX_ENABLE_COMPILATION_CACHE='true',
                                    JAX_COMPILATION_CACHE_DIR=str(self._directory / 'programs'),
                                    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0')
    return subprocess.Popen(command,
                            stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT,
                            text=True,
                            env=environment)

  def ended(self, *arguments, **options) -> tuple[int, str]:
    """A run's exit status and all it said."""
    process = self.start(*arguments, **options)
    said = process.communicate()[0]
    return process.returncode, said

  def outcome(self, workdir: Path, seen: str, *statuses: int, whole: int | None = None) -> Outcome:
    """Goes on with a run and looks at what is left of it.

    Raises:
      Broken: not all that was whole before.
    """
    whole = newest(workdir) if whole is None else whole
    status, said = self.ended(workdir)
    found = re.search(r'resumed at step (\d+)', said)
    resumed = int(found[1]) if found else 0
    if re.search('Traceback|^ERROR', seen + said, re.MULTILINE):
      raise Broken(f'what no user can read: {seen}{said}')
    if status or resumed < whole:
      raise Broken(f'status {status}, resumed at {resumed}, step {whole} was whole: {said}')
    if digests(workdir) != self.wanted:
      raise Broken(f'the result differs from that of a run without a fault: {said}')
    return Outcome(remarks(seen + said), (*statuses, status), whole, resumed)


def until(process: subprocess.Popen, condition: Callable[[], Any]) -> None:
  """Waits until a run has come so far.

  Raises:
    Broken: it ended before.
  """
  while not condition():
    if process.poll() is not None:
      raise Broken(f'the run ended: {process.communicate()[0]}')
    time.sleep(0.0005)


def newest(workdir: Path) -> int:
  """The step of the newest checkpoint that orbax has given its name."""
  return max((int(path.name) for path in workdir.glob('checkpoints/*') if path.name.isdecimal()),
             default=0)


def remarks(said: str) -> str:
  """The lines that are about a fault, without the names of directories."""
  lines = [
      line for line in said.splitlines()
      if re.match('error|warning|stopp|.*resumed at step|this run has ended', line)
  ]
  return ' / '.join(re.sub(r'/\S*/', '', line.strip()) for line in lines)


def each_array(damage: Callable[[Path], None]) -> Callable[[Path], None]:
  """Damages every file of the newest checkpoint that holds numbers; not all of them are read."""

  def all_of_them(workdir: Path) -> None:
    for path in (workdir / 'checkpoints' / '20' / 'state').rglob('d/*'):
      damage(path)

  return all_of_them


def flip(path: Path) -> None:
  """Changes the bytes in the middle of a file."""
  data = bytearray(path.read_bytes())
  for index in range(len(data) // 2, len(data), 97):
    data[index] ^= 1
  path.write_bytes(data)


def truncate(path: Path) -> None:
  """Takes the end of a file away."""
  os.truncate(path, path.stat().st_size - 5)


def empty(directory: Path) -> None:
  """Takes all that is in a directory away."""
  shutil.rmtree(directory)
  directory.mkdir()


def kills_in_a_save(bench: Bench, kills: int) -> Outcome:
  """kill -9 at random moments of saves: each run is killed in the first save that it begins."""
  rng, workdir, half_written = random.Random(0), bench.new(), 0
  for _ in range(kills):
    saved = newest(workdir)
    if saved == 35:  # the next save is the last, with the summary right behind
      bench.outcome(workdir, '', whole=saved)
      workdir, saved = bench.new(), 0
    old = set(workdir.glob('checkpoints/*'))
    process = bench.start(workdir)
    until(process, lambda: set(workdir.glob('checkpoints/*-tmp*')) - old)
    time.sleep(rng.uniform(0, 0.05))
    process.kill()
    said = process.communicate()[0]
    if saved and f'resumed at step {saved}' not in said:
      raise Broken(f'step {saved} was whole, but: {said}')
    half_written += bool(list(workdir.glob('checkpoints/*-tmp*')))
  outcome = bench.outcome(workdir, '', -signal.SIGKILL)
  return outcome._replace(seen=f'{half_written} of {kills} left a half-written save / '
                          f'{outcome.seen}')


def signalled(number: int) -> Callable[[Bench], Outcome]:
  """A signal in the middle of a run."""

  def fault(bench: Bench) -> Outcome:
    workdir = bench.new()
    process = bench.start(workdir)
    until(process, lambda: last_step(workdir) >= 12)
    process.send_signal(number)
    said = process.communicate()[0]
    return bench.outcome(workdir, said, process.returncode, whole=last_step(workdir))

  return fault


def damaged(damage: Callable[[Path], None], whole: int = 15) -> Callable[[Bench], Outcome]:
  """Damage to the newest checkpoint, of step 20, or to another file of a run."""
  return lambda bench: bench.outcome(bench.broken(damage), '', whole=whole)


def tear_metrics(workdir: Path) -> None:
  """Ends the last row in its middle."""
  path = workdir / 'metrics.jsonl'
  path.write_text(path.read_text()[:-10])


def disk_full(bench: Bench) -> Outcome:
  """A file system with room for the run so far and little else."""
  workdir, disk = bench.new(), bench.new()
  disk.mkdir()
  before = (f'size=$(du -sk {bench.half} | cut -f1)\n'
            f'mount -t tmpfs -o size=$((size + 40))k none {disk}\n'
            f'cp -r {bench.half} {disk}/run\n'
            f'trap "cp -r {disk}/run {workdir}" EXIT')
  status, said = bench.ended(disk / 'run', before=before)
  return bench.outcome(workdir, said, status, whole=20)


def read_only(part: str) -> Callable[[Bench], Outcome]:
  """A run of which a part cannot be written to."""

  def fault(bench: Bench) -> Outcome:
    workdir = bench.broken(lambda _: None)
    place = workdir / part
    before = f'mount --bind {place} {place}\nmount -o remount,ro,bind {place}'
    rows = last_step(workdir)
    status, said = bench.ended(workdir, before=before)
    if last_step(workdir) != rows:
      raise Broken(f'it trained before it found out: {said}')
    return bench.outcome(workdir, said, status)

  return fault


def another_config(bench: Bench) -> Outcome:
  """The same workdir, other settings."""
  workdir = bench.broken(lambda _: None)
  status, said = bench.ended(workdir, '--learning_rate=1e-3')
  return bench.outcome(workdir, said, status)


def two_writers(bench: Bench) -> Outcome:
  """A second process on a workdir that is in use."""
  workdir = bench.new()
  first = bench.start(workdir)
  until(first, lambda: last_step(workdir) >= 1)
  first.send_signal(signal.SIGSTOP)
  status, said = bench.ended(workdir)
  first.send_signal(signal.SIGCONT)
  said = remarks(said) + '\n' + remarks(first.communicate()[0])
  return bench.outcome(workdir, said, status, first.returncode, whole=0)


def not_finite(bench: Bench) -> Outcome:
  """A loss that is NaN at one step, once."""
  workdir = bench.new()
  status, said = bench.ended(workdir, program=('-c', _POISON))
  return bench.outcome(workdir, said, status, whole=20)


FAULTS: dict[str, Callable[[Bench], Outcome]] = {
    'SIGTERM': signalled(signal.SIGTERM),
    'SIGINT': signalled(signal.SIGINT),
    'flipped byte': damaged(each_array(flip)),
    'truncated file': damaged(each_array(truncate)),
    'empty step directory': damaged(lambda run: empty(run / 'checkpoints' / '20')),
    'deleted metadata': damaged(lambda run: shutil.rmtree(run / 'checkpoints' / '20' / 'meta')),
    'foreign directory': damaged(lambda run: (run / 'checkpoints' / 'mine').mkdir(), whole=20),
    'torn metrics line': damaged(tear_metrics, whole=20),
    'disk full': disk_full,
    'read-only workdir': read_only('.'),
    'read-only checkpoints': read_only('checkpoints'),
    'another config': another_config,
    'two writers': two_writers,
    f'NaN at step {POISONED_STEP}': not_finite,
}  # yapf: disable


def can_mount() -> bool:
  """Whether file systems can be made here, for those faults that are of one."""
  command = ['unshare', '--user', '--map-root-user', '--mount', 'mount', '-t', 'tmpfs', 'none',
             '/mnt']  # yapf: disable
  try:
    return not subprocess.run(command, capture_output=True, check=False).returncode
  except FileNotFoundError:
    return False


NEED_MOUNT = ('disk full', 'read-only workdir', 'read-only checkpoints')


def main() -> int:
  parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
  parser.add_argument('--kills', type=int, default=20)
  arguments = parser.parse_args()
  faults = {f'kill -9 in a save, {arguments.kills} times':
            lambda bench: kills_in_a_save(bench, arguments.kills)} | FAULTS  # yapf: disable
  bad = 0
  print('| fault | status, then | what the user sees | whole before | resumed at |\n'
        '| --- | --- | --- | --: | --: |')
  with tempfile.TemporaryDirectory() as directory:
    bench = Bench(Path(directory))
    for name, fault in faults.items():
      if name in NEED_MOUNT and not can_mount():
        print(f'| {name} | | not tried: no file system can be mounted here | | |', flush=True)
        continue
      try:
        outcome = fault(bench)
      except Broken as error:
        bad += 1
        print(f'| {name} | | BROKEN: {error} | | |', flush=True)
        continue
      print(f'| {name} | {", ".join(map(str, outcome.statuses))} | {outcome.seen} | '
            f'{outcome.whole} | {outcome.resumed} |', flush=True)  # yapf: disable
  print('every run ended with the parameters and rows of one without a fault'
        if not bad else f'{bad} faults cost what they must not')
  return bool(bad)


if __name__ == '__main__':
  sys.exit(main())
