"""Visibility predicates: which key positions a query position may see.

A predicate is a static, hashable value. Called with integer positions that broadcast it says which
pairs are visible, so nobody has to hold a [T, S] array; `dense` makes one for those who want it.
Predicates combine with & and |:

    masks.causal() & (masks.window(128, 0) | masks.global_tokens(4))

Two methods answer the same question for intervals of positions, ends included: `reaches`, whether
any pair might be visible, so that tiles can be skipped; it may say yes too often, never no. And
`fills`, whether every pair is, so that tiles need no mask; it may say no too often, never yes.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from attn.axes import Array, ArrayLike
from attn.checks import check_int, int32


class Predicate:
  """What a query at one position may see; see the module's text."""

  def __call__(self, query: Any, key: Any) -> Any:
    """Whether each query position sees each key position; integer arrays that broadcast."""
    raise NotImplementedError

  def reaches(self, first_query: Any, last_query: Any, first_key: Any, last_key: Any) -> Any:
    """Whether a query of one interval might see a key of another."""
    del last_query, first_key, last_key
    return first_query == first_query

  def fills(self, first_query: Any, last_query: Any, first_key: Any, last_key: Any) -> Any:
    """Whether every query of one interval surely sees every key of another."""
    del last_query, first_key, last_key
    return first_query != first_query

  def is_relative(self) -> bool:
    """Whether the distance from query to key is all that matters."""
    return False

  def __and__(self, other: 'Predicate') -> 'Predicate':
    return _And(self, other)

  def __or__(self, other: 'Predicate') -> 'Predicate':
    return _Or(self, other)

  def dense(self, query_positions: ArrayLike, key_positions: ArrayLike) -> Array:
    """Visibility of positions [..., T] and [..., S] as a boolean [..., T, S]."""
    query, key = (jnp.asarray(int32(x)) for x in (query_positions, key_positions))
    rank = max(query.ndim, key.ndim)
    query, key = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (query, key))
    shape = jnp.broadcast_shapes(query.shape[:-1],
                                 key.shape[:-1]) + (query.shape[-1], key.shape[-1])
    return jnp.broadcast_to(self(query[..., :, None], key[..., None, :]), shape)


@dataclasses.dataclass(frozen=True)
class _And(Predicate):
  a: Predicate
  b: Predicate

  def is_relative(self):
    return self.a.is_relative() and self.b.is_relative()

  def __call__(self, query, key):
    return self.a(query, key) & self.b(query, key)

  def reaches(self, *ends):
    return self.a.reaches(*ends) & self.b.reaches(*ends)

  def fills(self, *ends):
    return self.a.fills(*ends) & self.b.fills(*ends)


@dataclasses.dataclass(frozen=True)
class _Or(Predicate):
  a: Predicate
  b: Predicate

  def is_relative(self):
    return self.a.is_relative() and self.b.is_relative()

  def __call__(self, query, key):
    return self.a(query, key) | self.b(query, key)

  def reaches(self, *ends):
    return self.a.reaches(*ends) | self.b.reaches(*ends)

  def fills(self, *ends):
    return self.a.fills(*ends) | self.b.fills(*ends)


@dataclasses.dataclass(frozen=True)
class _Causal(Predicate):

  def is_relative(self):
    return True

  def __call__(self, query, key):
    return key <= query

  def reaches(self, first_query, last_query, first_key, last_key):
    return first_key <= last_query

  def fills(self, first_query, last_query, first_key, last_key):
    return last_key <= first_query


@dataclasses.dataclass(frozen=True)
class _Window(Predicate):
  left: int
  right: int

  def is_relative(self):
    return True

  def __call__(self, query, key):
    return (query - key <= self.left) & (key - query <= self.right)

  def reaches(self, first_query, last_query, first_key, last_key):
    return (first_query - last_key <= self.left) & (first_key - last_query <= self.right)

  def fills(self, first_query, last_query, first_key, last_key):
    return (last_query - first_key <= self.left) & (last_key - first_query <= self.right)


@dataclasses.dataclass(frozen=True)
class _Strided(Predicate):
  stride: int

  def is_relative(self):
    return True

  def __call__(self, query, key):
    return (abs(query - key) < self.stride) | ((query - key) % self.stride == 0)


@dataclasses.dataclass(frozen=True)
class _Apart(Predicate):
  """At least `distance` positions from the query."""
  distance: int

  def is_relative(self):
    return True

  def __call__(self, query, key):
    return abs(query - key) >= self.distance

  def reaches(self, first_query, last_query, first_key, last_key):
    return (last_query - first_key >= self.distance) | (last_key - first_query >= self.distance)

  def fills(self, first_query, last_query, first_key, last_key):
    return (first_query - last_key >= self.distance) | (first_key - last_query >= self.distance)


@dataclasses.dataclass(frozen=True)
class _SameBlock(Predicate):
  """In the query's own block of `size` positions."""
  size: int

  def __call__(self, query, key):
    # Not by //, which the kernels' compiler knows on the chip only.
    return query - query % self.size == key - key % self.size

  def reaches(self, first_query, last_query, first_key, last_key):
    return ((first_query // self.size <= last_key // self.size) &
            (first_key // self.size <= last_query // self.size))

  def fills(self, first_query, last_query, first_key, last_key):
    return ((first_query // self.size == last_key // self.size) &
            (last_query // self.size == first_key // self.size))


@dataclasses.dataclass(frozen=True)
class _OtherBlock(Predicate):
  """In another block of `size` positions than the query; with causal(), in an earlier one."""
  size: int

  def __call__(self, query, key):
    return query // self.size != key // self.size

  def reaches(self, first_query, last_query, first_key, last_key):
    return ((first_query // self.size != last_key // self.size) |
            (last_query // self.size != first_key // self.size))

  def fills(self, first_query, last_query, first_key, last_key):
    return ((first_query // self.size > last_key // self.size) |
            (first_key // self.size > last_query // self.size))


@dataclasses.dataclass(frozen=True)
class _Summary(Predicate):
  """The last `summary` positions of every block of `size`."""
  size: int
  summary: int

  def __call__(self, query, key):
    return (key % self.size >= self.size - self.summary) & (query == query)


@dataclasses.dataclass(frozen=True)
class _GlobalTokens(Predicate):
  number: int

  def __call__(self, query, key):
    return (query < self.number) | (key < self.number)

  def reaches(self, first_query, last_query, first_key, last_key):
    return (first_query < self.number) | (first_key < self.number)

  def fills(self, first_query, last_query, first_key, last_key):
    return (last_query < self.number) | (last_key < self.number)


@dataclasses.dataclass(frozen=True)
class _NearBlocks(Predicate):
  """In the query's own block of `size` positions or a neighbour of it."""
  size: int

  def __call__(self, query, key):
    return abs(query // self.size - key // self.size) <= 1

  def reaches(self, first_query, last_query, first_key, last_key):
    return ((first_query // self.size - last_key // self.size <= 1) &
            (first_key // self.size - last_query // self.size <= 1))

  def fills(self, first_query, last_query, first_key, last_key):
    return ((last_query // self.size - first_key // self.size <= 1) &
            (last_key // self.size - first_query // self.size <= 1))


@dataclasses.dataclass(frozen=True)
class _GlobalBlock(Predicate):
  """In one block of `size` positions, or seen from it."""
  size: int
  number: int

  def __call__(self, query, key):
    return (query // self.size == self.number) | (key // self.size == self.number)

  def reaches(self, first_query, last_query, first_key, last_key):
    inside = lambda first, last: (first // self.size <= self.number) & (self.number <= last // self.
                                                                        size)
    return inside(first_query, last_query) | inside(first_key, last_key)

  def fills(self, first_query, last_query, first_key, last_key):
    inside = lambda first, last: (first // self.size == self.number) & (last // self.size == self.
                                                                        number)
    return inside(first_query, last_query) | inside(first_key, last_key)


@dataclasses.dataclass(frozen=True)
class _OutsideBlocks(Predicate):
  """Query, key or both in none of some blocks of `size` positions."""
  size: int
  numbers: tuple[int, ...]
  query: bool
  key: bool

  def _outside(self, x):
    inside = x != x
    for number in self.numbers:
      inside = inside | (x // self.size == number)
    return ~inside

  def _both(self, query, key):
    return (query if self.query else query == query) & (key if self.key else key == key)

  def __call__(self, query, key):
    return self._both(self._outside(query), self._outside(key))

  def reaches(self, first_query, last_query, first_key, last_key):
    some = lambda first, last: (self._outside(first) | self._outside(last) |
                                (first // self.size != last // self.size))
    return self._both(some(first_query, last_query), some(first_key, last_key))

  def fills(self, first_query, last_query, first_key, last_key):

    def none(first, last):
      clear = first == first
      for number in self.numbers:
        clear = clear & ((last // self.size < number) | (first // self.size > number))
      return clear

    return self._both(none(first_query, last_query), none(first_key, last_key))


@dataclasses.dataclass(frozen=True, eq=False)
class _ListedBlocks(Predicate):
  """In one of the blocks listed for the query's own."""
  size: int
  blocks: ArrayLike  # int [blocks, r]

  def __call__(self, query, key):
    own = jnp.where(query < 0, len(self.blocks), query // self.size)
    listed = jnp.take(jnp.asarray(self.blocks), own, 0, mode='fill', fill_value=-1)
    return jnp.any((listed == (key // self.size)[..., None]) & (listed >= 0), -1)


@dataclasses.dataclass(frozen=True, eq=False)
class _Segments(Predicate):
  ids: ArrayLike

  def __call__(self, query, key):
    length = self.ids.shape[-1]
    at = jnp.vectorize(lambda ids, positions: ids[positions], signature='(l),(t,s)->(t,s)')
    inside = (0 <= query) & (query < length) & (0 <= key) & (key < length)
    ids = jnp.asarray(self.ids)
    return inside & (at(ids, jnp.clip(query, 0, length - 1)) == at(ids, jnp.clip(
        key, 0, length - 1)))


def causal() -> Predicate:
  """Keys at or before the query's position."""
  return _Causal()


def window(left: int, right: int) -> Predicate:
  """Keys s with t - left <= s <= t + right (Beltagy et al. 2020, section 3.1)."""
  return _Window(check_int('left', left, 0), check_int('right', right, 0))


def strided(stride: int) -> Predicate:
  """Keys nearer than `stride`, or a multiple of it away (Child et al. 2019, section 4.3)."""
  return _Strided(check_int('stride', stride, 1))


def fixed(stride: int, summary: int = 1) -> Predicate:
  """The query's own block of `stride` keys and the last `summary` of every block (ibid.)."""
  summary = check_summary(stride, summary)
  return same_block(stride) | _Summary(stride, summary)


def check_summary(stride: int, summary: int) -> int:
  """Returns summary, which counts positions of a block of `stride`."""
  stride, summary = check_int('stride', stride, 1), check_int('summary', summary, 1)
  if summary > stride:
    raise ValueError(f'summary must be at most stride; got summary = {summary}, stride = {stride}')
  return summary


def same_block(size: int) -> Predicate:
  """Keys in the query's own block: positions [i * size, (i + 1) * size)."""
  return _SameBlock(check_int('size', size, 1))


def other_block(size: int) -> Predicate:
  """Keys outside the query's own block of `size` positions."""
  return _OtherBlock(check_int('size', size, 1))


def apart(distance: int) -> Predicate:
  """Keys at least `distance` positions away, on either side."""
  return _Apart(check_int('distance', distance, 0))


def global_tokens(number: int) -> Predicate:
  """The first `number` positions see all and are seen by all (Beltagy et al. 2020, section 3.1)."""
  return _GlobalTokens(check_int('num_global', number, 0))


def near_blocks(size: int) -> Predicate:
  """Keys of the query's own block of `size` positions and of the blocks on both sides."""
  return _NearBlocks(check_int('size', size, 1))


def global_block(size: int, number: int) -> Predicate:
  """Block `number` of `size` positions sees all and is seen by all (Zaheer et al. 2020)."""
  return _GlobalBlock(check_int('size', size, 1), check_int('number', number, 0))


def outside_blocks(size: int,
                   numbers: tuple[int, ...],
                   query: bool = False,
                   key: bool = False) -> Predicate:
  """Queries, keys or both in none of the blocks `numbers` of `size` positions."""
  return _OutsideBlocks(check_int('size', size, 1), tuple(numbers), query, key)


def listed_blocks(size: int, blocks: ArrayLike) -> Predicate:
  """Keys of the blocks of `size` positions that blocks [blocks, r] lists for the query's own.

  A number that is no block, as -1, lists none.
  """
  return _ListedBlocks(check_int('size', size, 1), blocks)


def segments(ids: ArrayLike) -> Predicate:
  """Keys with the query's segment id; ids [..., L] holds the id of every position 0 ... L - 1."""
  return _Segments(ids)
