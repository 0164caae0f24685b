"""The variants of attention, and VARIANTS, the one table of them.

Flag values, conformance tests, the README's capability table and the benchmarks are derived from
VARIANTS.
"""

import functools
import inspect
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp

from attn import call as calls
from attn import cache as caches
from attn import checks, masks
from attn.axes import Array, ArrayLike, Dims
from attn.cache import Cache, Memory
from attn.variants import (bigbird, fixed, linformer, local, longformer, performer, strided,
                           vanilla)
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
    memory: how its causal form decodes.
    cost: time and memory.
    source: the paper.
  """

  attention: Callable[..., Array]
  init: Callable[..., Params]
  pattern: Callable[..., masks.Predicate | None] | None
  options: tuple[str, ...]
  sizes: tuple[str, ...]
  supports: frozenset[str]
  memory: Memory
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

  @property
  def cost_options(self) -> tuple[str, ...]:
    """The options on which only cost depends."""
    return tuple(name for name in self.options if name in _COST and name not in self.sizes)

  @property
  def name(self) -> str:
    """Its name in VARIANTS."""
    return self.attention.__name__.removesuffix('_attention')

  def init_cache(self,
                 params: Params,
                 dims: Dims,
                 *,
                 dtype: Any = jnp.float32,
                 max_length: int | None = None,
                 **options: Any) -> Cache:
    """An empty cache for the causal form: what `extend` needs to know of earlier tokens.

    Args:
      params: the variant's arrays, as `init` gives them; {} for most. BigBird's random_blocks are
        those of max_length tokens; if they are known (not traced), only blocks that a later one
        lists are kept, while it may.
      dims: the sizes, as `check_qkv(query, key, value)` gives them for any number of tokens.
      dtype: of queries, keys and values.
      max_length: the most tokens of a row. None, for any number, where the cache does not grow:
        local, longformer, performer.
      **options: of the variant's function: window, stride and the like.

    Returns:
      a pytree of arrays that lead with dims.leading; see `attn.cache.Cache`.

    Raises:
      TypeError: an array or option is missing, or is none of the variant's.
      ValueError: max_length is missing, or the arrays do not fit.
    """
    self._check_options(params, options)
    self._visible(params, options)
    return caches.init(self.name, self.memory, params, dims, dtype, max_length, options)

  def extend(self,
             params: Params,
             cache: Cache,
             query: ArrayLike,
             key: ArrayLike,
             value: ArrayLike,
             bias: Any = None,
             *,
             token_mask: ArrayLike | None = None,
             scale: float | None = None) -> tuple[Array, Cache]:
    """Causal attention of T new tokens of each row to all before them: prefill, or a step.

    However a sequence is cut into calls, the outputs are those of one `apply` with is_causal to all
    of it. Positions count the real tokens of a row, so what is padding, and on which side, changes
    nothing. A query sees no other row.

    Args:
      params: those `init_cache` was given.
      cache: of `init_cache`, or of the last call.
      query: [..., T, N, H].
      key: [..., T, K, H], with N a multiple of K.
      value: [..., T, K, Hv].
      bias: a position bias such as `positions.ALiBi`, or None.
      token_mask: boolean [..., T], True for a real token; None: all are. Padding is not kept, takes
        no position, and its outputs are zeros.
      scale: as in the variant's function.

    Returns:
      [..., T, N, Hv] in query's dtype, and the cache with the new tokens.

    Raises:
      TypeError, ValueError: as the variant's function does; the cache is another's, or was made
        with arrays of other shapes; or it is known that a row has more tokens than max_length.
        Under jit that is noted in cache.overflow: see `attn.cache.check`.
      NotImplementedError: bias is an array, or the variant has no bias.
    """
    if bias is not None and 'position_bias' not in self.supports:
      raise NotImplementedError(f'{self.attention.__name__} has no bias')
    if not isinstance(cache, Cache):
      raise TypeError(f'cache must be what init_cache returns; got {type(cache).__name__}')
    if cache.variant != self.name:
      raise ValueError(f'cache must be one of {self.name}; got one of {cache.variant}')
    self._check_options(params, dict(cache.options))
    visible = self._visible(params, dict(cache.options))
    return caches.extend(self.memory, visible, params, cache, query, key, value, bias, token_mask,
                         scale)

  def _visible(self, params: Params, options: dict[str, Any]) -> masks.Predicate | None:
    """The causal pattern of a variant without arrays; checks its options."""
    if self.pattern is None or params:
      return None
    return self.pattern(is_causal=True, **options)

  def _check_options(self, params: Params, options: dict[str, Any]) -> None:
    """Checks the names of arrays and options with which a cache is made."""
    if not isinstance(params, dict):
      raise TypeError("params must be a dict of the variant's arrays, as init gives it, or {}; got "
                      f'{type(params).__name__}')
    signature = inspect.signature(self.attention).parameters
    own = [name for name in self.options if name not in self.cost_options]
    arrays = [name for name in own if signature[name].annotation is ArrayLike]
    for what, given, known in (('array', params, arrays), ('option', options,
                                                           [n for n in own if n not in arrays])):
      wanted = [n for n in known if signature[n].default is inspect.Parameter.empty]
      where = ', which params hold' if what == 'array' else ''
      for state, names in (('has no', {*given} - {*known}), ('needs', {*wanted} - {*given})):
        for name in sorted(names):
          raise TypeError(f'a cache of {self.name} {state} {what} {name}; its {what}s{where} are: '
                          f'{", ".join(known) or "none"}')


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
# Options that change no result, but BigBird's block_size.
_COST = ('block_size', 'step_size', 'implementation')


def _nothing(rng: Array, dims: Dims) -> Params:
  """The arrays of a variant that needs none."""
  del rng, dims
  return {}


def _pattern(own: Callable[..., masks.Predicate | None]) -> Callable[..., masks.Predicate | None]:
  """A pattern's predicate with is_causal; options of cost have no part in it."""

  def predicate(*, is_causal: bool, **options: Any) -> masks.Predicate | None:
    options = {name: x for name, x in options.items() if name not in _COST}
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
        Variant(vanilla_attention, _nothing, _pattern(_everything), (), (), _ALL, vanilla.MEMORY,
                'O(T S), memory O(T S)', 'Vaswani et al. 2017, https://arxiv.org/abs/1706.03762'),
    'blockwise':
        Variant(blockwise_attention, _nothing, _pattern(_everything), _COST, (), _ALL,
                vanilla.MEMORY, 'O(T S), memory O(T + S)',
                'Dao et al. 2022, https://arxiv.org/abs/2205.14135'),
    'local':
        Variant(local_attention, _nothing, _pattern(_window), ('window', *_COST), (), _ALL,
                local.MEMORY, 'O(T window), memory O(T)',
                'Beltagy et al. 2020, https://arxiv.org/abs/2004.05150'),
    'strided':
        Variant(strided_attention, _nothing,
                _pattern(lambda is_causal, stride: masks.strided(stride)), ('stride', *_COST), (),
                _ALL, strided.MEMORY, 'O(T (stride + T / stride)), memory the same', _CHILD),
    'fixed':
        Variant(fixed_attention, _nothing,
                _pattern(lambda is_causal, stride, summary=1: masks.fixed(stride, summary)),
                ('stride', 'summary', *_COST), (), _ALL, fixed.MEMORY,
                'O(T (stride + summary T / stride)), memory O(T stride)', _CHILD),
    'longformer':
        Variant(longformer_attention, _nothing, _pattern(_longformer),
                ('window', 'num_global', *_COST), (), _ALL, longformer.MEMORY,
                'O(T (window + num_global)), memory O(T)',
                'Beltagy et al. 2020, https://arxiv.org/abs/2004.05150'),
    'bigbird':
        Variant(bigbird_attention, bigbird.init, bigbird.predicate, ('block_size', 'random_blocks'),
                ('num_random', 'block_size'), _ALL, bigbird.MEMORY,
                'O(T block_size (5 + r)), memory O(T)',
                'Zaheer et al. 2020, https://arxiv.org/abs/2007.14062'),
    'linformer':
        Variant(linformer_attention, linformer.init, None, ('key_projection', 'value_projection'),
                ('rank',),
                _ALL - {'bias', 'position_bias', 'dense_mask', 'segment_ids', 'key_positions'},
                linformer.MEMORY, 'O(T R), memory O(T R)',
                'Wang et al. 2020, https://arxiv.org/abs/2006.04768'),
    'performer':
        Variant(performer_attention, performer.init, None, ('features', 'kernel', 'block_size'),
                ('num_features',), _ALL - {'bias', 'position_bias', 'dense_mask', 'dropout'},
                performer.MEMORY, 'O(T M), memory O(T M)',
                'Choromanski et al. 2020, https://arxiv.org/abs/2009.14794'),
}


def state_size(name: str,
               params: Params,
               dims: Dims,
               *,
               dtype: Any = jnp.float32,
               max_length: int | None = None,
               **options: Any) -> int:
  """Bytes of a variant's decode cache, all of its arrays; see `Variant.init_cache`.

  Raises:
    ValueError: name is no variant, or as `Variant.init_cache` does.
  """
  make = functools.partial(_row(name).init_cache, params, dims, dtype=dtype, max_length=max_length)
  return caches.size(jax.eval_shape(functools.partial(make, **options)))


def _row(name: str) -> Variant:
  if name not in VARIANTS:
    raise ValueError(f'name must be one of {", ".join(VARIANTS)}; got {name!r}')
  return VARIANTS[name]


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
  variant = _row(name)
  for argument, x in (('query', query), ('key', key)):
    if not checks.is_array(x) or x.ndim < 3:
      raise ValueError(
          f'{argument} must be [..., length, heads, head_dim]; got {getattr(x, "shape", x)}')
  S = key.shape[-3]
  units = jnp.broadcast_to(
      jnp.eye(S, dtype=key.dtype)[:, None, :].reshape((1,) * (key.ndim - 3) + (S, 1, S)),
      (*key.shape[:-1], S))
  output = variant.apply(params or {}, query, key, units, bias, mask, **options)
  return jnp.swapaxes(output, -3, -2)


__all__ = [
    'CAPABILITIES', 'Params', 'VARIANTS', 'Variant', 'attention_weights', 'bigbird_attention',
    'bigbird_random_blocks', 'blockwise_attention', 'fixed_attention', 'linformer_attention',
    'local_attention', 'longformer_attention', 'orthogonal_features', 'performer_attention',
    'state_size', 'strided_attention', 'vanilla_attention'
]
