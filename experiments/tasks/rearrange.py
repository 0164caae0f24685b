"""copy, reverse, sort, duplicate_string, odds_first: write out a random sequence in another order.

n is drawn per row from min_length .. length. Symbols repeat; sort is ascending by token id. See
answers.py for the layout.
"""

from collections.abc import Callable
import functools
from typing import Any, Mapping, TYPE_CHECKING

import jax
from jax import Array
import jax.numpy as jnp

from experiments.tasks import answers
from experiments.tasks import base

if TYPE_CHECKING:
  from experiments.config import Config

Order = Callable[[Array, Array], Array]

OPTIONS = {'length': 12, 'min_length': 1, 'vocab_size': 32, 'free_running': True}
BINARY_FULL = {'length': 40, 'vocab_size': base.RESERVED + 2}


def _copy(symbols: Array, count: Array) -> Array:
  del count
  return symbols


def _reverse(symbols: Array, count: Array) -> Array:
  place = jnp.arange(symbols.shape[1], dtype=jnp.int32)[None, :]
  return jnp.take_along_axis(symbols, jnp.where(place < count, count - 1 - place, place), axis=1)


def _sort(symbols: Array, count: Array) -> Array:
  place = jnp.arange(symbols.shape[1], dtype=jnp.int32)[None, :]
  # Unused places sort behind every symbol.
  return jnp.sort(jnp.where(place < count, symbols, jnp.iinfo(jnp.int32).max), axis=1)


def _odds_first(symbols: Array, count: Array) -> Array:
  place = jnp.arange(symbols.shape[1], dtype=jnp.int32)[None, :]
  odds = (count + 1) // 2
  index = jnp.where(place < odds, 2 * place, 2 * (place - odds) + 1)
  return jnp.take_along_axis(symbols, jnp.minimum(index, symbols.shape[1] - 1), axis=1)


def _draw(rng: Array, batch_size: int, *, order: Order, copies: int, lengths: tuple[int, int],
          vocab_size: int) -> answers.Drawn:
  symbol_rng, count_rng = jax.random.split(rng)
  symbols = jax.random.randint(symbol_rng, (batch_size, lengths[1]), base.RESERVED, vocab_size,
                               jnp.int32)
  count = base.draw_count(count_rng, batch_size, *lengths)
  place = jnp.arange(copies * lengths[1], dtype=jnp.int32)[None, :]
  answer = jnp.take_along_axis(order(symbols, count), place % count, axis=1)
  return answers.Drawn(symbols, count, answer, copies * count)


def _guesses(batch: base.Batch, *, is_copy: bool, vocab_size: int) -> dict[str, Array]:
  targets = batch['targets']
  guesses = {
      'majority class': answers.majority(batch, vocab_size),
      'copy the last token': batch['inputs'],
      'chance': base.chance(targets.shape, base.RESERVED, vocab_size),
  }
  if not is_copy:
    guesses['source in order'] = answers.source_in_order(batch)
  return guesses


def _make(config: 'Config', *, order: Order, note: str, copies: int = 1) -> base.Task:
  """Rearranges a sequence; duplicate_string and odds_first are published with two symbols.

  Source: Deletang et al. 2022, appendix A, https://arxiv.org/abs/2207.02098.
  """
  lengths = base.lengths(config, OPTIONS)
  vocab_size = base.size(config, OPTIONS, 'vocab_size', base.RESERVED + 1)
  is_copy = order is _copy and copies == 1
  return answers.make(
      config,
      draw=functools.partial(_draw,
                             order=order,
                             copies=copies,
                             lengths=lengths,
                             vocab_size=vocab_size),
      sizes=(lengths[1], copies * lengths[1]),
      vocab_size=vocab_size,
      guesses=functools.partial(_guesses, is_copy=is_copy, vocab_size=vocab_size),
      note=note,
  )


def _family(order: Order,
            note: str,
            copies: int = 1,
            full: Mapping[str, Any] = {}) -> base.TaskFamily:
  make = functools.partial(_make, order=order, copies=copies, note=note)
  return base.TaskFamily(make, answers.MODELS, OPTIONS, full)


TASKS = {
    'copy':
        _family(_copy, 'repeat the source; exactly solvable, 1.00 is the number to reach'),
    'reverse':
        _family(_reverse, 'repeat the source backwards; exactly solvable, 1.00'),
    'sort':
        _family(_sort, 'repeat the source in ascending order; exactly solvable, 1.00'),
    'duplicate_string':
        _family(_copy, 'repeat the source twice; exactly solvable, 1.00', 2, BINARY_FULL),
    'odds_first':
        _family(_odds_first,
                'repeat the symbols at places 1, 3, 5 .., then 2, 4 ..; exactly solvable, 1.00',
                full=BINARY_FULL),
}
