"""mqar, induction, associative_recall: look up what stood behind a token (decoder-only)."""

import functools
from typing import TYPE_CHECKING

import jax
from jax import Array
import jax.numpy as jnp

from experiments.tasks import base
from experiments.tasks.base import SEP

if TYPE_CHECKING:
  from experiments.config import Config

MQAR_OPTIONS = {'length': 64, 'vocab_size': 64, 'num_pairs': 4, 'random_filler': False}
MQAR_FULL = {'length': 512, 'vocab_size': 8192, 'num_pairs': 64}
INDUCTION_OPTIONS = {'length': 40, 'vocab_size': 20 + base.RESERVED, 'free_running': True}
ASSOCIATIVE_OPTIONS = {'length': 40, 'vocab_size': 20 + base.RESERVED, 'free_running': True}
GAP_POWER = 0.01  # a in the gap weights a * g^(a - 1)


def _sample_mqar(rng: Array, batch_size: int, *, length: int, vocab_size: int, num_pairs: int,
                 random_filler: bool) -> base.Batch:
  """Draws pairs, then asks for each key once, at an even distance from the end of the pairs."""
  key_rng, value_rng, gap_rng, filler_rng = jax.random.split(rng, 4)
  half, context = vocab_size // 2, 2 * num_pairs
  keys = 1 + base.draw_distinct(key_rng, jnp.zeros(half - 1, jnp.float32), batch_size, num_pairs)
  values = half + base.draw_distinct(value_rng, jnp.zeros(vocab_size - half, jnp.float32),
                                     batch_size, num_pairs)
  gaps = jnp.arange(1, (length - context) // 2 + 1, dtype=jnp.float32)
  slots = base.draw_distinct(gap_rng, (GAP_POWER - 1.) * jnp.log(gaps), batch_size, num_pairs)
  place = context + 2 * slots
  rows = jnp.arange(batch_size, dtype=jnp.int32)[:, None]
  blank = jnp.zeros((batch_size, length), jnp.int32)
  filler = blank
  if random_filler:
    filler = jax.random.randint(filler_rng, (batch_size, length), 0, vocab_size, jnp.int32)
  pairs = jnp.stack([keys, values], axis=-1).reshape(batch_size, context)
  return {
      'inputs': filler.at[:, :context].set(pairs).at[rows, place].set(keys),
      'targets': blank.at[rows, place].set(values),
      'weights': blank.astype(jnp.float32).at[rows, place].set(1.),
  }


def _guess_mqar(batch: base.Batch, *, vocab_size: int, num_pairs: int) -> dict[str, Array]:
  inputs = batch['inputs']
  pair = base.chance(inputs.shape, 0, num_pairs)
  return {
      'any value in context': jnp.take_along_axis(inputs, 2 * pair + 1, axis=1),
      'majority class': jnp.full_like(inputs, vocab_size // 2),
      'copy the last token': inputs,
      'chance': base.chance(inputs.shape, vocab_size // 2, vocab_size),
  }


def _make_mqar(config: 'Config') -> base.Task:
  """Multi-query associative recall: k v k v .., then each key once more, its value the target.

  Keys are from [1, V/2), values from [V/2, V), so the reserved tokens but 0 are ordinary here.

  Source: Arora et al. 2023, Zoology, appendix E, https://arxiv.org/abs/2312.04927.
  """
  length = base.size(config, MQAR_OPTIONS, 'length', 4)
  vocab_size = base.size(config, MQAR_OPTIONS, 'vocab_size', 4)
  num_pairs = base.size(config, MQAR_OPTIONS, 'num_pairs', 1, (vocab_size // 2) - 1)
  if length % 2 or 4 * num_pairs > length:
    raise ValueError('length must be even and at least 4 * num_pairs for task mqar; got length '
                     f'{length} with num_pairs {num_pairs}')
  return base.Task(
      vocab_size=vocab_size,
      num_classes=vocab_size,
      input_length=length,
      target_length=length,
      sample=functools.partial(_sample_mqar,
                               length=length,
                               vocab_size=vocab_size,
                               num_pairs=num_pairs,
                               random_filler=config.random_filler),
      guesses=functools.partial(_guess_mqar, vocab_size=vocab_size, num_pairs=num_pairs),
      note=f'associative recall; attention reaches 1.00 with two layers, and 1 / num_pairs = '
      f'{1 / num_pairs:.2f} with one',
  )


def _sample_induction(rng: Array, batch_size: int, *, length: int, vocab_size: int) -> base.Batch:
  """Draws tokens with the trigger SEP somewhere and at the end; the answer follows the first."""
  token_rng, place_rng = jax.random.split(rng)
  tokens = jax.random.randint(token_rng, (batch_size, length + 1), base.RESERVED, vocab_size,
                              jnp.int32)
  trigger = jax.random.randint(place_rng, (batch_size, 1), 0, length - 2, jnp.int32)
  place = jnp.arange(length + 1, dtype=jnp.int32)[None, :]
  tokens = jnp.where((place == trigger) | (place == length - 1), SEP, tokens)
  answer = jnp.take_along_axis(tokens, trigger + 1, axis=1)
  tokens = jnp.where(place == length, answer, tokens)
  return base.next_token(tokens, jnp.broadcast_to(place == length, tokens.shape))


def _frame_induction(symbols: list[int]) -> tuple[list[int], list[int]]:
  """A prompt as it stands; ValueError unless the trigger is in it once and at its end."""
  if symbols.count(SEP) != 2 or symbols[-1] != SEP or SEP in symbols[-2:-1]:
    raise ValueError('the trigger SEP stands once among its symbols and once more at the end, as '
                     'in 5 SEP 6 7 SEP')
  if any(x < base.RESERVED for x in symbols if x != SEP):
    raise ValueError(f'its symbols but for SEP are the numbers from {base.RESERVED} on')
  return [], symbols


def _guess_induction(batch: base.Batch, *, vocab_size: int) -> dict[str, Array]:
  inputs = batch['inputs']
  place = base.chance(inputs.shape, 0, inputs.shape[1])
  return {
      'any token in context': jnp.take_along_axis(inputs, place, axis=1),
      'majority class': jnp.full_like(inputs, base.RESERVED),
      'copy the last token': inputs,
      'chance': base.chance(inputs.shape, base.RESERVED, vocab_size),
  }


def _make_induction(config: 'Config') -> base.Task:
  """Induction head: what followed the trigger the first time follows it at the end.

  Source: Fu et al. 2022, H3, section 3.1, https://arxiv.org/abs/2212.14052.
  """
  length = base.size(config, INDUCTION_OPTIONS, 'length', 3)
  vocab_size = base.size(config, INDUCTION_OPTIONS, 'vocab_size', base.RESERVED + 1)
  sizes = {'length': length, 'vocab_size': vocab_size}
  return base.Task(
      vocab_size=vocab_size,
      num_classes=vocab_size,
      input_length=length,
      target_length=length,
      sample=functools.partial(_sample_induction, **sizes),
      guesses=functools.partial(_guess_induction, vocab_size=vocab_size),
      note='recall what followed a trigger; a Transformer of two layers is above 0.97',
      answer=base.Answer(_frame_induction, None, 'symbols with SEP among them and at the end'),
  )


def _sample_associative(rng: Array, batch_size: int, *, length: int, vocab_size: int) -> base.Batch:
  """Draws a map for each row, then pairs of it, of which one is asked for."""
  map_rng, key_rng, asked_rng = jax.random.split(rng, 3)
  half = (vocab_size - base.RESERVED) // 2
  count = length // 2 - 1
  value_of = jax.random.randint(map_rng, (batch_size, half), base.RESERVED + half, vocab_size,
                                jnp.int32)
  keys = jax.random.randint(key_rng, (batch_size, count), 0, half, jnp.int32)
  pairs = jnp.stack([base.RESERVED + keys, jnp.take_along_axis(value_of, keys, axis=1)], axis=-1)
  asked = jax.random.randint(asked_rng, (batch_size, 1, 1), 0, count, jnp.int32)
  tokens = jnp.concatenate([
      pairs.reshape(batch_size, 2 * count),
      jnp.full((batch_size, 1), SEP, jnp.int32),
      jnp.take_along_axis(pairs, asked, axis=1)[:, 0],
  ], axis=1)  # yapf: disable
  place = jnp.arange(length + 1, dtype=jnp.int32)[None, :]
  return base.next_token(tokens, jnp.broadcast_to(place == length, tokens.shape))


def _guess_associative(batch: base.Batch, *, vocab_size: int) -> dict[str, Array]:
  inputs = batch['inputs']
  low = base.RESERVED + (vocab_size - base.RESERVED) // 2
  return {
      'any value in context': base.any_token(inputs, low, vocab_size),
      'majority class': jnp.full_like(inputs, low),
      'copy the last token': inputs,
      'chance': base.chance(inputs.shape, low, vocab_size),
  }


def _make_associative(config: 'Config') -> base.Task:
  """Associative recall: k v k v .. SEP k, and the value of that k, which occurred, is the target.

  Half of the ordinary tokens are keys. Every row has a map of its own from all of them to values,
  each drawn evenly; keys repeat, always with the same value.

  Source: Fu et al. 2022, H3, section 3.1, https://arxiv.org/abs/2212.14052.
  """
  length = base.size(config, ASSOCIATIVE_OPTIONS, 'length', 4)
  vocab_size = base.size(config, ASSOCIATIVE_OPTIONS, 'vocab_size', base.RESERVED + 2)
  if length % 2:
    raise ValueError(f'length must be even for task associative_recall; got {length}')
  return base.Task(
      vocab_size=vocab_size,
      num_classes=vocab_size,
      input_length=length,
      target_length=length,
      sample=functools.partial(_sample_associative, length=length, vocab_size=vocab_size),
      guesses=functools.partial(_guess_associative, vocab_size=vocab_size),
      note='recall the value of a key; exactly solvable, 1.00',
      answer=base.Answer(base.as_it_stands, None, 'key value key value .. SEP key'),
  )


TASKS = {
    'mqar': base.TaskFamily(_make_mqar, ('decoder',), MQAR_OPTIONS, MQAR_FULL),
    'induction': base.TaskFamily(_make_induction, ('decoder',), INDUCTION_OPTIONS),
    'associative_recall': base.TaskFamily(_make_associative, ('decoder',), ASSOCIATIVE_OPTIONS),
}
