"""The fixed pattern of the Sparse Transformer."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from attn import backends
from attn import call as calls
from attn import checks, groups, masks, softmax, stores, tiles
from attn.axes import Array, ArrayLike
from attn.call import Call, Spec
from attn.positions import PositionBias
from attn.softmax import State
from attn.stores import Keep


def fixed_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | PositionBias | None = None,
    mask: ArrayLike | None = None,
    *,
    stride: int,
    summary: int = 1,
    is_causal: bool = False,
    scale: float | None = None,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    segment_ids: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    block_size: int | None = None,
    step_size: int | None = None,
    implementation: str = 'auto',
) -> Array:
  """Softmax attention in which each query sees its own block and the last keys of every other.

  Query t attends to the keys s of its own block, s // stride == t // stride, and to those with
  s % stride >= stride - summary, when causal only to s <= t of either. Equal to `vanilla_attention`
  under `masks.fixed(stride, summary)`. With the default positions in O(T * (stride + summary * T /
  stride)) time and O(T * stride) memory; explicit positions cost O(T * S) time in O(T + S) memory.

  Args:
    query: [..., T, N, H].
    key: [..., S, K, H], with N a multiple of K.
    value: [..., S, K, Hv].
    stride: the size of a block, at least 1.
    summary: how many keys at the end of a block the others see, 1 ... stride.
    bias, mask, is_causal, scale, query_positions, key_positions, segment_ids, dropout_rate,
      dropout_rng: as in `vanilla_attention`.
    block_size: at most so many queries and keys in a tile; only cost depends on it.
    step_size: about so many logits are computed at a time; None for what suits the platform. Only
      cost depends on it.
    implementation: as in `blockwise_attention`, but 'auto' is 'xla':
      a kernel visits every pair.

  Returns:
    [..., T, N, Hv] in query's dtype; zeros for a query that sees nothing.

  Raises:
    TypeError, ValueError: as in `vanilla_attention`, or stride or summary is out of range.
    NotImplementedError: as in `blockwise_attention`.

  Source: Child et al. 2019, section 4.3, https://arxiv.org/abs/1904.10509.
  """
  summary, stride = masks.check_summary(stride, summary), checks.check_int('stride', stride, 1)
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
                                   dropout_rng=dropout_rng,
                                   pattern=masks.fixed(stride, summary))

  def xla(call: Call) -> Array:
    if query_positions is None and key_positions is None and dims.T:
      state = own_block(call, spec, stride, is_causal, block_size, step_size)
      if stride < dims.T:  # there are other blocks
        others = summaries(call, spec, stride, summary, is_causal, block_size, step_size)
        state = softmax.merge(state, others)
    else:
      state = tiles.attend(call, spec, block_size, step_size)
    return calls.heads_last(softmax.finish(state, call.query.dtype), dims)

  return backends.attend(implementation,
                         call,
                         spec,
                         xla,
                         block_size=block_size,
                         step_size=step_size,
                         dearer='a kernel would visit every pair')


def own_block(call: Call, spec: Spec, size: int, is_causal: bool, block_size: int | None,
              step_size: int | None) -> State:
  """Attention of every query within its own block of `size` positions, all blocks side by side."""
  length = call.lengths[0]
  spec = spec._replace(visible=masks.causal() if is_causal else None)
  blocks, spec = groups.fold(call, spec, min(size, length))
  return groups.unfold(tiles.attend(blocks, spec, block_size, step_size), length)


def summaries(call: Call,
              spec: Spec,
              stride: int,
              summary: int,
              is_causal: bool,
              block_size: int | None,
              step_size: int | None,
              attend: Callable[..., State] = tiles.attend) -> State:
  """The last `summary` keys of every other block, earlier ones when causal."""
  other = masks.other_block(stride)
  spec = spec._replace(visible=other & masks.causal() if is_causal else other)
  return attend(*groups.last_keys(call, spec, stride, summary), block_size, step_size)


def keeps(max_length: int, stride: int, summary: int = 1) -> tuple[Keep, ...]:
  """The query's own block, and the summaries of all that may become earlier ones."""
  summary, stride = masks.check_summary(stride, summary), checks.check_int('stride', stride, 1)
  stride = min(stride, max_length)  # where there is one block, its size does not matter
  summary = min(summary, stride)
  slots = (max_length - 1) // stride * summary

  def place(p: Array) -> Array:
    behind = p % stride - (stride - summary)
    return jnp.where(behind >= 0, p // stride * summary + behind, slots)

  # What the summaries of a query's own block hide, the ring shows.
  others = Keep(slots, place, masks.other_block(stride), forget=False)
  return stores.ring(stride, masks.same_block(stride), max_length), others


MEMORY = stores.pattern(keeps, grows=True)
