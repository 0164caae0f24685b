"""Reading, writing and adding to the parts of an array that belong to a step of tiles."""

import functools
from typing import Any, Hashable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn.axes import Array

Names = tuple[Hashable, ...]  # of an array's axes: numbers for leading ones, else letters


class Tile(NamedTuple):
  """A part of every axis, by the axis's name: a number for leading axes, else a letter.

  start: of T and S, and of K and G if `Plan.heads`, [W], one for each of the tiles, or [W, r] for S
    where a tile has r runs of keys, each of the size given; axes not named are taken whole.
  lanes: W.
  listed: bool [W, r], which of the runs are there; None: all.
  """
  start: dict[Hashable, Array]
  size: dict[Hashable, int]
  lanes: int
  listed: Array | None = None


def read(x: Any, names: Names, tile: Tile) -> Array:
  """The part of an array that belongs to a tile, [W, ...], or [1, ...] where all tiles share it.

  names are those of x's axes; an axis of 1 is shared.
  """
  starts, sizes, runs = _window(x, names, tile)
  x = jnp.asarray(x)
  if not starts:
    return x[None]
  if tile.lanes == 1 and runs is None:
    return lax.dynamic_slice(x, _corner(x, starts), sizes)[None]
  index = _indices(starts, tile, runs)
  numbers = lax.GatherDimensionNumbers(offset_dims=tuple(
      range(index.ndim - 1, index.ndim - 1 + x.ndim)),
                                       collapsed_slice_dims=(),
                                       start_index_map=tuple(starts))
  part = lax.gather(x, index, numbers, sizes, mode=lax.GatherScatterMode.CLIP)
  if runs is None:
    return part
  part = jnp.moveaxis(part, 1, 1 + runs)  # [W, r, ..., D, ...] to [W, ..., r, D, ...]
  r, size = part.shape[1 + runs:3 + runs]
  return part.reshape(*part.shape[:1 + runs], r * size, *part.shape[3 + runs:])


def write(x: Array, part: Array, names: Names, tile: Tile) -> Array:
  """x with the part that `read` reads replaced; beyond the last tile nothing is written."""
  starts, _, _ = _window(x, names, tile)
  if not starts:
    return part[0]
  if tile.lanes == 1:
    return lax.dynamic_update_slice(x, part[0], _corner(x, starts))
  return lax.scatter(x, _indices(starts, tile, None), part, _scattered(x, starts, 1))


def add(x: Array, part: Array, names: Names, tile: Tile) -> Array:
  """x with something added to the part that `read` reads."""
  starts, sizes, runs = _window(x, names, tile)
  part = part.astype(x.dtype)
  if not starts:
    return x + part[0]
  if tile.lanes == 1 and runs is None:
    corner = _corner(x, starts)
    return lax.dynamic_update_slice(x, lax.dynamic_slice(x, corner, sizes) + part[0], corner)
  index = _indices(starts, tile, runs)
  if runs is not None:  # undoes what `read` does
    number = part.shape[1 + runs] // sizes[runs]
    part = part.reshape(*part.shape[:1 + runs], number, sizes[runs], *part.shape[2 + runs:])
    part = jnp.moveaxis(part, 1 + runs, 1)
  return lax.scatter_add(x, index, part, _scattered(x, starts, index.ndim - 1))


def heads(x: Array, tile: Tile) -> Array:
  """A tile's heads of x [W or 1, ..., K, G, T, S], whose T and S are the tile's already."""
  for name, axis in (('K', -4), ('G', -3)):
    if name in tile.start and x.shape[axis] > 1:
      start = jnp.reshape(tile.start[name], (-1,))
      x = jnp.broadcast_to(x, (max(len(x), len(start)), *x.shape[1:]))
      start = jnp.broadcast_to(start, (len(x),))
      one = functools.partial(lax.dynamic_slice_in_dim, slice_size=tile.size[name], axis=axis)
      x = jax.vmap(one)(x, start)
  return x


def _window(x: Any, names: Names, tile: Tile) -> tuple[dict[int, Array], list[int], int | None]:
  """Where a tile begins on the axes of which it is not all, and how long it is on every axis.

  Also the axis, if any, on which it has several runs.
  """
  sizes = [min(n, tile.size.get(name, n)) for name, n in zip(names, x.shape)]
  starts: dict[int, Array] = {}
  runs = None
  for axis, (name, n, size) in enumerate(zip(names, x.shape, sizes)):
    several = name == 'S' and n > 1 and tile.start['S'].ndim > 1
    runs = axis if several else runs
    if size < n or several:
      starts[axis] = tile.start[name]
  return starts, sizes, runs


def _corner(x: Array, starts: dict[int, Array]) -> list[Any]:
  return [jnp.reshape(starts[a], ()) if a in starts else np.int32(0) for a in range(x.ndim)]


def _indices(starts: dict[int, Array], tile: Tile, runs: int | None) -> Array:
  """[W, number of axes], or [W, r, number of axes]."""
  shape = (tile.lanes,) if runs is None else starts[runs].shape
  align = lambda x: x[:, None] if x.ndim == 1 < len(shape) else x
  return jnp.stack([jnp.broadcast_to(align(start), shape) for start in starts.values()], -1)


def _scattered(x: Array, starts: dict[int, Array], first: int) -> lax.ScatterDimensionNumbers:
  return lax.ScatterDimensionNumbers(update_window_dims=tuple(range(first, first + x.ndim)),
                                     inserted_window_dims=(),
                                     scatter_dims_to_operand_dims=tuple(starts))
