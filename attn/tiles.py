"""Exact softmax attention tile by tile: visit the key tiles a pattern can reach, merge, finish.

Memory is O(T + S): the scan carries one state per query, and the backward pass computes each tile
again instead of keeping it, from the output o, the maximum m and the sum z = sum_s exp(l_s - m).

    p = exp(l - m) / z   dp = do v^T     dl = p (dp - do.o + dlog z)
    dv = p^T do          dq = dl k       dk = dl^T q

Source: Dao et al. 2022, FlashAttention, algorithms 1 and 4, https://arxiv.org/abs/2205.14135.
"""

import functools
from typing import Any, Callable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn import axes
from attn import call as calls
from attn import checks, softmax
from attn.axes import Array
from attn.call import Call, Spec
from attn.softmax import State

DEFAULT_BLOCK = 512


class _Inputs(NamedTuple):
  """What gradients reach."""
  query: Array
  key: Array
  value: Array
  bias: Any


def attend(call: Call, spec: Spec, block_size: int | None = None) -> State:
  """The state of every query after the keys it may see.

  Args:
    call: T queries and S keys.
    spec: its static values.
    block_size: at most so many queries and keys in a tile; DEFAULT_BLOCK if None. Only cost depends
      on it.

  Returns:
    the state [..., K, G, T] in float32 at least.
  """
  block_size = DEFAULT_BLOCK if block_size is None else checks.check_int(
      'block_size', block_size, 1)
  T, S = call.query.shape[-2], call.key.shape[-2]
  wide = axes.wide(call.query.dtype)
  if 0 in call.query.shape[:-1] or not S:
    return softmax.empty(call.query.shape[:-1], call.value.shape[-1], wide)
  (rows, C), (columns, D) = _split(T, block_size), _split(S, block_size)
  call, spec = _pad(call, spec, rows * C, columns * D)
  pairs = _layout(call, spec, rows, columns)
  call = axes.vary_alike(call)
  inputs = _Inputs(call.query, call.key, call.value, call.bias)
  output, top, log_sum = _tiled(spec, C, D)(inputs, call, pairs)
  output, top, log_sum = output[..., :T, :], lax.stop_gradient(top[..., :T]), log_sum[..., :T]
  total = jnp.exp(softmax.hide(log_sum, top > softmax.HIDDEN))
  return State(top, total, output * total[..., None])


def _split(length: int, block_size: int) -> tuple[int, int]:
  """How many tiles, and of what size: as few as block_size allows, then as small as that allows."""
  number = -(-length // block_size)
  return number, -(-length // number)


# Axes, from the end, along which queries and keys follow one another.
_QUERY_AXES = dict(query=-2,
                   bias=-2,
                   mask=-2,
                   query_positions=-1,
                   query_segments=-1,
                   query_index=-1)
_KEY_AXES = dict(key=-2,
                 value=-2,
                 bias=-1,
                 mask=-1,
                 key_positions=-1,
                 key_segments=-1,
                 key_index=-1)


def _along(call: Call, places: dict[str, int], function: Callable[..., Any]) -> Call:
  """Applies function(name, array, axis) to the fields that have one entry per query or key."""
  fields = {name: (getattr(call, name), axis) for name, axis in places.items()}
  return call._replace(**{
      name: function(name, x, axis) for name, (x, axis) in fields.items() if checks.is_array(x)
  })


def _pad(call: Call, spec: Spec, T: int, S: int) -> tuple[Call, Spec]:
  """The call with T queries and S keys; the new ones have index -1 and nothing sees them."""

  def pad(to):

    def one(name, x, axis):
      width = to - x.shape[axis]
      if not width or (name in ('bias', 'mask') and x.shape[axis] == 1):
        return x
      widths = [(0, width if a == axis % x.ndim else 0) for a in range(x.ndim)]
      library = np if isinstance(x, np.ndarray) else jnp
      if name.endswith('positions'):  # by the last one, so that a tile's interval stays narrow
        return library.pad(x, widths, mode='edge')
      return library.pad(x, widths, constant_values=-1 if name.endswith('index') else 0)

    return one

  padded = spec.padded or S > call.key.shape[-2]
  return _along(_along(call, _QUERY_AXES, pad(T)), _KEY_AXES, pad(S)), spec._replace(padded=padded)


def _layout(call: Call, spec: Spec, rows: int, columns: int) -> np.ndarray:
  """The pairs (query tile, key tile) to visit, int32 [P, 2]: all the pattern may connect.

  Positions known only at run time say nothing: then all pairs.
  """
  query, key = call.query_positions, call.key_positions
  if spec.visible is None or not (isinstance(query, np.ndarray) and isinstance(key, np.ndarray)):
    reached = np.ones((rows, columns), bool)
  else:
    ends = lambda x, n: (f(f(x.reshape(*x.shape[:-1], n, -1), -1).reshape(-1, n), 0)
                         for f in (np.min, np.max))
    (q_first, q_last), (k_first, k_last) = ends(query, rows), ends(key, columns)
    reached = np.broadcast_to(
        spec.visible.reaches(q_first[:, None], q_last[:, None], k_first, k_last), (rows, columns))
  return np.argwhere(reached).astype(np.int32)


@functools.lru_cache(maxsize=256)
def _tiled(spec: Spec, C: int, D: int) -> Callable[..., tuple[Array, Array, Array]]:
  """The function (inputs, call, pairs) -> (output, max, log of the sum) for tiles of [C, D].

  The maximum and the sum stay apart, since log(sum) would be lost beside a large maximum. A step
  carries all it reads and is made once for a spec, so that a second call, jitted or not, finds the
  first one's program.
  """

  def compute(call: Call, pair: Array) -> tuple[Call, Array, Array | None]:
    tile = _cut(call, pair, C, D)
    visible = calls.visibility(tile, spec)
    tile = calls.forget_unseen(tile, visible)
    logits = calls.scores(tile, spec, visible)
    return tile, logits, calls.dropped(tile, spec, logits.dtype)

  def visit(carry: Any, pair: Array) -> tuple[Any, None]:
    state, call = carry
    tile, logits, factor = compute(call, pair)
    seen = softmax.visit(logits, tile.value, factor)
    new = softmax.merge(State(*(_rows(x, call, pair, C) for x in state)), seen)
    start, axis = pair[0] * C, call.query.ndim - 2
    state = (lax.dynamic_update_slice_in_dim(x, y, start, axis) for x, y in zip(state, new))
    return (State(*state), call), None

  def forward(inputs: _Inputs, call: Call, pairs: Array) -> tuple[Array, Array, Array]:
    call = call._replace(**inputs._asdict())
    state = softmax.empty(call.query.shape[:-1], call.value.shape[-1], axes.wide(call.query.dtype))
    state, _ = _over(visit, axes.vary_alike((state, call)), pairs)
    total = jnp.where(state.sum > 0, state.sum, jnp.ones_like(state.sum))
    return softmax.finish(state), state.max, jnp.log(total)

  def revisit(carry: Any, pair: Array) -> tuple[Any, None]:
    grads, call, *rows = carry
    tile, logits, factor = compute(call, pair)
    do, top, log_sum, shift = (_rows(x, call, pair, C) for x in rows)
    wide, narrow = logits.dtype, lambda x: x.astype(call.value.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    p = jnp.exp((logits - softmax.finite(top)[..., None]) - log_sum[..., None])
    dp = product('...kgth,...ksh->...kgts', narrow(do), tile.value)
    weights, dp = (p, dp) if factor is None else (p * factor, dp * factor)
    dl = p * (dp + shift[..., None])
    dv = product('...kgts,...kgth->...ksh', narrow(weights), narrow(do))
    ds = narrow(dl * jnp.asarray(spec.scale, wide))
    dq = product('...kgts,...ksh->...kgth', ds, tile.key)
    dk = product('...kgts,...kgth->...ksh', ds, tile.query)
    row, column, axis = pair[0] * C, pair[1] * D, call.query.ndim - 2
    grads = _Inputs(_add(grads.query, dq, {axis: row}), _add(grads.key, dk, {axis - 1: column}),
                    _add(grads.value, dv, {axis - 1: column}),
                    _add_bias(grads.bias, dl, tile, row, column))
    return (grads, call, *rows), None

  def backward(kept: Any, cotangents: Any) -> tuple[_Inputs, None, None]:
    inputs, call, pairs, output, top, log_sum = kept
    d_output, _, d_log_sum = cotangents  # the maximum is a constant to whoever merges the state
    shift = d_log_sum - jnp.sum(d_output * output, -1)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, axes.wide(x.dtype)), inputs)
    carry = (zeros, call._replace(**inputs._asdict()), d_output, top, log_sum, shift)
    grads = _over(revisit, axes.vary_alike(carry), pairs)[0]
    return jax.tree.map(_cotangent, grads, inputs), None, None

  tiled = jax.custom_vjp(forward)
  tiled.defvjp(lambda *args: ((out := forward(*args)), (*args, *out)), backward)
  return tiled


def _cut(call: Call, pair: Array, C: int, D: int) -> Call:
  """The queries and keys of a pair of tiles."""

  def at(start, size):
    return lambda name, x, axis: x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(
        jnp.asarray(x), start * size, size, axis % x.ndim)

  return _along(_along(call, _QUERY_AXES, at(pair[0], C)), _KEY_AXES, at(pair[1], D))


def _rows(x: Array, call: Call, pair: Array, C: int) -> Array:
  """The part of [..., K, G, T, ...] that belongs to a pair's queries."""
  return lax.dynamic_slice_in_dim(x, pair[0] * C, C, call.query.ndim - 2)


def _cotangent(grad: Array, x: Array) -> Any:
  """A gradient in the dtype of what it is for; integers have none."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return np.zeros(x.shape, jax.dtypes.float0)
  return grad.astype(x.dtype)


def _over(step: Callable[..., Any], start: Any, pairs: Array) -> Any:
  """What remains after a step for every pair; a single one needs no loop to be compiled."""
  if len(pairs) == 1:
    return step(start, pairs[0])[0]
  return lax.scan(step, start, pairs)[0]


def _add(total: Array, part: Array, starts: dict[int, Array]) -> Array:
  """total with part added at the given start of the named axes; an axis of 1 starts at 0."""
  start = [
      jnp.asarray(starts.get(a, 0) if total.shape[a] > 1 else 0, jnp.int32)
      for a in range(total.ndim)
  ]
  old = lax.dynamic_slice(total, start, part.shape)
  return lax.dynamic_update_slice(total, old + part.astype(total.dtype), start)


def _add_bias(total: Any, d_logits: Array, tile: Call, row: Array, column: Array) -> Any:
  """Adds what a tile's logits say to the gradient of an array bias or of a position bias."""
  if total is None:
    return None
  if not checks.is_array(tile.bias):
    bias, pull = jax.vjp(lambda b: calls.position_bias(b, tile), tile.bias)
    (part,) = pull(_sum_to(d_logits, bias.shape).astype(bias.dtype))
    return jax.tree.map(lambda t, p: t
                        if p.dtype == jax.dtypes.float0 else t + p.astype(t.dtype), total, part)
  return _add(total, _sum_to(d_logits, tile.bias.shape), {
      total.ndim - 2: row,
      total.ndim - 1: column
  })


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
  """x summed over the axes that are 1 in shape."""
  return jnp.sum(x, [a for a, n in enumerate(shape) if n == 1], keepdims=True)


def band_block(width: int, block_size: int | None) -> int:
  """block_size; if None, that of the band, so that few of a tile's pairs lie outside it."""
  return min(DEFAULT_BLOCK, max(64, width)) if block_size is None else block_size
