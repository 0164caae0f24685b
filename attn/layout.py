"""Which tiles of queries and keys are visited, and how many in a step.

All of it is static and in NumPy: tiles that a pattern leaves empty are left out, those it fills
need no mask, and a step takes as many heads, batch rows and tiles as suit the platform.
"""

import functools
import math
from typing import Any, Hashable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn import checks
from attn.axes import Array
from attn.call import Call, Spec, along, fill

# Queries and keys in a tile.
BLOCK = 512
# Logits in a step: on CPU two tiles, one for each of the fewest cores there are, that their caches
# hold; elsewhere enough to fill the device.
STEP = {'cpu': 2 * BLOCK**2}
LARGE_STEP = 2**25
# Fewer full tiles are not worth a loop of their own.
FULL = 16

Pairs = Any  # int32 [P, W, 2], P steps of W pairs (query tile, key tile), or None
Names = tuple[Hashable, ...]  # of an array's axes: numbers for leading ones, else letters


class Tile(NamedTuple):
  """A part of every axis, by the axis's name: a number for leading axes, else a letter.

  starts of T and S are [W], one for each of the pairs; axes that are not named are taken whole.
  """
  start: dict[Hashable, Array]
  size: dict[Hashable, int]
  lanes: int


class Plan(NamedTuple):
  """The sizes of a step.

  C, D: queries and keys in a tile.
  rows: tiles of queries.
  batch: the leading axes and K.
  share: how much of each of them a step takes.
  W: how many tiles; 1 unless share is all of batch.
  """
  C: int
  D: int
  rows: int
  batch: tuple[int, ...]
  share: tuple[int, ...]
  W: int

  def steps(self, pairs: Array) -> int:
    """How many there are."""
    return len(pairs) * math.prod(n // c for n, c in zip(self.batch, self.share))

  def tile(self, pairs: Array, step: Any) -> Tile:
    """Where a step works."""
    pair, chunk = pairs[step % len(pairs)], step // len(pairs)
    start: dict[Hashable, Array] = {'T': pair[:, 0] * self.C, 'S': pair[:, 1] * self.D}
    size: dict[Hashable, int] = {'T': self.C, 'S': self.D}
    names = (*range(len(self.batch) - 1), 'K')
    for name, n, c in reversed(list(zip(names, self.batch, self.share))):
      if c < n:
        start[name], chunk = chunk % (n // c) * c, chunk // (n // c)
        size[name] = c
    return Tile(start, size, self.W)

  def hold(self, x: Array, tile: Tile) -> Array:
    """x [W, ...] of a tile with zeros for pairs beyond the last one."""
    if self.W == 1:
      return x
    beyond = (tile.start['T'] >= self.rows * self.C).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(beyond, jnp.zeros_like(x), x)


def arrange(call: Call, spec: Spec, block_size: int | None,
            step_size: int | None) -> tuple[Call, Spec, Plan, tuple[Pairs, Pairs]]:
  """Cuts a call into tiles.

  Returns:
    the call, its lengths filled up to whole tiles; its static values; the sizes of a step; and the
    pairs of tiles to visit, first those that need the predicate, then those that do not.
  """
  T, S = call.lengths
  block_size = BLOCK if block_size is None else checks.check_int('block_size', block_size, 1)
  (rows, C), (columns, D) = _split(T, block_size), _split(S, block_size)
  for letter, length in (('T', rows * C), ('S', columns * D)):
    call = along(call, letter, functools.partial(fill, length=length))
  spec = spec._replace(padded=spec.padded or columns * D > S)
  listed = call.query_blocks is not None  # known only at run time, and beside any predicate
  known = not listed and all(
      isinstance(x, np.ndarray) for x in (call.query_positions, call.key_positions))
  skip = spec.visible is not None and not (known or listed) and rows * columns > 1
  spec = spec._replace(skip=skip)
  reached, every = _reach(call, spec, known, rows, columns)
  if every.sum() < FULL or (spec.visible is None and not spec.padded):
    every = np.zeros_like(every)
  *batch, G = call.query.shape[:-2]
  share, W = _share(tuple(batch), G * C * D, step_size, min(rows, columns))
  some, full = (_in_steps(np.argwhere(chosen), W, rows, columns) if chosen.any() else None
                for chosen in (reached & ~every, reached & every))
  return call, spec, Plan(C, D, rows, tuple(batch), share, W), (some, full)


def _split(length: int, block_size: int) -> tuple[int, int]:
  """How many tiles, and of what size: as few as block_size allows, then as small as that allows."""
  number = -(-length // block_size)
  return number, -(-length // number)


def _reach(call: Call, spec: Spec, known: bool, rows: int,
           columns: int) -> tuple[np.ndarray, np.ndarray]:
  """Whether a query tile might see anything of a key tile, and surely sees all, bool twice.

  Positions known only at run time say nothing.
  """
  shape = (rows, columns)
  index, whole = call.key_index, np.full(columns, not spec.padded)
  if isinstance(index, np.ndarray):
    whole = np.all(index.reshape(-1, columns, index.shape[-1] // columns) >= 0, (0, 2))
  if spec.visible is None:
    return np.ones(shape, bool), np.broadcast_to(whole, shape)
  if not known:
    return np.ones(shape, bool), np.zeros(shape, bool)
  # Intervals of every batch row; a pair is left out if no row reaches it.
  ends = lambda x, n: (f(x.reshape(-1, n, x.shape[-1] // n), -1) for f in (np.min, np.max))
  (q_first, q_last), (k_first, k_last) = ends(call.query_positions,
                                              rows), ends(call.key_positions, columns)
  intervals = (q_first[:, :, None], q_last[:, :, None], k_first[:, None], k_last[:, None])
  reached = np.broadcast_to(spec.visible.reaches(*intervals).any(0), shape)
  every = np.broadcast_to(spec.visible.fills(*intervals).all(0), shape)
  return reached, every & whole


def _share(batch: tuple[int, ...], area: int, step_size: int | None,
           most: int) -> tuple[tuple[int, ...], int]:
  """How much of each batch axis a step takes, and how many tiles of `area` logits."""
  if step_size is None:
    # Where arrays may be sharded over devices, a loop over their batch would gather them.
    step_size = STEP.get(jax.default_backend(), max(LARGE_STEP, math.prod(batch) * area))
  room = max(1, checks.check_int('step_size', step_size, 1) // area)
  share: list[int] = []
  for n in reversed(batch):
    share.insert(0, max(c for c in range(1, n + 1) if n % c == 0 and c <= room))
    room = room // n if share[0] == n else 1
  return tuple(share), max(1, min(room, most))


def _in_steps(pairs: np.ndarray, W: int, rows: int, columns: int) -> np.ndarray:
  """Pairs [P, 2] as [steps, W, 2]; a step has no row and no column twice.

  Its tiles can then be written side by side. Pairs beyond the last tile fill up.
  """
  pairs = pairs.astype(np.int32)
  if W == 1:
    return pairs[:, None]
  diagonal = (pairs[:, 1] - pairs[:, 0]) % max(rows, columns)
  order = np.argsort(diagonal, kind='stable')
  groups = np.split(pairs[order], np.flatnonzero(np.diff(diagonal[order])) + 1)
  beyond = np.array([[rows, columns]], np.int32)
  return np.concatenate([
      np.concatenate([group, np.repeat(beyond, -len(group) % W, 0)]).reshape(-1, W, 2)
      for group in groups
  ])


def read(x: Any, names: Names, tile: Tile) -> Array:
  """The part of an array that belongs to a tile, [W, ...], or [1, ...] where all pairs share it.

  names are those of x's axes; an axis of 1 is shared.
  """
  starts, sizes, moving = _window(x, names, tile)
  x = jnp.asarray(x)
  if not moving:
    return x[None]
  if tile.lanes == 1:
    return lax.dynamic_slice(x, starts, sizes)[None]
  numbers = lax.GatherDimensionNumbers(offset_dims=tuple(range(1, x.ndim + 1)),
                                       collapsed_slice_dims=(),
                                       start_index_map=tuple(range(x.ndim)))
  return lax.gather(x, _indices(starts, tile), numbers, sizes, mode=lax.GatherScatterMode.CLIP)


def write(x: Array, part: Array, names: Names, tile: Tile) -> Array:
  """x with the part that `read` reads replaced; beyond the last tile nothing is written."""
  starts, _, moving = _window(x, names, tile)
  if not moving:
    return part[0]
  if tile.lanes == 1:
    return lax.dynamic_update_slice(x, part[0], starts)
  return lax.scatter(x, _indices(starts, tile), part, *_scattered(x))


def add(x: Array, part: Array, names: Names, tile: Tile) -> Array:
  """x with something added to the part that `read` reads."""
  starts, sizes, moving = _window(x, names, tile)
  part = part.astype(x.dtype)
  if not moving:
    return x + part[0]
  if tile.lanes == 1:
    return lax.dynamic_update_slice(x, lax.dynamic_slice(x, starts, sizes) + part[0], starts)
  return lax.scatter_add(x, _indices(starts, tile), part, *_scattered(x))


def _window(x: Any, names: Names, tile: Tile) -> tuple[list[Any], list[int], bool]:
  """Where a tile begins on every axis, how long it is there, and whether it is not all of x."""
  sizes = [min(n, tile.size.get(name, n)) for name, n in zip(names, x.shape)]
  starts = [
      tile.start[name] if size < n else np.int32(0) for name, n, size in zip(names, x.shape, sizes)
  ]
  if tile.lanes == 1:
    starts = [jnp.reshape(start, ()) for start in starts]
  return starts, sizes, tuple(sizes) != x.shape


def _indices(starts: list[Any], tile: Tile) -> Array:
  return jnp.stack([jnp.broadcast_to(start, (tile.lanes,)) for start in starts], -1)


def _scattered(x: Array) -> tuple[Any, ...]:
  numbers = lax.ScatterDimensionNumbers(update_window_dims=tuple(range(1, x.ndim + 1)),
                                        inserted_window_dims=(),
                                        scatter_dims_to_operand_dims=tuple(range(x.ndim)))
  return (numbers,)
