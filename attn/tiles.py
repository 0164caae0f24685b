"""Exact softmax attention tile by tile: visit the key tiles a pattern can reach, merge, finish.

Memory is O(T + S): the loop carries one state per query, and the backward pass computes each tile
again instead of keeping it, from the maximum m and the sum z = sum_s exp(l_s - m) of each query.
Of a = sum_s exp(l_s - m) v_s and z come da and dz; they are multiplied by z, since da is as much
smaller than the gradient of a / z, and would underflow in a narrow dtype.

    p = exp(l - m) / z   dl = p (z da v^T + z dz)
    dv = p^T z da        dq = dl k       dk = dl^T q

Which tiles are visited, and how many in a step, is said by `attn.layout`.

Source: Dao et al. 2022, FlashAttention, algorithms 1 and 4, https://arxiv.org/abs/2205.14135.
"""

from collections.abc import Sequence
import functools
from typing import Any, Callable, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn import axes
from attn import call as calls
from attn import checks, layout, slices, softmax
from attn.axes import Array
from attn.call import Call, Spec
from attn.layout import Part, Plan
from attn.slices import Names, Tile
from attn.softmax import State


class Inputs(NamedTuple):
  """What gradients reach."""
  query: Array
  key: Array
  value: Array
  bias: Any


class Returned(NamedTuple):
  """What each query brings to the backward pass: m, 1 / z, z dz and z da."""
  max: Array
  inverse: Array
  sum: Array
  weighted: Array


# The axes, after the leading ones, of every field of a Call, State, Inputs or
# Returned.
_LETTERS = calls.LETTERS | dict(weighted='KGTH', max='KGT', sum='KGT', inverse='KGT')
_PER_TOKEN = ('query_positions', 'key_positions', 'query_segments', 'key_segments', 'query_index',
              'key_index')
# The loop keeps these as callers have them, T or S ahead of the heads, so that only tiles are
# transposed, in the cache.
_LARGE = ('query', 'key', 'value', 'weighted')


def attend(call: Call,
           spec: Spec,
           block_size: int | None = None,
           step_size: int | None = None,
           parts: Sequence[Part] | None = None,
           raw: bool = False) -> State:
  """The state of every query after the keys it may see, to be merged with others.

  Args:
    call: T queries and S keys.
    spec: its static values.
    block_size: at most so many queries and keys in a tile; layout.BLOCK if None. Only cost depends
      on it.
    step_size: about so many logits at a time; what suits the platform if None. Only cost depends on
      it.
    parts: the pairs to visit; None for all that spec.visible lets see.
    raw: whether the caller knows the gradient; then there is none here.

  Returns:
    the state [..., K, G, T] in float32 at least.
  """
  state = _run(call, spec, block_size, step_size, parts, raw)
  return state._replace(weighted=_heads_first('weighted', state.weighted, spec))


def output(call: Call,
           spec: Spec,
           block_size: int | None = None,
           step_size: int | None = None,
           parts: Sequence[Part] | None = None) -> Array:
  """The attention of every query over the keys it may see: [..., T, N, Hv] in query's dtype."""
  state = _run(call, spec, block_size, step_size, parts)
  total = jnp.where(state.sum > 0, state.sum, jnp.ones_like(state.sum))
  result = state.weighted / _stored('weighted', total[..., None], spec)
  *lead, K, G, Hv = result.shape
  return result.reshape(*lead, K * G, Hv).astype(call.query.dtype)


def _run(call: Call,
         spec: Spec,
         block_size: int | None,
         step_size: int | None,
         parts: Sequence[Part] | None,
         raw: bool = False) -> State:
  """The state of every query, its weighted values as [..., T, K, G, Hv]."""
  T, S = call.lengths
  wide = axes.wide(call.query.dtype)
  if 0 in call.query.shape[:-1] or not S:
    nothing = softmax.empty(call.query.shape[:-1], call.value.shape[-1], wide)
    return nothing._replace(weighted=_stored('weighted', nothing.weighted, spec))
  parts = layout.whole(call, spec, block_size) if parts is None else parts
  call, loops, steps = layout.arrange(calls.forget_masked(call), spec, parts, step_size)
  call = axes.vary_alike(call)
  inputs = Inputs(_stored('query', call.query, spec), _stored('key', call.key, spec),
                  _stored('value', call.value, spec), call.bias)
  call = call._replace(**inputs._asdict())
  forward, tiled = _tiled(spec, loops)
  top, total, weighted = (forward if raw else tiled)(inputs, call, steps)
  weighted = lax.slice_in_dim(weighted, 0, T, axis=weighted.ndim + _first('weighted', spec))
  return State(lax.stop_gradient(top[..., :T]), total[..., :T], weighted)


@functools.lru_cache(maxsize=256)
def _tiled(spec: Spec, loops: tuple[tuple[Spec, Plan], ...]) -> tuple[Callable[..., State], ...]:
  """The function (inputs, call, steps of each loop) -> State, and the same with its gradient.

  The maximum and the sum stay apart, since log(sum) would be lost beside a large maximum. A step
  carries all it reads and is made once for a spec, so that a second call, jitted or not, finds the
  first one's program.
  """

  def compute(rule: Spec, plan: Plan, call: Call, tile: Tile) -> tuple[Call, Array, Array | None]:
    part = _cut(call, tile, spec)
    # Else XLA may read these few from the whole arrays again for every logit.
    part = part._replace(**lax.optimization_barrier(
        {name: getattr(part, name) for name in _PER_TOKEN if getattr(part, name) is not None}))
    part = part._replace(bias=_bias(call.bias, call, part, tile))
    if plan.listed:
      part = part._replace(key_index=plan.there(part.key_index, tile))
    visible = calls.visibility(part, rule)
    part = calls.forget_unseen(part, visible) if rule.forget else part
    logits = calls.scores(part, rule, visible)
    return part, logits, calls.dropped(part, rule, logits.dtype)

  def visit(rule: Spec, plan: Plan, carry: Any, number: Any) -> tuple[Any, None]:
    state, call, steps = carry
    tile = plan.tile(steps, number)
    old = None if plan.once else _cut(state, tile, spec)

    def look() -> State:
      part, logits, factor = compute(rule, plan, call, tile)
      new = softmax.visit(logits, part.value, factor, part.top)
      return new if old is None else softmax.merge(old, new)

    new = _if_reached(rule, call, tile, look, lambda: old)
    return (_paste(slices.write, state, new, tile, spec), call, steps), None

  def forward(inputs: Inputs, call: Call, steps: Any) -> State:
    call = call._replace(**inputs._asdict())
    shape = _heads_first('query', call.query, spec).shape[:-1]
    state = softmax.empty(shape, call.value.shape[-1], axes.wide(call.query.dtype))
    state = state._replace(weighted=_stored('weighted', state.weighted, spec))
    return _over(visitors, loops, axes.vary_alike((state, call)), steps)[0]

  def revisit(rule: Spec, plan: Plan, carry: Any, number: Any) -> tuple[Any, None]:
    grads, call, returned, steps = carry
    tile = plan.tile(steps, number)

    def look() -> Inputs:
      part, logits, factor = compute(rule, plan, call, tile)
      top, inverse, dz, da = _cut(returned, tile, spec)
      wide, narrow = logits.dtype, lambda x: x.astype(part.value.dtype)
      p = jnp.exp(logits - softmax.finite(top)[..., None]) * inverse[..., None]
      dp = softmax.grouped('...kth,...ksh->...kts', narrow(da), part.value, wide)
      weights, dp = (p, dp) if factor is None else (p * factor, dp * factor)
      dl = plan.hold(p * (dp + dz[..., None]), tile)
      dv = _to_keys(narrow(weights), narrow(da), wide)
      scale, ds = jnp.asarray(rule.scale, wide), narrow(dl)
      dq = softmax.grouped('...kts,...ksh->...kth', ds, part.key, wide) * scale
      dk = _to_keys(ds, part.query, wide) * scale
      return Inputs(dq, dk, dv, _bias_gradient(dl, call, part, tile))

    zeros = lambda: axes.vary_alike(
        (call, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(look))))[1]
    parts = _if_reached(rule, call, tile, look, zeros)
    new = _paste(slices.add, grads._replace(query=None, bias=None), parts, tile, spec)
    how = slices.write if plan.once else slices.add
    new = new._replace(query=_place(how, 'query', grads.query, parts.query, tile, spec))
    if checks.is_array(call.bias):
      new = new._replace(
          bias=slices.add(grads.bias, parts.bias, _names('bias', grads.bias, spec), tile))
    else:
      new = new._replace(bias=jax.tree.map(jnp.add, grads.bias, parts.bias))
    return (new, call, returned, steps), None

  def backward(kept: Any, cotangents: Any) -> tuple[Inputs, None, None]:
    inputs, call, steps, top, total = kept
    if call.top is not None:  # so that of the state nothing is needed
      top, total = call.top, call.total
    total = jnp.where(total > 0, total, jnp.ones_like(total))
    _, dz, da = cotangents  # the maximum is a constant to whoever merges the state
    returned = Returned(top, 1 / total, dz * total,
                        da * _stored('weighted', total[..., None], spec))
    call = call._replace(**inputs._asdict())
    # A query that sees nothing may hold anything.
    blind = _stored('query', (top == softmax.HIDDEN)[..., None], spec)
    call = call._replace(query=jnp.where(blind, jnp.zeros_like(call.query), call.query))
    zeros = jax.tree.map(zeros_of, inputs)
    grads = _over(revisitors, loops, axes.vary_alike((zeros, call, returned)), steps)[0]
    return jax.tree.map(cotangent_of, grads, inputs), None, None

  visitors = tuple(functools.partial(visit, *loop) for loop in loops)
  revisitors = tuple(functools.partial(revisit, *loop) for loop in loops)
  tiled = jax.custom_vjp(forward)
  tiled.defvjp(lambda *args: ((state := forward(*args)), (*args, state.max, state.sum)), backward)
  return forward, tiled


def _to_keys(x: Array, y: Array, wide: Any) -> Array:
  """[..., K, G, T, S] and [..., K, G, T, H] to [..., K, S, H], summed over G and T."""
  x, y = (z.reshape(*z.shape[:-3], z.shape[-3] * z.shape[-2], z.shape[-1]) for z in (x, y))
  product = functools.partial(jnp.einsum, preferred_element_type=wide)
  if x.dtype != wide:  # XLA on CPU has no narrow product of the other form
    return product('...kts,...kth->...ksh', x, y)
  # So that the smaller factor and the result are transposed and not x.
  return product('...kth,...kts->...khs', y, x).swapaxes(-1, -2)


def _over(bodies: tuple[Any, ...], loops: tuple[tuple[Spec, Plan], ...], start: tuple[Any, ...],
          steps: tuple[Any, ...]) -> Any:
  """What remains after every loop; a single step needs none to be compiled."""
  for body, (_, plan), where in zip(bodies, loops, steps):
    number = plan.number(where)
    carry = axes.vary_alike((*start, jnp.asarray(where)))
    if number == 1:
      *start, _ = body(carry, 0)[0]
    else:
      *start, _ = lax.scan(body, carry, jnp.arange(number, dtype=jnp.int32))[0]
  return start


def _first(name: str, spec: Spec) -> int:
  """Where the loop keeps the axis T or S of a large array, counted from the end."""
  return -len(_LETTERS[name]) - spec.interleaved


def _stored(name: str, x: Array, spec: Spec) -> Array:
  """An array or a part of one, heads first, as the loop keeps it."""
  return jnp.moveaxis(x, -2, _first(name, spec)) if name in _LARGE else x


def _heads_first(name: str, x: Array, spec: Spec) -> Array:
  """Undoes _stored."""
  return jnp.moveaxis(x, _first(name, spec), -2) if name in _LARGE else x


def _names(name: str, x: Any, spec: Spec) -> Names:
  """The names of an array's axes in the loop."""
  names: list[Any] = [*range(x.ndim - len(_LETTERS[name])), *_LETTERS[name]]
  if name in _LARGE:
    names.insert(x.ndim + _first(name, spec), names.pop(-2))
  return tuple(names)


def _cut(tree: Any, tile: Tile, spec: Spec) -> Any:
  """The parts of a NamedTuple's arrays in a tile, heads first, behind an axis of pairs."""
  one = lambda name, x: _heads_first(name, slices.read(x, _names(name, x, spec), tile), spec)
  parts = {
      name: one(name, x)
      for name, x in tree._asdict().items()
      if name in _LETTERS and checks.is_array(x)
  }
  if getattr(tree, 'draw', None) is not None:
    parts['draw'] = tree.draw._replace(heads=one('heads', tree.draw.heads))
  return tree._replace(**parts)


def _paste(how: Callable[..., Array], tree: Any, parts: Any, tile: Tile, spec: Spec) -> Any:
  """tree with parts written or added to its arrays."""
  return tree._replace(
      **{
          name: _place(how, name, x, getattr(parts, name), tile, spec)
          for name, x in tree._asdict().items()
          if checks.is_array(x)
      })


def _place(how: Callable[..., Array], name: str, x: Array, part: Array, tile: Tile,
           spec: Spec) -> Array:
  """An array with a part, heads first, written or added."""
  return how(x, _stored(name, part, spec), _names(name, x, spec), tile)


def _if_reached(rule: Spec, call: Call, tile: Tile, look: Callable[[], Any],
                otherwise: Callable[[], Any]) -> Any:
  """look(), unless positions known only now put everything out of reach."""
  if not rule.skip or rule.visible is None:
    return look()
  query, key = (slices.read(x, _names(name, x, rule), tile)
                for name, x in (('query_positions', call.query_positions), ('key_positions',
                                                                            call.key_positions)))
  reached = rule.visible.reaches(query.min(-1), query.max(-1), key.min(-1), key.max(-1))
  return lax.cond(jnp.any(reached), look, otherwise)


def _bias(bias: Any, call: Call, part: Call, tile: Tile) -> Array | None:
  """The bias of a tile as an array."""
  if bias is None or checks.is_array(bias):
    return part.bias
  table = calls.position_bias(bias, part, call.query.shape[-3:-1])
  return slices.heads(table, tile)


def _bias_gradient(d_logits: Array, call: Call, part: Call, tile: Tile) -> Any:
  """What a tile's logits say to its part of an array bias, or to all of a position bias."""
  if call.bias is None:
    return None
  if checks.is_array(call.bias):
    return _sum_to(d_logits, part.bias.shape)
  bias, pull = jax.vjp(lambda bias: _bias(bias, call, part, tile), call.bias)
  assert bias is not None
  (grads,) = pull(_sum_to(d_logits, bias.shape).astype(bias.dtype))
  return jax.tree.map(
      lambda x, d: zeros_of(x)
      if d.dtype == jax.dtypes.float0 else d.astype(axes.wide(d.dtype)), call.bias, grads)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
  """x summed over the axes that are 1 in shape."""
  return jnp.sum(x, [a for a, n in enumerate(shape) if n == 1], keepdims=True)


def zeros_of(x: Array) -> Array:
  """What gradients of x are summed in."""
  return jnp.zeros(jnp.shape(x), axes.wide(x.dtype))


def cotangent_of(grad: Array, x: Array) -> Any:
  """A gradient in the dtype of what it is for; integers have none."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return np.zeros(x.shape, jax.dtypes.float0)
  return grad.astype(x.dtype)


def band_block(width: int, block_size: int | None) -> int:
  """block_size; if None, that of the band, so that few of a tile's pairs lie outside it."""
  return min(layout.BLOCK, max(64, width)) if block_size is None else block_size
