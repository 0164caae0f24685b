"""Softmax attention in a sliding window."""

from typing import Any

from attn import backends
from attn import call as calls
from attn import masks, stores, tiles
from attn.axes import Array, ArrayLike
from attn.checks import check_window
from attn.positions import PositionBias
from attn.stores import Keep


def local_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | PositionBias | None = None,
    mask: ArrayLike | None = None,
    *,
    window: int | tuple[int, int],
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
  """Softmax attention in which each query sees a band of neighbouring keys.

  Query t attends to the keys s with t - left <= s <= t + right, where (left, right) = window. Equal
  to `vanilla_attention` under `masks.window(left, right)`, in O(T * (left + right)) time and O(T +
  S) memory. Positions that are given as traced arrays leave the memory as it is; tiles are then
  skipped at run time.

  Args:
    query: [..., T, N, H].
    key: [..., S, K, H], with N a multiple of K.
    value: [..., S, K, Hv].
    window: keys to the left and right of the query, its own not counted; an int w is (w, w).
      Causal, right is 0.
    bias, mask, is_causal, scale, query_positions, key_positions, segment_ids, dropout_rate,
      dropout_rng: as in `vanilla_attention`.
    block_size: at most so many queries and keys in a tile; only cost depends on it.
    step_size: about so many logits are computed at a time; None for what suits the platform. Only
      cost depends on it.
    implementation: as in `blockwise_attention`.

  Returns:
    [..., T, N, Hv] in query's dtype; zeros for a query that sees nothing.

  Raises:
    TypeError, ValueError: as in `vanilla_attention`, or window is negative.
    NotImplementedError: as in `blockwise_attention`.

  Source: Beltagy et al. 2020, Longformer, section 3.1, https://arxiv.org/abs/2004.05150.
  """
  left, right = check_window(window, is_causal)
  _, call, spec = calls.prepare(query,
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
                                pattern=masks.window(left, right))
  width = max(left, right)
  xla = lambda call: tiles.output(call, spec, tiles.band_block(width, block_size), step_size)
  return backends.attend(implementation,
                         call,
                         spec,
                         xla,
                         block_size=block_size,
                         step_size=step_size)


def keeps(max_length: int | None, window: int | tuple[int, int]) -> tuple[Keep, ...]:
  """A ring of the last left + 1 keys."""
  left, right = check_window(window, True)
  return (stores.ring(left + 1, masks.window(left, right), max_length),)


MEMORY = stores.pattern(keeps, grows=False)
