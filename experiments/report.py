"""What a person sees of a run: a progress bar at a terminal, plain lines elsewhere."""

import contextlib
from pathlib import Path
import sys
import time
from typing import Any, Callable, Iterator

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from experiments import parts
from experiments.config import Config, FIELDS
from experiments.costs import Costs
from experiments.evaluate import MODEL

_ALWAYS = ('num_layers', 'heads', 'model_dim', 'positions', 'steps', 'batch_size', 'learning_rate',
           'seed')
_PLAIN_WIDTH = 100


def warn(message: str) -> None:
  """Says something on stderr that does not end the program."""
  print(f'warning: {message}', file=sys.stderr, flush=True)


def settings(config: Config) -> str:
  """The resolved configuration in short: sizes, options of the variants, and what is unusual."""
  shown = []
  for name, value in parts.resolved(config).items():
    group = FIELDS[name].metadata['group']
    if group in ('parts', 'run'):
      continue
    if group in ('attention', 'task') or name in _ALWAYS or value != FIELDS[name].default:
      shown.append(f'{name}={value}')
  return ' '.join(shown)


class Report:
  """Everything a program prints on stdout about a run."""

  def __init__(self, config: Config, speaks: bool = True):
    self._config = config
    self._console = Console(highlight=False, soft_wrap=True, quiet=not speaks)
    if not self._console.is_terminal:
      self._console = Console(highlight=False, soft_wrap=True, width=_PLAIN_WIDTH, quiet=not speaks)

  def say(self, line: str) -> None:
    """Prints a line."""
    self._console.print(line, markup=False)

  def costs(self, costs: Costs, note: str, device: str) -> None:
    """Prints what would be trained, and what it costs."""
    self._subject(note, costs.parameters, device)
    if costs.step_flops is not None:
      self.say(f'  {costs.step_flops / 1e6:,.0f} MFLOP of matrix products a step')
    self.say(f'  {costs.step_bytes / 1e6:,.1f} MB for a step, beside parameters and optimiser, '
             f'which take {12 * costs.parameters / 1e6:,.1f} MB')
    if costs.decode_bytes is not None:
      self.say(f'  {costs.decode_bytes / 1e3:,.1f} kB to decode a sequence')

  def start(self, note: str, parameters: int, device: str, workdir: Path, step: int) -> None:
    """Prints what is about to be trained, and where."""
    self._subject(note, parameters, device)
    self.say(f'  workdir {workdir}')
    if step:
      self.say(f'  resumed at step {step} of {self._config.steps}')

  def _subject(self, note: str, parameters: int, device: str) -> None:
    config = self._config
    places = config.places()
    variants = {place.variant for place in places.values()}
    attention = ('+'.join(variants) if len(variants) == 1 else ', '.join(
        f'{name} {place.variant}' for name, place in places.items()))
    self.say(f'{config.task}, {config.model}, attention {attention}: '
             f'{parameters:,} parameters on {device}')
    self.say(f'  {note}')
    self.say(f'  {settings(config)}')

  @contextlib.contextmanager
  def progress(self, start: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields what to call with each step's row, from start on."""
    if not self._console.is_terminal:
      yield _Lines(self, start, self._config)
      return
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn('{task.fields[numbers]}'),
               TimeRemainingColumn())
    with Progress(*columns, console=self._console, refresh_per_second=4) as bar:
      task = bar.add_task('', total=self._config.steps, completed=start, numbers='compiling')
      pace = _Pace(start)

      def update(row: dict[str, Any]) -> None:
        numbers = f'{pace.rate(row["step"]):.1f} steps/s {_training(row)}'
        bar.update(task, completed=row['step'], numbers=numbers)
        if 'eval_loss' in row:
          self.say(f'step {row["step"]}  {_held_out(row)}')

      yield update

  def result(self, summary: dict[str, Any], workdir: Path) -> None:
    """Prints the one table: the model beside the trivial baselines."""
    self.say(f'held-out scores after {summary["step"]} steps')
    self._table(summary['scores'])
    by_length = summary.get('by_length', {})
    if by_length:
      self.say('the model at other lengths')
      self._table({length: scores[MODEL] for length, scores in by_length.items()})
    self.say(f'everything is in {workdir}: metrics.jsonl, summary.json, checkpoints')

  def _table(self, scores: dict[str, dict[str, Any]]) -> None:
    table = Table('', box=box.SIMPLE_HEAD if self._console.is_terminal else box.ASCII2)
    columns = ['loss', 'accuracy', 'exact match', 'free running']
    columns = [
        column for column in columns if any(_cell(score, column) for score in scores.values())
    ]
    for column in columns:
      table.add_column(column, justify='right')
    for name, score in scores.items():
      table.add_row(name,
                    *(_cell(score, column) for column in columns),
                    style='bold' if name == MODEL else None)
    self._console.print(table)


def _cell(score: dict[str, Any], column: str) -> str:
  value = score.get(column.replace(' ', '_'))
  return '' if value is None else f'{value:.4f}'


def _training(row: dict[str, Any]) -> str:
  return f'loss {row["loss"]:.4f} accuracy {row["accuracy"]:.4f}'


def _held_out(row: dict[str, Any]) -> str:
  return (f'held-out: loss {row["eval_loss"]:.4f} accuracy {row["eval_accuracy"]:.4f} '
          f'exact match {row["eval_exact_match"]:.4f}' + _written(row))


def _written(row: dict[str, Any]) -> str:
  return f' free running {row["eval_free_running"]:.4f}' if 'eval_free_running' in row else ''


class _Pace:
  """Steps per second since the first step, whose time is mostly compilation."""

  def __init__(self, start: int):
    self._first = start + 1
    self._since: float | None = None

  def rate(self, step: int) -> float:
    now = time.monotonic()
    if self._since is None:
      self._first, self._since = step, now
    return (step - self._first) / max(now - self._since, 1e-9)


class _Lines:
  """Prints every row that metrics.jsonl gets as a plain line."""

  def __init__(self, report: Report, start: int, config: Config):
    self._report, self._pace, self._config = report, _Pace(start), config

  def __call__(self, row: dict[str, Any]) -> None:
    step, steps = row['step'], self._config.steps
    rate = self._pace.rate(step)
    if step % self._config.log_every and 'eval_loss' not in row:
      return
    line = [f'step {step}/{steps}', _training(row)]
    if 'eval_loss' in row:
      line.append(_held_out(row))
    if rate and step < steps:
      line += [f'{rate:.1f} steps/s', f'{(steps - step) / rate:.0f} s left']
    self._report.say('  '.join(line))
