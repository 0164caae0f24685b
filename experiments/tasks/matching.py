"""matching: whether two sequences are the same (encoder-only, classification).

BOS x_1 .. x_n SEP y_1 .. y_n, then PAD; n is drawn per row from min_length .. length. Class 1: y is
x. Class 0: y is x with two different symbols in each other's place, so the symbols, their number
and the length tell nothing, nor does either sequence alone.
"""

import functools
from typing import TYPE_CHECKING

import jax
from jax import Array
import jax.numpy as jnp

from experiments.tasks import base
from experiments.tasks.base import BOS, PAD, RESERVED, SEP

if TYPE_CHECKING:
  from experiments.config import Config

OPTIONS = {'length': 8, 'min_length': 8, 'vocab_size': 16 + RESERVED, 'pooling': 'mean'}


def _draw_pair(rng: Array, count: Array, num_symbols: int,
               length: int) -> tuple[Array, Array, Array]:
  """Draws x [B, length], and two places [B, 1] of its first `count` [B, 1] that differ."""
  symbol_rng, first_rng, second_rng, other_rng = jax.random.split(rng, 4)
  x = jax.random.randint(symbol_rng, (len(count), length), 0, num_symbols, jnp.int32)
  first = jax.random.randint(first_rng, count.shape, 0, count, jnp.int32)
  second = (first + jax.random.randint(second_rng, count.shape, 1, count, jnp.int32)) % count
  other = jax.random.randint(other_rng, count.shape, 1, num_symbols, jnp.int32)
  place = jnp.arange(length, dtype=jnp.int32)[None, :]
  other = (jnp.take_along_axis(x, first, axis=1) + other) % num_symbols
  return jnp.where(place == second, other, x), first, second


def _sample(rng: Array, batch_size: int, *, lengths: tuple[int, int],
            vocab_size: int) -> base.Batch:
  count_rng, pair_rng, class_rng = jax.random.split(rng, 3)
  count = base.draw_count(count_rng, batch_size, *lengths)
  x, first, second = _draw_pair(pair_rng, count, vocab_size - RESERVED, lengths[1])
  same = jax.random.bernoulli(class_rng, 0.5, (batch_size,))
  place = jnp.arange(2 * lengths[1] + 2, dtype=jnp.int32)[None, :]
  # Where in x the token at a place is from.
  source = jnp.where(place <= count, place - 1, place - count - 2)
  swapped = ~same[:, None] & (place > count)
  source = jnp.where(swapped & (source == first), second,
                     jnp.where(swapped & (source == second), first, source))
  tokens = RESERVED + jnp.take_along_axis(x, jnp.clip(source, 0, lengths[1] - 1), axis=1)
  tokens = jnp.where(place == 0, BOS, jnp.where(place == count + 1, SEP, tokens))
  real = place <= 2 * count + 1
  return {
      'inputs': jnp.where(real, tokens, PAD),
      'input_mask': real,
      'targets': same.astype(jnp.int32),
      'weights': jnp.ones(batch_size, jnp.float32),
  }


def _guesses(batch: base.Batch) -> dict[str, Array]:
  inputs, targets = batch['inputs'], batch['targets']
  separator = jnp.argmax(inputs == SEP, axis=1).astype(jnp.int32)[:, None]
  pairs = {'first token': (1, separator + 1), 'last token': (separator - 1, 2 * separator - 1)}
  at = lambda place: jnp.take_along_axis(inputs, jnp.broadcast_to(place, separator.shape), axis=1)
  alike = {
      name: (at(jnp.asarray(x, jnp.int32)) == at(y))[:, 0].astype(jnp.int32)
      for name, (x, y) in pairs.items()
  }
  return alike | {
      'majority class': jnp.zeros_like(targets),
      'chance': base.chance(targets.shape, 0, 2),
  }


def _make(config: 'Config') -> base.Task:
  """A stand-in, token by token, for the document matching of Long Range Arena (Retrieval).

  Source: Tay et al. 2020, section 2.2.3, https://arxiv.org/abs/2011.04006.
  """
  lengths = base.lengths(config, OPTIONS, 2)
  vocab_size = base.size(config, OPTIONS, 'vocab_size', RESERVED + 2)
  time = 2 * lengths[1] + 2
  return base.Task(
      vocab_size=vocab_size,
      num_classes=2,
      input_length=time,
      target_length=time,
      sample=functools.partial(_sample, lengths=lengths, vocab_size=vocab_size),
      guesses=_guesses,
      note='tell two equal sequences from two that differ by a swap; exactly solvable, 1.00, which '
      'two layers reach at one length within 2,500 steps at --learning_rate=1e-3',
      per_position=False,
  )


TASKS = {'matching': base.TaskFamily(_make, ('encoder',), OPTIONS)}
