"""The tasks of MAD: recall, fuzzy and noisy; selective copying; memorization (decoder-only);
compression (seq2seq).

Source: Poli et al. 2024, Mechanistic Design and Scaling of Hybrid Architectures,
https://arxiv.org/abs/2403.17844.
"""

from collections.abc import Mapping
import functools
from typing import Any, TYPE_CHECKING

import jax
from jax import Array
import jax.numpy as jnp

from experiments.tasks import answers
from experiments.tasks import base
from experiments.tasks.base import BOS, MASK, PAD, RESERVED

if TYPE_CHECKING:
  from experiments.config import Config

RECALL_OPTIONS = {'length': 64, 'vocab_size': 16 + RESERVED}
RECALL_FULL = {'length': 128}
NOISY_OPTIONS = {
    'length': 64,
    'vocab_size': 16 + 16 + RESERVED,
    'noise_rate': 0.2,
    'num_noise': 16,
}
FUZZY_OPTIONS = {'length': 64, 'vocab_size': 16 + RESERVED, 'num_pairs': 6, 'span': 2}
FUZZY_FULL = RECALL_FULL | {'span': 3}
COPY_OPTIONS = {'length': 64, 'vocab_size': 16 + RESERVED, 'num_items': 8}
COPY_FULL = {'length': 256, 'num_items': 16}
MEMORIZATION_OPTIONS = {'length': 32, 'vocab_size': 256 + RESERVED}
COMPRESSION_OPTIONS = {'length': 8, 'vocab_size': 16 + RESERVED, 'free_running': True}
MAP_SEED = 1  # of the facts to memorize, the same in every run


def _again(indices: Array, real: Array, count: int) -> Array:
  """Says where an index in [0, count) stood before in its row [B, n], among the real ones alone."""
  marks = jnp.where(real[..., None], jax.nn.one_hot(indices, count, dtype=jnp.int32), 0)
  return jnp.sum(marks * jnp.cumsum(marks, axis=1), axis=2) > 1


def _sample_recall(rng: Array, batch_size: int, *, length: int, vocab_size: int, num_noise: int,
                   noise_rate: float) -> base.Batch:
  """Draws pairs of a map of each row; the last asks for one that came before."""
  map_rng, key_rng, source_rng, where_rng, noise_rng = jax.random.split(rng, 5)
  first_noise, count = vocab_size - num_noise, length // 2
  half = (first_noise - RESERVED) // 2
  value_of = jax.random.randint(map_rng, (batch_size, half), RESERVED + half, first_noise,
                                jnp.int32)
  keys = jax.random.randint(key_rng, (batch_size, count), 0, half, jnp.int32)
  source = jax.random.randint(source_rng, (batch_size, 1), 0, count - 1, jnp.int32)
  keys = keys.at[:, -1:].set(jnp.take_along_axis(keys, source, axis=1))
  place = jnp.arange(count, dtype=jnp.int32)[None, :]
  real = (place == source) | (place == count - 1)
  real |= ~jax.random.bernoulli(where_rng, noise_rate, keys.shape)
  pairs = jnp.stack([RESERVED + keys, jnp.take_along_axis(value_of, keys, axis=1)], axis=-1)
  if num_noise:
    noise = jax.random.randint(noise_rng, pairs.shape, first_noise, vocab_size, jnp.int32)
    pairs = jnp.where(real[..., None], pairs, noise)
  scored = _again(keys, real, half)
  scored = jnp.stack([jnp.zeros_like(scored), scored], axis=-1)
  tokens, scored = (x.reshape(batch_size, length) for x in (pairs, scored))
  return base.next_token(jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=BOS),
                         jnp.pad(scored, ((0, 0), (1, 0))))


def _guess_values(batch: base.Batch, *, low: int, high: int) -> dict[str, Array]:
  """The trivial answers where the answers are in [low, high)."""
  inputs = batch['inputs']
  return {
      'any value in context': base.any_token(inputs, low, high),
      'majority class': jnp.full_like(inputs, low),
      'copy the last token': inputs,
      'chance': base.chance(inputs.shape, low, high),
  }


def _task(length: int, vocab_size: int, sample: functools.partial, answers: tuple[int, int],
          note: str) -> base.Task:
  return base.Task(
      vocab_size=vocab_size,
      num_classes=vocab_size,
      input_length=length,
      target_length=length,
      sample=functools.partial(sample, length=length, vocab_size=vocab_size),
      guesses=functools.partial(_guess_values, low=answers[0], high=answers[1]),
      note=note,
  )


def _even_length(config: 'Config', options: Mapping[str, Any]) -> int:
  length = base.size(config, options, 'length', 4)
  if length % 2:
    raise ValueError(f'length must be even for task {config.task}; got {length}')
  return length


def _values(vocab_size: int) -> tuple[int, int]:
  """Which ids are values; the ordinary ones before them, half of all, are keys."""
  return RESERVED + (vocab_size - RESERVED) // 2, vocab_size


def _make_recall(config: 'Config') -> base.Task:
  """In-context recall: BOS k v k v .., scored at every value whose key came before.

  Half of the ordinary tokens are keys; every row has a map of its own from keys to values.

  Source: Poli et al. 2024, MAD, https://arxiv.org/abs/2403.17844.
  """
  length = _even_length(config, RECALL_OPTIONS)
  vocab_size = base.size(config, RECALL_OPTIONS, 'vocab_size', RESERVED + 2)
  sample = functools.partial(_sample_recall, num_noise=0, noise_rate=0.)
  return _task(length, vocab_size, sample, _values(vocab_size),
               'recall the value of a key seen before; exactly solvable, 1.00')


def _make_noisy(config: 'Config') -> base.Task:
  """Noisy recall: in-context recall with pairs of noise between the pairs of key and value.

  A pair is noise, two tokens of the last num_noise ids, with the chance noise_rate.

  Source: Poli et al. 2024, MAD, https://arxiv.org/abs/2403.17844.
  """
  length = _even_length(config, NOISY_OPTIONS)
  num_noise = base.size(config, NOISY_OPTIONS, 'num_noise', 1)
  vocab_size = base.size(config, NOISY_OPTIONS, 'vocab_size', RESERVED + 2 + num_noise)
  noise_rate = base.size(config, NOISY_OPTIONS, 'noise_rate', 0., 1.)
  sample = functools.partial(_sample_recall, num_noise=num_noise, noise_rate=noise_rate)
  return _task(length, vocab_size, sample, _values(vocab_size - num_noise),
               'recall the value of a key, past noise; exactly solvable, 1.00')


def _sample_fuzzy(rng: Array, batch_size: int, *, length: int, vocab_size: int, num_pairs: int,
                  span: int) -> base.Batch:
  """Draws num_pairs pairs of tuples, and writes them one after the other as often as there is room.

  Of two pairs with the same key, the first stands for both.
  """
  key_rng, value_rng, size_rng, choice_rng = jax.random.split(rng, 4)
  shape = (batch_size, num_pairs, span)
  low, high = _values(vocab_size)
  keys = jax.random.randint(key_rng, shape, RESERVED, low, jnp.int32)
  values = jax.random.randint(value_rng, shape, low, high, jnp.int32)
  sizes = jax.random.randint(size_rng, (2, batch_size, num_pairs), 1, span + 1, jnp.int32)
  used = jnp.arange(span, dtype=jnp.int32)[None, None, :] < sizes[0, ..., None]
  keys = jnp.where(used, keys, PAD)
  same = jnp.all(keys[:, :, None] == keys[:, None, :], axis=-1)
  choice = jax.random.randint(choice_rng, (batch_size, length // 2 + 1), 0, num_pairs, jnp.int32)
  choice = jnp.take_along_axis(jnp.argmax(same, axis=2), choice, axis=1)
  again = _again(choice, jnp.ones_like(choice, bool), num_pairs)
  key_sizes, value_sizes = (jnp.take_along_axis(x, choice, axis=1) for x in sizes)
  ends = jnp.cumsum(key_sizes + value_sizes, axis=1)
  place = jnp.broadcast_to(jnp.arange(length + 1, dtype=jnp.int32), (batch_size, length + 1))
  at = jax.vmap(functools.partial(jnp.searchsorted, side='right'))(ends, place)
  pair, end, size, known = (
      jnp.take_along_axis(x, at, axis=1) for x in (choice, ends, value_sizes, again))
  starts = ends - key_sizes - value_sizes
  in_key = place - jnp.take_along_axis(starts, at, axis=1)
  in_value = place - end + size
  rows = jnp.arange(batch_size, dtype=jnp.int32)[:, None]
  tokens = jnp.where(in_value < 0, keys[rows, pair, jnp.clip(in_key, 0, span - 1)],
                     values[rows, pair, jnp.clip(in_value, 0, span - 1)])
  return base.next_token(tokens, (in_value >= 0) & known)


def _make_fuzzy(config: 'Config') -> base.Task:
  """Fuzzy recall: in-context recall where keys and values are tuples of 1 to span tokens.

  Keys and values are of disjoint halves of the ordinary tokens, so a key ends where a value begins,
  and a value where the next key does. Scored are all tokens of a value whose whole key came before.
  Each row has num_pairs pairs of its own, so that long keys come again as often as short ones;
  the paper draws from all tuples there are, so that few but the short come again.

  Source: Poli et al. 2024, MAD, https://arxiv.org/abs/2403.17844.
  """
  num_pairs = base.size(config, FUZZY_OPTIONS, 'num_pairs', 1)
  span = base.size(config, FUZZY_OPTIONS, 'span', 1)
  # So many that one pair comes twice.
  length = base.size(config, FUZZY_OPTIONS, 'length', 2 * span * (num_pairs + 1))
  vocab_size = base.size(config, FUZZY_OPTIONS, 'vocab_size', RESERVED + 2)
  sample = functools.partial(_sample_fuzzy, num_pairs=num_pairs, span=span)
  return _task(length, vocab_size, sample, _values(vocab_size),
               'recall a value of some tokens by a key of some; exactly solvable, 1.00')


def _sample_copy(rng: Array, batch_size: int, *, length: int, vocab_size: int,
                 num_items: int) -> base.Batch:
  """Scatters tokens among blanks, PAD, and asks for them with as many MASK."""
  token_rng, place_rng = jax.random.split(rng)
  context = length - num_items
  items = jax.random.randint(token_rng, (batch_size, num_items), RESERVED, vocab_size, jnp.int32)
  places = base.draw_distinct(place_rng, jnp.zeros(context, jnp.float32), batch_size, num_items)
  rows = jnp.arange(batch_size, dtype=jnp.int32)[:, None]
  blank = jnp.full((batch_size, length), PAD, jnp.int32)
  return {
      'inputs': blank.at[rows, jnp.sort(places, axis=1)].set(items).at[:, context:].set(MASK),
      'targets': blank.at[:, context:].set(items),
      'weights': blank.astype(jnp.float32).at[:, context:].set(1.),
  }


def _make_copy(config: 'Config') -> base.Task:
  """Selective copying: num_items tokens among blanks, then a MASK for each of them in order.

  Source: Poli et al. 2024, MAD, https://arxiv.org/abs/2403.17844.
  """
  num_items = base.size(config, COPY_OPTIONS, 'num_items', 1)
  length = base.size(config, COPY_OPTIONS, 'length', 2 * num_items)
  vocab_size = base.size(config, COPY_OPTIONS, 'vocab_size', RESERVED + 2)
  sample = functools.partial(_sample_copy, num_items=num_items)
  return _task(length, vocab_size, sample, (RESERVED, vocab_size),
               'repeat the tokens between blanks in order; exactly solvable, 1.00')


def _sample_memorization(rng: Array, batch_size: int, *, length: int,
                         vocab_size: int) -> base.Batch:
  half = (vocab_size - RESERVED) // 2
  value_of = jax.random.permutation(jax.random.key(MAP_SEED),
                                    jnp.arange(*_values(vocab_size), dtype=jnp.int32))
  keys = jax.random.randint(rng, (batch_size, length // 2), 0, half, jnp.int32)

  def alternate(left: Array, right: Array) -> Array:
    return jnp.stack([left, right], axis=-1).reshape(batch_size, length)

  blank = jnp.zeros_like(keys)
  return {
      'inputs': alternate(RESERVED + keys, jnp.full_like(keys, MASK)),
      'targets': alternate(blank, value_of[keys]),
      'weights': alternate(blank, jnp.ones_like(keys)).astype(jnp.float32),
  }


def _make_memorization(config: 'Config') -> base.Task:
  """Memorization: k MASK k MASK .., scored at MASK with the value of the key before it.

  The map from keys to values, all different, is the same in all rows and runs, and no row shows it.

  Source: Poli et al. 2024, MAD, https://arxiv.org/abs/2403.17844.
  """
  length = _even_length(config, MEMORIZATION_OPTIONS)
  vocab_size = base.size(config, MEMORIZATION_OPTIONS, 'vocab_size', RESERVED + 2)
  return _task(length, vocab_size, functools.partial(_sample_memorization), _values(vocab_size),
               'know a fixed map from keys to values by heart; exactly solvable, 1.00')


def _draw_sequence(rng: Array, batch_size: int, *, length: int, vocab_size: int) -> answers.Drawn:
  symbols = jax.random.randint(rng, (batch_size, length), RESERVED, vocab_size, jnp.int32)
  count = jnp.full((batch_size, 1), length, jnp.int32)
  return answers.Drawn(symbols, count, symbols, count)


def _make_compression(config: 'Config') -> base.Task:
  """Compression: a sequence and EOS, at which one vector must hold all of it, to be written out.

  The decoder sees that vector alone. The paper's decoder is an MLP of it for each position; ours is
  the decoder of a seq2seq model, for which what it wrote before tells nothing of what comes.

  Source: Poli et al. 2024, MAD, https://arxiv.org/abs/2403.17844.
  """
  length = base.size(config, COMPRESSION_OPTIONS, 'length', 1)
  vocab_size = base.size(config, COMPRESSION_OPTIONS, 'vocab_size', RESERVED + 1)
  return answers.make(
      config,
      draw=functools.partial(_draw_sequence, length=length, vocab_size=vocab_size),
      sizes=(length, length),
      vocab_size=vocab_size,
      guesses=lambda batch: {
          'majority class': answers.majority(batch, vocab_size),
          'copy the last token': batch['inputs'],
          'chance': base.chance(batch['targets'].shape, RESERVED, vocab_size),
      },
      note='repeat the source from one vector; exactly solvable, 1.00')._replace(bottleneck=True)


TASKS = {
    'compression':
        base.TaskFamily(_make_compression, ('seq2seq',), COMPRESSION_OPTIONS, {'length': 32}),
    'in_context_recall':
        base.TaskFamily(_make_recall, ('decoder',), RECALL_OPTIONS, RECALL_FULL),
    'fuzzy_recall':
        base.TaskFamily(_make_fuzzy, ('decoder',), FUZZY_OPTIONS, FUZZY_FULL),
    'noisy_recall':
        base.TaskFamily(_make_noisy, ('decoder',), NOISY_OPTIONS, RECALL_FULL),
    'selective_copy':
        base.TaskFamily(_make_copy, ('decoder',), COPY_OPTIONS, COPY_FULL),
    'memorization':
        base.TaskFamily(_make_memorization, ('decoder',), MEMORIZATION_OPTIONS),
}
