"""The tasks: pure functions (rng, batch_size) -> batch, and the trivial answers to them."""

import dataclasses
from typing import TYPE_CHECKING

from experiments.tasks import addition
from experiments.tasks import grammar
from experiments.tasks import languages
from experiments.tasks import listops
from experiments.tasks import mad
from experiments.tasks import majority
from experiments.tasks import matching
from experiments.tasks import needle
from experiments.tasks import rearrange
from experiments.tasks import recall
from experiments.tasks.base import (Batch, BOS, EOS, MASK, next_token, PAD, RESERVED, SEP, Task,
                                    TaskFamily)

if TYPE_CHECKING:
  from experiments.config import Config

TASKS: dict[str, TaskFamily] = (rearrange.TASKS | addition.TASKS | recall.TASKS | mad.TASKS |
                                needle.TASKS | languages.TASKS | listops.TASKS | majority.TASKS |
                                matching.TASKS | grammar.TASKS)


def make_task(config: 'Config') -> Task:
  """Makes the task a Config names.

  Raises:
    ValueError: the task is unknown, not one for the model family, or a size is out of bounds.
  """
  if config.task not in TASKS:
    raise ValueError(f'task must be one of {", ".join(TASKS)}; got {config.task}')
  family = TASKS[config.task]
  if config.model not in family.models:
    raise ValueError(f'task {config.task} is for model {" or ".join(family.models)}; '
                     f'got model {config.model}')
  return family.make(config)


def at_length(config: 'Config', length: int) -> Task:
  """The task of a Config with sequences of one length, where lengths are drawn of that alone.

  Raises:
    ValueError: the task has no such length.
  """
  drawn = 'min_length' in TASKS[config.task].options
  return make_task(dataclasses.replace(config, length=length, min_length=length if drawn else 0))


__all__ = [
    'BOS', 'Batch', 'EOS', 'MASK', 'PAD', 'RESERVED', 'SEP', 'TASKS', 'Task', 'TaskFamily',
    'at_length', 'make_task', 'next_token'
]
