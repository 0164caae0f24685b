"""Variants that sum keys before a query sees them, over a mesh axis: what is sent are the sums."""

from typing import Any

from jax import lax
import jax.numpy as jnp
import numpy as np

from attn import axes
from attn import call as calls
from attn import checks, masks, softmax, tiles
from attn.axes import Array, ArrayLike
from attn.ring import Ring
from attn.variants import fixed, linformer, performer
from attn.variants.performer import Sums


def performer_over(ring: Ring, query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: Any,
                   mask: ArrayLike | None, *, features: ArrayLike, kernel: str,
                   block_size: int | None, segment_ids: Any, dropout_rate: float,
                   dropout_rng: Array | None, **common: Any) -> Array:
  """Keys are summed on every device; and the sums of all, or causal of those before, are added."""
  del dropout_rng
  checks.refuse('performer',
                'over a mesh axis keys of all devices would have to be sorted',
                segment_ids=segment_ids)
  if common['is_causal']:
    checks.refuse('performer',
                  'over a mesh axis keys of all devices would have to be sorted',
                  query_positions=common['query_positions'],
                  key_positions=common['key_positions'])
  dims, call, spec, features, seen = performer.prepare(query,
                                                       key,
                                                       value,
                                                       bias,
                                                       mask,
                                                       features=features,
                                                       kernel=kernel,
                                                       dropout_rate=dropout_rate,
                                                       segment_ids=None,
                                                       **common)
  call = calls.forget_blind(call, _seen_anywhere(seen, ring))
  log_query, log_key, weighted = performer.log_features_of(call, features, kernel, spec.scale, seen)
  if not dims.S or not dims.T:
    state = softmax.empty(call.query.shape[:-1], dims.Hv, log_query.dtype)
  elif common['is_causal']:
    block = performer.BLOCK if block_size is None else block_size
    block = checks.check_int('block_size', block, 1)
    before = _sums_before(performer.sum_keys(log_key, weighted), ring)
    state, _ = performer.causal(log_query, log_key, weighted, None, block, before)
  else:
    state = performer.read(_sum_over(performer.sum_keys(log_key, weighted), ring), log_query)
  return calls.heads_last(softmax.finish(state, call.query.dtype), dims)


def _seen_anywhere(seen: Array | None, ring: Ring) -> Array | None:
  """Of each head and batch row whether a key of any device is real, as [..., K, 1]."""
  if seen is None:
    return None
  some = jnp.any(seen, -1, keepdims=True)
  return lax.pmax(some.astype(jnp.int32), ring.axis_name) > 0


def _sum_over(sums: Sums, ring: Ring) -> Sums:
  """The sums of all devices' keys."""
  top = lax.pmax(lax.stop_gradient(sums.max), ring.axis_name)
  scale = jnp.exp(sums.max - softmax.finite(top))
  return Sums(top, lax.psum(sums.features * scale, ring.axis_name),
              lax.psum(sums.weighted * scale[..., None], ring.axis_name))


def _sums_before(sums: Sums, ring: Ring) -> Sums:
  """The sums of the keys of all devices before this one, in as many steps as size has bits."""

  def from_before(sums: Sums, by: int) -> Sums:
    """Those of the device `by` places before; of no keys where there is none."""
    came = Sums(*ring.shift(tuple(sums[:3]), by, around=False))
    return came._replace(max=jnp.where(ring.here >= by, came.max, softmax.HIDDEN))

  by = 1
  while by < ring.size:
    sums, by = performer.merge(from_before(sums, by), sums), 2 * by
  return from_before(sums, 1)


def linformer_over(ring: Ring, query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: Any,
                   mask: ArrayLike | None, *, key_projection: ArrayLike,
                   value_projection: ArrayLike, segment_ids: Any, key_positions: ArrayLike | None,
                   **common: Any) -> Array:
  """Every device projects its own keys; the slots are added up, or when causal put side by side."""
  is_causal = common['is_causal']
  if is_causal:
    checks.refuse('linformer',
                  'over a mesh axis causal segments lie on one device each',
                  query_positions=common['query_positions'])
  dims, call, spec = linformer.prepare(query,
                                       key,
                                       value,
                                       bias,
                                       mask,
                                       key_positions=key_positions,
                                       segment_ids=segment_ids,
                                       **common)
  every = dims._replace(S=dims.S * ring.size)
  projections = linformer.check_projections(key_projection, value_projection, every, is_causal)
  size, rank = projections[0].shape[-2:]
  if is_causal and dims.S % size:
    raise ValueError(f"a device's run must be whole segments of key_projection's {size} rows; got "
                     f'S = {dims.S} keys on each of {ring.size} devices')
  whole = ring.indexed(call)
  call, seen = linformer.hold_seen(whole)
  call = calls.forget_blind(call, _seen_anywhere(seen, ring))
  shape = (*dims.leading, dims.K, dims.G, dims.T)
  if not is_causal:
    rows = lambda x: lax.dynamic_slice_in_dim(x, ring.here * dims.S, dims.S, axis=x.ndim - 2)
    slots = linformer.slots_of(call, rows(projections[0]), rows(projections[1]), None)
    slots = slots._replace(key=lax.psum(slots.key, ring.axis_name),
                           value=lax.psum(slots.value, ring.axis_name),
                           key_index=every.S + slots.key_index - dims.S)
    state = linformer.regrouped(tiles.attend(slots, spec), shape)
    return calls.heads_last(softmax.finish(state, call.query.dtype), dims)
  slots = linformer.slots_of(call, *projections, seen)
  gather = lambda x, axis: lax.all_gather(x, ring.axis_name, axis=x.ndim + axis, tiled=True)
  places = axes.ranked(np.arange(every.S // size * rank, dtype=np.int32), slots.key_index.ndim)
  slots = slots._replace(key=gather(slots.key, -2),
                         value=gather(slots.value, -2),
                         mask=None if slots.mask is None else gather(slots.mask, -1),
                         key_positions=places // rank * size,
                         key_index=every.S + places,
                         query_positions=call.query_positions + ring.here * dims.T)
  before = spec._replace(visible=masks.causal() & masks.other_block(size), forget=True)
  own = spec._replace(visible=masks.causal() & masks.same_block(size))
  state = linformer.regrouped(tiles.attend(slots, before), shape)
  if dims.T:
    state = softmax.merge(state, fixed.own_block(whole, own, size, True, None, None))
  return calls.heads_last(softmax.finish(state, call.query.dtype), dims)
