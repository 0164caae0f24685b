"""BigBird: blocks in a window, global blocks, random blocks."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn import call as calls
from attn import checks, layout, masks, tiles
from attn.axes import Array, ArrayLike, Dims
from attn.layout import Part, Tiles
from attn.masks import Predicate
from attn.positions import PositionBias


def bigbird_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | PositionBias | None = None,
    mask: ArrayLike | None = None,
    *,
    block_size: int,
    random_blocks: ArrayLike,
    is_causal: bool = False,
    scale: float | None = None,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    segment_ids: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
) -> Array:
  """Softmax attention by blocks: near ones, global ones and some at random.

  A query in block i attends to the keys of the blocks i - 1, i and i + 1, of the first and the last
  block, and of those that random_blocks[i] lists; queries of the first and the last block attend to
  all. When causal only to keys at or before it, and the last block is not global. A key is counted
  once however often it is listed. In O(T * block_size * (5 + r)) time and O(T) memory; explicit
  positions cost O(T * S) time in as much memory.

  Args:
    query: [..., T, N, H].
    key: [..., S, K, H], with N a multiple of K.
    value: [..., S, K, Hv].
    block_size: positions in a block, which begins at a multiple of it.
    random_blocks: integers [blocks, r], or [N, blocks, r] for each head its own, such as
      `bigbird_random_blocks` draws; blocks = ceil(T / block_size), and with explicit positions all
      that they reach. A number that is no block, as -1, lists none; when causal, neither does one
      that is not earlier.
    bias, mask, is_causal, scale, query_positions, key_positions, segment_ids, dropout_rate,
      dropout_rng: as in `vanilla_attention`.

  Returns:
    [..., T, N, Hv] in query's dtype; zeros for a query that sees nothing.

  Raises:
    TypeError, ValueError: as in `vanilla_attention`, or random_blocks does not fit.

  Source: Zaheer et al. 2020, BigBird, section 2, https://arxiv.org/abs/2007.14062.
  """
  size = checks.check_int('block_size', block_size, 1)
  random_blocks, given = _check_blocks(random_blocks), random_blocks
  number = random_blocks.shape[-2]
  dims, call, spec = calls.prepare(query,
                                   key,
                                   value,
                                   bias,
                                   mask,
                                   is_causal=is_causal,
                                   scale=scale,
                                   query_positions=query_positions,
                                   key_positions=key_positions,
                                   segment_ids=segment_ids,
                                   dropout_rate=dropout_rate,
                                   dropout_rng=dropout_rng,
                                   pattern=_near_and_global(size, number, is_causal))
  placed = query_positions is not None or key_positions is not None
  if random_blocks.ndim == 3 and random_blocks.shape[0] != dims.N:
    raise ValueError(f'random_blocks must be [blocks, r] or [N, blocks, r] with N = {dims.N} query '
                     f'heads; got {given.shape}')
  if not placed and number != -(-dims.T // size):
    raise ValueError(
        f'random_blocks must list {-(-dims.T // size)} blocks of block_size = {size} for T = '
        f'{dims.T}; got {given.shape}, which lists {number}')
  chosen = choose(random_blocks, is_causal)  # [N or 1, blocks, r]
  heads = (dims.K, dims.G) if chosen.shape[0] > 1 else (1, 1)
  chosen = chosen.reshape(*heads, *chosen.shape[1:])
  if not dims.T or not dims.S:
    return tiles.output(call, spec)
  if placed:
    own = jnp.asarray(call.query_positions)
    own = jnp.where(own < 0, number, own // size)
    lists = jnp.take(chosen, own, 2, mode='fill', fill_value=-1)
    call = call._replace(query_blocks=jnp.moveaxis(lists, (0, 1), (-4, -3)))
    return tiles.output(call, spec._replace(block=size), tiles.band_block(2 * size, None))
  return tiles.output(call, spec, parts=parts(dims.T, size, chosen, is_causal))


def parts(length: int, size: int, chosen: Array, is_causal: bool) -> tuple[Part, ...]:
  """Near blocks; chosen and global ones, listed; and all of them for queries of global blocks."""
  number = chosen.shape[-2]
  ends = (0,) if is_causal or number < 2 else (0, number - 1)
  blocks = layout.cut(0, number * size, size)
  near = masks.near_blocks(size)
  near = masks.causal() & near if is_causal else near & masks.outside_blocks(size, ends, query=True)
  found: tuple[Part, ...] = (Part(near, layout.cut(0, length, 2 * size), blocks),)
  own = np.arange(number, dtype=np.int32)
  listed = [np.where(abs(own - end) > 1, end, -1) for end in ends]
  if not is_causal:
    listed = [np.where(np.isin(own, ends), -1, x) for x in listed]
    rows = Tiles(size * np.array(ends), size)
    found += (Part(None, rows, layout.cut(0, length, None)),)
  columns = jnp.broadcast_to(jnp.asarray(np.stack(listed, -1), jnp.int32),
                             (*chosen.shape[:-1], len(ends)))
  return (*found, Part(None, blocks, blocks, jnp.concatenate([columns, chosen], -1)))


def _check_blocks(blocks: ArrayLike) -> Array:
  if not checks.is_array(blocks) or not jnp.issubdtype(blocks.dtype, jnp.integer):
    raise ValueError('random_blocks must be an integer array [blocks, r] or [N, blocks, r]; '
                     f'got {blocks.dtype if checks.is_array(blocks) else type(blocks).__name__}')
  if blocks.ndim not in (2, 3):
    raise ValueError(
        f'random_blocks must be [blocks, r] or [N, blocks, r]; got {tuple(blocks.shape)}')
  return jnp.asarray(checks.int32(blocks))


def _near_and_global(size: int, number: int, is_causal: bool) -> Predicate:
  near = masks.near_blocks(size) | masks.global_block(size, 0)
  return near if is_causal or number < 2 else near | masks.global_block(size, number - 1)


def predicate(*, is_causal: bool, block_size: int, random_blocks: ArrayLike) -> Predicate:
  """All that a query of one head sees.

  Raises:
    ValueError: random_blocks are those of several heads.
  """
  blocks = _check_blocks(random_blocks)
  if blocks.ndim == 3:
    raise ValueError(
        'random_blocks must be [blocks, r], since what is visible differs between heads; '
        f'got {blocks.shape}: give those of one head, random_blocks[n]')
  near = _near_and_global(block_size, blocks.shape[-2], is_causal)
  seen = near | masks.listed_blocks(block_size, blocks)
  return masks.causal() & seen if is_causal else seen


def choose(blocks: Array, is_causal: bool) -> Array:
  """Blocks [N or 1, blocks, r] with -1 for those that are seen anyway, twice there, or none."""
  blocks = blocks if blocks.ndim == 3 else blocks[None]
  number, r = blocks.shape[-2:]
  own = np.arange(number, dtype=np.int32)[None, :, None]
  new = (blocks > 0) & (blocks < own - 1 if is_causal else abs(blocks - own) > 1)
  if not is_causal:
    new &= (blocks < number - 1) & (own > 0) & (own < number - 1)
  twice = [jnp.any(blocks[..., :j] == blocks[..., j:j + 1], -1) for j in range(r)]
  return jnp.where(new & ~jnp.stack(twice, -1), blocks, -1) if r else blocks


def bigbird_random_blocks(rng: Array,
                          length: int,
                          *,
                          block_size: int,
                          num_random: int,
                          num_heads: int | None = None,
                          is_causal: bool = False) -> Array:
  """Draws the random blocks of every block of queries, and for every head if asked.

  Uniform over the sets of blocks that window and global blocks leave out; when causal over earlier
  ones. Blocks with fewer than num_random to draw from list all of those, then -1.

  Args:
    rng: a key; fold in the layer's number to give each layer its own.
    length: T.
    block_size: positions in a block.
    num_random: r.
    num_heads: N for a draw per head; None for one that heads share.
    is_causal: as in `bigbird_attention`.

  Returns:
    int32 [blocks, r], or [N, blocks, r], with blocks = ceil(T / block_size).

  Source: Zaheer et al. 2020, BigBird, section 2, https://arxiv.org/abs/2007.14062.
  """
  number = -(-checks.check_int('length', length, 0) //
             checks.check_int('block_size', block_size, 1))
  r = checks.check_int('num_random', num_random, 0)
  heads = () if num_heads is None else (checks.check_int('num_heads', num_heads, 1),)
  own = np.arange(number, dtype=np.int32)
  if is_causal:  # blocks 1 ... own - 2
    low, width, most = np.maximum(own - 1, 1), np.zeros_like(own), np.maximum(own - 2, 0)
  else:  # blocks 1 ... number - 2 but for own - 1, own, own + 1
    low = np.maximum(own - 1, 1)
    width = np.maximum(np.minimum(own + 1, number - 2) - low + 1, 0)
    most = np.where((own > 0) & (own < number - 1), number - 2 - width, 0)
  # Floyd's draw of r of `most` numbers: the j-th is new, or else the largest it could be.
  low, width, most = (np.broadcast_to(x, (*heads, number)) for x in (low, width, most))
  picks: list[Array] = []
  for j in range(r):
    largest = most - r + j
    rng, draw = jax.random.split(rng)
    pick = jax.random.randint(draw, (*heads, number), 0, np.maximum(largest, 0) + 1, jnp.int32)
    taken = functools.reduce(operator.or_, [pick == other for other in picks], np.bool_(False))
    picks.append(jnp.where(largest < 0, -1, jnp.where(taken, largest, pick)))
  if not r:
    return jnp.zeros((*heads, number, 0), jnp.int32)
  index = jnp.stack(picks, -1)
  block = 1 + index + jnp.where(1 + index >= low[..., None], width[..., None], 0)
  block = jnp.where(index < 0, -1, block).astype(jnp.int32)
  return -jnp.sort(-block, -1)


def init(rng: Array,
         dims: Dims,
         *,
         block_size: int,
         num_random: int,
         is_causal: bool = False) -> dict[str, Array]:
  """Random blocks of every head, for dims.S positions."""
  return {
      'random_blocks':
          bigbird_random_blocks(rng,
                                dims.S,
                                block_size=block_size,
                                num_random=num_random,
                                num_heads=dims.N,
                                is_causal=is_causal)
  }
