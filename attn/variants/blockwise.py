"""Dense softmax attention in linear memory."""

from typing import Any

from attn import backends
from attn import call as calls
from attn import tiles
from attn.axes import Array, ArrayLike
from attn.positions import PositionBias


def blockwise_attention(
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
    block_size: int | None = None,
    step_size: int | None = None,
    implementation: str = 'auto',
) -> Array:
  """Computes `vanilla_attention` tile by tile, in O(T + S) memory, forward and backward.

  O(T * S) time; is_causal, with the default positions, visits half of the tiles.

  Args:
    query: [..., T, N, H].
    key: [..., S, K, H], with N a multiple of K.
    value: [..., S, K, Hv].
    bias, mask, is_causal, scale, query_positions, key_positions, segment_ids, dropout_rate,
      dropout_rng: as in `vanilla_attention`.
    block_size: at most so many queries and keys in a tile; only cost depends on it.
    step_size: about so many logits are computed at a time; None for what suits the platform. Only
      cost depends on it.
    implementation: 'xla'; 'pallas', JAX's kernels for TPU, splash attention or with a bias array
      flash attention, which other platforms interpret, slowly; or 'auto', for the kernel in
      programs for one TPU device, or inside shard_map with check_vma=False, where one serves the
      call.

  Returns:
    [..., T, N, Hv] in query's dtype; zeros for a query that sees nothing.

  Raises:
    TypeError, ValueError: as in `vanilla_attention`, or block_size is not positive.
    NotImplementedError: implementation is 'pallas' and no kernel serves the call; it says why.

  Source: Dao et al. 2022, FlashAttention, https://arxiv.org/abs/2205.14135; Rabe and Staats 2021,
  https://arxiv.org/abs/2112.05682.
  """
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
                                dropout_rng=dropout_rng)
  xla = lambda call: tiles.output(call, spec, block_size, step_size)
  return backends.attend(implementation,
                         call,
                         spec,
                         xla,
                         block_size=block_size,
                         step_size=step_size)
