"""Needles in random filler, and the question for them at the end (decoder-only).

A needle is SEP k v. The ordinary tokens are in thirds: keys, values, filler. Needles stand at
random places of the filler; behind it, at the end of the row, are SEP, the key asked for, the
answer.

Source: Hsieh et al. 2024, RULER, https://arxiv.org/abs/2404.06654, section 3; its needles are
sentences in essays or in noise, these are tokens.
"""

from collections.abc import Mapping
import functools
from typing import Any, TYPE_CHECKING

import jax
from jax import Array
import jax.numpy as jnp

from experiments.tasks import base
from experiments.tasks.base import RESERVED, SEP

if TYPE_CHECKING:
  from experiments.config import Config

NEEDLE_OPTIONS = {'length': 64, 'vocab_size': 48 + RESERVED, 'free_running': True}
MULTI_KEY_OPTIONS = NEEDLE_OPTIONS | {'num_pairs': 4}
MULTI_VALUE_OPTIONS = NEEDLE_OPTIONS | {'num_values': 4}
MULTI_QUERY_OPTIONS = {'length': 64, 'vocab_size': 48 + RESERVED, 'num_queries': 4}
TRACKING_OPTIONS = NEEDLE_OPTIONS | {'num_pairs': 2, 'hops': 2}
FULL = {'length': 4096}
TRACKING_FULL = FULL | {'hops': 4}
WIDTH = 3  # tokens of a needle


def _third(vocab_size: int) -> int:
  return (vocab_size - RESERVED) // 3


def _draw(rng: Array, batch_size: int, low: int, count: int, vocab_size: int) -> Array:
  """Draws distinct tokens of the third that begins at `low`: [B, count]."""
  weights = jnp.zeros(_third(vocab_size), jnp.float32)
  return low + base.draw_distinct(rng, weights, batch_size, count)


def _draw_pairs(rng: Array, batch_size: int, num_keys: int, num_values: int,
                vocab_size: int) -> tuple[Array, Array]:
  """Draws distinct keys [B, num_keys] and distinct values [B, num_values]."""
  key_rng, value_rng = jax.random.split(rng)
  low = RESERVED + _third(vocab_size)
  return (_draw(key_rng, batch_size, RESERVED, num_keys,
                vocab_size), _draw(value_rng, batch_size, low, num_values, vocab_size))


def _needles(keys: Array, values: Array) -> Array:
  """Returns SEP k v for keys and values [B, n]: [B, n, 3]."""
  return jnp.stack([jnp.full_like(keys, SEP), keys, values], axis=-1)


def _hide(rng: Array, needles: Array, end: Array, scored: tuple[bool, ...], length: int,
          vocab_size: int) -> base.Batch:
  """Hides needles [B, n, 3] in their order, all ways of it alike, before the end [B, m].

  scored says which of the end's tokens are.
  """
  place_rng, filler_rng = jax.random.split(rng)
  batch_size, count, _ = needles.shape
  room = length + 1 - end.shape[1]
  slots = jnp.zeros(room - (WIDTH - 1) * count, jnp.float32)
  slots = jnp.sort(base.draw_distinct(place_rng, slots, batch_size, count), axis=1)
  starts = slots + (WIDTH - 1) * jnp.arange(count, dtype=jnp.int32)[None, :]
  places = starts[..., None] + jnp.arange(WIDTH, dtype=jnp.int32)[None, None, :]
  rows = jnp.arange(batch_size, dtype=jnp.int32)[:, None, None]
  tokens = jax.random.randint(filler_rng, (batch_size, length + 1),
                              RESERVED + 2 * _third(vocab_size), vocab_size, jnp.int32)
  tokens = tokens.at[rows, places].set(needles).at[:, room:].set(end)
  counts = jnp.array([False] * room + list(scored))[None, :]
  return base.next_token(tokens, jnp.broadcast_to(counts, tokens.shape))


def _sample_keys(rng: Array, batch_size: int, *, length: int, vocab_size: int, num_pairs: int,
                 num_queries: int) -> base.Batch:
  """Hides needles of different keys, and asks for some of them in another order."""
  pair_rng, asked_rng, hide_rng = jax.random.split(rng, 3)
  keys, values = _draw_pairs(pair_rng, batch_size, num_pairs, num_pairs, vocab_size)
  needles = _needles(keys, values)
  asked = base.draw_distinct(asked_rng, jnp.zeros(num_pairs, jnp.float32), batch_size, num_queries)
  end = jnp.take_along_axis(needles, asked[..., None], axis=1).reshape(batch_size, -1)
  return _hide(hide_rng, needles, end, (False, False, True) * num_queries, length, vocab_size)


def _sample_values(rng: Array, batch_size: int, *, length: int, vocab_size: int,
                   num_values: int) -> base.Batch:
  """Hides needles of one key, and asks for it."""
  pair_rng, hide_rng = jax.random.split(rng)
  key, values = _draw_pairs(pair_rng, batch_size, 1, num_values, vocab_size)
  needles = _needles(jnp.broadcast_to(key, values.shape), values)
  end = jnp.concatenate([needles[:, 0, :2], values], axis=1)
  scored = (False, False) + (True,) * num_values
  return _hide(hide_rng, needles, end, scored, length, vocab_size)


def _sample_tracking(rng: Array, batch_size: int, *, length: int, vocab_size: int, num_pairs: int,
                     hops: int) -> base.Batch:
  """Hides num_pairs chains x1 = v, x2 = x1, .., among one another, and asks for one's last name."""
  pair_rng, order_rng, asked_rng, hide_rng = jax.random.split(rng, 4)
  count = num_pairs * hops
  names, values = _draw_pairs(pair_rng, batch_size, count, num_pairs, vocab_size)
  names = names.reshape(batch_size, num_pairs, hops)
  assigned = jnp.concatenate([values[..., None], names[..., :-1]], axis=2)
  order = base.draw_distinct(order_rng, jnp.zeros(count, jnp.float32), batch_size, count)
  # Which chain each needle is of; how far the chain is there.
  chain = order % num_pairs
  marks = jax.nn.one_hot(chain, num_pairs, dtype=jnp.int32)
  step = jnp.sum(marks * jnp.cumsum(marks, axis=1), axis=2) - 1
  rows = jnp.arange(batch_size, dtype=jnp.int32)[:, None]
  needles = _needles(names[rows, chain, step], assigned[rows, chain, step])
  asked = jax.random.randint(asked_rng, (batch_size, 1), 0, num_pairs, jnp.int32)
  end = _needles(names[rows, asked, hops - 1], values[rows, asked])[:, 0]
  return _hide(hide_rng, needles, end, (False, False, True), length, vocab_size)


def _guesses(batch: base.Batch, *, vocab_size: int, one_value: bool) -> dict[str, Array]:
  inputs = batch['inputs']
  low = RESERVED + _third(vocab_size)
  high = low + _third(vocab_size)
  guesses = {
      'any token in context': base.any_token(inputs, 0, vocab_size),
      'majority class': jnp.full_like(inputs, low),
      'copy the last token': inputs,
      'chance': base.chance(inputs.shape, low, high),
  }
  if not one_value:
    guesses['any value in context'] = base.any_token(inputs, low, high)
  return guesses


def _task(config: 'Config', options: Mapping[str, Any], sample: functools.partial, needles: int,
          distinct: int, end: int, note: str) -> base.Task:
  """Makes a task with so many needles, distinct tokens of a third, and tokens of the end."""
  length = base.size(config, options, 'length', WIDTH * needles + end - 1)
  vocab_size = base.size(config, options, 'vocab_size', RESERVED + 3 * distinct)
  one_run = 'free_running' in options
  return base.Task(
      vocab_size=vocab_size,
      num_classes=vocab_size,
      input_length=length,
      target_length=length,
      sample=functools.partial(sample, length=length, vocab_size=vocab_size),
      guesses=functools.partial(_guesses, vocab_size=vocab_size, one_value=needles == 1),
      note=note,
      answer=base.Answer(base.as_it_stands, None, 'SEP key value among filler; SEP key at the end')
      if one_run else None,
  )


def _make_needle(config: 'Config') -> base.Task:
  """One needle. The only value of a row is the answer, so that no model need look at the key.

  Source: Hsieh et al. 2024, RULER, single needle, https://arxiv.org/abs/2404.06654.
  """
  sample = functools.partial(_sample_keys, num_pairs=1, num_queries=1)
  return _task(config, NEEDLE_OPTIONS, sample, 1, 1, WIDTH,
               'find the only value in filler; exactly solvable, 1.00')


def _make_multi_key(config: 'Config') -> base.Task:
  """num_pairs needles with keys of their own, one of which is asked for.

  Source: Hsieh et al. 2024, RULER, multi-keys, https://arxiv.org/abs/2404.06654.
  """
  count = base.size(config, MULTI_KEY_OPTIONS, 'num_pairs', 1)
  sample = functools.partial(_sample_keys, num_pairs=count, num_queries=1)
  return _task(config, MULTI_KEY_OPTIONS, sample, count, count, WIDTH,
               'find the value of one key of some in filler; exactly solvable, 1.00')


def _make_multi_value(config: 'Config') -> base.Task:
  """num_values needles with the same key: SEP k, then all its values in the order they stand.

  Source: Hsieh et al. 2024, RULER, multi-values, https://arxiv.org/abs/2404.06654.
  """
  count = base.size(config, MULTI_VALUE_OPTIONS, 'num_values', 1)
  sample = functools.partial(_sample_values, num_values=count)
  return _task(config, MULTI_VALUE_OPTIONS, sample, count, count, count + 2,
               'list the values of a key in filler in order; exactly solvable, 1.00')


def _make_multi_query(config: 'Config') -> base.Task:
  """num_queries needles, all asked for: SEP k v SEP k v .. in another order, scored at each v.

  The paper asks for all keys at once, then lists the values; here an answer follows its key.

  Source: Hsieh et al. 2024, RULER, multi-queries, https://arxiv.org/abs/2404.06654.
  """
  count = base.size(config, MULTI_QUERY_OPTIONS, 'num_queries', 1)
  sample = functools.partial(_sample_keys, num_pairs=count, num_queries=count)
  return _task(config, MULTI_QUERY_OPTIONS, sample, count, count, WIDTH * count,
               'find the values of all keys in filler; exactly solvable, 1.00')


def _make_tracking(config: 'Config') -> base.Task:
  """Variable tracking: x1 = v, x2 = x1, .., each a needle SEP x y; asked is the last name's value.

  A chain has `hops` needles, in its order. The paper hides one and asks for all its names; here the
  only value of a row would be the answer, so there are num_pairs chains, mixed at random.

  Source: Hsieh et al. 2024, RULER, variable tracking, https://arxiv.org/abs/2404.06654.
  """
  num_pairs = base.size(config, TRACKING_OPTIONS, 'num_pairs', 1)
  hops = base.size(config, TRACKING_OPTIONS, 'hops', 1)
  sample = functools.partial(_sample_tracking, num_pairs=num_pairs, hops=hops)
  count = num_pairs * hops
  return _task(
      config, TRACKING_OPTIONS, sample, count, count, WIDTH,
      f'follow {hops} assignments to a value; exactly solvable, 1.00; any value in context '
      f'is right in 1 / num_pairs = {1 / num_pairs:.2f}')


TASKS = {
    'needle':
        base.TaskFamily(_make_needle, ('decoder',), NEEDLE_OPTIONS, FULL),
    'needle_multi_key':
        base.TaskFamily(_make_multi_key, ('decoder',), MULTI_KEY_OPTIONS, FULL),
    'needle_multi_value':
        base.TaskFamily(_make_multi_value, ('decoder',), MULTI_VALUE_OPTIONS, FULL),
    'needle_multi_query':
        base.TaskFamily(_make_multi_query, ('decoder',), MULTI_QUERY_OPTIONS, FULL),
    'variable_tracking':
        base.TaskFamily(_make_tracking, ('decoder',), TRACKING_OPTIONS, TRACKING_FULL),
}
