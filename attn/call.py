"""One attention call, checked and laid out for work: what every softmax variant shares.

`prepare` turns a public call into a `Call` of arrays, heads first, and a `Spec` of static values;
`visibility` and `scores` are those of whatever is there, the whole or a tile.
"""

import functools
import operator
from typing import Any, Callable, NamedTuple

import jax.numpy as jnp
import numpy as np

from attn import axes, checks, dropout, softmax
from attn.axes import Array, ArrayLike, Dims
from attn.masks import Predicate, causal


class Call(NamedTuple):
  """The arrays of a call; leading axes and heads may be 1 where they are shared."""

  query: Array  # [..., K, G, T, H]
  key: Array  # [..., K, S, H]
  value: Array  # [..., K, S, Hv]
  bias: Any  # [..., K, G, T, S] with any axis 1, a position bias, or None
  mask: Array | None  # bool [..., K, G, T, S] with any axis 1
  query_positions: ArrayLike  # [..., T]
  key_positions: ArrayLike  # [..., S]
  query_segments: ArrayLike | None  # [..., T]
  key_segments: ArrayLike | None  # [..., S]
  query_index: ArrayLike  # [..., T], the place in the caller's arrays: what dropout counts by
  key_index: ArrayLike  # [..., S], -1 for padding
  draw: dropout.Draw | None
  query_blocks: Array | None = None  # [..., K, G, T, r]: of Spec.block keys, seen beside `visible`
  top: Array | None = None  # [..., K, G, T]: the maximum a state is relative to, if it is known,
  total: Array | None = None  # [..., K, G, T]: and the sum of all keys; then both are

  @property
  def lengths(self) -> tuple[int, int]:
    """T, S of what is here."""
    return self.query.shape[-2], self.key.shape[-2]


# The axes of a Call's fields, after the leading ones, and of its draw's heads.
LETTERS = dict(query='KGTH',
               key='KSH',
               value='KSH',
               bias='KGTS',
               mask='KGTS',
               query_positions='T',
               key_positions='S',
               query_segments='T',
               key_segments='S',
               query_index='T',
               key_index='S',
               query_blocks='KGTR',
               top='KGT',
               total='KGT',
               heads='KG')


class Spec(NamedTuple):
  """The static values of a call."""

  visible: Predicate | None  # None: every position sees every other
  scale: float
  dropout_rate: float
  forget: bool = True  # whether keys that no query sees are there, beside those of a key mask
  padded: bool = False  # whether some key_index is -1
  skip: bool = False  # whether a tile finds out at run time that nothing in it is visible
  block: int = 0  # keys in a block of query_blocks
  interleaved: bool = False  # whether the last leading axis runs faster than T in memory


def prepare(query: ArrayLike,
            key: ArrayLike,
            value: ArrayLike,
            bias: Any,
            mask: ArrayLike | None,
            *,
            is_causal: bool,
            scale: float | None,
            query_positions: ArrayLike | None,
            key_positions: ArrayLike | None,
            segment_ids: Any,
            dropout_rate: float,
            dropout_rng: Array | None,
            pattern: Predicate | None = None) -> tuple[Dims, Call, Spec]:
  """Checks the arguments of an attention function and lays them out.

  Args:
    pattern: what the variant lets a position see, besides is_causal.
    The others are those of `attn.vanilla_attention`.

  Returns:
    sizes, arrays and static values of the call.

  Raises:
    ValueError: see `attn.checks`; or positions are needed and missing.
  """
  dims = checks.check_qkv(query, key, value)
  checks.check_flag('is_causal', is_causal)
  checks.check_bias(bias, dims)
  checks.check_mask(mask, dims)
  scale = checks.check_scale(scale, dims.H)
  rate = checks.check_dropout(dropout_rate, dropout_rng)
  placed = is_causal or pattern is not None or not (bias is None or checks.is_array(bias))
  positions = check_positions(query_positions, key_positions, dims, needed=placed)
  segments = check_segments(segment_ids, dims)
  visible = pattern
  if is_causal:
    visible = causal() if pattern is None else causal() & pattern
  q, k, v = heads_first(query, key, value, dims)
  ones = (1,) * len(dims.leading)
  draw = None
  if rate and dropout_rng is not None:
    draw = dropout.draw(dropout_rng, (*dims.leading, dims.K, dims.G))
  index = lambda n: np.arange(n, dtype=np.int32).reshape(*ones, n)
  call = Call(q, k, v,
              bias if bias is None or not checks.is_array(bias) else split_heads(bias, dims),
              None if mask is None else split_heads(mask, dims), *positions, *segments,
              index(dims.T), index(dims.S), draw)
  # With the default positions every query sees the key at its own place.
  placed = query_positions is not None or key_positions is not None
  per_query = call.mask is not None and call.mask.shape[-2] > 1
  return dims, call, Spec(visible, scale, rate, forget=placed or per_query or dims.T != dims.S)


def check_positions(query_positions: ArrayLike | None, key_positions: ArrayLike | None, dims: Dims,
                    *, needed: bool) -> tuple[ArrayLike, ArrayLike]:
  """Returns positions of the rank [..., T] and [..., S]; arange where they are not given.

  Raises:
    ValueError: T != S, positions are needed, and where the queries stand is not said.
  """
  if needed and query_positions is None and dims.T != dims.S:
    raise ValueError(
        f'query_positions must say where the queries stand among the keys when T = {dims.T} '
        f'differs from S = {dims.S}; for the last keys, np.arange({dims.S - dims.T}, {dims.S})')
  given = (('query_positions', query_positions, dims.T), ('key_positions', key_positions, dims.S))
  query, key = (np.arange(n, dtype=np.int32).reshape((1,) * len(dims.leading) + (n,))
                if x is None else checks.check_per_token(name, x, n, dims) for name, x, n in given)
  return query, key


def check_segments(segment_ids: Any, dims: Dims) -> tuple[ArrayLike | None, ArrayLike | None]:
  """Returns segment ids of queries [..., T] and keys [..., S], or None twice."""
  if segment_ids is None:
    return None, None
  if isinstance(segment_ids, (tuple, list)):
    if len(segment_ids) != 2:
      raise ValueError(
          f'segment_ids must be an array or a pair (queries, keys); got {len(segment_ids)} entries')
    query, key = segment_ids
  elif dims.T != dims.S:
    raise ValueError(
        f'segment_ids must be a pair (queries, keys) when T = {dims.T} differs from S = {dims.S}')
  else:
    query = key = segment_ids
  return (checks.check_per_token('segment_ids', query, dims.T,
                                 dims), checks.check_per_token('segment_ids', key, dims.S, dims))


def heads_first(query: ArrayLike, key: ArrayLike, value: ArrayLike,
                dims: Dims) -> tuple[Array, Array, Array]:
  """query [..., T, N, H] to [..., K, G, T, H]; key, value [..., S, K, H] to [..., K, S, H]."""
  # Reshaped before it is transposed: so the transposition cancels where a loop undoes it.
  q = jnp.asarray(query).reshape(*dims.leading, dims.T, dims.K, dims.G, dims.H)
  key, value = jnp.swapaxes(jnp.asarray(key), -3, -2), jnp.swapaxes(jnp.asarray(value), -3, -2)
  return jnp.moveaxis(q, -4, -2), key, value


def heads_last(output: Array, dims: Dims) -> Array:
  """[..., K, G, T, Hv] to [..., T, N, Hv]."""
  return jnp.moveaxis(output, -2, -4).reshape(*dims.leading, dims.T, dims.N, dims.Hv)


def split_heads(x: ArrayLike, dims: Dims) -> Array:
  """The head axis of [..., N, T, S] (or 1 in its place) as K, G."""
  heads = (1, 1) if x.shape[-3] == 1 else (dims.K, dims.G)
  return jnp.asarray(x).reshape(*x.shape[:-3], *heads, *x.shape[-2:])


def along(call: Call, letter: str, function: Callable[[str, Any, int], Any]) -> Call:
  """Applies function(name, array, axis) to the arrays with an entry per query, 'T', or key, 'S'."""
  fields = {}
  for name, x in call._asdict().items():
    if checks.is_array(x) and letter in LETTERS[name]:
      fields[name] = function(name, x, x.ndim - len(LETTERS[name]) + LETTERS[name].index(letter))
  return call._replace(**fields)


def fill(name: str, x: Any, axis: int, length: int) -> Any:
  """Fills an axis up to length; the new queries or keys have index -1 and nothing sees them."""
  missing = length - x.shape[axis]
  if not missing or (name in ('bias', 'mask') and x.shape[axis] == 1):
    return x
  widths = [(0, missing if a == axis else 0) for a in range(x.ndim)]
  library = np if isinstance(x, np.ndarray) else jnp
  if name.endswith('positions'):  # by the last one, so that intervals of positions stay narrow
    return library.pad(x, widths, mode='edge')
  return library.pad(x, widths, constant_values=-1 if name.endswith('index') else 0)


def visibility(call: Call, spec: Spec) -> Array | None:
  """Which keys each query may see, [..., K, G, T, S] with axes of 1 where they share; None: all."""
  rows = lambda x: jnp.asarray(x)[..., None, None, :, None]
  columns = lambda x: jnp.asarray(x)[..., None, None, None, :]
  parts = [] if call.mask is None else [call.mask]
  if spec.visible is not None:
    seen = spec.visible(rows(call.query_positions), columns(call.key_positions))
    if call.query_blocks is not None:
      own = columns(call.key_positions) // spec.block
      seen |= jnp.any(call.query_blocks[..., :, None, :] == own[..., None], -1)
    parts.append(seen)
  if call.query_segments is not None:
    parts.append(rows(call.query_segments) == columns(call.key_segments))
  if spec.padded:
    parts.append(columns(call.key_index) >= 0)
  return functools.reduce(operator.and_, parts) if parts else None


def forget_unseen(call: Call, visible: Array | None) -> Call:
  """Zeroes keys and values no query here sees, and queries that see nothing: no effect at all.

  Hiding the logit is not enough, since 0 * nan is nan in the products with value, and with key in
  the gradient.
  """
  if visible is None:
    return call
  keys, queries = visible.any(axis=(-3, -2))[..., None], visible.any(axis=-1)[..., None]
  keep = lambda seen, x: jnp.where(seen, x, jnp.zeros_like(x))
  return call._replace(query=keep(queries, call.query),
                       key=keep(keys, call.key),
                       value=keep(keys, call.value))


def forget_masked(call: Call) -> Call:
  """Zeroes the keys and values that a mask without a query axis hides."""
  if call.mask is None or call.mask.shape[-2] != 1:
    return call
  seen = call.mask.any(-3)[..., 0, :, None]
  keep = lambda x: jnp.where(seen, x, jnp.zeros_like(x))
  return call._replace(key=keep(call.key), value=keep(call.value))


def position_bias(bias: Any, call: Call, heads: tuple[int, ...]) -> Array:
  """A position bias of K, G heads on the positions of a call: [..., K, G, T, S]."""
  tile = bias(jnp.asarray(call.query_positions), jnp.asarray(call.key_positions))
  K, G = heads
  if tile.shape[-3] not in (1, K * G):
    raise ValueError(
        f'bias must have {K * G} heads, as query has, or one for all; got {tile.shape[-3]} heads')
  return tile.reshape(*tile.shape[:-3], *((1, 1) if tile.shape[-3] == 1 else (K, G)),
                      *tile.shape[-2:])


def scores(call: Call, spec: Spec, visible: Array | None) -> Array:
  """scale * q.k + bias, hidden where not visible: [..., K, G, T, S] in float32 at least."""
  wide = axes.wide(call.query.dtype)
  query, scale = call.query, jnp.asarray(spec.scale, wide)
  early = query.dtype == wide  # cheaper, but would round a narrow query
  query = query * scale if early else query
  logits = softmax.grouped('...kth,...ksh->...kts', query, call.key, wide)
  logits = logits if early else logits * scale
  if call.bias is not None:
    heads = call.query.shape[-4:-2]
    bias = call.bias if checks.is_array(call.bias) else position_bias(call.bias, call, heads)
    logits += bias.astype(wide)
  return softmax.hide(logits, visible)


def dropped(call: Call, spec: Spec, dtype: Any) -> Array | None:
  """What dropout multiplies the weights [..., K, G, T, S] by; None without dropout."""
  if call.draw is None:
    return None
  return dropout.scale(call.draw, spec.dropout_rate, jnp.asarray(call.query_index),
                       jnp.asarray(call.key_index), dtype)


def key_mask(call: Call, variant: str) -> tuple[Call, Array | None]:
  """Returns the call without its mask, and the mask per key, [..., K, S] with any axis 1.

  Where the query heads of one key head are masked differently, each gets a copy of the keys.

  Raises:
    NotImplementedError: the mask differs between queries.
  """
  if call.mask is None or not call.mask.shape[-2]:
    return call._replace(mask=None), None
  if call.mask.shape[-2] > 1:
    raise NotImplementedError(
        f'{variant}_attention has no mask per query: its keys are summed before any query sees '
        f'them; got a query axis of {call.mask.shape[-2]}, use one of 1, as in a padding mask')
  mask = jnp.broadcast_to(call.mask[..., 0, :], (*call.mask.shape[:-2], call.key.shape[-2]))
  if mask.shape[-2] > 1:
    K, G, S = mask.shape[-3:]
    call, mask = ungroup(call), mask.reshape(*mask.shape[:-3], K * G, 1, S)
  return call._replace(mask=None), mask[..., 0, :]


def ungroup(call: Call) -> Call:
  """The call with a key head for each query head: K = N, G = 1. Bias and mask must be None."""
  K, G = call.query.shape[-4:-2]
  split = lambda x: x.reshape(*x.shape[:-4], K * G, 1, *x.shape[-2:])
  draw = call.draw and call.draw._replace(
      heads=call.draw.heads.reshape(*call.draw.heads.shape[:-2], K * G, 1))
  return call._replace(query=split(call.query),
                       key=jnp.repeat(call.key, G, -3),
                       value=jnp.repeat(call.value, G, -3),
                       draw=draw)


def forget_blind(call: Call, keys_seen: Array | None) -> Call:
  """Zeroes the queries of a batch row, or head, all of whose keys [..., K, S] are masked."""
  if keys_seen is None:
    return call
  sees = keys_seen.any(-1)[..., None, None, None]
  return call._replace(query=jnp.where(sees, call.query, jnp.zeros_like(call.query)))
