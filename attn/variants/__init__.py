"""The variants of attention, and VARIANTS, the one table of them.

Flag values, conformance tests, the README's capability table and the benchmarks are derived from
VARIANTS.
"""

from typing import Any, Callable, NamedTuple

import jax.numpy as jnp

from attn import call as calls
from attn import checks, masks
from attn.axes import Array, ArrayLike, Dims
from attn.variants import bigbird, linformer, performer
from attn.variants.bigbird import bigbird_attention, bigbird_random_blocks
from attn.variants.blockwise import blockwise_attention
from attn.variants.fixed import fixed_attention
from attn.variants.linformer import linformer_attention
from attn.variants.local import local_attention
from attn.variants.longformer import longformer_attention
from attn.variants.performer import orthogonal_features, performer_attention
from attn.variants.strided import strided_attention
from attn.variants.vanilla import vanilla_attention

Params = dict[str, Array]


class Variant(NamedTuple):
  """One kind of attention as a pair of pure functions and what is known of it.

  Attributes:
    attention: the public function.
    init: (rng, dims, **sizes) to the arrays the variant needs, {} where there are none.
    pattern: its own options to a visibility predicate; None where no query sees a set of keys as
      they are.
    options: the keyword arguments it has beside everybody's.
    sizes: the keyword arguments of init.
    supports: what of CAPABILITIES it can do.
    cost: time and memory.
    source: the paper.
  """

  attention: Callable[..., Array]
  init: Callable[..., Params]
  pattern: Callable[..., masks.Predicate | None] | None
  options: tuple[str, ...]
  sizes: tuple[str, ...]
  supports: frozenset[str]
  cost: str
  source: str

  def apply(self,
            params: Params,
            query: ArrayLike,
            key: ArrayLike,
            value: ArrayLike,
            bias: Any = None,
            mask: ArrayLike | None = None,
            **options: Any) -> Array:
    """`attention` with the arrays of `init`: [..., T, N, Hv]."""
    return self.attention(query, key, value, bias, mask, **params, **options)

  def visibility(self,
                 T: int,
                 S: int,
                 *,
                 is_causal: bool = False,
                 query_positions: ArrayLike | None = None,
                 key_positions: ArrayLike | None = None,
                 **options: Any) -> Array:
    """Which keys each query may see, bool [T, S]; positions default to arange.

    Raises:
      NotImplementedError: the variant is no pattern.
      ValueError: the pattern is about positions, T != S, and query_positions is None.
    """
    if self.pattern is None:
      raise NotImplementedError(
          f'{self.attention.__name__} is no visibility pattern: its queries see sums of keys')
    pattern = self.pattern(is_causal=is_causal, **options)
    query, key = calls.check_positions(query_positions,
                                       key_positions,
                                       Dims((), T, S, 1, 1, 1, 1),
                                       needed=pattern is not None)
    return jnp.ones((T, S), bool) if pattern is None else pattern.dense(query, key)


# What a caller may ask of a variant, in the words of the README's table.
CAPABILITIES = {
    'causal': 'is_causal',
    'cross': 'keys of another sequence',
    'key_mask': 'padding mask',
    'dense_mask': 'mask per query',
    'bias': 'bias array',
    'position_bias': 'ALiBi, T5',
    'segment_ids': 'segment_ids',
    'query_positions': 'query_positions',
    'key_positions': 'key_positions',
    'dropout': 'dropout',
    'grouped_heads': 'GQA, MQA',
}
_ALL = frozenset(CAPABILITIES)


def _nothing(rng: Array, dims: Dims) -> Params:
  """The arrays of a variant that needs none."""
  del rng, dims
  return {}


def _pattern(own: Callable[..., masks.Predicate | None]) -> Callable[..., masks.Predicate | None]:
  """A pattern's predicate with is_causal; block_size and step_size have no part in it."""

  def predicate(*,
                is_causal: bool,
                block_size: int | None = None,
                step_size: int | None = None,
                **options: Any) -> masks.Predicate | None:
    del block_size, step_size
    pattern = own(is_causal, **options)
    if not is_causal:
      return pattern
    return masks.causal() if pattern is None else masks.causal() & pattern

  return predicate


def _everything(is_causal: bool) -> None:
  del is_causal


def _window(is_causal: bool, window: int | tuple[int, int]) -> masks.Predicate:
  return masks.window(*checks.check_window(window, is_causal))


def _longformer(is_causal: bool, window: int | tuple[int, int], num_global: int) -> masks.Predicate:
  return _window(is_causal, window) | masks.global_tokens(num_global)


_CHILD = 'Child et al. 2019, https://arxiv.org/abs/1904.10509'

VARIANTS: dict[str, Variant] = {
    'vanilla':
        Variant(vanilla_attention, _nothing, _pattern(_everything), (), (), _ALL,
                'O(T S), memory O(T S)', 'Vaswani et al. 2017, https://arxiv.org/abs/1706.03762'),
    'blockwise':
        Variant(blockwise_attention, _nothing, _pattern(_everything), ('block_size', 'step_size'),
                (), _ALL, 'O(T S), memory O(T + S)',
                'Dao et al. 2022, https://arxiv.org/abs/2205.14135'),
    'local':
        Variant(local_attention, _nothing, _pattern(_window), ('window', 'block_size', 'step_size'),
                (), _ALL, 'O(T window), memory O(T)',
                'Beltagy et al. 2020, https://arxiv.org/abs/2004.05150'),
    'strided':
        Variant(strided_attention, _nothing,
                _pattern(lambda is_causal, stride: masks.strided(stride)),
                ('stride', 'block_size', 'step_size'), (), _ALL,
                'O(T (stride + T / stride)), memory the same', _CHILD),
    'fixed':
        Variant(fixed_attention, _nothing,
                _pattern(lambda is_causal, stride, summary=1: masks.fixed(stride, summary)),
                ('stride', 'summary', 'block_size', 'step_size'), (), _ALL,
                'O(T (stride + summary T / stride)), memory O(T stride)', _CHILD),
    'longformer':
        Variant(longformer_attention, _nothing, _pattern(_longformer),
                ('window', 'num_global', 'block_size', 'step_size'), (), _ALL,
                'O(T (window + num_global)), memory O(T)',
                'Beltagy et al. 2020, https://arxiv.org/abs/2004.05150'),
    'bigbird':
        Variant(bigbird_attention, bigbird.init, bigbird.predicate, ('block_size', 'random_blocks'),
                ('num_random', 'block_size'), _ALL, 'O(T block_size (5 + r)), memory O(T)',
                'Zaheer et al. 2020, https://arxiv.org/abs/2007.14062'),
    'linformer':
        Variant(linformer_attention, linformer.init, None, ('key_projection', 'value_projection'),
                ('rank',),
                _ALL - {'bias', 'position_bias', 'dense_mask', 'segment_ids', 'key_positions'},
                'O(T R), memory O(T R)', 'Wang et al. 2020, https://arxiv.org/abs/2006.04768'),
    'performer':
        Variant(performer_attention, performer.init, None, ('features', 'kernel', 'block_size'),
                ('num_features',), _ALL - {'bias', 'position_bias', 'dense_mask', 'dropout'},
                'O(T M), memory O(T M)',
                'Choromanski et al. 2020, https://arxiv.org/abs/2009.14794'),
}


def attention_weights(name: str,
                      query: ArrayLike,
                      key: ArrayLike,
                      bias: Any = None,
                      mask: ArrayLike | None = None,
                      *,
                      params: Params | None = None,
                      **options: Any) -> Array:
  """The effective weights of any variant, [..., N, T, S]: what each value is multiplied by.

  Attention is linear in its values, so these are its outputs for unit vectors; a Linformer's and a
  Performer's too.

  Args:
    name: a row of VARIANTS.
    query: [..., T, N, H].
    key: [..., S, K, H].
    bias, mask: as in the variant's function.
    params: the variant's arrays, as `init` gives them.
    **options: of the variant's function.

  Returns:
    [..., N, T, S] in query's dtype.

  Raises:
    ValueError: name is no variant, or as the variant's function does.
  """
  if name not in VARIANTS:
    raise ValueError(f'name must be one of {", ".join(VARIANTS)}; got {name!r}')
  for argument, x in (('query', query), ('key', key)):
    if not checks.is_array(x) or x.ndim < 3:
      raise ValueError(
          f'{argument} must be [..., length, heads, head_dim]; got {getattr(x, "shape", x)}')
  S = key.shape[-3]
  units = jnp.broadcast_to(
      jnp.eye(S, dtype=key.dtype)[:, None, :].reshape((1,) * (key.ndim - 3) + (S, 1, S)),
      (*key.shape[:-1], S))
  output = VARIANTS[name].apply(params or {}, query, key, units, bias, mask, **options)
  return jnp.swapaxes(output, -3, -2)


__all__ = [
    'CAPABILITIES', 'Params', 'VARIANTS', 'Variant', 'attention_weights', 'bigbird_attention',
    'bigbird_random_blocks', 'blockwise_attention', 'fixed_attention', 'linformer_attention',
    'local_attention', 'longformer_attention', 'orthogonal_features', 'performer_attention',
    'strided_attention', 'vanilla_attention'
]
