"""Decode caches: what causal attention to earlier tokens needs to be kept of them.

`Variant.init_cache` makes a cache and `Variant.extend` moves it on by any number of tokens, so
prefill and a single step are one function. New queries visit what is kept, then the new keys, and
the states merge; then the new keys are written. Positions count the real tokens of a row, so rows
may have different lengths, and padding on either side.

A variant says in a `Memory` what it keeps; `attn.stores` has that of patterns.
"""

import dataclasses
import functools
from typing import Any, Callable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn import axes
from attn import call as calls
from attn import checks, groups, softmax
from attn.axes import Array, ArrayLike, Dims
from attn.call import Call, Spec
from attn.masks import Predicate
from attn.softmax import State

# The position of an empty slot and of padding: no query comes so far, so causality hides it.
FAR = 2**30


@functools.partial(jax.tree_util.register_dataclass,
                   data_fields=('length', 'overflow', 'kept'),
                   meta_fields=('variant', 'heads', 'dtype', 'max_length', 'chunk', 'arrays',
                                'options'))
@dataclasses.dataclass(frozen=True)
class Cache:
  """What a variant keeps of the tokens so far; a pytree whose arrays all lead with the batch axes.

  To reorder or repeat rows, as a beam search does: jax.tree.map(lambda x: x[rows], cache).

  Attributes:
    length: int32 [...], the real tokens of every row, and the position of its next one.
    overflow: bool [...], whether a row was given more tokens than max_length; see `check`.
    kept: the variant's own arrays.
    variant: its name in VARIANTS.
    heads: N, K, H, Hv.
    dtype: of queries, keys and values.
    max_length: the most tokens a row may have; None for any number.
    chunk: the most tokens taken in at once; None for any number.
    arrays: names, kinds and shapes of the variant's arrays.
    options: the variant's own options.
  """
  length: Array
  overflow: Array
  kept: Any
  variant: str
  heads: tuple[int, int, int, int]
  dtype: Any
  max_length: int | None
  chunk: int | None
  arrays: tuple[tuple[str, str, tuple[int, ...]], ...]
  options: tuple[tuple[str, Any], ...]


class Memory(NamedTuple):
  """How a variant decodes.

  Attributes:
    init: (params, dims, dtype, max_length, **options) to what is kept when nothing has been seen,
      and the most tokens to be taken in at once, None for any number.
    extend: (params, kept, call, spec, max_length, **options) to the state of the call's queries,
      which have seen what is kept and the call's own keys, and to what is kept then. Queries of
      padding stand at -1, keys of padding at FAR.
    grows: whether what is kept depends on max_length, which must then be given.
  """
  init: Callable[..., tuple[Any, int | None]]
  extend: Callable[..., tuple[State, Any]]
  grows: bool


def init(name: str, memory: Memory, params: Any, dims: Dims, dtype: Any, max_length: int | None,
         options: dict[str, Any]) -> Cache:
  """An empty cache; see `Variant.init_cache`."""
  dims, dtype = checks.check_dims(dims), _check_dtype(dtype)
  if max_length is not None:
    max_length = checks.check_int('max_length', max_length, 1)
  elif memory.grows:
    raise ValueError(f'max_length must say how many tokens a cache of {name} may hold, since it '
                     'grows with them; got None')
  options = {name: _static(x) for name, x in options.items()}
  kept, chunk = memory.init(params, dims, dtype, max_length, **options)
  return Cache(jnp.zeros(dims.leading, jnp.int32), jnp.zeros(dims.leading, bool), kept, name,
               (dims.N, dims.K, dims.H, dims.Hv), dtype, max_length, chunk, _described(params),
               tuple(sorted(options.items())))


def extend(memory: Memory, visible: Predicate | None, params: Any, cache: Cache, query: ArrayLike,
           key: ArrayLike, value: ArrayLike, bias: Any, token_mask: ArrayLike | None,
           scale: float | None) -> tuple[Array, Cache]:
  """The attention of new tokens, and the cache after them; see `Variant.extend`."""
  dims = checks.check_qkv(query, key, value)
  _check(cache, params, dims, query.dtype, bias)
  real = _check_token_mask(token_mask, dims)
  scale = checks.check_scale(scale, dims.H)
  positions = cache.length[..., None] + jnp.cumsum(real, -1, dtype=jnp.int32) - 1
  overflow = cache.overflow
  if cache.max_length is not None:
    fits = positions < cache.max_length
    beyond = jnp.any(real & ~fits, -1)
    overflow |= beyond
    _refuse_overflow(cache, dims.T, token_mask is None, beyond)
    real &= fits
  q, k, v = calls.heads_first(query, key, value, dims)
  hold = lambda x, axes: jnp.where(jnp.expand_dims(real, axes), x, jnp.zeros_like(x))
  place = np.arange(dims.T, dtype=np.int32).reshape((1,) * len(dims.leading) + (-1,))
  call = Call(hold(q, (-4, -3, -1)), hold(k, (-3, -1)), hold(v, (-3, -1)), bias, None,
              jnp.where(real, positions, -1), jnp.where(real, positions, FAR), None, None, place,
              place, None)
  step = functools.partial(memory.extend,
                           params,
                           max_length=cache.max_length,
                           **dict(cache.options))
  state, kept = _in_chunks(step, cache.kept, call, Spec(visible, scale, 0.), cache.chunk)
  output = calls.heads_last(softmax.finish(state, call.query.dtype), dims)
  output = jnp.where(real[..., None, None], output, jnp.zeros_like(output))
  length = cache.length + jnp.sum(real, -1, dtype=jnp.int32)
  return output, dataclasses.replace(cache, length=length, overflow=overflow, kept=kept)


def check(cache: Cache) -> None:
  """Raises if a row was given more tokens than its cache may hold.

  Inside jit lengths are unknown, so there a token too many is left out, gets zeros, and is noted in
  cache.overflow. Call this outside, once the loop has ended.

  Raises:
    ValueError: names max_length and the rows.
  """
  overflow = np.asarray(cache.overflow)
  if overflow.any():
    raise ValueError(f'a cache of max_length = {cache.max_length} was given more tokens in the '
                     f'rows {np.argwhere(overflow).tolist()}; those beyond were not written. '
                     'Make a longer cache')


def size(cache: Any) -> int:
  """Bytes of a cache's arrays, or of what jax.eval_shape makes of them."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def _described(params: dict[str, Any]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
  """Names, kinds and shapes of a variant's arrays, which a cache depends on."""
  kinds = {'floating': jnp.floating, 'integer': jnp.integer}
  kind = lambda x: next((k for k, v in kinds.items() if jnp.issubdtype(x.dtype, v)), str(x.dtype))
  return tuple(
      (name, kind(x), tuple(x.shape)) if checks.is_array(x) else (name, type(x).__name__, ())
      for name, x in sorted(params.items()))


def _static(x: Any) -> Any:
  """An option as Python numbers, which can be compared and hashed."""
  if isinstance(x, (tuple, list)):
    return tuple(map(_static, x))
  return x.item() if checks.is_array(x) and x.ndim == 0 else x


def _check_dtype(dtype: Any) -> Any:
  try:
    found = None if dtype is None else jnp.dtype(dtype)
  except TypeError:
    found = None
  if found is None or not jnp.issubdtype(found, jnp.floating):
    raise ValueError(
        f'dtype must be a floating-point dtype; got {dtype if found is None else found}')
  if jax.dtypes.canonicalize_dtype(found) != found:
    raise ValueError(f'dtype is {found}, which jax has with jax_enable_x64 only; set that, or '
                     'give float32')
  return found


def _check(cache: Cache, params: dict[str, Any], dims: Dims, dtype: Any, bias: Any) -> None:
  for (name, *ours), (_, *theirs) in zip(_described(params), cache.arrays):
    if ours != theirs:
      was, got = (' '.join(map(str, x)) for x in (theirs, ours))
      raise ValueError(f'params must be those the cache was made with; {name} was {was}, got {got}')
  if cache.length.shape != dims.leading:
    raise ValueError(f'query must have the batch axes of the cache, {cache.length.shape}; got '
                     f'{dims.leading}')
  heads, held = (dims.N, dims.K, dims.H, dims.Hv), cache.heads
  if heads != held:
    raise ValueError('query, key and value must have the heads and sizes of the cache, '
                     f'(N, K, H, Hv) = {held}; got {heads}')
  if dtype != cache.dtype:
    raise ValueError(f'query, key and value must have the dtype of the cache, {cache.dtype}; got '
                     f'{dtype}')
  if dims.T != dims.S:
    raise ValueError('query, key and value must be those of the same new tokens; got '
                     f'T = {dims.T} queries and S = {dims.S} keys')
  if checks.is_array(bias):
    raise NotImplementedError(
        'extend has no bias array, since a cache keeps keys in an order of its own; pass a '
        'position bias such as ALiBi or T5Bias')
  checks.check_bias(bias, dims)


def _check_token_mask(token_mask: ArrayLike | None, dims: Dims) -> Array:
  """Which tokens are real, bool [..., T]."""
  shape = (*dims.leading, dims.T)
  if token_mask is None:
    return jnp.ones(shape, bool)
  if not checks.is_array(token_mask) or token_mask.dtype != jnp.bool_ or token_mask.shape != shape:
    got = (f'{token_mask.dtype} {token_mask.shape}'
           if checks.is_array(token_mask) else type(token_mask).__name__)
    raise ValueError(f'token_mask must be boolean [..., T] = {shape}, True for a real token; '
                     f'got {got}')
  return jnp.asarray(token_mask)


def _refuse_overflow(cache: Cache, length: int, all_real: bool, beyond: Array) -> None:
  """Raises where it is known before the program runs that a cache is too short."""
  most = cache.max_length
  assert most is not None
  if all_real and length > most:
    raise ValueError(f'a cache of max_length = {most} cannot take T = {length} tokens; make a '
                     'longer cache')
  if not isinstance(beyond, jax.core.Tracer) and np.any(beyond):
    rows = np.argwhere(np.asarray(beyond)).tolist()
    raise ValueError(f'a cache of max_length = {most} that holds '
                     f'{np.asarray(cache.length).tolist()} tokens cannot take the real ones of '
                     f'{length} more in the rows {rows}; make a longer cache')


def _in_chunks(step: Callable[..., tuple[State, Any]], kept: Any, call: Call, spec: Spec,
               chunk: int | None) -> tuple[State, Any]:
  """Takes in the tokens of a call, at most so many at once."""
  length, lead = call.lengths[0], call.query_positions.ndim - 1
  if not length:
    shape = call.query.shape[:-1]
    return softmax.empty(shape, call.value.shape[-1], axes.wide(call.query.dtype)), kept
  if chunk is None or length <= chunk:
    return step(kept, call, spec)
  number = -(-length // chunk)
  size, ends = -(-length // number), dict(query_positions=-1, key_positions=FAR)

  def cut(name: str, x: Any, axis: int) -> Any:
    return groups.runs(x, axis, size, ends.get(name, 0))

  runs = calls.along(calls.along(call._replace(bias=None), 'T', cut), 'S', cut)

  def body(kept: Any, run: Call) -> tuple[Any, State]:
    return step(kept, run._replace(bias=call.bias), spec)[::-1]

  kept, states = lax.scan(body, *axes.vary_alike((kept, runs)))
  return State(*(groups.joined(x, lead + 2, length) for x in states)), kept
