"""copy, reverse, sort: write out a random sequence again, in another order.

Decoder-only: BOS x_1 .. x_n SEP y_1 .. y_n EOS in one sequence, scored from y_1 to EOS. Seq2seq:
source x_1 .. x_n EOS, decoder inputs BOS y_1 .. y_n, targets y_1 .. y_n EOS. n is drawn per row
from min_length .. length; what remains is PAD. Symbols repeat; sort is ascending by token id.
"""

from collections.abc import Callable
import functools
from typing import TYPE_CHECKING

import jax
from jax import Array
import jax.numpy as jnp

from experiments.tasks import base
from experiments.tasks.base import BOS, EOS, PAD, SEP

if TYPE_CHECKING:
  from experiments.config import Config

Order = Callable[[Array, Array], Array]

OPTIONS = {'length': 12, 'min_length': 1, 'vocab_size': 32, 'free_running': True}


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


def _ended(symbols: Array, count: Array) -> Array:
  """Appends EOS behind the first `count` [B, 1] of symbols [B, n], then PAD: [B, n+1]."""
  place = jnp.arange(symbols.shape[1] + 1, dtype=jnp.int32)[None, :]
  padded = jnp.pad(symbols, ((0, 0), (0, 1)))
  return jnp.where(place < count, padded, jnp.where(place == count, EOS, PAD)).astype(jnp.int32)


def _draw(rng: Array, batch_size: int, lengths: tuple[int, int],
          vocab_size: int) -> tuple[Array, Array]:
  """Returns symbols [B, length] and how many of them are used, [B, 1]."""
  symbol_rng, count_rng = jax.random.split(rng)
  symbols = jax.random.randint(symbol_rng, (batch_size, lengths[1]), base.RESERVED, vocab_size,
                               jnp.int32)
  return symbols, base.draw_count(count_rng, batch_size, *lengths)


def _sample_decoder(rng: Array, batch_size: int, *, order: Order, lengths: tuple[int, int],
                    vocab_size: int) -> base.Batch:
  length = lengths[1]
  symbols, count = _draw(rng, batch_size, lengths, vocab_size)
  source, answer = _ended(symbols, count), _ended(order(symbols, count), count)
  place = jnp.arange(2 * length + 3, dtype=jnp.int32)[None, :]
  before = jnp.take_along_axis(source, jnp.clip(place - 1, 0, length), axis=1)
  after = jnp.take_along_axis(answer, jnp.clip(place - count - 2, 0, length), axis=1)
  tokens = jnp.where(place <= count, before, after)
  tokens = jnp.where(place == 0, BOS, jnp.where(place == count + 1, SEP, tokens))
  tokens = jnp.where(place <= 2 * count + 2, tokens, PAD).astype(jnp.int32)
  return base.next_token(tokens, (place >= count + 2) & (place <= 2 * count + 2))


def _sample_seq2seq(rng: Array, batch_size: int, *, order: Order, lengths: tuple[int, int],
                    vocab_size: int) -> base.Batch:
  length = lengths[1]
  symbols, count = _draw(rng, batch_size, lengths, vocab_size)
  targets = _ended(order(symbols, count), count)
  scored = jnp.arange(length + 1, dtype=jnp.int32)[None, :] <= count
  start = jnp.full((batch_size, 1), BOS, jnp.int32)
  return {
      'source': _ended(symbols, count),
      'source_mask': scored,
      'inputs': jnp.concatenate([start, targets[:, :-1]], axis=1),
      'targets': targets,
      'weights': scored.astype(jnp.float32),
  }


def _source_in_order(batch: base.Batch) -> Array:
  """Returns x_1 .. x_n EOS at the places of the answer, whatever the order asked for."""
  if 'source' in batch:
    return batch['source']
  inputs = batch['inputs']
  place = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None, :]
  separator = jnp.argmax(inputs == SEP, axis=1).astype(jnp.int32)[:, None]
  back = jnp.take_along_axis(inputs, jnp.clip(place - separator + 1, 0, separator), axis=1)
  return jnp.where(back == SEP, EOS, back).astype(jnp.int32)


def _guesses(batch: base.Batch, *, is_copy: bool, vocab_size: int) -> dict[str, Array]:
  targets = batch['targets']
  guesses = {
      'majority class': jnp.full_like(targets, EOS),
      'copy the last token': batch['inputs'],
      'chance': base.chance(targets.shape, base.RESERVED, vocab_size),
  }
  if not is_copy:
    guesses['source in order'] = _source_in_order(batch)
  return guesses


def _frame(symbols: list[int], *, length: int, is_seq2seq: bool) -> tuple[list[int], list[int]]:
  """What is read and gone on from; ValueError for reserved symbols, or too many."""
  if min(symbols) < base.RESERVED:
    raise ValueError(f'its symbols are the numbers from {base.RESERVED} on, and what stands around '
                     'them is put there')
  if len(symbols) > length:
    raise ValueError(f'it was made for at most {length} symbols; got {len(symbols)}')
  return ([*symbols, EOS], [BOS]) if is_seq2seq else ([], [BOS, *symbols, SEP])


def _make(config: 'Config', *, order: Order, note: str) -> base.Task:
  lengths = base.lengths(config, OPTIONS)
  length = lengths[1]
  vocab_size = base.size(config, OPTIONS, 'vocab_size', base.RESERVED + 1)
  is_seq2seq = config.model == 'seq2seq'
  sample = _sample_seq2seq if is_seq2seq else _sample_decoder
  time = length + 1 if is_seq2seq else 2 * length + 2
  return base.Task(
      vocab_size=vocab_size,
      num_classes=vocab_size,
      input_length=time,
      target_length=time,
      sample=functools.partial(sample, order=order, lengths=lengths, vocab_size=vocab_size),
      guesses=functools.partial(_guesses, is_copy=order is _copy, vocab_size=vocab_size),
      note=note,
      answer=base.Answer(functools.partial(_frame, length=length, is_seq2seq=is_seq2seq), EOS,
                         f'at most {length} symbols'),
  )


def _family(order: Order, note: str) -> base.TaskFamily:
  return base.TaskFamily(functools.partial(_make, order=order, note=note), ('decoder', 'seq2seq'),
                         OPTIONS)


TASKS = {
    'copy': _family(_copy, 'repeat the source; exactly solvable, 1.00 is the number to reach'),
    'reverse': _family(_reverse, 'repeat the source backwards; exactly solvable, 1.00'),
    'sort': _family(_sort, 'repeat the source in ascending order; exactly solvable, 1.00'),
}
