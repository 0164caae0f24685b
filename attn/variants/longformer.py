"""Longformer: a sliding window and global tokens."""

from typing import Any

from attn import backends
from attn import call as calls
from attn import layout, masks, stores, tiles
from attn.axes import Array, ArrayLike
from attn.checks import check_window
from attn.layout import Part
from attn.masks import Predicate
from attn.positions import PositionBias
from attn.stores import Keep


def longformer_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | PositionBias | None = None,
    mask: ArrayLike | None = None,
    *,
    window: int | tuple[int, int],
    num_global: int,
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
  """Softmax attention in a sliding window, with leading tokens that see, and are seen by, all.

  Query t attends to the keys s with t - left <= s <= t + right, where (left, right) = window, and
  to those at s < num_global; a query at t < num_global to every key; when causal only to s <= t.
  Equal to `vanilla_attention` under `masks.window(left, right) | masks.global_tokens(num_global)`,
  in O(T * (left + right + num_global)) time and O(T + S) memory. The projections of global tokens
  are those of all others; the paper's own are the caller's to make. Positions that are given as
  traced arrays leave the memory as it is; tiles are then skipped at run time.

  Args:
    query: [..., T, N, H].
    key: [..., S, K, H], with N a multiple of K.
    value: [..., S, K, Hv].
    window: keys to the left and right of the query, its own not counted; an int w is (w, w).
      Causal, right is 0.
    num_global: how many positions from 0 are global.
    bias, mask, is_causal, scale, query_positions, key_positions, segment_ids, dropout_rate,
      dropout_rng: as in `vanilla_attention`.
    block_size: at most so many queries and keys in a tile; only cost depends on it.
    step_size: about so many logits are computed at a time; None for what suits the platform. Only
      cost depends on it.
    implementation: as in `blockwise_attention`.

  Returns:
    [..., T, N, Hv] in query's dtype; zeros for a query that sees nothing.

  Raises:
    TypeError, ValueError: as in `vanilla_attention`, or window or num_global is negative.
    NotImplementedError: as in `blockwise_attention`.

  Source: Beltagy et al. 2020, Longformer, section 3.1, https://arxiv.org/abs/2004.05150.
  """
  left, right = check_window(window, is_causal)
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
                                   pattern=masks.window(left, right) |
                                   masks.global_tokens(num_global))
  block, parts = tiles.band_block(max(left, right), block_size), None
  if query_positions is None and key_positions is None and num_global and dims.T:
    parts = global_parts(dims.T, masks.window(left, right), min(num_global, dims.T), is_causal,
                         block)
  xla = lambda call: tiles.output(call, spec, block, step_size, parts)
  return backends.attend(implementation,
                         call,
                         spec,
                         xla,
                         block_size=block_size,
                         step_size=step_size)


def global_parts(length: int, near: Predicate, number: int, is_causal: bool,
                 block_size: int) -> tuple[Part, ...]:
  """The keys that are near, the global ones, and for global queries all others.

  So a global token costs itself and not whole tiles.
  """
  causal = (lambda p: masks.causal() & p) if is_causal else (lambda p: p)
  band, every = layout.cut(0, length, block_size), layout.cut(0, length, None)
  tokens = layout.cut(0, number, None, exact=True)
  rest = near & masks.outside_blocks(number, (0,), query=True, key=True)
  parts = (Part(causal(rest), band, band), Part(masks.causal() if is_causal else None, every,
                                                tokens))
  others = Part(masks.outside_blocks(number, (0,), key=True), tokens, every)
  return parts if is_causal else (*parts, others)


def keeps(max_length: int | None, window: int | tuple[int, int],
          num_global: int) -> tuple[Keep, ...]:
  """A ring of the last left + 1 keys, and the global ones."""
  left, right = check_window(window, True)
  near = masks.window(left, right)
  if not num_global:
    return (stores.ring(left + 1, near, max_length),)
  near &= masks.outside_blocks(num_global, (0,), key=True)
  return stores.ring(left + 1, near, max_length), stores.first(num_global, max_length)


MEMORY = stores.pattern(keeps, grows=False)
