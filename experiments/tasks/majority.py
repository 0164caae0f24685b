"""majority: which class of token is the most frequent (encoder-only, classification)."""

import functools
from typing import Any, TYPE_CHECKING

import jax
from jax import Array
import jax.numpy as jnp

from experiments.tasks import base
from experiments.tasks.base import RESERVED

if TYPE_CHECKING:
  from experiments.config import Config

OPTIONS: dict[str, Any] = {'length': 32, 'min_length': 16, 'num_classes': 4, 'pooling': 'mean'}


def _break_ties(rng: Array, classes: Array, real: Array, num_classes: int) -> tuple[Array, Array]:
  """Makes one class strictly the most frequent, by changing at most one token of each row.

  A class drawn from the most frequent ones wins; where another is level, one random token of it
  becomes the winner's.

  Args:
    rng: a key.
    classes: [B, T], from 0 to num_classes - 1.
    real: [B, T], false at padding.
    num_classes: C.

  Returns:
    classes [B, T] and the winners [B].
  """
  order_rng, place_rng = jax.random.split(rng)
  names = jnp.arange(num_classes, dtype=jnp.int32)[None, :]
  counts = jnp.sum((classes[..., None] == names[:, None]) & real[..., None],
                   axis=1,
                   dtype=jnp.int32)
  order = jax.random.uniform(order_rng, counts.shape, jnp.float32)
  level = counts == jnp.max(counts, axis=1, keepdims=True)
  winner = jnp.argmax(jnp.where(level, order, -1.), axis=1).astype(jnp.int32)
  rivals = level & (names != winner[:, None])
  has_rival = jnp.any(rivals, axis=1, keepdims=True)
  rival = jnp.argmax(rivals, axis=1).astype(jnp.int32)[:, None]
  candidate = real & (classes == rival) & has_rival
  score = jax.random.uniform(place_rng, classes.shape, jnp.float32)
  score = jnp.where(candidate, score, -1.)
  chosen = jax.nn.one_hot(jnp.argmax(score, axis=1), classes.shape[1], dtype=jnp.bool)
  change = candidate & chosen
  return jnp.where(change, winner[:, None], classes), winner


def _sample(rng: Array, batch_size: int, *, lengths: tuple[int, int],
            num_classes: int) -> base.Batch:
  length = lengths[1]
  class_rng, count_rng, tie_rng = jax.random.split(rng, 3)
  classes = jax.random.randint(class_rng, (batch_size, length), 0, num_classes, jnp.int32)
  count = base.draw_count(count_rng, batch_size, *lengths)
  real = jnp.arange(length, dtype=jnp.int32)[None, :] < count
  classes, winner = _break_ties(tie_rng, classes, real, num_classes)
  return base.classified(RESERVED + classes, real, winner)


def _guesses(batch: base.Batch, *, num_classes: int) -> dict[str, Array]:
  inputs, targets = batch['inputs'], batch['targets']
  last = jnp.sum(batch['input_mask'], axis=1, keepdims=True, dtype=jnp.int32) - 1
  return {
      'majority class': jnp.zeros_like(targets),
      'first token': inputs[:, 1] - RESERVED,
      'last token': jnp.take_along_axis(inputs, last, axis=1)[:, 0] - RESERVED,
      'chance': base.chance(targets.shape, 0, num_classes),
  }


def _make(config: 'Config') -> base.Task:
  half = ((config.length or OPTIONS['length']) + 1) // 2
  lengths = base.lengths(config, OPTIONS | {'min_length': half})
  length = lengths[1]
  num_classes = base.size(config, OPTIONS, 'num_classes', 2)
  return base.Task(
      vocab_size=RESERVED + num_classes,
      num_classes=num_classes,
      input_length=length + 1,
      target_length=length + 1,
      sample=functools.partial(_sample, lengths=lengths, num_classes=num_classes),
      guesses=functools.partial(_guesses, num_classes=num_classes),
      note='name the most frequent token, often ahead by one; exactly solvable, 1.00',
      per_position=False,
  )


TASKS = {'majority': base.TaskFamily(_make, ('encoder',), OPTIONS)}
