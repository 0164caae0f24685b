"""Which tiles of queries and keys are visited, and how many in a step.

Tiles that a pattern leaves empty are left out, those it fills need no mask, and a step takes as
many heads, batch rows and tiles as suit the platform. All of it is static and in NumPy but for
tiles that are listed, whose places are known at run time.
"""

from collections.abc import Sequence
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
from attn.masks import Predicate
from attn.slices import Tile

# Queries and keys in a tile.
BLOCK = 512
# Logits in a step: on CPU two tiles, one for each of the fewest cores there are, that their caches
# hold; elsewhere enough to fill the device.
STEP = {'cpu': 2 * BLOCK**2}
LARGE_STEP = 2**25
# Fewer full tiles are not worth a loop of their own.
FULL = 16
# Neighbouring key tiles are read at once while the logits with them are no more than this,
RUN = 2 * BLOCK**2
# and for so many times the tiles that are reached.
WASTE = 1.25

# int32 [P, W, 2], P steps of W tiles: where they begin in T and S. Listed ones [P, W, 1 + 2 r], and
# 2 more for tiles of one head: where they begin in T, r times in S, which of those are in the list,
# and where they begin in K and G.
Steps = Any


class Tiles(NamedTuple):
  """Runs of `size` queries or keys."""
  starts: np.ndarray
  size: int


class Part(NamedTuple):
  """Pairs of a query and a key, to be visited; parts of one call have none in common.

  visible: which pairs of the tiles belong to it.
  listed: the key tiles of each query tile, int [K, G, query tiles, r] with K and G or 1 for both,
    -1 for none, where the first key tile is read instead; None: those that `visible` reaches.
  """
  visible: Predicate | None
  queries: Tiles
  keys: Tiles
  listed: Array | None = None


class Plan(NamedTuple):
  """The sizes of a step.

  C, D: queries and keys in a tile.
  T, S: the lengths, filled up.
  once: whether nothing was visited before and no query is twice, so that there is nothing to merge.
  listed: how many key tiles are listed for a query tile; 0: none are.
  heads: whether a tile is that of one head.
  batch: the leading axes and, unless heads, K.
  share: how much of each of them a step takes.
  W: how many tiles; 1 unless share is all of batch.
  """
  C: int
  D: int
  T: int
  S: int
  once: bool
  listed: int
  heads: bool
  batch: tuple[int, ...]
  share: tuple[int, ...]
  W: int

  def number(self, steps: Array) -> int:
    """How many steps there are."""
    return len(steps) * math.prod(n // c for n, c in zip(self.batch, self.share))

  def tile(self, steps: Array, number: Any) -> Tile:
    """Where a step works."""
    starts, chunk = steps[number % len(steps)], number // len(steps)
    r = self.listed
    start: dict[Hashable, Array] = {
        'T': starts[:, 0],
        'S': starts[:, 1:1 + r] if r else starts[:, 1]
    }
    listed = starts[:, 1 + r:1 + 2 * r] > 0 if r else None
    size: dict[Hashable, int] = {'T': self.C, 'S': self.D}
    names: tuple[Hashable, ...] = tuple(range(len(self.batch)))
    if self.heads:
      start |= {'K': starts[:, -2], 'G': starts[:, -1]}
      size |= {'K': 1, 'G': 1}
    else:
      names = (*names[:-1], 'K')
    for name, n, c in reversed(list(zip(names, self.batch, self.share))):
      if c < n:
        start[name], chunk = chunk % (n // c) * c, chunk // (n // c)
        size[name] = c
    return Tile(start, size, self.W, listed)

  def hold(self, x: Array, tile: Tile) -> Array:
    """x [W, ...] of a tile with zeros for tiles beyond the last one."""
    if self.W == 1:
      return x
    beyond = (tile.start['T'] >= self.T).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(beyond, jnp.zeros_like(x), x)

  def there(self, index: Array, tile: Tile) -> Array:
    """key_index of listed tiles [W, ..., r * D] with -1 for those that are not in the list."""
    assert tile.listed is not None
    there = jnp.repeat(tile.listed, self.D, -1)
    there = there.reshape(len(there), *(1,) * (jnp.ndim(index) - 2), -1)
    return jnp.where(there, index, np.int32(-1))


_Loop = tuple[Spec, Plan, Steps]


def cut(start: int, stop: int, block_size: int | None, exact: bool = False) -> Tiles:
  """The tiles of an interval: as few as block_size allows, then as small as that allows.

  The last may reach beyond the interval, unless exact.
  """
  block_size = BLOCK if block_size is None else checks.check_int('block_size', block_size, 1)
  length = stop - start
  number = -(-length // block_size)
  while exact and length % number:
    number += 1
  size = -(-length // max(number, 1))
  return Tiles(start + size * np.arange(number), size)


def whole(call: Call, spec: Spec, block_size: int | None) -> tuple[Part, ...]:
  """All pairs that the call's predicate lets see, as one part."""
  T, S = call.lengths
  return (Part(spec.visible, cut(0, T, block_size), cut(0, S, block_size)),)


def arrange(call: Call, spec: Spec, parts: Sequence[Part],
            step_size: int | None) -> tuple[Call, tuple[tuple[Spec, Plan], ...], tuple[Steps, ...]]:
  """Cuts a call into tiles.

  Returns:
    the call, its lengths filled up to whole tiles; and for every loop to be made over tiles its
    static values, the sizes of a step, and the steps.
  """
  T, S = call.lengths
  ends = lambda tiles: int(tiles.starts[-1]) + tiles.size if len(tiles.starts) else 0
  lengths = max(T, *(ends(p.queries) for p in parts)), max(S, *(ends(p.keys) for p in parts))
  for letter, length in zip('TS', lengths):
    call = along(call, letter, functools.partial(fill, length=length))
  spec = spec._replace(padded=spec.padded or lengths[1] > S)
  loops: list[_Loop] = []
  for part in parts:
    if len(part.queries.starts) and len(part.keys.starts):
      make = _reached_loops if part.listed is None else _listed_loop
      loops += make(part, call, spec, lengths, step_size, not loops)
  return call, tuple((rule, plan) for rule, plan, _ in loops), tuple(steps for *_, steps in loops)


def _listed_loop(part: Part, call: Call, spec: Spec, lengths: tuple[int, int],
                 step_size: int | None, first: bool) -> list[_Loop]:
  """The loop over query tiles, each with all of its listed key tiles."""
  listed, (T, S) = part.listed, lengths
  assert listed is not None
  *lead, K, G = call.query.shape[:-2]
  C, D, r, heads = part.queries.size, part.keys.size, listed.shape[-1], listed.shape[:2] != (1, 1)
  batch = tuple(lead if heads else [*lead, K])
  share, W = _share(batch, C * D * r * (1 if heads else G), step_size, len(part.queries.starts))
  starts = [np.asarray(tiles.starts, np.int32) for tiles in (part.queries, part.keys)]
  own = (*listed.shape[:-1], 1)  # [K, G, query tiles, 1]
  columns = [
      jnp.broadcast_to(starts[0][:, None], own),
      jnp.asarray(starts[1])[jnp.maximum(listed, 0)], (listed >= 0).astype(np.int32)
  ]
  if heads:
    columns += [lax.broadcasted_iota(jnp.int32, own, axis) for axis in (0, 1)]
  missing = -len(starts[0]) % W
  columns = [
      jnp.pad(x, [(0, 0)] * 2 + [(0, missing), (0, 0)], constant_values=end)
      for x, end in zip(columns, (T, 0, 0, 0, 0))
  ]
  steps = jnp.concatenate(columns, -1)
  return [(spec._replace(visible=part.visible,
                         padded=True), Plan(C, D, T, S, first, r, heads, batch, share,
                                            W), steps.reshape(-1, W, steps.shape[-1]))]


def _reached_loops(part: Part, call: Call, spec: Spec, lengths: tuple[int, int],
                   step_size: int | None, first: bool) -> list[_Loop]:
  """The loops over the tiles that a part's predicate reaches: first those it does not fill."""
  (T, S), (queries, keys) = lengths, (part.queries, part.keys)
  shape = rows, columns = len(queries.starts), len(keys.starts)
  *batch, G = call.query.shape[:-2]
  blocks = call.query_blocks is not None  # known only at run time, and beside any predicate
  known = not blocks and all(
      isinstance(x, np.ndarray) for x in (call.query_positions, call.key_positions))
  rule = spec._replace(visible=part.visible,
                       skip=part.visible is not None and not (known or blocks) and
                       rows * columns > 1)
  reached, every = _reach(call, rule, known, queries, keys)
  joined = np.all(np.diff(keys.starts) == keys.size)
  run = _run(reached, G * queries.size * keys.size) if joined else 1
  if run > 1:
    reached = _first(reached, run)
  if run > 1 or every.sum() < FULL or (rule.visible is None and not rule.padded):
    every = np.zeros_like(every)
  share, W = _share(tuple(batch), G * queries.size * keys.size * run, step_size,
                    -(-min(shape) // run))
  once = first and not rule.skip and bool((reached.sum(1) <= 1).all())
  plan = Plan(queries.size, keys.size * run, T, S, once, 0, False, tuple(batch), share, W)
  full = rule._replace(visible=None, padded=False)
  loops: list[_Loop] = []
  for chosen, how in ((reached & ~every, rule), (reached & every, full)):
    if chosen.any():
      pairs = _in_steps(np.argwhere(chosen), W, shape, run)
      starts = np.stack([
          np.append(x, end)[np.minimum(pairs[..., axis], len(x))]
          for axis, (x, end) in enumerate(((queries.starts, T), (keys.starts, S)))
      ], -1)
      loops.append((how, plan, starts.astype(np.int32)))
  return loops


def _reach(call: Call, spec: Spec, known: bool, queries: Tiles,
           keys: Tiles) -> tuple[np.ndarray, np.ndarray]:
  """Whether a query tile might see anything of a key tile, and surely sees all, bool twice.

  Positions known only at run time say nothing.
  """
  shape = (len(queries.starts), len(keys.starts))
  inside = lambda x, tiles: np.asarray(x)[..., tiles.starts[:, None] + np.arange(tiles.size)]
  complete = np.full(shape[1], not spec.padded)
  if isinstance(call.key_index, np.ndarray):
    complete = np.all(inside(call.key_index, keys).reshape(-1, shape[1], keys.size) >= 0, (0, 2))
  if spec.visible is None:
    return np.ones(shape, bool), np.broadcast_to(complete, shape)
  if not known:
    return np.ones(shape, bool), np.zeros(shape, bool)
  # Intervals of every batch row; a pair is left out if no row reaches it.
  places = ((inside(x, tiles).reshape(-1, *tiles.starts.shape, tiles.size), axis)
            for x, tiles, axis in ((call.query_positions, queries, 2), (call.key_positions, keys,
                                                                        1)))
  intervals = [np.expand_dims(f(x, -1), axis) for x, axis in places for f in (np.min, np.max)]
  reached = np.broadcast_to(spec.visible.reaches(*intervals).any(0), shape)
  every = np.broadcast_to(spec.visible.fills(*intervals).all(0), shape)
  return reached, every & complete


def _ends(reached: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The first and the last key tile that each query tile reaches; 0 and -1 where there is none."""
  some, last = reached.any(1), reached.shape[1] - 1
  return reached.argmax(1), np.where(some, last - reached[:, ::-1].argmax(1), -1)


def _run(reached: np.ndarray, area: int) -> int:
  """How many key tiles to read at once: all of a narrow band, whose states need no merging."""
  rows, columns = reached.shape
  if not reached.any():
    return 1
  first, last = _ends(reached)
  run = int(np.max(last - first)) + 1
  narrow = run < columns and rows * run <= WASTE * reached.sum() and area * run <= RUN
  return run if narrow else 1


def _first(reached: np.ndarray, run: int) -> np.ndarray:
  """True for the first of the `run` key tiles that hold all that a query tile reaches."""
  first, last = _ends(reached)
  start = np.minimum(first, reached.shape[1] - run)
  return (np.arange(reached.shape[1]) == start[:, None]) & (last >= 0)[:, None]


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
  steps = -(-most // max(1, min(room, most)))
  return tuple(share), -(-most // steps)  # no more than fill as many steps evenly


def _in_steps(pairs: np.ndarray, W: int, shape: tuple[int, int], run: int) -> np.ndarray:
  """Pairs of tiles [P, 2] as [steps, W, 2]; a step reaches no row and no column twice.

  Its tiles can then be written side by side. Pairs beyond the last tile fill up.
  """
  if W == 1:
    return pairs[:, None]
  apart = pairs[:, 0] % run if run > 1 else (pairs[:, 1] - pairs[:, 0]) % max(shape)
  order = np.argsort(apart, kind='stable')
  groups = np.split(pairs[order], np.flatnonzero(np.diff(apart[order])) + 1)
  return np.concatenate([
      np.concatenate([group, np.repeat([shape], -len(group) % W, 0)]).reshape(-1, W, 2)
      for group in groups
  ])
