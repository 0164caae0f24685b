"""Tasks whose answer is written out token by token: how sources and answers become batches.

Decoder-only: BOS x_1 .. x_n SEP y_1 .. y_m EOS in one sequence, scored from y_1 to EOS. Seq2seq:
source x_1 .. x_n EOS, decoder inputs BOS y_1 .. y_m, targets y_1 .. y_m EOS. What remains is PAD.
"""

from collections.abc import Callable
import functools
from typing import NamedTuple, TYPE_CHECKING

from jax import Array
import jax.numpy as jnp

from experiments.tasks import base
from experiments.tasks.base import BOS, EOS, PAD, SEP

if TYPE_CHECKING:
  from experiments.config import Config

MODELS = ('decoder', 'seq2seq')


class Drawn(NamedTuple):
  """Sources [B, n] and answers [B, m]; of each row the first count [B, 1] are used."""
  source: Array
  source_count: Array
  answer: Array
  answer_count: Array


Draw = Callable[[Array, int], Drawn]


def _ended(symbols: Array, count: Array) -> Array:
  """Appends EOS behind the first `count` [B, 1] of symbols [B, n], then PAD: [B, n+1]."""
  place = jnp.arange(symbols.shape[1] + 1, dtype=jnp.int32)[None, :]
  padded = jnp.pad(symbols, ((0, 0), (0, 1)))
  return jnp.where(place < count, padded, jnp.where(place == count, EOS, PAD)).astype(jnp.int32)


def one_sequence(drawn: Drawn) -> base.Batch:
  """Writes BOS, the source, SEP and the answer, which is scored: a decoder's batch, T = n + m + 1.

  An answer that EOS is to end has it already.
  """
  source, count, answer, answer_count = drawn
  sizes = source.shape[1], answer.shape[1]
  place = jnp.arange(sum(sizes) + 2, dtype=jnp.int32)[None, :]
  before = jnp.take_along_axis(source, jnp.clip(place - 1, 0, sizes[0] - 1), axis=1)
  after = jnp.take_along_axis(answer, jnp.clip(place - count - 2, 0, sizes[1] - 1), axis=1)
  tokens = jnp.where(place <= count, before, after)
  tokens = jnp.where(place == 0, BOS, jnp.where(place == count + 1, SEP, tokens))
  real = place < count + 2 + answer_count
  tokens = jnp.where(real, tokens, PAD).astype(jnp.int32)
  return base.next_token(tokens, (place >= count + 2) & real)


def _sample_decoder(rng: Array, batch_size: int, *, draw: Draw) -> base.Batch:
  drawn = draw(rng, batch_size)
  answer = _ended(drawn.answer, drawn.answer_count)
  return one_sequence(drawn._replace(answer=answer, answer_count=drawn.answer_count + 1))


def _sample_seq2seq(rng: Array, batch_size: int, *, draw: Draw) -> base.Batch:
  source, source_count, answer, answer_count = draw(rng, batch_size)
  source, targets = _ended(source, source_count), _ended(answer, answer_count)
  place = jnp.arange(targets.shape[1], dtype=jnp.int32)[None, :]
  start = jnp.full((batch_size, 1), BOS, jnp.int32)
  return {
      'source': source,
      'source_mask': source != PAD,
      'inputs': jnp.concatenate([start, targets[:, :-1]], axis=1),
      'targets': targets,
      'weights': (place <= answer_count).astype(jnp.float32),
  }


def source_in_order(batch: base.Batch) -> Array:
  """Returns x_1 .. x_n at the places of the answer, and EOS behind them."""
  inputs = batch['inputs']
  place = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None, :]
  if 'source' in batch:
    source = batch['source']
  else:
    source = inputs[:, 1:]
    place = place - jnp.argmax(inputs == SEP, axis=1).astype(jnp.int32)[:, None]
  symbols = jnp.take_along_axis(source, jnp.clip(place, 0, source.shape[1] - 1), axis=1)
  return jnp.where(jnp.cumsum(symbols < base.RESERVED, axis=1) > 0, EOS, symbols).astype(jnp.int32)


def majority(batch: base.Batch, vocab_size: int) -> Array:
  """Returns the most frequent scored target: EOS, or where answers are long a symbol."""
  counts = jnp.zeros(vocab_size, jnp.float32).at[batch['targets']].add(batch['weights'])
  return jnp.full_like(batch['targets'], jnp.argmax(counts))


def frame(symbols: list[int], *, length: int, is_seq2seq: bool) -> tuple[list[int], list[int]]:
  """What is read and gone on from; ValueError for reserved symbols, or more than length."""
  if min(symbols) < base.RESERVED:
    raise ValueError(f'its symbols are the numbers from {base.RESERVED} on, and what stands around '
                     'them is put there')
  if len(symbols) > length:
    raise ValueError(f'it was made for at most {length} symbols; got {len(symbols)}')
  return ([*symbols, EOS], [BOS]) if is_seq2seq else ([], [BOS, *symbols, SEP])


def answer(length: int, eos_id: int | None, is_seq2seq: bool = False) -> base.Answer:
  """The answer to a source of at most `length` symbols, which is framed."""
  framed = functools.partial(frame, length=length, is_seq2seq=is_seq2seq)
  return base.Answer(framed, eos_id,
                     f'at most {length} symbols, the numbers from {base.RESERVED} on')


def make(config: 'Config', *, draw: Draw, sizes: tuple[int, int], vocab_size: int,
         guesses: Callable[[base.Batch], dict[str, Array]], note: str) -> base.Task:
  """Makes a task for MODELS; sizes are the most tokens (n, m) of a source and its answer."""
  is_seq2seq = config.model == 'seq2seq'
  sample = _sample_seq2seq if is_seq2seq else _sample_decoder
  return base.Task(
      vocab_size=vocab_size,
      num_classes=vocab_size,
      input_length=sizes[0] + 1 if is_seq2seq else sum(sizes) + 2,
      target_length=sizes[1] + 1 if is_seq2seq else sum(sizes) + 2,
      sample=functools.partial(sample, draw=draw),
      guesses=guesses,
      note=note,
      answer=answer(sizes[0], EOS, is_seq2seq),
  )
