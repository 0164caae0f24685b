"""Dropout on attention weights: a draw for each (key, batch row, head, query index, key index).

Every pair has its own counter, so any tile of the [T, S] weights can be drawn by itself, and every
variant and block size drops the same pairs.
"""

from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from attn.axes import Array, ArrayLike


class Draw(NamedTuple):
  """words: uint32 [2], the key. heads: uint32 [..., K, G], one number per batch row and head."""

  words: Array
  heads: ArrayLike


def _hash(words: Array, high: Array, low: Array) -> tuple[Array, Array]:
  """Two pseudo-random uint32 for each pair of counters (Threefry-2x32, Salmon et al. 2011)."""
  counters = jnp.concatenate([high.ravel(), low.ravel()])
  first, second = jnp.split(jax.extend.random.threefry_2x32((words[0], words[1]), counters), 2)
  return first.reshape(high.shape), second.reshape(low.shape)


def draw(rng: Array, shape: tuple[int, ...]) -> Draw:
  """The draw of a call whose batch and head axes are `shape`."""
  return Draw(jax.random.bits(rng, (2,), jnp.uint32),
              np.arange(np.prod(shape), dtype=np.uint32).reshape(shape))


def scale(drawn: Draw, rate: float, query_index: Array, key_index: Array, dtype: Any) -> Array:
  """0 with probability rate, else 1 / (1 - rate): [..., K, G, T, S].

  query_index is [..., T] and key_index [..., S].
  """
  heads = jnp.asarray(drawn.heads)
  # Each head gets an origin of its own in the 2^64 counters; a collision of two heads is as likely
  # as one of two keys.
  high, low = _hash(drawn.words, heads, jnp.zeros_like(heads))
  high = high[..., None, None] + query_index.astype(jnp.uint32)[..., None, None, :, None]
  low = low[..., None, None] + key_index.astype(jnp.uint32)[..., None, None, None, :]
  high, low = jnp.broadcast_arrays(high, low)
  bits, _ = _hash(drawn.words, high, low)
  threshold = np.uint32(min(round(rate * 2**32), 2**32 - 1))
  return jnp.where(bits >= threshold, jnp.asarray(1 / (1 - rate), dtype), jnp.asarray(0, dtype))
