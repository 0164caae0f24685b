"""Named experiments: functions that return the Config fields they set.

A docstring gives the command, the time it takes on two CPU cores, and the result to expect.
"""

from typing import Any, Callable

from experiments.tasks import TaskFamily, TASKS


def recall() -> dict[str, Any]:
  """Multi-query associative recall, which two layers of attention solve.

  python -m experiments.train --preset=recall
  Under 2 minutes on 2 cores; accuracy 1.00, where naming any value in context gives 0.25.
  """
  return dict(task='mqar', model='decoder', attention='vanilla', steps=500)


def recall_one_layer() -> dict[str, Any]:
  """The same with one layer, which cannot do better than to name any value in context.

  python -m experiments.train --preset=recall_one_layer
  About 1 minute on 2 cores; accuracy about 0.26, where naming any value in context gives 0.25.
  """
  return recall() | dict(num_layers=1)


def reverse() -> dict[str, Any]:
  """Reversal from encoder to decoder, with a window in each and dense cross-attention.

  python -m experiments.train --preset=reverse
  About 1 minute on 2 cores; accuracy 1.00, where copying the source in order gives 0.24.
  """
  return dict(task='reverse', model='seq2seq', attention='local', window=16, steps=400)


def tagging() -> dict[str, Any]:
  """Roles of words in a small grammar, by an encoder with Performer attention.

  python -m experiments.train --preset=tagging
  About 1 minute on 2 cores; accuracy 1.00, where the word alone gives 0.65.
  """
  return dict(task='tagging', model='encoder', attention='performer', steps=400)


def _full(name: str, family: TaskFamily) -> Callable[[], dict[str, Any]]:
  """The published form of a task, whose small form is the default."""

  def preset() -> dict[str, Any]:
    return dict(task=name, model=family.models[0]) | dict(family.full)

  preset.__doc__ = f'The published form of {name}: ' + ', '.join(
      f'{field} {value}' for field, value in family.full.items()) + '.'
  return preset


PRESETS: dict[str, Callable[[], dict[str, Any]]] = {
    preset.__name__: preset for preset in (recall, recall_one_layer, reverse, tagging)
} | {
    f'{name}_full': _full(name, family) for name, family in TASKS.items() if family.full
}
