"""addition: write out the sum of two numbers, least significant digits first."""

import functools
from typing import TYPE_CHECKING

import jax
from jax import Array
import jax.numpy as jnp

from experiments.tasks import answers
from experiments.tasks import base
from experiments.tasks.base import EOS, RESERVED

if TYPE_CHECKING:
  from experiments.config import Config

OPTIONS = {'length': 8, 'min_length': 1, 'free_running': True}
BASE = 10
PLUS = RESERVED + BASE


def _draw_number(rng: Array, batch_size: int, lengths: tuple[int, int]) -> tuple[Array, Array]:
  """Returns digits [B, length], zeros behind the last, and how many there are, [B, 1].

  Only a number of one digit can end in zero.
  """
  digit_rng, count_rng = jax.random.split(rng)
  count = base.draw_count(count_rng, batch_size, *lengths)
  place = jnp.arange(lengths[1], dtype=jnp.int32)[None, :]
  low = ((place == count - 1) & (count > 1)).astype(jnp.int32)
  digits = jax.random.randint(digit_rng, (batch_size, lengths[1]), low, BASE, jnp.int32)
  return jnp.where(place < count, digits, 0), count


def _add(columns: Array) -> Array:
  """Returns the digits [B, length + 1] of a sum from the sums [B, length] of its columns."""

  def step(carry: Array, column: Array) -> tuple[Array, Array]:
    return jnp.divmod(column + carry, BASE)

  carry, digits = jax.lax.scan(step, jnp.zeros_like(columns[:, 0]), columns.T)
  return jnp.concatenate([digits.T, carry[:, None]], axis=1)


def _draw(rng: Array, batch_size: int, *, lengths: tuple[int, int]) -> answers.Drawn:
  rngs = jax.random.split(rng)
  first, first_count = _draw_number(rngs[0], batch_size, lengths)
  second, second_count = _draw_number(rngs[1], batch_size, lengths)
  total = _add(first + second)
  longest = jnp.maximum(first_count, second_count)
  overflow = jnp.take_along_axis(total, longest, axis=1)
  place = jnp.arange(2 * lengths[1] + 1, dtype=jnp.int32)[None, :]
  behind = jnp.clip(place - first_count - 1, 0, lengths[1] - 1)
  source = jnp.where(place < first_count, jnp.pad(first, ((0, 0), (0, lengths[1] + 1))),
                     jnp.take_along_axis(second, behind, axis=1))
  source = jnp.where(place == first_count, PLUS, RESERVED + source)
  return answers.Drawn(source, first_count + 1 + second_count, RESERVED + total, longest + overflow)


def _guesses(batch: base.Batch) -> dict[str, Array]:
  targets, source = batch['targets'], answers.source_in_order(batch)
  return {
      'majority class': answers.majority(batch, PLUS),
      'first number': jnp.where(jnp.cumsum(source == PLUS, axis=1) > 0, EOS, source),
      'copy the last token': batch['inputs'],
      'chance': base.chance(targets.shape, RESERVED, PLUS),
  }


def _make_addition(config: 'Config') -> base.Task:
  """Addition of two numbers of min_length .. length decimal digits each: x_1 .. PLUS x_1 .. .

  Digits have the ids from RESERVED on. The published numbers are binary.

  Source: Deletang et al. 2022, appendix A, https://arxiv.org/abs/2207.02098.
  """
  lengths = base.lengths(config, OPTIONS)
  return answers.make(
      config,
      draw=functools.partial(_draw, lengths=lengths),
      sizes=(2 * lengths[1] + 1, lengths[1] + 1),
      vocab_size=PLUS + 1,
      guesses=_guesses,
      note='add two numbers, least significant digits first; exactly solvable, 1.00',
  )


TASKS = {'addition': base.TaskFamily(_make_addition, answers.MODELS, OPTIONS)}
