"""Kernel attention with random features (FAVOR+)."""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn import axes
from attn import call as calls
from attn import cache, checks, groups, softmax
from attn.axes import Array, ArrayLike, Dims
from attn.call import Call, Spec
from attn.positions import PositionBias
from attn.softmax import State, finite

KERNELS = ('softmax', 'relu')
BLOCK = 128  # keys summed at a time
# A product of features below this has lost digits or all; and a logit that is so far below another
# is nothing beside it.
_LOST, _APART = 1e-30, 30.


def performer_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | PositionBias | None = None,
    mask: ArrayLike | None = None,
    *,
    features: ArrayLike,
    kernel: str = 'softmax',
    is_causal: bool = False,
    scale: float | None = None,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    segment_ids: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    block_size: int | None = None,
) -> Array:
  """Attention whose weights are products of positive features: keys are summed before queries come.

    output[t] = sum_s (phi(q[t]) . phi(k[s])) v[s] / sum_s phi(q[t]) . phi(k[s])
    kernel 'softmax': phi(x)[m] = exp(w[m] . x' - |x'|^2 / 2)
    kernel 'relu':    phi(x)[m] = max(w[m] . x', 0)

  with x' = sqrt(scale) x and w = features; E[phi(q) . phi(k)] = exp(scale * q . k) for the first.
  Features are kept as logarithms and every sum is taken relative to its own running maximum, so
  nothing is added to the normaliser, and a large later key changes no earlier row. O(T * M) time
  and memory. With is_causal the keys are summed block by block; with explicit positions or segments
  queries and keys are first sorted into one sequence.

  Args:
    query: [..., T, N, H].
    key: [..., S, K, H], with N a multiple of K.
    value: [..., S, K, Hv].
    bias: not defined, since no score is ever formed.
    mask: boolean, [..., N, 1, S] or with axes of 1: masked keys leave both sums.
    features: [M, H], such as `orthogonal_features` draws.
    kernel: 'softmax' or 'relu'.
    is_causal, scale, query_positions, key_positions, segment_ids: as in `vanilla_attention`.
    dropout_rate, dropout_rng: not defined, since no weight is ever formed.
    block_size: keys summed at a time when order matters; only cost depends on it.

  Returns:
    [..., T, N, Hv] in query's dtype; zeros for a query that sees nothing, or whose kernel with all
    it sees is zero.

  Raises:
    TypeError, ValueError: as in `vanilla_attention`, or features or kernel do not fit.
    NotImplementedError: bias, dropout or a mask per query is asked for.

  Source: Choromanski et al. 2020, Rethinking Attention with Performers, sections 2.2 to 2.4,
  https://arxiv.org/abs/2009.14794.
  """
  del dropout_rng
  dims, call, spec, features, seen = prepare(
      query, key, value, bias, mask, features=features, kernel=kernel, dropout_rate=dropout_rate,
      is_causal=is_causal, scale=scale, query_positions=query_positions,
      key_positions=key_positions, segment_ids=segment_ids)  # yapf: disable
  block = checks.check_int('block_size', BLOCK if block_size is None else block_size, 1)
  placed = is_causal and not (query_positions is None and key_positions is None)
  sequence = _sequence(call, is_causal) if dims.T and (placed or segment_ids is not None) else None
  if sequence is not None:
    reached = sequence.reached[..., None, :]
    seen = reached if seen is None else reached & seen
  call = calls.forget_blind(call, seen)
  log_query, log_key, weighted = log_features_of(call, features, kernel, spec.scale, seen)
  if not dims.S or not dims.T:
    state = softmax.empty(call.query.shape[:-1], dims.Hv, log_query.dtype)
  elif sequence is not None:
    state = _in_one_sequence(sequence, log_query, log_key, weighted, block)
  elif is_causal:
    state, _ = causal(log_query, log_key, weighted, None, block)
  else:
    state = read(sum_keys(log_key, weighted), log_query)
  return calls.heads_last(softmax.finish(state, call.query.dtype), dims)


def prepare(query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: Any, mask: ArrayLike | None,
            *, features: ArrayLike, kernel: str, dropout_rate: float,
            **common: Any) -> tuple[Dims, Call, Spec, Array, Array | None]:
  """Sizes, arrays, static values and features of a call, and which keys are real, [..., K, S]."""
  checks.refuse('performer', 'its scores are never formed', bias=bias, dropout_rate=dropout_rate)
  dims, call, spec = calls.prepare(query, key, value, None, mask, dropout_rate=0.,
                                   dropout_rng=None, **common)  # yapf: disable
  features = check_features(features, kernel, dims)
  call, seen = calls.key_mask(call, 'performer')
  return dims, call, spec, features, seen


def check_features(features: ArrayLike, kernel: str, dims: Dims) -> Array:
  checks.check_choice('kernel', kernel, KERNELS)
  if not checks.is_array(features) or not jnp.issubdtype(features.dtype, jnp.floating):
    raise ValueError(
        'features must be a floating-point array [M, H]; '
        f'got {features.dtype if checks.is_array(features) else type(features).__name__}')
  if features.ndim != 2 or features.shape[1] != dims.H or not features.shape[0]:
    raise ValueError(
        f'features must be [M, H] with the head dim H = {dims.H} of query; got {features.shape}')
  return jnp.asarray(features)


def log_features_of(call: Call, features: Array, kernel: str, scale: float,
                    seen: Array | None) -> tuple[Array, Array, Array]:
  """log phi of queries [..., K, G, T, M], of keys [..., K, S, M], HIDDEN if masked; and value."""
  wide = axes.wide(call.query.dtype)
  features = features.astype(wide)

  def log_features(x, root):
    x = x.astype(wide) * jnp.asarray(root, wide)
    product = jnp.einsum('...h,mh->...m', x, features)
    if kernel == 'softmax':
      return product - jnp.sum(x * x, -1, keepdims=True) / 2
    return _log(product)

  root = abs(scale)**0.5
  key, value = call.key, call.value
  if seen is not None:
    key, value = (jnp.where(seen[..., None], x, jnp.zeros_like(x)) for x in (key, value))
  log_key = log_features(key, np.copysign(root, scale))
  return log_features(call.query,
                      root), softmax.hide(log_key, None if seen is None else seen[..., None]), value


def _log(x: Array) -> Array:
  """log x, HIDDEN and without gradient where x is not positive."""
  return jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, jnp.ones_like(x))),
                   jnp.asarray(softmax.HIDDEN, x.dtype))


class Sums(NamedTuple):
  """What has been seen of the keys, each feature relative to its largest logarithm so far."""
  max: Array  # [..., K, M]
  features: Array  # [..., K, M]
  weighted: Array  # [..., K, M, Hv]
  segment: Array | None = None  # [..., 1], whose keys these are


def sum_keys(log_key: Array, value: Array) -> Sums:
  """Sums over the keys of a block."""
  top = lax.stop_gradient(jnp.max(log_key, -2))
  phi = jnp.exp(log_key - finite(top)[..., None, :])
  weighted = jnp.einsum('...ksm,...ksh->...kmh', phi, value.astype(phi.dtype))
  return Sums(top, jnp.sum(phi, -2), weighted)


def read(sums: Sums, log_query: Array) -> State:
  """The state [..., K, G, T] of queries that have seen the summed keys."""
  logits = log_query + sums.max[..., None, None, :]
  top = lax.stop_gradient(jnp.max(logits, -1))
  phi = jnp.exp(logits - finite(top)[..., None])
  return State(top, jnp.einsum('...kgtm,...km->...kgt', phi, sums.features),
               jnp.einsum('...kgtm,...kmh->...kgth', phi, sums.weighted))


def merge(a: Sums, b: Sums) -> Sums:
  """The sums over both sets of keys."""
  top = jnp.maximum(a.max, b.max)
  scale_a, scale_b = jnp.exp(a.max - finite(top)), jnp.exp(b.max - finite(top))
  return Sums(top, a.features * scale_a + b.features * scale_b,
              a.weighted * scale_a[..., None] + b.weighted * scale_b[..., None])


def _within(before: State, log_query: Array, log_key: Array, value: Array,
            same: Array | None) -> State:
  """The state `before`, after the keys of each query's own block up to its place, pair by pair.

  Scores are relative to the largest feature of either side alone, so no key has a part in another's
  rounding; that of the key at a query's own place is summed in full. Where those features are far
  apart a score underflows: if it may count beside what else is seen, all are summed in full.
  """
  top_query, top_key = jnp.max(log_query, -1), jnp.max(log_key, -1)
  shift_query, shift_key = finite(top_query), finite(top_key)
  product = jnp.einsum('...kgtm,...ksm->...kgts', jnp.exp(log_query - shift_query[..., None]),
                       jnp.exp(log_key - shift_key[..., None]))
  logits = _log(product) + shift_query[..., None] + shift_key[..., None, None, :]
  pair = log_query + log_key[..., None, :, :]
  top = finite(jnp.max(pair, -1))
  exact = _log(jnp.sum(jnp.exp(pair - top[..., None]), -1)) + top
  C = log_query.shape[-2]
  place = np.arange(C)
  here = (place[:, None] == place).reshape((1,) * (logits.ndim - 2) + (C, C))
  earlier = (place[:, None] >= place).reshape(here.shape)
  visible = earlier if same is None else same & earlier
  logits = softmax.hide(jnp.where(here, exact[..., None], logits), visible)
  if C > 1:
    most = top_query[..., None] + top_key[..., None, None, :] + np.log(_LOST)
    finite_keys = jnp.all(jnp.isfinite(log_key), -1)[..., None, None, :]
    real = jnp.all(jnp.isfinite(log_query), -1)[..., None] & finite_keys
    known = jnp.maximum(jnp.max(jnp.where(product > _LOST, logits, exact[..., None]), -1),
                        jnp.where(before.sum > 0, before.max, softmax.HIDDEN))
    counts = real & visible & ~here & (product <= _LOST) & (most > known[..., None] - _APART)
    in_full = lambda: softmax.hide(_pairs(log_query, log_key), visible)
    logits = lax.cond(_anywhere(lax.stop_gradient(counts)), in_full, lambda: logits)
  return softmax.merge(before, softmax.visit(logits, value.astype(logits.dtype)))


@jax.custom_batching.custom_vmap
def _anywhere(x: Array) -> Array:
  """Whether any is true; under vmap in any row, so that a branch stays a branch."""
  return jnp.any(x)


@_anywhere.def_vmap
def _anywhere_batched(size: int, is_batched: Any, x: Array) -> tuple[Array, bool]:
  del size, is_batched
  return _anywhere(x), False


def _pairs(log_query: Array, log_key: Array) -> Array:
  """The logits of all pairs in a block, [..., K, G, T, S], each summed relative to its largest."""

  @jax.checkpoint
  def one(log_key: Array) -> Array:
    pair = log_query + log_key[..., None, None, :]
    top = finite(jnp.max(pair, -1))
    return _log(jnp.sum(jnp.exp(pair - top[..., None]), -1)) + top

  logits = lax.map(one, jnp.moveaxis(log_key, -2, 0))
  return jnp.moveaxis(logits, 0, -1)


@jax.checkpoint
def _step(sums: Sums, block: tuple[Array, Array, Array, Array | None]) -> tuple[Sums, State]:
  """The sums after a block (queries, keys, values, segments), and its queries' state."""
  log_query, log_key, value, ids = block
  if ids is None:
    state = _within(read(sums, log_query), log_query, log_key, value, None)
    return merge(sums, sum_keys(log_key, value)), state
  same = (ids[..., :, None] == ids[..., None, :])[..., None, None, :, :]
  assert sums.segment is not None
  here, last = ids == sums.segment, ids[..., -1:]
  before = read(sums, softmax.hide(log_query, here[..., None, None, :, None]))
  kept = sums._replace(max=softmax.hide(sums.max, (sums.segment == last)[..., None]))
  new = sum_keys(softmax.hide(log_key, (ids == last)[..., None, :, None]), value)
  sums = merge(kept, new)._replace(segment=last)
  return sums, _within(before, log_query, log_key, value, same)


def causal(log_query: Array,
           log_key: Array,
           value: Array,
           segments: Array | None,
           block: int,
           sums: Sums | None = None) -> tuple[State, Sums]:
  """The state [..., K, G, T] of queries in one order with the keys, each after all before it.

  segments [..., T], if any, come in runs, and a run sees itself alone. sums are those of what came
  before; returned with the keys added.
  """
  length, lead = log_query.shape[-2], log_query.ndim - 4
  number = -(-length // block)
  size = -(-length // number)
  if sums is None:
    shape = (*log_key.shape[:lead], log_key.shape[-3], log_key.shape[-1])
    sums = Sums(*softmax.empty(shape, value.shape[-1], log_key.dtype),
                segment=None if segments is None else segments[..., :1])
  if number == 1:  # nothing to loop over, so nothing more to compile
    sums, state = _step(sums, (log_query, log_key, value, segments))
    return state, sums
  blocks = (groups.runs(log_query, lead + 2, size,
                        0), groups.runs(log_key, lead + 1, size, softmax.HIDDEN),
            groups.runs(value, lead + 1, size,
                        0), None if segments is None else groups.runs(segments, lead, size, None))
  sums, state = lax.scan(_step, *axes.vary_alike((sums, blocks)))
  assert sums is not None
  return State(*(groups.joined(x, lead + 2, length) for x in state)), sums


class _Sequence(NamedTuple):
  """Keys and queries in one sequence of S + T, in which what a query may see comes before it."""
  order: Array  # [..., S + T], keys counted first, then queries
  segments: Array  # [..., S + T], sorted
  reached: Array  # bool [..., S], whether any query comes after the key in its segment


def _sequence(call: Call, is_causal: bool) -> _Sequence:
  """Sorts by segment, then (causal) position, keys before queries."""
  leading, T, S = call.query.shape[:-4], call.query.shape[-2], call.key.shape[-2]

  def join(key, query):
    parts = ((jnp.zeros(
        (1,) * len(leading) + (n,), jnp.int32) if x is None else jnp.asarray(x, jnp.int32), n)
             for x, n in ((key, S), (query, T)))
    return jnp.concatenate([jnp.broadcast_to(x, (*leading, n)) for x, n in parts], -1)

  segments = join(call.key_segments, call.query_segments)
  positions = (join(call.key_positions, call.query_positions),) if is_causal else ()
  # The sort is stable: a key stays before a query of its position.
  index = jnp.lexsort((*positions, segments), -1)
  segments = jnp.take_along_axis(segments, index, -1)
  ids = jnp.broadcast_to(jnp.arange(S + T, dtype=index.dtype), index.shape)
  following = lax.cummin(jnp.where(index >= S, ids, S + T - 1), index.ndim - 1, reverse=True)
  reached = ((jnp.take_along_axis(index, following, -1) >= S) &
             (jnp.take_along_axis(segments, following, -1) == segments))
  return _Sequence(index, segments,
                   jnp.take_along_axis(reached, jnp.argsort(index, -1), -1)[..., :S])


def _in_one_sequence(sequence: _Sequence, log_query: Array, log_key: Array, value: Array,
                     block: int) -> State:
  """The state [..., K, G, T] of queries after the keys that come before them in the order."""
  T, S, leading = log_query.shape[-2], log_key.shape[-2], log_query.shape[:-4]

  def sort(x, fill, before, after):
    heads = x.ndim - len(leading) - 2
    index = sequence.order.reshape(*leading, *(1,) * heads, S + T, 1)
    widths = [(0, 0)] * (x.ndim - 2) + [(before, after), (0, 0)]
    return jnp.take_along_axis(jnp.pad(x, widths, constant_values=fill), index, -2)

  state, _ = causal(sort(log_query, 0, S, 0), sort(log_key, softmax.HIDDEN, 0, T),
                    sort(value, 0, 0, T), sequence.segments, block)
  place = jnp.argsort(sequence.order, -1)[..., S:].reshape(*leading, 1, 1, T)
  return State(jnp.take_along_axis(state.max, place, -1), jnp.take_along_axis(state.sum, place, -1),
               jnp.take_along_axis(state.weighted, place[..., None], -2))


def _init_memory(params: dict[str, Array],
                 dims: Dims,
                 dtype: Any,
                 max_length: int | None,
                 kernel: str = 'softmax') -> tuple[Sums, None]:
  """The sums of no keys, of one size at any length."""
  del max_length
  features = check_features(params['features'], kernel, dims)
  shape = (*dims.leading, dims.K, len(features))
  return Sums(*softmax.empty(shape, dims.Hv, axes.wide(dtype))), None


def _extend_memory(params: dict[str, Array],
                   kept: Sums,
                   call: Call,
                   spec: Spec,
                   max_length: int | None,
                   kernel: str = 'softmax') -> tuple[State, Sums]:
  """The state of new queries after the sums and the new keys up to their own, and the sums then."""
  del max_length
  K, G, _, H = call.query.shape[-4:]
  dims = Dims((), 0, 0, K * G, K, H, call.value.shape[-1])
  features = check_features(params['features'], kernel, dims)
  real = jnp.asarray(call.key_positions)[..., None, :] < cache.FAR
  return causal(*log_features_of(call, features, kernel, spec.scale, real), None, 128, kept)


MEMORY = cache.Memory(_init_memory, _extend_memory, grows=False)


def orthogonal_features(rng: Array, num_features: int, head_dim: int) -> Array:
  """Draws blocks of head_dim orthogonal rows with the norms of Gaussian rows.

  Args:
    rng: a key.
    num_features: M, the number of rows; the last block is cut short where head_dim does not divide
      it.
    head_dim: H.

  Returns:
    float32 [M, H]; every row is distributed as a standard Gaussian vector.

  Source: Choromanski et al. 2020, section 2.4, https://arxiv.org/abs/2009.14794.
  """
  M, H = checks.check_int('num_features', num_features,
                          1), checks.check_int('head_dim', head_dim, 1)
  for_directions, for_norms = jax.random.split(rng)
  gaussian = jax.random.normal(for_directions, (-(-M // H), H, H), jnp.float32)
  q, r = jnp.linalg.qr(gaussian)
  # The signs of r's diagonal make q uniform among orthogonal matrices (Mezzadri 2007).
  directions = (q * jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))[..., None, :]).swapaxes(
      -1, -2).reshape(-1, H)[:M]
  norms = jnp.linalg.norm(jax.random.normal(for_norms, (M, H), jnp.float32), axis=-1, keepdims=True)
  return directions * norms


def init(rng: Array, dims: Dims, *, num_features: int) -> dict[str, Array]:
  """The features [num_features, dims.H] of a layer."""
  return {'features': orthogonal_features(rng, num_features, checks.check_dims(dims).H)}
