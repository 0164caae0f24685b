"""Softmax attention over projected keys."""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn import axes
from attn import call as calls
from attn import cache, checks, masks, softmax, stores, tiles
from attn.axes import Array, ArrayLike, Dims
from attn.call import Call, Spec
from attn.positions import PositionBias
from attn.softmax import State
from attn.stores import Store
from attn.variants import fixed


def linformer_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | PositionBias | None = None,
    mask: ArrayLike | None = None,
    *,
    key_projection: ArrayLike,
    value_projection: ArrayLike,
    is_causal: bool = False,
    scale: float | None = None,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    segment_ids: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
) -> Array:
  """Softmax attention over R slots, each a learned combination of the keys.

    k'[r] = sum_s key_projection[s, r] k[s]      v'[r] = sum_s value_projection[s, r] v[s]
    output[t] = sum_r softmax_r(scale * q[t] . k'[r]) v'[r]

  Causal, the keys fall into segments of c positions, each projected to r slots of its own by one
  [c, r] projection. A query sees the slots of completed segments and, exactly, the keys of its own
  segment up to itself. (A triangular mask over the R slots would not do: every slot holds every
  key.) A slot whose keys are all masked is not seen.

  O(T * R) time and memory; causal O(T * (c + r * S / c)) time and O(T * c) memory.

  Args:
    query: [..., T, N, H].
    key: [..., S, K, H], with N a multiple of K.
    value: [..., S, K, Hv].
    bias: not defined, since no score belongs to a single key.
    mask: boolean, [..., N, 1, S] or with axes of 1: keys that are False are zeroed before
      projecting.
    key_projection: [S_max, R] shared by the heads, or [N, S_max, R]; shorter keys use its first S
      rows. Causal: [c, r] or [N, c, r].
    value_projection: as key_projection, with the same S_max and R.
    is_causal: whether to use the segment form.
    scale: multiplies the logits; H**-0.5 if None.
    query_positions: integers [T] or [..., T], used when causal; keys stand at arange(S).
    key_positions, segment_ids: not defined, since a projection's row belongs to a place among the
      keys.
    dropout_rate, dropout_rng: as in `vanilla_attention`, on the weights of slots and keys.

  Returns:
    [..., T, N, Hv] in query's dtype; zeros where every key is masked.

  Raises:
    TypeError, ValueError: as in `vanilla_attention`, or the projections do not fit, or S > S_max.
    NotImplementedError: bias, segment_ids, key_positions or a mask per query is asked for.

  Source: Wang et al. 2020, Linformer, https://arxiv.org/abs/2006.04768; causal: Zhu et al. 2021,
  Long-Short Transformer, section 3.2, https://arxiv.org/abs/2107.02192.
  """
  dims, call, spec = prepare(query,
                             key,
                             value,
                             bias,
                             mask,
                             key_positions=key_positions,
                             segment_ids=segment_ids,
                             is_causal=is_causal,
                             scale=scale,
                             query_positions=query_positions,
                             dropout_rate=dropout_rate,
                             dropout_rng=dropout_rng)
  key_projection, value_projection = check_projections(key_projection, value_projection, dims,
                                                       is_causal)
  whole = call
  call, keys_seen = hold_seen(call)
  call = calls.forget_blind(call, keys_seen)
  slots = slots_of(call, key_projection, value_projection, keys_seen if is_causal else None)
  shape = (*dims.leading, dims.K, dims.G, dims.T)
  if is_causal:
    size = key_projection.shape[-2]
    before = spec._replace(visible=masks.causal() & masks.other_block(size), forget=True)
    own = spec._replace(visible=masks.causal() & masks.same_block(size))
    state = regrouped(tiles.attend(slots, before), shape)
    if query_positions is None and dims.T:
      state = softmax.merge(state, fixed.own_block(whole, own, size, True, None, None))
    else:
      state = softmax.merge(state, tiles.attend(whole, own))
  else:
    state = regrouped(tiles.attend(slots, spec), shape)
  return calls.heads_last(softmax.finish(state, call.query.dtype), dims)


def prepare(query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: Any, mask: ArrayLike | None,
            *, key_positions: ArrayLike | None, segment_ids: Any,
            **common: Any) -> tuple[Dims, Call, Spec]:
  """Sizes, arrays and static values of a call."""
  checks.refuse('linformer',
                'a slot mixes many keys, so nothing can be said of one of them',
                bias=bias,
                segment_ids=segment_ids)
  checks.refuse('linformer',
                'a row of the projection belongs to a place among the keys',
                key_positions=key_positions)
  return calls.prepare(query, key, value, None, mask, key_positions=None, segment_ids=None,
                       **common)  # yapf: disable


def hold_seen(call: Call) -> tuple[Call, Array | None]:
  """The call with zeros for masked keys and values, and which are seen, [..., K, S]."""
  call, seen = calls.key_mask(call, 'linformer')
  if seen is None:
    return call, None
  hold = lambda x: jnp.where(seen[..., None], x, jnp.zeros_like(x))
  return call._replace(key=hold(call.key), value=hold(call.value)), seen


def regrouped(state: State, shape: tuple[int, ...]) -> State:
  """A state whose heads are grouped as the slots needed, as `shape` [..., K, G, T]."""
  return State(state.max.reshape(shape), state.sum.reshape(shape),
               state.weighted.reshape(*shape, state.weighted.shape[-1]))


def check_projections(key_projection: ArrayLike, value_projection: ArrayLike, dims: Dims,
                      is_causal: bool) -> tuple[Array, Array]:
  """Returns the projections, cut to S rows unless causal."""
  given = (('key_projection', key_projection), ('value_projection', value_projection))
  for name, x in given:
    if not checks.is_array(x) or not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f'{name} must be a floating-point array [S_max, R] or [N, S_max, R]; '
                       f'got {x.dtype if checks.is_array(x) else type(x).__name__}')
    if x.ndim not in (2, 3) or (x.ndim == 3 and x.shape[0] != dims.N) or 0 in x.shape:
      raise ValueError(
          f'{name} must be [S_max, R] or [N, S_max, R] with N = {dims.N}; got {x.shape}')
    if not is_causal and x.shape[-2] < dims.S:
      raise ValueError(
          f'{name} has S_max = {x.shape[-2]} rows ({x.shape}) but there are S = {dims.S} keys; '
          'make a longer projection')
  if key_projection.shape[-2:] != value_projection.shape[-2:]:
    raise ValueError('key_projection and value_projection must agree in S_max and R; '
                     f'got {key_projection.shape} and {value_projection.shape}')
  if is_causal:
    return jnp.asarray(key_projection), jnp.asarray(value_projection)
  return jnp.asarray(key_projection)[..., :dims.S, :], jnp.asarray(value_projection)[
      ..., :dims.S, :]


def slots_of(call: Call, key_projection: Array, value_projection: Array,
             keys_seen: Array | None) -> Call:
  """The call whose keys are the slots of each complete block of keys, at its first position."""
  size, rank = key_projection.shape[-2:]
  K, G, T, H = call.query.shape[-4:]
  S = call.key.shape[-2]
  number = S // size if size else 1
  if 3 in (key_projection.ndim, value_projection.ndim):
    K, G = K * G, 1

  def project(x, projection):
    # In float32 at least, since XLA on CPU has no bfloat16 product of this form.
    wide = axes.wide(x.dtype)
    blocks = x[..., :number * size, :].reshape(*x.shape[:-2], number, size, x.shape[-1])
    blocks, projection = blocks.astype(wide), projection.astype(wide)
    if projection.ndim == 2:
      slots = jnp.einsum('...kbsh,sr->...kbrh', blocks, projection)
      slots = jnp.repeat(slots, K // x.shape[-3], -4)
    else:
      projection = projection.reshape(x.shape[-3], K // x.shape[-3], size, rank)
      slots = jnp.einsum('...kbsh,kgsr->...kgbrh', blocks, projection)
    return slots.reshape(*x.shape[:-3], K, number * rank, x.shape[-1]).astype(x.dtype)

  mask = None
  if keys_seen is not None:
    seen = keys_seen[..., :number * size].reshape(*keys_seen.shape[:-1], number, size).any(-1)
    mask = jnp.repeat(seen, rank, -1)[..., None, None, :]  # [..., K, G, T, number * rank]
    mask = jnp.repeat(mask, K // mask.shape[-4], -4) if mask.shape[-4] > 1 else mask
  lead = call.query_positions.ndim - 1
  place = np.arange(number * rank, dtype=np.int32).reshape((1,) * lead + (-1,))
  # The slots follow the keys in the count of dropout, so that none shares its draw with a key.
  draw = call.draw and call.draw._replace(
      heads=call.draw.heads.reshape(*call.draw.heads.shape[:-2], K, G))
  return call._replace(query=call.query.reshape(*call.query.shape[:-4], K, G, T, H),
                       key=project(call.key, key_projection),
                       value=project(call.value, value_projection),
                       mask=mask,
                       key_positions=place // rank * size,
                       key_index=S + place,
                       draw=draw)


def init(rng: Array, dims: Dims, *, rank: int) -> dict[str, Array]:
  """Projections [dims.S, rank] with entries of variance 1 / rank, as in the paper's theorem 2.

  For the causal form give the segment's length as dims.S.
  """
  dims = checks.check_dims(dims)
  rngs = jax.random.split(rng)
  draw = lambda rng: jax.random.normal(rng, (dims.S, checks.check_int('rank', rank, 1)), jnp.float32
                                      ) * rank**-0.5
  return {'key_projection': draw(rngs[0]), 'value_projection': draw(rngs[1])}


class _Kept(NamedTuple):
  """The slots of finished segments, and the keys of the open one."""
  slots: Store
  open: Store


def _init_memory(params: dict[str, Array], dims: Dims, dtype: Any,
                 max_length: int) -> tuple[_Kept, int]:
  """No keys; room for the slots of every segment that may become an earlier one."""
  pair = check_projections(params['key_projection'], params['value_projection'], dims, True)
  size, rank = pair[0].shape[-2:]
  heads = dims.N if 3 in (pair[0].ndim, pair[1].ndim) else dims.K
  number = (max_length - 1) // size
  kept = _Kept(stores.empty(dims._replace(K=heads), number * rank, dtype),
               stores.empty(dims, size, dtype))
  return kept, min(size, stores.chunk((number * rank, 0)))


def _extend_memory(params: dict[str, Array], kept: _Kept, call: Call, spec: Spec,
                   max_length: int) -> tuple[State, _Kept]:
  """The state of new queries, at most a segment of them, and what is kept then."""
  del max_length
  projections = params['key_projection'], params['value_projection']
  size, rank = projections[0].shape[-2:]
  p, beyond = call.key_positions, kept.slots.positions.shape[-1]
  segment = jnp.min(p, -1, keepdims=True) // size  # the one that is open
  last = segment * size + size - 1
  ends = lambda p: jnp.any((p == last) & (p < cache.FAR), -1, keepdims=True)
  in_it = (p // size == segment) & (p < cache.FAR)
  held = stores.write(kept.open, jnp.where(in_it, p % size, size), call)
  first = jnp.where(ends(p), segment * size, cache.FAR)
  first = jnp.broadcast_to(first, (*segment.shape[:-1], rank))
  nothing = jax.tree.map(lambda x: jnp.zeros((*x.shape[:-2], rank, x.shape[-1]), x.dtype),
                         kept.slots[:2])

  def project() -> tuple[Array, Array]:
    slots = slots_of(call._replace(key=held.key, value=held.value), *projections, None)
    return slots.key, slots.value

  new = lax.cond(jnp.any(ends(p)), project, lambda: axes.vary_alike((nothing, call))[0])
  K, G, T, H = call.query.shape[-4:]
  heads = kept.slots.key.shape[-3]
  query = call.query.reshape(*call.query.shape[:-4], heads, K * G // heads, T, H)
  by_slots = call._replace(query=query, key=new[0], value=new[1], key_positions=first)
  before = spec._replace(visible=masks.causal() & masks.other_block(size))
  state = softmax.merge(stores.visit_store(by_slots, before._replace(forget=False), kept.slots),
                        stores.visit(by_slots, before))
  state = regrouped(state, call.query.shape[:-1])
  inside = spec._replace(visible=masks.causal() & masks.same_block(size))
  beside = call._replace(key_positions=jnp.where(p // size > segment, p, cache.FAR))
  for seen in (stores.visit_store(call, inside, held), stores.visit(beside, inside)):
    state = softmax.merge(state, seen)
  p = stores.after(call, state).key_positions
  place = segment * rank + axes.ranked(np.arange(rank, dtype=np.int32), segment.ndim)
  slots = stores.write(kept.slots, jnp.where(ends(p), place, beyond), by_slots)
  later = jnp.where((p // size > segment) & (p < cache.FAR), p % size, size)
  return state, _Kept(slots, stores.write(held, later, call))


MEMORY = cache.Memory(_init_memory, _extend_memory, grows=True)
