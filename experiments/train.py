"""Trains one model on one task: `python -m experiments.train --task=copy --attention=local`."""

import contextlib
import dataclasses
import hashlib
import os
from pathlib import Path
import signal
import sys
import time
from typing import Any, Iterator, NamedTuple, Sequence

from flax import linen as nn
import jax
from jax.sharding import Mesh

from experiments import flags
from experiments import loop
from experiments import placement
from experiments import processes
from experiments.bench_report import device_name
from experiments.checkpoint import CheckpointError, Checkpoints, silence_orbax
from experiments.costs import compile_step, Costs, Step, StepTimer
from experiments.config import Config, UserError
from experiments.evaluate import make_evaluate
from experiments.loop import Scores
from experiments.models import build_model
from experiments.profiling import Profiler
from experiments.report import Report, warn
from experiments.step import init_state, State
from experiments.tasks import at_length, make_task, Task
from experiments.workdir import Borrowed, CHECKPOINTS, Workdir
from experiments.writer import MetricsFile, NoFile, write_json

PROGRAM = 'python -m experiments.train'
SUMMARY, METRICS = 'summary.json', 'metrics.jsonl'


class Experiment(NamedTuple):
  """What a Config stands for.

  Attributes:
    config: it.
    task: its task.
    longer: the task at each of config.lengths.
    model: a model for the longest of them.
    abstract: the shapes of the run's state, and where it lives.
    mesh: the devices, where there are several.
  """
  config: Config
  task: Task
  longer: dict[int, Task]
  model: nn.Module
  abstract: State
  mesh: Mesh | None


def build(config: Config) -> Experiment:
  """Builds everything without computing anything.

  Raises:
    UserError: a part cannot do what the config asks of it.
  """
  try:
    task = make_task(config)
    longer = {length: at_length(config, length) for length in config.lengths}
    every, mesh = (task, *longer.values()), placement.make_mesh(config)
    model = build_model(
        config,
        task._replace(input_length=max(x.input_length for x in every),
                      target_length=max(x.target_length for x in every)), mesh)
    abstract = placement.placed(mesh, jax.eval_shape(lambda: init_state(config, task, model)))
  except (ValueError, NotImplementedError) as error:
    raise UserError(' '.join(str(error).split())) from error
  return Experiment(config, task, longer, model, abstract, mesh)


class Stop:
  """Notes SIGTERM and SIGINT, for the loop to end after its step. A second one ends the process.

  Attributes:
    signal: the one that came, or None.
  """

  def __init__(self) -> None:
    self.signal: int | None = None
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._note)

  def _note(self, number: int, frame: Any) -> None:
    del frame
    self.signal = number
    signal.signal(number, signal.SIG_DFL)
    os.write(2, b'stopping after this step; once more to stop at once\n')

  def __call__(self) -> bool:
    return self.signal is not None


def digest(params: Any) -> str:
  """A sha256 of every parameter's path, shape and bits."""
  total = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    array = processes.whole(leaf)
    total.update(f'{jax.tree_util.keystr(path)} {array.dtype} {array.shape}'.encode())
    total.update(array.tobytes())
  return total.hexdigest()


def train(config: Config) -> int:
  """Runs, resumes or, where it has ended before, reports an experiment; returns the exit status.

  Raises:
    UserError: the experiment cannot run here, or did not stay finite.
  """
  processes.join(config.distributed)
  stop, report, experiment = Stop(), Report(config, processes.is_first()), build(config)
  if config.dry_run:
    report.costs(
        compile_step(config, experiment.task, experiment.model, experiment.abstract,
                     experiment.mesh)[1], experiment.task.note,
        jax.devices()[0].platform)
    return 0
  with contextlib.closing(_open_workdir(config)) as workdir:
    summary = workdir.read_json(SUMMARY)
    if summary is None:
      for line in workdir.warnings:
        warn(line)
      try:
        summary = _run(experiment, workdir, report, stop)
      except (CheckpointError, OSError) as error:
        raise CheckpointError(f'{error}. {_kept(workdir.path / CHECKPOINTS)}') from error
    else:
      report.say('this run has ended; its result:')
      if config.tensorboard:  # which may be asked for only now
        with _metrics(config, workdir.path, summary['step']):
          pass
      if config.profiled:
        warn(f'profile_steps={config.profile_steps}: nothing is left to trace; give another '
             '--workdir')
    if summary is not None:
      report.result(summary, workdir.path)
  return 128 + stop.signal if summary is None and stop.signal == signal.SIGINT else 0


def _open_workdir(config: Config) -> Borrowed:
  """The workdir, which the first process has; the others read it.

  Raises:
    UserError: it is not to be had, on any process.
  """
  workdir, failure = None, None
  if processes.is_first():
    try:
      workdir = Workdir(config)
    except UserError as error:
      failure = error
  if processes.any_of(failure is not None):
    raise failure or UserError('the first process cannot use the workdir; see what it says')
  return workdir or Borrowed(config)


def _kept(checkpoints: Path) -> str:
  """What a run that could not go on can go on from."""
  steps = [int(path.name) for path in checkpoints.glob('*') if path.name.isdecimal()]
  return (
      'It has no checkpoint yet' if not steps else
      f'Its newest checkpoint is of step {max(steps)}; the same command goes on from the newest '
      'that is whole')


@contextlib.contextmanager
def _metrics(config: Config, workdir: Path, step: int) -> Iterator[MetricsFile | NoFile]:
  """The rows of a run that goes on after a step, where asked for in TensorBoard's form too."""
  with contextlib.ExitStack() as stack:
    mirror = None
    if config.tensorboard and processes.is_first():
      from experiments.tensorboard import TensorBoard  # only this needs tensorboardX
      board = stack.enter_context(contextlib.closing(TensorBoard(workdir / 'tensorboard')))
      mirror = board.write
    if processes.is_first():
      rows = MetricsFile(workdir / METRICS, step, mirror)
      yield stack.enter_context(contextlib.closing(rows))
    else:
      yield NoFile()


@contextlib.contextmanager
def _profiled(config: Config, workdir: Path, report: Report, train_step: Step,
              start: int) -> Iterator[Step]:
  """The step, of which a trace is written if it was asked for."""
  if config.profiled is None:
    yield train_step
    return
  profiler = Profiler(*config.profiled, workdir / 'profile')
  with contextlib.closing(profiler):
    yield profiler.around(train_step, start)
  if profiler.done:
    report.say(f'the trace of steps {config.profile_steps} is in {workdir / "profile"}')
  else:
    warn(f'profile_steps={config.profile_steps} were not all trained in this session')


def _run(experiment: Experiment, workdir: Borrowed, report: Report,
         stop: Stop) -> dict[str, Any] | None:
  """Trains to the end and returns the summary it wrote, or None if stopped before."""
  config, task, longer, model, abstract, mesh = experiment
  path, began = workdir.path, time.monotonic()
  with Checkpoints(path / CHECKPOINTS, config, warn) as checkpoints:
    state = checkpoints.restore(abstract)
    if state is None:
      state = jax.jit(lambda: init_state(config, task, model),
                      out_shardings=placement.shardings(mesh, abstract))()
    start = int(state.step)
    timer, parameters = StepTimer(), sum(x.size for x in jax.tree.leaves(abstract.params))
    report.start(task.note, parameters, jax.devices()[0].platform, path, start)
    with _metrics(config, path, start) as metrics_file, report.progress(start) as progress:
      train_step, costs = compile_step(config, task, model, abstract, mesh)
      with _profiled(config, path, report, train_step, start) as profiled_step:
        state, scores = loop.run(config,
                                 state,
                                 profiled_step,
                                 make_evaluate(config, task, model, mesh),
                                 metrics_file,
                                 checkpoints,
                                 should_stop=processes.any_of_late(stop),
                                 report=timer.around(progress))
    checkpoints.wait()
  if scores is None:
    report.say(f'stopped and saved at step {int(state.step)} of {config.steps}; '
               'the same command resumes')
    return None
  by_length = {}
  for length, at in longer.items():
    report.say(f'evaluating at length {length}')
    by_length[length] = make_evaluate(config, at, model, mesh)(state.params)
  summary = _summary(config, state, scores, by_length, costs) | dict(
      seconds_per_step=timer.seconds_per_step,
      seconds_of_last_session=round(time.monotonic() - began, 1))
  if processes.is_first():
    write_json(path / SUMMARY, summary)
  return summary


def _summary(config: Config, state: State, scores: Scores, by_length: dict[int, Scores],
             costs: Costs) -> dict[str, Any]:
  plain = lambda scores: {name: score._asdict() for name, score in scores.items()}
  return dict(config=dataclasses.asdict(config),
              device=device_name(),
              step=int(state.step),
              scores=plain(scores),
              by_length={
                  str(length): plain(found) for length, found in by_length.items()
              },
              params_digest=digest(state.params),
              **costs._asdict())


def main(argv: Sequence[str]) -> int:
  """Returns the exit status: 0, 1 for a run that failed, 2 for a request that cannot be met."""
  silence_orbax()
  try:
    config = flags.parse(argv)
    if config is None:
      print(flags.help_text(PROGRAM))
      return 0
    return train(config)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return error.exit_status
  except OSError as error:
    print(f'error: {error}', file=sys.stderr)
    return 1


if __name__ == '__main__':
  sys.exit(main(sys.argv))
