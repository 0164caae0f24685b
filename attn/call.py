"""One attention call, checked and laid out for work: what every softmax variant shares.

`prepare` turns a public call into a `Call` of arrays, heads first, and a `Spec` of static values.
Groups of queries and keys can then be gathered (`take`), and `visibility` and `scores` are those of
whatever is there, the whole or a tile.
"""

import functools
import operator
from typing import Any, NamedTuple

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

  @property
  def lengths(self) -> tuple[int, int]:
    """T, S of what is here."""
    return self.query.shape[-2], self.key.shape[-2]


class Spec(NamedTuple):
  """The static values of a call."""

  visible: Predicate | None  # None: every position sees every other
  scale: float
  dropout_rate: float
  padded: bool = False  # whether some key_index is -1


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
  return dims, call, Spec(visible, scale, rate)


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
  q = jnp.swapaxes(jnp.asarray(query), -3, -2).reshape(*dims.leading, dims.K, dims.G, dims.T,
                                                       dims.H)
  return q, jnp.swapaxes(jnp.asarray(key), -3, -2), jnp.swapaxes(jnp.asarray(value), -3, -2)


def heads_last(output: Array, dims: Dims) -> Array:
  """[..., K, G, T, Hv] to [..., T, N, Hv]."""
  return jnp.swapaxes(output.reshape(*dims.leading, dims.N, dims.T, dims.Hv), -3, -2)


def split_heads(x: ArrayLike, dims: Dims) -> Array:
  """The head axis of [..., N, T, S] (or 1 in its place) as K, G."""
  heads = (1, 1) if x.shape[-3] == 1 else (dims.K, dims.G)
  return jnp.asarray(x).reshape(*x.shape[:-3], *heads, *x.shape[-2:])


def take(call: Call, query_index: np.ndarray, key_index: np.ndarray) -> Call:
  """Gathers groups of queries [E, T'] and of keys [E, S']; E becomes the innermost leading axis.

  Group e of the queries meets group e of the keys alone. Index -1 is padding.
  """
  lead = call.query_index.ndim - 1

  def one(x, axis, index):
    if x is None:
      return None
    library = np if isinstance(x, np.ndarray) else jnp
    return library.moveaxis(library.take(x, np.maximum(index, 0), axis=axis), axis - 1, lead)

  def both(x):
    if not checks.is_array(x):
      return x
    rows = np.maximum(query_index, 0)[:, :, None] if x.shape[-2] > 1 else np.zeros(
        (1, 1, 1), np.int32)
    columns = np.maximum(key_index, 0)[:, None, :] if x.shape[-1] > 1 else np.zeros(
        (1, 1, 1), np.int32)
    return jnp.moveaxis(x[..., rows, columns], -3, lead)

  def place(x, index):
    return np.where(index < 0, np.int32(-1), one(x, -1, index))

  draw = call.draw and call.draw._replace(heads=np.expand_dims(call.draw.heads, lead))
  return Call(one(call.query, -2, query_index), one(call.key, -2, key_index),
              one(call.value, -2, key_index), both(call.bias), both(call.mask),
              one(call.query_positions, -1, query_index), one(call.key_positions, -1, key_index),
              one(call.query_segments, -1, query_index), one(call.key_segments, -1, key_index),
              place(call.query_index, query_index), place(call.key_index, key_index), draw)


def visibility(call: Call, spec: Spec) -> Array | None:
  """Which keys each query may see, [..., K, G, T, S] with axes of 1 where they share; None: all."""
  rows = lambda x: jnp.asarray(x)[..., None, None, :, None]
  columns = lambda x: jnp.asarray(x)[..., None, None, None, :]
  parts = [] if call.mask is None else [call.mask]
  if spec.visible is not None:
    parts.append(spec.visible(rows(call.query_positions), columns(call.key_positions)))
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


def position_bias(bias: Any, call: Call) -> Array:
  """A position bias on the positions of a call: [..., K, G, T, S]."""
  tile = bias(jnp.asarray(call.query_positions), jnp.asarray(call.key_positions))
  K, G = call.query.shape[-4:-2]
  if tile.shape[-3] not in (1, K * G):
    raise ValueError(
        f'bias must have {K * G} heads, as query has, or one for all; got {tile.shape[-3]} heads')
  return tile.reshape(*tile.shape[:-3], *((1, 1) if tile.shape[-3] == 1 else (K, G)),
                      *tile.shape[-2:])


def scores(call: Call, spec: Spec, visible: Array | None) -> Array:
  """scale * q.k + bias, hidden where not visible: [..., K, G, T, S] in float32 at least."""
  wide = axes.wide(call.query.dtype)
  logits = jnp.einsum('...kgth,...ksh->...kgts', call.query, call.key, preferred_element_type=wide)
  logits *= jnp.asarray(spec.scale, wide)
  if call.bias is not None:
    bias = call.bias if checks.is_array(call.bias) else position_bias(call.bias, call)
    logits += bias.astype(wide)
  return softmax.hide(logits, visible)


def dropped(call: Call, spec: Spec, dtype: Any) -> Array | None:
  """What dropout multiplies the weights [..., K, G, T, S] by; None without dropout."""
  if call.draw is None:
    return None
  return dropout.scale(call.draw, spec.dropout_rate, jnp.asarray(call.query_index),
                       jnp.asarray(call.key_index), dtype)


def groups(length: int, size: int) -> np.ndarray:
  """0 ... length - 1 in rows, int32 [ceil(length / size), size]; -1 fills the last row."""
  index = np.full(-(-length // size) * size, -1, np.int32)
  index[:length] = np.arange(length)
  return index.reshape(-1, size)


def put_back(state: softmax.State, index: np.ndarray, length: int) -> softmax.State:
  """Undoes `take` for queries [E, T']: a state [..., E, K, G, T'] becomes [..., K, G, length]."""
  place = np.zeros(length, np.int32)
  place[index[index >= 0]] = np.flatnonzero(index.ravel() >= 0)

  def one(x, axis):
    x = jnp.moveaxis(x, axis, axis + 2)  # E beside T'
    x = x.reshape(*x.shape[:axis + 2], index.size, *x.shape[axis + 4:])
    return jnp.take(x, place, axis=axis + 2)

  lead = state.max.ndim - 4
  return softmax.State(*(one(x, lead) for x in state))


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
