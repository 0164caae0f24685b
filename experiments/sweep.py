"""A comparison as a list of runs: which it is made of, where each lives, which are left to do."""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import attn

from experiments import config as config_lib
from experiments import parts
from experiments import tasks
from experiments.config import Config, FIELDS, UserError
from experiments.workdir import identity
from experiments.writer import to_json

SUMMARY, FAILURE = 'summary.json', 'failure.json'


class Block(NamedTuple):
  """Runs that are a product of choices.

  Attributes:
    tasks: names of tasks.
    attention: names of variants.
    seeds: so many, from 0.
    vary: fields and their values, which the report shows apart.
    tune: fields and their values, of which the report takes the best for every row alike.
    fixed: fields that are the same in all runs that read them.
  """
  tasks: tuple[str, ...]
  attention: tuple[str, ...]
  seeds: int
  vary: Mapping[str, tuple[Any, ...]]
  tune: Mapping[str, tuple[Any, ...]]
  fixed: Mapping[str, Any]


class Cell(NamedTuple):
  """One run.

  Attributes:
    config: what is trained, in a workdir of its own.
    vary: what its row of the report is named by, beside task and attention.
    tune: which point of the tuning grid it is.
  """
  config: Config
  vary: tuple[tuple[str, Any], ...]
  tune: tuple[tuple[str, Any], ...]

  @property
  def path(self) -> Path:
    """Its workdir."""
    return Path(self.config.workdir)

  @property
  def name(self) -> str:
    """What a person calls it."""
    return self.path.name.rpartition('-')[0]

  @property
  def is_done(self) -> bool:
    """Whether it has ended."""
    return (self.path / SUMMARY).exists()


class Plan(NamedTuple):
  """The cells of a comparison, in a fixed order, and what is not defined: (cell, reason)."""
  cells: list[Cell]
  undefined: list[tuple[str, str]]


def values_of(text: str, option: str) -> tuple[str, tuple[Any, ...]]:
  """A field and its values from text such as learning_rate:1e-3,3e-3.

  Raises:
    UserError: there is no such field, or a value is not of its type.
  """
  name, colon, rest = text.partition(':')
  if not colon or not rest or name not in FIELDS or name in ('workdir', 'preset', 'seed'):
    raise UserError(f'--{option}={text} must be a field and its values, as learning_rate:1e-3,3e-3')
  kind: type = type(FIELDS[name].default)
  try:
    values = tuple({
        'True': True,
        'False': False
    }[x] if kind is bool else kind(x) for x in rest.split(','))
  except (KeyError, ValueError):
    raise UserError(f'--{option}={text}: values of {name} are of type {kind.__name__}') from None
  return name, values


def plan(blocks: Sequence[Block], directory: Path) -> Plan:
  """The runs of all blocks, each once.

  A field that a run does not read is left out of it, so what varies a window gives one run of a
  variant that has none.

  Raises:
    UserError: nothing is defined, or no run reads a field that somebody gave.
  """
  cells: dict[Path, Cell] = {}
  undefined: dict[str, str] = {}
  for block in blocks:
    unread = {*block.vary, *block.tune, *block.fixed}
    for task, attention, vary, tune, seed in itertools.product(block.tasks, block.attention,
                                                               _points(block.vary),
                                                               _points(block.tune),
                                                               range(block.seeds)):
      try:
        cell, read = _cell(task, attention, vary, tune, seed, block.fixed, directory)
      except ValueError as error:
        undefined[_slug(task, attention, vary, tune)] = ' '.join(str(error).split())
        continue
      unread -= read
      cells.setdefault(cell.path, cell)
    if unread and cells:
      name = sorted(unread)[0]
      raise UserError(f'--{name} is read by no run of this comparison; it belongs to '
                      f'{parts.readers(name)}')
  if not cells:
    reasons = ''.join(f' {name}: {reason}.' for name, reason in undefined.items())
    raise UserError(f'there is nothing to compare.{reasons}')
  return Plan(list(cells.values()), list(undefined.items()))


def _points(choices: Mapping[str, tuple[Any, ...]]) -> list[tuple[tuple[str, Any], ...]]:
  """The points of a grid, as (field, value) pairs."""
  return [tuple(zip(choices, values)) for values in itertools.product(*choices.values())]


def _cell(task: str, attention: str, vary: tuple[tuple[str, Any], ...], tune: tuple[tuple[str, Any],
                                                                                    ...], seed: int,
          fixed: Mapping[str, Any], directory: Path) -> tuple[Cell, set[str]]:
  """A cell, and those of its fields that it reads.

  Raises:
    ValueError: a part cannot do what is asked of it.
  """
  for name, known in ((task, tasks.TASKS), (attention, attn.VARIANTS)):
    if name not in known:
      raise UserError(f'{name} is not one of: {", ".join(known)}')
  values = dict(model=tasks.TASKS[task].models[0]) | dict(fixed) | dict(vary) | dict(tune)
  config = Config(**values | dict(task=task, attention=attention, seed=seed))
  read = set(parts.used_fields(config)) if config.model in tasks.TASKS[task].models else set(values)
  dropped: dict[str, Any] = {name: FIELDS[name].default for name in values if name not in read}
  config = dataclasses.replace(config, **dropped)
  config_lib.validate(config)
  tasks.make_task(config)
  kept = tuple(pair for pair in vary if pair[0] in read), tuple(x for x in tune if x[0] in read)
  digest = hashlib.sha256(to_json(identity(config)).encode()).hexdigest()[:8]
  name = f'{_slug(task, attention, *kept)}-s{seed}-{digest}'
  workdir = str((directory / 'cells' / name).absolute())
  return Cell(dataclasses.replace(config, workdir=workdir), *kept), read


def _slug(task: str, attention: str, *points: tuple[tuple[str, Any], ...]) -> str:
  words = [f'{name}={value}' for point in points for name, value in point]
  return '-'.join((task, attention, *words)).replace('/', '_').replace(' ', '')


def arguments(cell: Cell) -> list[str]:
  """The flags of experiments.train that make this run."""
  found = []
  for name, field in FIELDS.items():
    value = getattr(cell.config, name)
    if value == field.default:
      continue
    if isinstance(value, bool):
      found.append(f'--{"" if value else "no"}{name}')
    else:
      found.append(f'--{name}={value}')
  return found


def guess_seconds(cell: Cell, rate: float) -> float:
  """About how long a run takes, from its matrix products and the machine's rate of them.

  A rough one: starting, compiling and evaluating 30 s, a step 4 ms and its products at a tenth of
  the rate at which the machine multiplies large matrices.
  """
  config, task = cell.config, tasks.make_task(cell.config)
  tokens = config.batch_size * (task.target_length if config.model == 'decoder' else
                                task.input_length + task.target_length)
  layers, width = config.num_layers * (2 if config.model == 'seq2seq' else 1), config.model_dim
  weights = layers * 12 * width**2 + task.num_classes * width
  pairs = 2 * layers * width * max(task.input_length, task.target_length)
  return 30 + config.steps * (0.004 + 6 * tokens * (weights + pairs) / (0.1 * rate))
