"""JAX's Pallas kernels for TPU under this library's contract: splash and flash attention.

Each says why it does not serve a call, or computes it: the same function as the tiles of
`attn.tiles`, to the rounding of its dtype. In addition to what the kernels do themselves,

  * a query that sees nothing gives zeros and zero gradients: splash counts a key of weight
    exp(SINK) and no value, beside which hidden keys, at LOW, weigh nothing;
  * a key mask and padding to whole blocks become segment ids;
  * scale multiplies the query, in its dtype: the kernels have none, or apply it to the bias too.

Only here may a query that is not finite and sees nothing harm the gradients of keys, and only if a
key mask together with a window hides everything from it.

Source: jax.experimental.pallas.ops.tpu; Dao et al. 2022, https://arxiv.org/abs/2205.14135.
"""

import contextlib
import dataclasses
import functools
from typing import Any, Callable, NamedTuple

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu import splash_attention as splash
import jax.numpy as jnp
import numpy as np

from attn import call as calls
from attn import axes, checks, masks
from attn.axes import Array
from attn.call import Call, Spec
from attn.masks import Predicate

# Queries and keys in a block are a multiple of LANES; a chip's vector memory holds blocks of MOST.
LANES, BLOCK, MOST = 128, 512, 1024
# Logits below SINK count as hidden; a hidden key's logit is LOW.
LOW = float(np.finfo(np.float32).min)
SINK = LOW / 2
# Pairs of blocks in a table, which is made one by one, and kept in scalar memory.
MOST_BLOCKS = 2**18
_DTYPES = (jnp.float32, jnp.bfloat16)


class Kernel(NamedTuple):
  """A backend.

  refuses: why it does not serve a call, with blocks of the size that is asked for, or None.
  compute: the attention [..., T, N, Hv] of a call it serves; interpreted if the last argument says
    so, which any platform can do, slowly.
  interpreting: the context in which that is done, and its gradient.
  """
  name: str
  refuses: Callable[[Call, Spec, int | None], str | None]
  compute: Callable[[Call, Spec, int | None, bool], Array]
  interpreting: Callable[[], Any]


def _refuses(call: Call, spec: Spec, block_size: int | None) -> str | None:
  """What no kernel does."""
  T, S = call.lengths
  if call.query.dtype not in _DTYPES:
    return f'query must be float32 or bfloat16; got {call.query.dtype}'
  if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
    return 'it counts in 32 bits; jax_enable_x64 is on'
  if 0 in call.query.shape or 0 in call.value.shape:
    return f'an axis is empty: query {call.query.shape}, value {call.value.shape}'
  if call.draw is not None:
    return f'it has no dropout; got dropout_rate = {spec.dropout_rate}'
  if spec.visible is not None:
    if call.query_blocks is not None:
      return 'it has no blocks known at run time only'
    if T != S or not (_counts(call.query_positions) and _counts(call.key_positions)):
      return 'its positions are 0, 1, ... for queries and keys alike'
  if block_size is not None and (block_size % LANES or block_size > MOST):
    return f'block_size must be a multiple of {LANES} up to {MOST}; got {block_size}'
  if names := axes.varying(call.query):
    return f'it is inside shard_map over {", ".join(sorted(names))}, which needs check_vma=False'
  return None


def _counts(positions: Any) -> bool:
  """Whether positions are known, and 0, 1, ..."""
  return isinstance(positions, np.ndarray) and bool(
      np.all(positions == np.arange(positions.shape[-1])))


def _blocks(call: Call, block_size: int | None) -> tuple[tuple[int, int], int]:
  """Queries and keys in a block: as few blocks as block_size allows, then as small; and pairs."""
  for size in (BLOCK, MOST) if block_size is None else (block_size,):
    numbers = [-(-length // size) for length in call.lengths]
    pairs = numbers[0] * numbers[1]
    if pairs <= MOST_BLOCKS:
      break
  C, D = (-(-length // (n * LANES)) * LANES for length, n in zip(call.lengths, numbers))
  return (C, D), pairs


# Splash attention: a static pattern, segments, grouped heads.


def _splash_refuses(call: Call, spec: Spec, block_size: int | None) -> str | None:
  if reason := _refuses(call, spec, block_size):
    return reason
  if call.bias is not None:
    return 'it has no bias'
  if call.mask is not None and call.mask.shape[-4:-1] != (1, 1, 1):
    return ('its mask is that of keys, [..., 1, 1, S]; got one with axes of heads and queries '
            f'{call.mask.shape[-4] * call.mask.shape[-3]}, {call.mask.shape[-2]}')
  _, pairs = _blocks(call, block_size)
  if spec.visible is not None and pairs > MOST_BLOCKS:
    return (f'its table of {pairs} pairs of blocks would be larger than {MOST_BLOCKS}; got '
            f'T, S = {call.lengths}')
  return None


def _splash(call: Call, spec: Spec, block_size: int | None, interpret: bool) -> Array:
  T, S = call.lengths
  *lead, K, G, _, H = call.query.shape
  (C, D), _ = _blocks(call, block_size)
  call, ids = _identify(calls.forget_masked(call), tuple(lead), -S % D)
  whole = lambda x, size: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % size), (0, 0)])
  query = whole((call.query * spec.scale).reshape(*lead, K * G, T, H).astype(call.query.dtype), C)
  kernel = _splash_kernel(spec.visible, query.shape[-2], S + -S % D, K * G, C, D, interpret)
  sinks = jnp.full(K * G, SINK, jnp.float32)
  if ids is not None:
    ids = splash.SegmentIds(jnp.pad(ids.q, [(0, 0)] * len(lead) + [(0, -T % C)]), ids.kv)
  compute = lambda q, k, v, ids: kernel(q, k, v, ids, sinks)
  for _ in lead:
    compute = jax.vmap(compute)
  return jnp.swapaxes(
      compute(query, whole(call.key, D), whole(call.value, D), ids)[..., :T, :], -3, -2)


def _identify(call: Call, lead: tuple[int, ...], more: int) -> tuple[Call, Any]:
  """Segment ids for segments, key mask and `more` keys that fill up a block; None if all see all.

  Keys no query has the id of, and queries no key has the id of, are forgotten.
  """
  if call.query_segments is None and call.mask is None and not more:
    return call, None
  T, S = call.lengths
  ids = lambda x, n: jnp.broadcast_to(jnp.zeros(n, jnp.int32) if x is None else x, (*lead, n))
  query, key = ids(call.query_segments, T), ids(call.key_segments, S)
  hidden = jnp.vectorize(_unused, signature='(t)->()')(query)[..., None]
  if call.mask is not None:
    key = jnp.where(jnp.broadcast_to(call.mask[..., 0, 0, 0, :], key.shape), key, hidden)
  isin = jnp.vectorize(jnp.isin, signature='(a),(b)->(a)')
  keep = lambda seen, x: jnp.where(seen, x, jnp.zeros_like(x))
  keys_seen, sees = isin(key, query)[..., None, :, None], isin(query, key)[..., None, None, :, None]
  call = call._replace(query=keep(sees, call.query),
                       key=keep(keys_seen, call.key),
                       value=keep(keys_seen, call.value))
  key = jnp.concatenate([key, jnp.broadcast_to(hidden, (*lead, more))], -1)
  return call, splash.SegmentIds(query, key)


def _unused(ids: Array) -> Array:
  """The smallest number that is no segment's id."""
  number = len(ids)  # so one of 0 ... number is free
  taken = jnp.zeros(number + 2, bool).at[jnp.where((ids >= 0) & (ids <= number), ids,
                                                   number + 1)].set(True)
  return jnp.argmin(taken[:-1]).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Mask(splash.Mask):
  """A predicate as the kernel's mask; of a block that it leaves empty or fills, one entry."""
  mask_function: Predicate
  lengths: tuple[int, int]

  @property
  def shape(self) -> tuple[int, ...]:
    return self.lengths

  @property
  def q_sequence(self) -> np.ndarray:
    return np.arange(self.lengths[0], dtype=np.int32)

  def __getitem__(self, places: Any) -> np.ndarray:
    query, key = (np.arange(part.start, part.stop) for part in places)
    ends = (query[0], query[-1], key[0], key[-1])
    if not self.mask_function.reaches(*ends) or self.mask_function.fills(*ends):
      return np.full((1, 1), bool(self.mask_function.reaches(*ends)))
    return self.mask_function(query[:, None], key[None, :])


@functools.lru_cache(maxsize=64)
def _splash_kernel(visible: Predicate | None, T: int, S: int, N: int, C: int, D: int,
                   interpret: bool) -> Any:
  """The kernel of a pattern; its tables are constants of any program, so made outside of all."""
  sizes = splash.BlockSizes(block_q=C, block_kv=D, block_kv_compute=D, block_q_dkv=C,
                            block_kv_dkv=D, block_kv_dkv_compute=D, block_q_dq=C,
                            block_kv_dq=D)  # yapf: disable
  mask = splash.FullMask((T, S)) if visible is None else _Mask(visible, (T, S))
  with jax.ensure_compile_time_eval():
    return splash.make_splash_mha(splash.MultiHeadMask([mask] * N),
                                  head_shards=1,
                                  q_seq_shards=1,
                                  block_sizes=sizes,
                                  mask_value=LOW,
                                  interpret=interpret)


# Flash attention: a bias array.


def _flash_refuses(call: Call, spec: Spec, block_size: int | None) -> str | None:
  T, S = call.lengths
  if reason := _refuses(call, spec, block_size):
    return reason
  if call.bias is None or not checks.is_array(call.bias):
    return f'it is for a bias array; got {"none" if call.bias is None else "a position bias"}'
  if call.mask is not None or call.query_segments is not None:
    return 'it has no mask and no segment_ids'
  if spec.visible not in (None, masks.causal()):
    return 'it has no pattern but is_causal'
  if call.query.shape[-1] != call.value.shape[-1]:
    return (f'value must have the head dim of key; got {call.value.shape[-1]}, '
            f'{call.query.shape[-1]}')
  if T % LANES or S % LANES:
    return f'lengths must be multiples of {LANES}; got T = {T}, S = {S}'
  return None


def _flash(call: Call, spec: Spec, block_size: int | None, interpret: bool) -> Array:
  T, S = call.lengths
  most = BLOCK if block_size is None else block_size
  C, D = (max(c for c in range(LANES, most + 1, LANES) if n % c == 0) for n in (T, S))
  sizes = flash.BlockSizes(block_q=C, block_k_major=D, block_k=D, block_b=1, block_q_major_dkv=C,
                           block_k_major_dkv=D, block_k_dkv=D, block_q_dkv=C, block_k_major_dq=D,
                           block_k_dq=D, block_q_dq=C)  # yapf: disable
  is_causal = spec.visible is not None

  def compute(q: Array, k: Array, v: Array, bias: Array) -> Array:
    bias = jnp.broadcast_to(bias, (T, S))
    shown = bias > -jnp.inf
    sees = jnp.any(shown & np.tri(T, S, dtype=bool) if is_causal else shown, -1, keepdims=True)
    bias = jnp.maximum(bias.astype(jnp.float32), SINK)  # a block of infinities would give nan
    out = flash.flash_attention(*(x[None, None] for x in (q, k, v, bias)),
                                causal=is_causal,
                                block_sizes=sizes)
    return jnp.where(sees, out[0, 0], jnp.zeros_like(q))

  *lead, K, G, _, H = call.query.shape
  query = (call.query * spec.scale).astype(call.query.dtype)
  out = _over_leading(_one_by_one if interpret else jax.vmap, compute, query,
                      call.key[..., None, :, :], call.value[..., None, :, :], call.bias)
  return jnp.moveaxis(out, -2, -4).reshape(*lead, T, K * G, H)


def _over_leading(vmap: Callable[..., Any], compute: Callable[..., Array], *arrays: Array) -> Array:
  """compute() for every index of all but the last two axes; one of 1 is shared and not copied."""
  if arrays[0].ndim == 2:
    return compute(*arrays)
  axes = [None if x.shape[0] == 1 else 0 for x in arrays]
  arrays = tuple(x[0] if axis is None else x for x, axis in zip(arrays, axes))
  rest = functools.partial(_over_leading, vmap, compute)
  if not any(axis == 0 for axis in axes):
    return rest(*arrays)[None]
  return vmap(rest, axes)(*arrays)


def _one_by_one(compute: Callable[..., Array], axes: list[int | None]) -> Callable[..., Array]:
  """jax.vmap, which interpreted kernels do not know."""
  number = lambda arrays: max(len(x) for x, axis in zip(arrays, axes) if axis == 0)
  at = lambda arrays, i: (x if axis is None else x[i] for x, axis in zip(arrays, axes))
  return lambda *arrays: jnp.stack([compute(*at(arrays, i)) for i in range(number(arrays))])


KERNELS = (Kernel('splash', _splash_refuses, _splash, contextlib.nullcontext),
           Kernel('flash', _flash_refuses, _flash, pltpu.force_tpu_interpret_mode))
