"""A batch of sequences fed to a cache in pieces, and the same sequences in one pass.

`pieces` cuts rows of different lengths at random and pads every piece at random places; what comes
out must be what one `apply` to the whole sequences gives.
"""

import functools
from typing import Any, NamedTuple

import attn
import jax
import jax.numpy as jnp
import numpy as np

from tests import harness
from tests.rows import Row, ROWS

CAUSAL = tuple(row for row in ROWS if row.is_causal)
B, T, N, K, H, HV = 3, 17, 4, 2, 8, 6
DTYPES = ('float64', 'float32', 'bfloat16')


class Sequences(NamedTuple):
  """query [B, T, N, H], key [B, T, K, H], value [B, T, K, Hv] and the variant's own arrays."""
  query: Any
  key: Any
  value: Any
  params: Any

  @property
  def dims(self):
    return attn.check_qkv(*self[:3])


class Piece(NamedTuple):
  """One call: tokens [B, width, ...] with a token_mask, and which token of its row each is."""
  query: Any
  key: Any
  value: Any
  token_mask: np.ndarray
  place: np.ndarray


def sequences(row: Row, dtype: str, seed: int = 0) -> Sequences:
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  params = row.params(np.random.default_rng(7), T, N, H)
  params = {
      name: jnp.asarray(x, x.dtype if np.issubdtype(x.dtype, np.integer) else dtype)
      for name, x in params.items()
  }
  return Sequences(draw(B, T, N, H), draw(B, T, K, H), draw(B, T, K, HV), params)


def options(row: Row) -> dict[str, Any]:
  """The row's options without those that are about cost."""
  of_cost = attn.VARIANTS[row.name].cost_options
  return {name: value for name, value in row.options.items() if name not in of_cost}


def one_pass(row: Row, given: Sequences, **more: Any) -> jax.Array:
  apply = functools.partial(attn.VARIANTS[row.name].apply, is_causal=True, **row.options)
  return harness.jit(apply)(given.params, *given[:3], **more)


def init(row: Row, given: Sequences, max_length: int | None = T) -> attn.cache.Cache:
  return attn.VARIANTS[row.name].init_cache(given.params,
                                            given.dims,
                                            dtype=given.key.dtype,
                                            max_length=max_length,
                                            **options(row))


def pieces(given: Sequences, lengths: list[int], width: int, seed: int) -> list[Piece]:
  """Cuts the first lengths[b] tokens of every row into pieces of `width`, most of them padded.

  What stands at padding is nan.
  """
  rng, found, done = np.random.default_rng(seed), [], np.zeros(B, int)
  while np.any(done < lengths):
    mask, place = np.zeros((B, width), bool), np.zeros((B, width), int)
    for b in range(B):
      number = min(rng.integers(0, width + 1), lengths[b] - done[b])
      mask[b, np.sort(rng.choice(width, number, replace=False))] = True
      place[b, mask[b]] = done[b] + np.arange(number)
      done[b] += number
    at = (np.arange(B)[:, None], place)
    arrays = (np.where(mask[..., None, None], np.asarray(x)[at], np.nan) for x in given[:3])
    arrays = (jnp.asarray(x, given.key.dtype) for x in arrays)
    found.append(Piece(*arrays, mask, place))
  return found


def collect(shape: tuple[int, ...], found: list[tuple[Piece, Any]]) -> tuple[np.ndarray, float]:
  """Outputs [B, T, N, Hv] put where their tokens stand, nan elsewhere; the largest at padding."""
  whole, stray = np.full(shape, np.nan), 0.
  for piece, output in found:
    output = np.asarray(output, np.float64)
    for b in range(B):
      mask = piece.token_mask[b]
      whole[b, piece.place[b, mask]] = output[b, mask]
      stray = max(stray, np.max(np.abs(output[b, ~mask]), initial=0.))
  return whole, stray


def run(row: Row, given: Sequences, lengths: list[int], width: int, seed: int, extend: Any,
        **more: Any) -> tuple[np.ndarray, float, attn.cache.Cache]:
  """Feeds all pieces: the outputs, the largest at padding, and the cache."""
  cache, found = init(row, given), []
  for piece in pieces(given, lengths, width, seed):
    output, cache = extend(given.params,
                           cache,
                           *piece[:3],
                           token_mask=jnp.asarray(piece.token_mask),
                           **more)
    found.append((piece, output))
  whole, stray = collect((B, T, N, HV), found)
  return whole, stray, cache
