"""BigBird: blocks in a window, global blocks, random blocks."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn import call as calls
from attn import cache, checks, layout, masks, softmax, stores, tiles
from attn.axes import Array, ArrayLike, Dims
from attn.call import Call, Spec
from attn.layout import Part, Tiles
from attn.masks import Predicate
from attn.positions import PositionBias
from attn.softmax import State
from attn.stores import Store


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
  random_blocks = check_blocks(random_blocks)
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
                                   pattern=near_and_global(size, number, is_causal))
  placed = query_positions is not None or key_positions is not None
  check_blocks(random_blocks, dims.N)
  if not placed and number != -(-dims.T // size):
    raise ValueError(
        f'random_blocks must list {-(-dims.T // size)} blocks of block_size = {size} for T = '
        f'{dims.T}; got {random_blocks.shape}, which lists {number}')
  chosen = choose(random_blocks, is_causal)  # [N or 1, blocks, r]
  chosen = by_heads(chosen, dims.K)
  if not dims.T or not dims.S or not placed and number == 1:  # of which all is near
    return tiles.output(call, spec)
  if placed:
    call = call._replace(query_blocks=lists_of(chosen, size, jnp.asarray(call.query_positions)))
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


def by_heads(chosen: Array, K: int) -> Array:
  """[N or 1, blocks, r] as [K or 1, G or 1, blocks, r]."""
  heads = (K, len(chosen) // K) if len(chosen) > 1 else (1, 1)
  return chosen.reshape(*heads, *chosen.shape[1:])


def lists_of(chosen: Array, size: int, positions: Array) -> Array:
  """The blocks chosen for queries at positions [..., T]: [..., K or 1, G or 1, T, r]."""
  own = jnp.where(positions < 0, chosen.shape[2], positions // size)
  lists = jnp.take(chosen, own, 2, mode='fill', fill_value=-1)
  return jnp.moveaxis(lists, (0, 1), (-4, -3))


def check_blocks(blocks: ArrayLike, N: int | None = None) -> Array:
  """Returns them; N: how many heads there are, if that is known."""
  if not checks.is_array(blocks) or not jnp.issubdtype(blocks.dtype, jnp.integer):
    raise ValueError('random_blocks must be an integer array [blocks, r] or [N, blocks, r]; '
                     f'got {blocks.dtype if checks.is_array(blocks) else type(blocks).__name__}')
  if blocks.ndim not in (2, 3):
    raise ValueError(
        f'random_blocks must be [blocks, r] or [N, blocks, r]; got {tuple(blocks.shape)}')
  if blocks.ndim == 3 and N not in (None, blocks.shape[0]):
    raise ValueError(f'random_blocks must be [blocks, r] or [N, blocks, r] with N = {N} query '
                     f'heads; got {tuple(blocks.shape)}')
  return jnp.asarray(checks.int32(blocks))


def near_and_global(size: int, number: int, is_causal: bool) -> Predicate:
  near = masks.near_blocks(size) | masks.global_block(size, 0)
  return near if is_causal or number < 2 else near | masks.global_block(size, number - 1)


def predicate(*, is_causal: bool, block_size: int, random_blocks: ArrayLike) -> Predicate:
  """All that a query of one head sees.

  Raises:
    ValueError: random_blocks are those of several heads.
  """
  blocks = check_blocks(random_blocks)
  if blocks.ndim == 3:
    raise ValueError(
        'random_blocks must be [blocks, r], since what is visible differs between heads; '
        f'got {blocks.shape}: give those of one head, random_blocks[n]')
  near = near_and_global(block_size, blocks.shape[-2], is_causal)
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
  dims = checks.check_dims(dims)
  return {
      'random_blocks':
          bigbird_random_blocks(rng,
                                dims.S,
                                block_size=block_size,
                                num_random=num_random,
                                num_heads=dims.N,
                                is_causal=is_causal)
  }


class _Kept(NamedTuple):
  """Keys that are near, those of the first block, those that later blocks may list."""
  near: Store  # a ring of two blocks
  first: Store
  listed: Store  # as many blocks as are needed at a time
  place: Array  # int32 [..., blocks], which of them is a block's; -1: nobody lists it


def _init_memory(params: dict[str, Array], dims: Dims, dtype: Any, max_length: int,
                 block_size: int) -> tuple[_Kept, int]:
  """No keys, in as much room as the random blocks ask for."""
  size = checks.check_int('block_size', block_size, 1)
  blocks = check_blocks(params['random_blocks'], dims.N)
  if -(-max_length // size) > blocks.shape[-2]:
    raise ValueError(f'random_blocks must list {-(-max_length // size)} blocks of block_size = '
                     f'{size} for max_length = {max_length}; got {blocks.shape}')
  chosen = choose(blocks, True)
  with jax.ensure_compile_time_eval():  # known lists stay known under jit and eval_shape
    place = _place(choose(check_blocks(params['random_blocks']), True))
  number, r = int(place.max(initial=-1)) + 1, chosen.shape[-1]
  slots = min(2 * size, max_length), min(size, max_length), number * size
  near, first, listed = (stores.empty(dims, n, dtype) for n in slots)
  where = jnp.broadcast_to(jnp.asarray(place, jnp.int32), (*dims.leading, len(place)))
  kept = _Kept(near, first, listed, where)
  return kept, stores.chunk((slots[0], 0), (slots[2], r * size))


def _place(chosen: Array) -> np.ndarray:
  """Where each block is kept until the last one that lists it; -1 for one that nobody lists.

  A place is used again once nobody can reach who is there. Lists that are known only at run time
  ask for all of them.
  """
  number = chosen.shape[-2]
  place = np.arange(number)
  if isinstance(chosen, jax.core.Tracer):
    return place
  last = np.full(number, -1)
  rows, listed = np.asarray(chosen), np.asarray(chosen) >= 0
  np.maximum.at(last, rows[listed], np.broadcast_to(place[:, None], rows.shape)[listed])
  until: list[int] = []  # the last block that needs a place
  place = np.full(number, -1)
  for block in np.flatnonzero(last >= 0):
    free = [i for i, end in enumerate(until) if end < block]
    place[block] = free[0] if free else len(until)
    until[place[block]:place[block] + 1] = [last[block]]
  return place


def _extend_memory(params: dict[str, Array], kept: _Kept, call: Call, spec: Spec, max_length: int,
                   block_size: int) -> tuple[State, _Kept]:
  """The state of new queries, and what is kept then."""
  size, K = block_size, call.query.shape[-4]
  chosen = by_heads(choose(check_blocks(params['random_blocks']), True), K)
  lists = lists_of(chosen, size, jnp.asarray(call.query_positions))
  number = chosen.shape[-2]
  seen = masks.causal() & near_and_global(size, number, True)
  state = stores.visit(call._replace(query_blocks=lists), spec._replace(visible=seen, block=size))
  visible = masks.near_blocks(size) & masks.outside_blocks(size, (0,), key=True)
  near, first = stores.ring(2 * size, visible, max_length), stores.first(size, max_length)
  listed, far = kept.listed, kept.listed.positions.shape[-1]
  for keep, store in ((near, kept.near), (first, kept.first)):
    state = softmax.merge(state, stores.look(call, spec, keep, store))
  if far and lists.shape[-1]:
    blocks = kept.place[..., None, None, None, :]
    places = jnp.take_along_axis(jnp.broadcast_to(blocks, (*lists.shape[:-1], number)),
                                 jnp.maximum(lists, 0), -1)
    starts, wanted = jnp.maximum(places, 0) * size, jnp.repeat(lists, size, -1)
    rule = spec._replace(visible=masks.causal())
    state = softmax.merge(
        state, stores.visit_slots(call, rule, listed, starts, size, lambda p: p // size == wanted))
  call = stores.after(call, state)
  p = call.key_positions
  own = jnp.take_along_axis(kept.place, jnp.minimum(p // size, number - 1), -1)
  slots = jnp.where((own >= 0) & (p < cache.FAR), own * size + p % size, far)
  return state, kept._replace(near=stores.put(near, kept.near, call),
                              first=stores.put(first, kept.first, call),
                              listed=stores.write(listed, slots, call))


MEMORY = cache.Memory(_init_memory, _extend_memory, grows=True)
