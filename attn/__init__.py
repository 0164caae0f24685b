"""Attention for JAX as pure functions: every variant under one contract.

    attn.local_attention(query, key, value, window=128, is_causal=True)  # [..., T, N, H]

All functions take arrays first and options by name, work under jit, vmap and grad, and hold no
state.
"""

from attn import cache, decoding, interop, masks, positions, sampling, sharding, softmax
from attn.axes import Dims
from attn.checks import check_qkv
from attn.variants import CAPABILITIES, VARIANTS, Variant, attention_weights, state_size
# Softmax attention over what a pattern lets each query see.
from attn.variants import (bigbird_attention, bigbird_random_blocks, blockwise_attention,
                           fixed_attention, local_attention, longformer_attention,
                           strided_attention, vanilla_attention)
# Attention over sums of keys.
from attn.variants import linformer_attention, orthogonal_features, performer_attention

__all__ = [
    'CAPABILITIES', 'Dims', 'VARIANTS', 'Variant', 'attention_weights', 'bigbird_attention',
    'bigbird_random_blocks', 'blockwise_attention', 'cache', 'check_qkv', 'decoding',
    'fixed_attention', 'interop', 'linformer_attention', 'local_attention', 'longformer_attention',
    'masks', 'orthogonal_features', 'performer_attention', 'positions', 'sampling', 'sharding',
    'softmax', 'state_size', 'strided_attention', 'vanilla_attention'
]
