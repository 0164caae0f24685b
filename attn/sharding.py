"""The variants over a mesh axis: every device holds an equal run of one sequence.

    mesh = jax.make_mesh((8,), ('sequence',))
    attend = functools.partial(sharding.attention, 'local', axis_name='sequence', window=(128, 0),
                               is_causal=True)
    spec = jax.P(None, 'sequence')  # [B, T, N, H]
    output = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(q, k, v)

`sharded_attention` does the same from outside. The result is that of the variant's own function on
the whole sequence. What is sent: by patterns near the diagonal, the keys that queries of the next
device reach; by other patterns, all keys once round; by a Linformer its slots; by a Performer its
sums.
"""

import functools
import inspect
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from attn import call as calls
from attn import checks, softmax, sums, tiles
from attn.axes import Array, ArrayLike, Dims
from attn.backends import IMPLEMENTATIONS
from attn.call import Call, Spec
from attn.masks import Predicate
from attn.ring import attend, Ring
from attn.softmax import State
from attn.variants import bigbird, fixed, strided, VARIANTS

_KEY_FIELDS = ('key', 'value', 'key_positions', 'key_segments', 'key_index')


def attention(name: str,
              query: ArrayLike,
              key: ArrayLike,
              value: ArrayLike,
              bias: Any = None,
              mask: ArrayLike | None = None,
              *,
              axis_name: str,
              params: dict[str, Array] | None = None,
              is_causal: bool = False,
              scale: float | None = None,
              query_positions: ArrayLike | None = None,
              key_positions: ArrayLike | None = None,
              segment_ids: Any = None,
              dropout_rate: float = 0.0,
              dropout_rng: Array | None = None,
              **options: Any) -> Array:
  """A variant inside `jax.shard_map`, on this device's runs of T queries and S keys.

  Args:
    name: a row of VARIANTS.
    query: [..., T, N, H], this device's run.
    key: [..., S, K, H].
    value: [..., S, K, Hv].
    bias: as in `vanilla_attention`. An array with a query axis of T has all S * size keys, one with
      a query axis of 1 this device's S.
    mask: boolean; its axes as those of bias: a padding mask is [..., 1, 1, S].
    axis_name: the mesh axis along which the sequence is cut, into equal runs in its order.
    params: the variant's arrays for the whole sequence, the same on every device.
    is_causal, scale: as in `vanilla_attention`.
    query_positions, key_positions, segment_ids: of this device's queries and keys; positions count
      through the whole sequence if None.
    dropout_rate, dropout_rng: as in `vanilla_attention`; the key is the same on every device, and
      the same pairs are dropped as without a mesh.
    **options: of the variant's function; of BigBird block_size, of others those of cost too.

  Returns:
    [..., T, N, Hv] in query's dtype: of the variant's function on the whole sequence, this device's
    run.

  Raises:
    TypeError, ValueError: as the variant's function does; or a run's length does not suit the
      variant.
    NotImplementedError: the variant cannot do what is asked, or not over a mesh axis.
  """
  if name not in VARIANTS:
    raise ValueError(f'name must be one of {", ".join(VARIANTS)}; got {name!r}')
  options = _check_options(name, (params or {}) | options)
  dims = checks.check_qkv(query, key, value)
  size = lax.axis_size(axis_name)
  placed = query_positions is not None or key_positions is not None
  arrays: dict[str, Any] = {
      field: x for field, x in (('bias', bias), ('mask', mask)) if checks.is_array(x)
  }
  of_keys = tuple(field for field, x in arrays.items() if _is_of_keys(field, x, dims, size))
  ring = Ring(axis_name, size, dims.T, dims.S, placed, (*_KEY_FIELDS, *of_keys))
  common = dict(is_causal=is_causal,
                scale=scale,
                query_positions=query_positions,
                key_positions=key_positions,
                segment_ids=segment_ids,
                dropout_rate=dropout_rate,
                dropout_rng=dropout_rng)
  if name == 'linformer':
    return sums.linformer_over(ring, query, key, value, bias, mask, **common, **options)
  if name == 'performer':
    return sums.performer_over(ring, query, key, value, bias, mask, **common, **options)
  chosen = options.pop('implementation', 'auto')
  if checks.check_choice('implementation', chosen, IMPLEMENTATIONS) == 'pallas':
    raise NotImplementedError(
        "implementation must be 'auto' or 'xla' over a mesh axis: what a kernel "
        "has seen of one device's keys cannot be merged; got 'pallas'")
  whole = {field: x for field, x in arrays.items() if field not in of_keys and size > 1}
  call, spec = _prepare(name, query, key, value, *(None if field in whole else x for field, x in (
      ('bias', bias), ('mask', mask))), ring=ring, options=options, common=common)  # yapf: disable
  for field, x in whole.items():
    check = checks.check_bias if field == 'bias' else checks.check_mask
    check(x, dims._replace(S=dims.S * size))
    split: dict[str, Any] = {field: calls.split_heads(x, dims)}
    call = call._replace(**split)
  state = _visit(name, call, spec, ring, is_causal, bool(whole), options)
  return calls.heads_last(softmax.finish(state, call.query.dtype), dims)


def sharded_attention(name: str,
                      query: ArrayLike,
                      key: ArrayLike,
                      value: ArrayLike,
                      bias: Any = None,
                      mask: ArrayLike | None = None,
                      *,
                      mesh: Mesh,
                      axis_name: str,
                      params: dict[str, Array] | None = None,
                      query_positions: ArrayLike | None = None,
                      key_positions: ArrayLike | None = None,
                      segment_ids: Any = None,
                      dropout_rng: Array | None = None,
                      **options: Any) -> Array:
  """`attention` of whole arrays, whose sequence is cut along a mesh axis; use it under jit.

  Other axes of the mesh stay as they are, so that batch and heads may be sharded over them.

  Args:
    name, params: as in `attention`.
    query: [..., T, N, H], with T and S multiples of the axis' size.
    key: [..., S, K, H].
    value: [..., S, K, Hv].
    bias, mask, query_positions, key_positions, segment_ids, dropout_rng, **options: as in the
      variant's function.
    mesh: what the arrays live on.
    axis_name: the axis of the mesh that cuts the sequence.

  Returns:
    [..., T, N, Hv] in query's dtype, cut as query is.

  Raises:
    TypeError, ValueError, NotImplementedError: as `attention` does; or a length is no multiple of
      the axis' size.
  """
  dims = checks.check_qkv(query, key, value)
  if axis_name not in mesh.shape:
    raise ValueError(f'axis_name must be an axis of the mesh, {", ".join(mesh.shape)}; '
                     f'got {axis_name!r}')
  size = mesh.shape[axis_name]
  for what, length in (('T', dims.T), ('S', dims.S)):
    if length % size:
      raise ValueError(f'{what} = {length} is no multiple of the {size} devices along {axis_name}; '
                       f'pad to {-(-length // size) * size} and mask the padding')

  def cut(x: Any, axis: int) -> PartitionSpec:
    """An array's axis over the mesh axis; what has none, or is no array, is whole everywhere."""
    if not checks.is_array(x) or x.ndim < -axis or x.shape[axis] == 1 < size:
      return PartitionSpec()
    return PartitionSpec(*(None,) * (x.ndim + axis), axis_name)

  def of_logits(x: Any) -> PartitionSpec:
    has_queries = checks.is_array(x) and x.ndim > 1 and x.shape[-2] > 1
    return cut(x, -2 if has_queries else -1)

  row = cut(query, -3)
  tokens = jax.tree.map(lambda x: cut(x, -1), (query_positions, key_positions, segment_ids))
  specs = (row, cut(key, -3), cut(value, -3), of_logits(bias), of_logits(mask), PartitionSpec(),
           PartitionSpec(), *tokens)

  def call(query, key, value, bias, mask, params, rng, query_positions, key_positions, segment_ids):
    return attention(name, query, key, value, bias, mask, axis_name=axis_name, params=params,
                     query_positions=query_positions, key_positions=key_positions,
                     segment_ids=segment_ids, dropout_rng=rng, **options)  # yapf: disable

  mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=row, axis_names={axis_name})
  return mapped(query, key, value, bias, mask, params or {}, dropout_rng, query_positions,
                key_positions, segment_ids)


def _check_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
  """Returns the options of a variant, with its function's defaults."""
  known = inspect.signature(VARIANTS[name].attention).parameters
  for option in sorted(options.keys() - set(VARIANTS[name].options)):
    raise TypeError(f'{name} has no option {option}; its options are: '
                    f'{", ".join(VARIANTS[name].options) or "none"}')
  found = {option: options.get(option, known[option].default) for option in VARIANTS[name].options}
  for option, value in found.items():
    if value is inspect.Parameter.empty:
      raise TypeError(f'{name} needs option {option}')
  return found


def _is_of_keys(field: str, x: ArrayLike, dims: Dims, size: int) -> bool:
  """Whether an array's columns are those of this device's keys, which it then goes with.

  Raises:
    ValueError: it has other columns.
  """
  if x.ndim < 2:
    return False  # which is refused elsewhere
  T, S = x.shape[-2:]
  if S == dims.S and (T == 1 or size == 1):
    return True
  if S not in (1, dims.S * size):
    wanted = f'{dims.S}, of this device' if T == 1 else f'{dims.S * size}, of all devices'
    raise ValueError(f'{field} with a query axis of {T} must have a key axis of {wanted}; '
                     f'got {tuple(x.shape)}')
  return False


def _prepare(name: str, query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: Any,
             mask: ArrayLike | None, *, ring: Ring, options: dict[str, Any],
             common: dict[str, Any]) -> tuple[Call, Spec]:
  """The call of a pattern on this device's run, its positions counted from there."""
  is_causal, size = checks.check_flag('is_causal', common['is_causal']), 0
  if name == 'bigbird':
    size = checks.check_int('block_size', options['block_size'], 1)
    blocks = bigbird.check_blocks(options['random_blocks'])
    pattern: Predicate | None = bigbird.near_and_global(size, blocks.shape[-2], is_causal)
  else:
    make = VARIANTS[name].pattern
    assert make is not None
    pattern = make(is_causal=is_causal, **options)
  if ring.placed:  # what is not said counts through the whole sequence
    own = lambda length: ring.here * length + np.arange(length, dtype=np.int32)
    T, S = query.shape[-3], key.shape[-3]
    if common['key_positions'] is None:
      common = common | {'key_positions': own(S)}
    elif common['query_positions'] is None and T == S:
      common = common | {'query_positions': own(T)}
  dims, call, spec = calls.prepare(query, key, value, bias, mask, **common, pattern=pattern)
  if not size:
    return call, spec
  bigbird.check_blocks(blocks, dims.N)
  number, length = blocks.shape[-2], dims.T * ring.size
  if not ring.placed and number != -(-length // size):
    raise ValueError(f'random_blocks must list {-(-length // size)} blocks of block_size = {size} '
                     f'for T = {length} on all devices; got {blocks.shape}')
  chosen = bigbird.by_heads(bigbird.choose(blocks, is_causal), dims.K)
  positions = jnp.asarray(call.query_positions)
  positions = positions if ring.placed else positions + ring.here * dims.T
  lists = bigbird.lists_of(chosen, size, positions)
  return call._replace(query_blocks=lists), spec._replace(block=size)


def _visit(name: str, call: Call, spec: Spec, ring: Ring, is_causal: bool, has_whole: bool,
           options: dict[str, Any]) -> State:
  """The state of this device's queries after all keys that a pattern lets them see."""
  go = functools.partial(attend, ring=ring)
  cost = options.get('block_size') if name != 'bigbird' else None, options.get('step_size')
  stride = options.get('stride', 0)
  if stride and ring.T == ring.S and ring.T and not (ring.placed or has_whole or ring.T % stride):
    if name == 'strided':
      return strided.window_and_columns(call, spec, stride, is_causal, *cost, go, ring.size)
    state = fixed.own_block(ring.indexed(call), spec, stride, is_causal, *cost)
    others = fixed.summaries(call, spec, stride, options['summary'], is_causal, *cost, go)
    return softmax.merge(state, others)
  if name in ('local', 'longformer'):
    width = max(checks.check_window(options['window'], is_causal))
    return go(call, spec, tiles.band_block(width, cost[0]), cost[1])
  return go(call, spec, *cost)
