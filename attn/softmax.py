"""Softmax over the keys a query may see, whole or in parts.

Attention over a set of keys has a small state (running maximum, running sum, weighted values), and
the states of disjoint sets merge: blocks, windows, columns, caches and devices are one operation,
*visit, merge, finish*.

    m = max_s l_s     z = sum_s exp(l_s - m)     a = sum_s exp(l_s - m) v_s     output = a / z

Source: Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867; Rabe and Staats 2021,
https://arxiv.org/abs/2112.05682.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn.axes import Array, ArrayLike

# The logit of a key that may not be seen. Minus infinity and not a large number: no finite logit or
# bias reaches it.
HIDDEN = -np.inf


class State(NamedTuple):
  """What a query has seen of its keys: max [..., T], sum [..., T], weighted [..., T, Hv]."""

  max: Array
  sum: Array
  weighted: Array


def empty(shape: tuple[int, ...], value_dim: int, dtype: Any = jnp.float32) -> State:
  """The state [*shape] of queries that have seen nothing; merging it changes nothing."""
  return State(jnp.full(shape, HIDDEN, dtype), jnp.zeros(shape, dtype),
               jnp.zeros((*shape, value_dim), dtype))


def finite(x: Array) -> Array:
  """x with 0 for infinities, without gradient: a shift that is safe where nothing was seen."""
  return jax.lax.stop_gradient(jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)))


def hide(logits: Array, mask: ArrayLike | None) -> Array:
  """Logits with HIDDEN where mask is False."""
  return logits if mask is None else jnp.where(mask, logits, jnp.asarray(HIDDEN, logits.dtype))


def masked_softmax(logits: Array, mask: Array | None = None, axis: int = -1) -> Array:
  """Softmax over the visible entries of an axis; zeros, with zero gradients, where none is visible.

  Args:
    logits: floating point, any shape.
    mask: True where visible; broadcasts to logits.
    axis: the axis that sums to one.

  Returns:
    weights in the shape and dtype of logits.
  """
  logits = hide(logits, mask)
  weights = jnp.exp(logits - finite(jnp.max(logits, axis, keepdims=True, initial=HIDDEN)))
  total = jnp.sum(weights, axis, keepdims=True)
  return weights / jnp.where(total > 0, total, jnp.ones_like(total))


def grouped(product: str, x: Array, y: Array, dtype: Any) -> Array:
  """An einsum of x [..., K, G, T, :] and y [..., K, :, :] in which 't' stands for G and T together.

  Every factor then has one axis beside the batch and the summed one, which spares XLA on CPU a
  transposition of y.
  """
  *batch, G, T, size = x.shape
  result = jnp.einsum(product, x.reshape(*batch, G * T, size), y, preferred_element_type=dtype)
  return result.reshape(*batch, G, T, result.shape[-1])


def visit(logits: Array,
          value: Array,
          factor: Array | None = None,
          top: Array | None = None) -> State:
  """The state of queries that have seen one set of keys.

  Args:
    logits: [..., K, G, T, S], HIDDEN where a key may not be seen; float32 at least.
    value: [..., K, S, Hv].
    factor: multiplies the weights of the values and not their sum, as dropout does; the shape of
      logits.
    top: [..., K, G, T], what the state is to be relative to; its largest logits if None.

  Returns:
    the state [..., K, G, T] in the dtype of logits.
  """
  top = jnp.max(logits, -1, initial=HIDDEN) if top is None else top
  weights = jnp.exp(logits - finite(top)[..., None])
  total = jnp.sum(weights, -1)
  weights = weights if factor is None else weights * factor
  weighted = grouped('...kts,...ksh->...kth', weights.astype(value.dtype), value, logits.dtype)
  return State(jax.lax.stop_gradient(top), total, weighted)


def merge(a: State, b: State) -> State:
  """The state of the union of two disjoint key sets; associative, commutative, `empty` neutral."""
  top = jax.lax.stop_gradient(jnp.maximum(a.max, b.max))
  shift = finite(top)
  scale_a, scale_b = jnp.exp(a.max - shift), jnp.exp(b.max - shift)
  return State(top, a.sum * scale_a + b.sum * scale_b,
               a.weighted * scale_a[..., None] + b.weighted * scale_b[..., None])


def finish(state: State, dtype: Any = None) -> Array:
  """The output [..., T, Hv] in dtype, the state's own if None; zeros where nothing was seen."""
  total = jnp.where(state.sum > 0, state.sum, jnp.ones_like(state.sum))
  return (state.weighted / total[..., None]).astype(dtype or state.weighted.dtype)
