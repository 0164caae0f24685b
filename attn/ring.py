"""Attention over keys of which every device holds a run: visit each run, merge, finish.

Keys go round the devices along a mesh axis, and every query keeps one state, so that no device ever
holds more keys than its own and a neighbour's. Where only keys near a query are seen, their ends
alone are fetched from the devices beside it.

Source: Liu et al. 2023, Ring Attention, https://arxiv.org/abs/2310.01889; that causal work is to be
alike on all devices: Brandon et al. 2023, Striped Attention, https://arxiv.org/abs/2311.09431.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn import axes
from attn import call as calls
from attn import checks, softmax, tiles
from attn.axes import Array
from attn.call import Call, Spec
from attn.positions import ALiBi, T5Bias
from attn.softmax import State

RELATIVE = (ALiBi, T5Bias)  # position biases known to depend on distances alone


class Ring(NamedTuple):
  """A mesh axis, inside shard_map, along which the devices hold equal runs of one sequence.

  T, S: queries and keys of a device.
  placed: whether the caller says where they stand.
  moving: the fields of a Call that belong to a device's keys.
  """
  axis_name: str
  size: int
  T: int
  S: int
  placed: bool
  moving: tuple[str, ...]

  @property
  def here(self) -> Array:
    """This device's place."""
    return lax.axis_index(self.axis_name)

  def indexed(self, call: Call, positions: bool = False) -> Call:
    """A device's call with places in the whole sequence, by which dropout and some biases go.

    Those of a cut call remain -1. Its positions are of the whole sequence too if that is asked for,
    or its bias needs it, and the caller did not say where it stands.
    """
    query, key = self.here * self.T, self.here * self.S
    if (positions or is_absolute(call.bias)) and not self.placed:
      call = call._replace(query_positions=call.query_positions + query,
                           key_positions=call.key_positions + key)
    counted = lambda x, by: jnp.where(jnp.asarray(x) < 0, x, x + by)
    return call._replace(query_index=counted(call.query_index, query),
                         key_index=counted(call.key_index, key))

  def shift(self, tree: Any, by: int = 1, around: bool = True) -> Any:
    """Sends arrays to the device `by` places on; nothing, zeros, comes from beyond an end."""
    pairs = [
        (i, (i + by) % self.size) for i in range(self.size) if around or 0 <= i + by < self.size
    ]
    return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, pairs), tree)


def attend(call: Call,
           spec: Spec,
           block_size: int | None = None,
           step_size: int | None = None,
           *,
           ring: Ring) -> State:
  """`tiles.attend` where every device has its own queries and keys.

  Args:
    call: of this device; positions and indices count from its own first query and key, unless
      ring.placed. A bias or mask that has a query axis has all S * size keys.
    spec: its static values.
    block_size, step_size: as in `tiles.attend`.
    ring: where the other keys are.

  Returns:
    the state of this device's queries after the keys of all devices.
  """
  if ring.size == 1 or 0 in call.lengths:
    state = tiles.attend(call, spec, block_size, step_size)
    return axes.vary_alike((state, call.query))[0]
  width = _near(call, spec, ring)
  if width is not None:
    return tiles.attend(*_with_neighbours(call, spec, ring, width), block_size, step_size)
  call = ring.indexed(call, positions=True)
  halves = _causal(spec) and not ring.placed and not any(n % 2 for n in call.lengths)
  if halves:
    call = _exchange(call, ring)
  state = _around(call, spec._replace(forget=True), ring, block_size, step_size)
  return State(
      *(exchanged_back(x, axis, ring) for x, axis in zip(state, (-1, -1, -2)))) if halves else state


def _causal(spec: Spec) -> bool:
  """Whether no later key is seen."""
  return spec.visible is not None and not spec.visible.reaches(0, 0, 1, 2**30)


def _near(call: Call, spec: Spec, ring: Ring) -> tuple[int, int] | None:
  """How many keys before and behind a device's own its queries reach; None: far too many."""
  if spec.visible is None or not spec.visible.is_relative():
    return None
  if ring.placed or call.query_blocks is not None or ring.T != ring.S or call.lengths[0] != ring.T:
    return None
  last, every = ring.T - 1, np.arange(1, (ring.size - 1) * ring.S + 1)
  before = spec.visible.reaches(0, last, -every, -every)
  behind = spec.visible.reaches(0, last, last + every, last + every)
  width = int(every[before].max(initial=0)), int(every[behind].max(initial=0))
  return width if sum(width) < (ring.size - 1) * ring.S else None


def _with_neighbours(call: Call, spec: Spec, ring: Ring, width: tuple[int,
                                                                      int]) -> tuple[Call, Spec]:
  """The call with so many keys of the devices before and behind; those that are none have index -1.

  Positions stay known, as do the tiles to visit: they count from the device's own.
  """
  (before, behind), S = width, ring.S

  def around(x: Array, axis: int) -> Array:
    take = lambda start, stop: lax.slice_in_dim(x, start, stop, axis=axis)
    left = [
        ring.shift(take(S - min(S, before - n * S), S), n + 1, around=False)
        for n in range(-(-before // S))
    ]
    right = [
        ring.shift(take(0, min(S, behind - n * S)), -n - 1, around=False)
        for n in range(-(-behind // S))
    ]
    return jnp.concatenate([*reversed(left), x, *right], axis)

  moved: dict[str, Any] = {}
  for name in ring.moving:
    x = getattr(call, name)
    if name not in ('key_positions', 'key_index') and checks.is_array(x):
      axis = x.ndim - len(calls.LETTERS[name]) + calls.LETTERS[name].index('S')
      moved[name] = around(jnp.asarray(x), axis) if x.shape[axis] > 1 or S == 1 else x
  rank = call.key_index.ndim
  places = axes.ranked(np.arange(-before, S + behind, dtype=np.int32), rank)
  index = places + ring.here * S
  real = (index >= 0) & (index < ring.size * S)
  call = call._replace(**moved,
                       key_positions=places,
                       key_index=jnp.where(real, index, -1),
                       query_index=call.query_index + ring.here * ring.T)
  if is_absolute(call.bias):
    call = call._replace(query_positions=call.query_positions + ring.here * ring.T,
                         key_positions=index)
  return _columns(call, ring), spec._replace(forget=True, padded=True)


def is_absolute(bias: Any) -> bool:
  """Whether a position bias may depend on more than distances."""
  return not (bias is None or checks.is_array(bias) or isinstance(bias, RELATIVE))


def _columns(call: Call, ring: Ring) -> Call:
  """Of a bias or mask for all keys, the columns of those that are here."""
  index = jnp.maximum(jnp.ravel(call.key_index), 0)

  def cut(name: str, x: Any) -> Any:
    if not checks.is_array(x) or name in ring.moving or x.shape[-1] == 1:
      return x
    return jnp.take(x, index, -1)

  return call._replace(bias=cut('bias', call.bias), mask=cut('mask', call.mask))


def _exchange(call: Call, ring: Ring) -> Call:
  """Gives device d the halves d and 2 size - 1 - d of 2 size: as many pairs are visible on each."""
  one = lambda name, x, axis: x if x.shape[axis] == 1 else exchanged(jnp.asarray(x), axis, ring)
  return calls.along(
      calls.along(call, 'T', one), 'S', lambda name, x, axis: x
      if name not in ring.moving and name in ('bias', 'mask') else one(name, x, axis))


def _half_pairs(ring: Ring) -> list[list[tuple[int, int]]]:
  """(from, to) of every device's first half, and of its second."""
  n = ring.size
  to = lambda half: half if half < n else 2 * n - 1 - half
  return [[(i, to(2 * i + j)) for i in range(n)] for j in range(2)]


def exchanged(x: Array, axis: int, ring: Ring) -> Array:
  """x with the halves d and 2 size - 1 - d along an axis."""
  even, odd = (lax.ppermute(half, ring.axis_name, pairs)
               for half, pairs in zip(jnp.split(x, 2, axis), _half_pairs(ring)))
  is_even = ring.here % 2 == 0
  return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis)


def exchanged_back(x: Array, axis: int, ring: Ring) -> Array:
  """Undoes exchanged."""
  first, second = jnp.split(x, 2, axis)
  is_even = ring.here % 2 == 0
  halves = jnp.where(is_even, first, second), jnp.where(is_even, second, first)
  return jnp.concatenate([
      lax.ppermute(half, ring.axis_name, [(there, here)
                                          for here, there in pairs])
      for half, pairs in zip(halves, _half_pairs(ring))
  ], axis)


def _around(call: Call, spec: Spec, ring: Ring, block_size: int | None,
            step_size: int | None) -> State:
  """The state of every query after all keys, which go once round."""
  call = axes.vary_alike(call._replace(key_index=call.key_index + 0 * ring.here))
  inputs = tiles.Inputs(call.query, call.key, call.value, call.bias)
  moving = [name for name in ring.moving if getattr(call, name) is not None]

  def look(call: Call, raw: bool = False) -> State:
    return tiles.attend(_columns(call, ring), spec, block_size, step_size, raw=raw)

  def over(step: Any, start: Any, moved: dict[str, Any]) -> Any:
    """step(carry, keys here) for the keys of every device; what it adds to them comes home."""

    def body(carry: Any, _: None) -> tuple[Any, None]:
      kept, moved, extra = carry
      onward = ring.shift(moved)  # while this one is visited
      kept, extra = step(kept, moved, extra)
      return (kept, onward, ring.shift(extra)), None

    kept, extra = start
    carry = axes.vary_alike((kept, moved, extra, call.key_index))[:3]
    (kept, _, extra), _ = lax.scan(body, carry, None, length=ring.size)
    return kept, extra

  def forward(inputs: tiles.Inputs, call: Call) -> State:
    call = call._replace(**inputs._asdict())
    empty = softmax.empty(call.query.shape[:-1], call.value.shape[-1], axes.wide(call.query.dtype))

    def visit(state: State, moved: dict[str, Any], extra: Any) -> tuple[State, Any]:
      return softmax.merge(state, look(call._replace(**moved), raw=True)), extra

    return over(visit, (empty, ()), {name: getattr(call, name) for name in moving})[0]

  def backward(kept: Any, cotangents: State) -> tuple[tiles.Inputs, None]:
    inputs, call, top, total = kept
    call = call._replace(**inputs._asdict(), top=top, total=total)
    cotangents = cotangents._replace(max=jnp.zeros_like(top))
    goes = [name for name in inputs._fields if name in moving]
    stays = [name for name in inputs._fields if name not in moving]

    def revisit(grads: Any, moved: dict[str, Any], extra: Any) -> tuple[Any, Any]:
      there = call._replace(**moved)
      here = tiles.Inputs(*(getattr(there, name) for name in inputs._fields))
      _, pull = jax.vjp(lambda x: look(there._replace(**x._asdict())), here)
      (new,) = pull(cotangents)

      def add(total: Array, x: Array) -> Array:
        return total if x.dtype == jax.dtypes.float0 else total + x.astype(total.dtype)

      sums = lambda old, names: jax.tree.map(add, old, {name: getattr(new, name) for name in names})
      return sums(grads, stays), sums(extra, goes)

    zeros = lambda names: jax.tree.map(tiles.zeros_of,
                                       {name: getattr(inputs, name) for name in names})
    grads, extra = over(revisit, (zeros(stays), zeros(goes)),
                        {name: getattr(call, name) for name in moving})
    return jax.tree.map(tiles.cotangent_of, tiles.Inputs(**grads, **extra), inputs), None

  around = jax.custom_vjp(forward)
  around.defvjp(
      lambda inputs, call: ((state := forward(inputs, call)), (inputs, call, state.max, state.sum)),
      backward)
  rest: Any = dict(query=None, key=None, value=None, bias=None)
  state = around(inputs, call._replace(**rest))
  return state._replace(max=lax.stop_gradient(state.max))
