"""What patterns keep of earlier tokens: keys and values with their positions, in stores.

Positions travel with the keys, so the order of the slots is free, and who sees a key is said by the
pattern's own predicate: in a cache as in one pass.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn import axes
from attn import call as calls
from attn import softmax
from attn.axes import Array, Dims
from attn.cache import FAR, Memory
from attn.call import Call, Spec
from attn.masks import causal, Predicate
from attn.softmax import State

# The most tokens that are taken in at once, and the most logits of one head then.
CHUNK = 256
LOGITS = 2**19
# The size of the first part of a sequence that is kept whole.
PART = 1024


class Store(NamedTuple):
  """Keys that are kept: key [..., K, slots, H], value [..., K, slots, Hv], positions [..., slots].

  An empty slot holds zeros and stands at FAR.
  """
  key: Array
  value: Array
  positions: Array


class Keep(NamedTuple):
  """Which keys a store keeps, and who reads them.

  Attributes:
    slots: how many.
    place: positions to slots; `slots` for a position that is not kept.
    visible: which of the kept keys this store shows a query, beside causality; None: all.
    reads: positions of queries [..., T] to where the slots begin that may hold what they see,
      [..., T]; None: every query reads all.
    width: how many slots a query reads then.
    forget: whether there are keys here that some later query does not see, in this store or
      another, so that what they hold must not reach it.
  """
  slots: int
  place: Callable[[Array], Array]
  visible: Predicate | None
  reads: Callable[[Array], Array] | None = None
  width: int = 0
  forget: bool = True


def empty(dims: Dims, slots: int, dtype: Any) -> Store:
  """A store in which nothing is kept."""
  shape = (*dims.leading, dims.K, slots)
  return Store(jnp.zeros((*shape, dims.H), dtype), jnp.zeros((*shape, dims.Hv), dtype),
               jnp.full((*dims.leading, slots), FAR, jnp.int32))


def pattern(keeps: Callable[..., tuple[Keep, ...]], grows: bool) -> Memory:
  """The memory of a pattern; keeps(max_length, **options) says what its stores keep."""

  def begin(params: Any, dims: Dims, dtype: Any, max_length: int | None,
            **options: Any) -> tuple[tuple[Store, ...], int]:
    del params
    stores = keeps(max_length, **options)
    return (tuple(empty(dims, keep.slots, dtype) for keep in stores),
            chunk(*((keep.slots, keep.width) for keep in stores)))

  def further(params: Any, kept: tuple[Store, ...], call: Call, spec: Spec, max_length: int | None,
              **options: Any) -> tuple[State, tuple[Store, ...]]:
    del params
    state, stores = visit(call, spec), keeps(max_length, **options)
    for keep, store in zip(stores, kept):
      state = softmax.merge(state, look(call, spec, keep, store))
    call = after(call, state)
    return state, tuple(put(keep, store, call) for keep, store in zip(stores, kept))

  return Memory(begin, further, grows)


def ring(slots: int, visible: Predicate, max_length: int | None) -> Keep:
  """The newest keys; all, where a row has no more."""
  slots = slots if max_length is None else min(slots, max_length)
  return Keep(slots, lambda p: p % slots, visible)


def first(number: int, max_length: int | None) -> Keep:
  """The keys at the first positions."""
  number = number if max_length is None else min(number, max_length)
  return Keep(number, lambda p: p, None, forget=False)


def parts(length: int) -> tuple[Keep, ...]:
  """All keys, in parts that double: a step reads those that have begun, whole, as they lie.

  So it costs at most about twice what is there, and nothing is cut out, which would be a copy.
  """
  keeps: list[Keep] = []
  start, size = 0, PART
  while start < length:
    slots = min(size, length - start)
    keeps.append(Keep(slots, functools.partial(_in_part, start, slots), None, forget=False))
    start, size = start + slots, start + slots
  return tuple(keeps)


def _in_part(start: int, slots: int, positions: Array) -> Array:
  return jnp.where(positions >= start, positions - start, slots)


def put(keep: Keep, store: Store, call: Call) -> Store:
  """The store with a call's keys."""
  p = jnp.asarray(call.key_positions)
  return write(store, jnp.where(p < FAR, keep.place(p), keep.slots), call)


def chunk(*stores: tuple[int, int]) -> int:
  """How many tokens to take in at once, for stores of (slots, slots read by each query or 0).

  What single queries read is copied for them, which costs memory as so many more logits would.
  """
  widest = max(16 * width or slots for slots, width in stores)
  return max(1, min(CHUNK, LOGITS // max(widest, 1)))


def after(call: Call, state: State) -> Call:
  """The call, whose keys are to be written when the state is known.

  XLA writes in place what it knows nobody reads any more; without an order it copies all of a store
  at every step. A sum of squares is never negative, but XLA does not know that; and it stays so
  however often, and with whatever rounding, XLA computes it again. (A comparison of the values with
  their own minimum does not: the two may come from fusions that round differently.)
  """
  never = jnp.sum(jnp.square(state.weighted), (-4, -3, -2, -1)) < 0
  return call._replace(key_positions=jnp.where(never[..., None], FAR, call.key_positions))


def look(call: Call, spec: Spec, keep: Keep, store: Store) -> State:
  """The state of a call's queries that have seen what a store shows them."""
  spec = spec._replace(visible=causal() if keep.visible is None else causal() & keep.visible,
                       forget=keep.forget)
  if keep.reads is None:
    return visit_store(call, spec, store)
  starts = keep.reads(jnp.asarray(call.query_positions))[..., None, None, :, None]
  return visit_slots(call, spec, store, starts, keep.width)


def visit(call: Call, spec: Spec) -> State:
  """The state of a call's queries that have seen its keys, all at once."""
  visible = calls.visibility(call, spec)
  call = calls.forget_unseen(call, visible) if spec.forget else call
  return softmax.visit(calls.scores(call, spec, visible), call.value)


def visit_store(call: Call, spec: Spec, store: Store) -> State:
  """The state of a call's queries that have seen a store; a large one that is empty is not read."""
  call = call._replace(key=store.key, value=store.value, key_positions=store.positions)
  see = lambda: visit(call, spec)
  if store.positions.shape[-1] < PART:
    return see()
  shape, wide = call.query.shape[:-1], axes.wide(call.query.dtype)
  nobody = softmax.empty(shape, call.value.shape[-1], wide)
  nothing = lambda: axes.vary_alike((nobody, call))[0]
  return lax.cond(jnp.any(store.positions < FAR), see, nothing)


def visit_slots(call: Call,
                spec: Spec,
                store: Store,
                starts: Array,
                size: int,
                seen: Callable[[Array], Array] | None = None) -> State:
  """The state of a call's queries that have each seen slots of its own.

  Args:
    call: its queries.
    spec: its static values; spec.visible says which of the slots a query sees.
    store: whose slots they are.
    starts: [..., K or 1, G or 1, T, r], where runs of slots begin.
    size: slots in a run.
    seen: positions [..., K or 1, G or 1, T, r * size] to whether a query sees them, beside
      spec.visible.
  """
  lead, keys_apart = starts.ndim - 4, starts.shape[-4] > 1
  K, G, T, r = starts.shape[-4:]  # sizes are said in full, since -1 has no meaning beside a 0
  flat = starts.reshape(*starts.shape[:lead + 1], G * T * r)

  def read(x: Array, starts: Array, batched: int) -> Array:
    """[batched axes, ..., slots, H] and [batched axes, m] to [batched axes, m, ..., size, H]."""
    one = lambda x, start: lax.dynamic_slice_in_dim(x, start, size, x.ndim - 2)
    one = jax.vmap(one, (None, 0))
    for _ in range(batched):
      one = jax.vmap(one)
    return one(x, starts)

  def heads(x: Array) -> Array:
    """[..., K, slots, H] to [..., K, G or 1, T, r * size, H]."""
    x = read(x, flat, lead +
             1) if keys_apart else jnp.moveaxis(read(x, flat[..., 0, :], lead), lead, lead + 1)
    return x.reshape(*x.shape[:lead + 1], G, T, r * size, x.shape[-1])

  key, value = heads(store.key), heads(store.value)
  every = flat.reshape(*flat.shape[:lead], K * G * T * r)
  positions = read(store.positions[..., None], every, lead).reshape(*starts.shape[:-1], r * size)
  assert spec.visible is not None
  visible = spec.visible(call.query_positions[..., None, None, :, None], positions)
  visible = visible if seen is None else visible & seen(positions)
  key, value = (jnp.where(visible[..., None], x, jnp.zeros_like(x)) for x in (key, value))
  wide = axes.wide(call.query.dtype)
  logits = jnp.einsum('...kgth,...kgtnh->...kgtn', call.query, key, preferred_element_type=wide)
  logits *= jnp.asarray(spec.scale, wide)
  if call.bias is not None:
    logits += _bias_of_slots(call, positions).astype(wide)
  logits = softmax.hide(logits, visible)
  top = jnp.max(logits, -1, initial=softmax.HIDDEN)
  weights = jnp.exp(logits - softmax.finite(top)[..., None])
  weighted = jnp.einsum('...kgtn,...kgtnh->...kgth',
                        weights.astype(value.dtype),
                        value,
                        preferred_element_type=wide)
  return State(lax.stop_gradient(top), jnp.sum(weights, -1), weighted)


def write(store: Store, slots: Array, call: Call) -> Store:
  """The store with a call's keys in slots [..., T]; of those for one slot the last stays.

  A slot beyond the last one is none.
  """
  later = np.triu(np.ones((slots.shape[-1],) * 2, bool), 1)
  again = jnp.any((slots[..., :, None] == slots[..., None, :]) & axes.ranked(later, slots.ndim + 1),
                  -1)
  slots = jnp.where(again, store.positions.shape[-1], slots)
  lead = slots.ndim - 1

  def one(x: Array, new: Array, axis: int) -> Array:
    put = lambda x, new, slots: x.at[(slice(None),) * axis + (slots,)].set(new, mode='drop')
    for _ in range(lead):
      put = jax.vmap(put)
    return put(jnp.asarray(x), new.astype(x.dtype), slots)

  return Store(one(store.key, call.key, 1), one(store.value, call.value, 1),
               one(store.positions, jnp.asarray(call.key_positions), 0))


def _bias_of_slots(call: Call, positions: Array) -> Array:
  """The position bias of queries and slots of their own [..., K or 1, G or 1, T, n]."""
  K, G, T = call.query.shape[-4:-1]
  query = jnp.broadcast_to(call.query_positions[..., None, None, :], positions.shape[:-1])
  table = call.bias(query[..., None], positions)[..., 0, :]  # [..., K or 1, G or 1, T, N or 1, n]
  table = jnp.moveaxis(table, -2, -3)  # [..., K or 1, G or 1, N or 1, T, n]
  if table.shape[-3] == 1:
    return table[..., 0, :, :]
  heads = np.arange(K * G).reshape(K, G)
  k, g = (np.minimum(i, n - 1) for i, n in zip(np.indices((K, G)), table.shape[-5:-3]))
  return table[..., k, g, heads, :, :]
