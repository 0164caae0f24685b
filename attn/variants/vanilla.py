"""Dense softmax attention: the reference for every other variant."""

from typing import Any

import jax.numpy as jnp

from attn import call as calls
from attn import softmax, stores
from attn.axes import Array, ArrayLike
from attn.positions import PositionBias
from attn.stores import Keep


def vanilla_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | PositionBias | None = None,
    mask: ArrayLike | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    segment_ids: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
) -> Array:
  """Weighs every visible value by the softmax of its scaled product with the query.

    output[t, n] = sum_s softmax_s(scale * q[t, n] . k[s, n // (N/K)] + bias[n, t, s]) v[s, n //
    (N/K)]

  The only variant, with `attention_weights`, that holds a [T, S] array. Differentiable any number
  of times, in either mode.

  Args:
    query: [..., T, N, H].
    key: [..., S, K, H], with N a multiple of K.
    value: [..., S, K, Hv].
    bias: added to the scaled logits: an array that broadcasts to [..., N, T, S], of their rank, or
      a position bias such as `positions.ALiBi` or `positions.T5Bias`.
    mask: boolean, True where a key may be seen; broadcasts to [..., N, T, S], of their rank.
    is_causal: hides keys at later positions than the query's.
    scale: multiplies the logits, before bias; H**-0.5 if None.
    query_positions: integers [T] or [..., T]; arange(T) if None.
    key_positions: integers [S] or [..., S]; arange(S) if None.
    segment_ids: integers [..., T], or a pair [..., T] and [..., S]; only equal ids see each other.
    dropout_rate: the share of weights that become 0, in [0, 1); the others grow by 1 / (1 -
      dropout_rate).
    dropout_rng: the key of the draw; needed when dropout_rate is positive.

  Returns:
    [..., T, N, Hv] in query's dtype; zeros for a query that sees nothing.

  Raises:
    TypeError: query, key or value is no array.
    ValueError: shapes, dtypes or values disagree, or positions are needed, since T != S, and
      missing.

  Source: Vaswani et al. 2017, section 3.2, https://arxiv.org/abs/1706.03762.
  """
  dims, call, spec = calls.prepare(query,
                                   key,
                                   value,
                                   bias,
                                   mask,
                                   is_causal=is_causal,
                                   scale=scale,
                                   query_positions=query_positions,
                                   key_positions=key_positions,
                                   segment_ids=segment_ids,
                                   dropout_rate=dropout_rate,
                                   dropout_rng=dropout_rng)
  visible = calls.visibility(call, spec)
  call = calls.forget_unseen(call, visible)
  weights = softmax.masked_softmax(calls.scores(call, spec, visible))
  factor = calls.dropped(call, spec, weights.dtype)
  weights = weights if factor is None else weights * factor
  output = jnp.einsum('...kgts,...ksh->...kgth',
                      weights.astype(call.value.dtype),
                      call.value,
                      preferred_element_type=weights.dtype)
  return calls.heads_last(output.astype(call.query.dtype), dims)


def keeps(max_length: int) -> tuple[Keep, ...]:
  """Every key."""
  return stores.parts(max_length)


MEMORY = stores.pattern(keeps, grows=True)
