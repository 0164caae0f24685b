"""The layers all models are made of: attention with any variant, MLP, block, stack, embedding.

    D model_dim    F mlp_dim    N heads    K kv_heads    H head dim    V vocab_size
    x [B, T, D]    context [B, S, D]    masks [B, T] or [B, S], True = a real token

Parameters are float32; `dtype` is that of the computation; logits are float32 whatever it is.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import attn
from attn.axes import ArrayLike
from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from experiments import placement

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {'gelu': nn.gelu, 'relu': nn.relu}
# Keeps the keys of what variants draw apart from other keys that start from the same seed.
FEATURE_STREAM = 0x70657266
# Variants whose parameters are drawn and not learned.
DRAWN = ('bigbird', 'performer')


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
  """The static choices of one place where attention stands.

  Attributes:
    variant: a name in attn.VARIANTS.
    options: the variant's own options.
    sizes: sizes of the variant's parameters; none for a variant without parameters.
    parameter_length: positions a parameter of the variant spans (S_max; causal: a segment).
    num_heads: N.
    num_kv_heads: K.
    is_causal: whether later keys are hidden.
    max_length: the most positions of a sequence of keys.
    dropout: on attention weights.
    seed: of features, for a variant that draws its parameters rather than learn them.
    mesh: what activations are cut over; None for one device.
  """
  variant: str
  options: tuple[tuple[str, Any], ...]
  sizes: tuple[tuple[str, int], ...]
  parameter_length: int
  num_heads: int
  num_kv_heads: int
  is_causal: bool
  max_length: int
  dropout: float
  seed: int
  mesh: Mesh | None = None


@dataclasses.dataclass(frozen=True)
class StackSpec:
  """The static choices of a stack of blocks; cross_attention is None where there is no context."""
  num_layers: int
  model_dim: int
  mlp_dim: int
  activation: str
  norm: str
  positions: str
  max_length: int
  dropout: float
  remat: bool
  dtype: Any
  self_attention: AttentionSpec
  cross_attention: AttentionSpec | None = None


class Attention(nn.Module):
  """Projects to heads, attends with the variant of `spec`, projects back."""
  spec: AttentionSpec
  instance: int  # differs between all attention layers of a model
  dtype: Any
  deterministic: bool
  decode: bool = False

  @nn.compact
  def __call__(
      self,
      x: Array,
      context: Array | None,
      mask: Array | None,
      bias: Any = None,
      rope_positions: ArrayLike | None = None,
      draw: Array | int = 0,
  ) -> Array:
    """Returns [B, T, D]; keys and values come from context, whose real tokens mask [B, S] tells.

    When decoding, causal attention extends its cache by x, of which mask tells the real tokens; and
    other attention keeps the keys, values and mask of the first call's context.
    """
    spec, head_dim = self.spec, x.shape[-1] // self.spec.num_heads
    dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
    query = dense((spec.num_heads, head_dim), name='query')(x)

    def project() -> tuple[Array, Array, Array | None]:
      key = dense((spec.num_kv_heads, head_dim), name='key')(context)
      return key, dense((spec.num_kv_heads, head_dim), name='value')(context), mask

    if self.decode and not spec.is_causal:
      key, value, mask = self.variable('cache', 'context', project).value
    else:
      key, value, _ = project()
    if rope_positions is not None:
      query = attn.positions.rope(query, rope_positions)
      key = attn.positions.rope(key, rope_positions)
    output = dense(x.shape[-1], axis=(-2, -1), name='out')
    dims = attn.check_qkv(query, key, value)
    query, key, value = (placement.constrain(spec.mesh, y, 'data',
                                             None if self.decode else 'sequence', 'model')
                         for y in (query, key, value))
    if self.decode and spec.is_causal:
      return output(self._extend(dims, query, key, value, bias, mask, draw))
    options: dict[str, Any] = dict(spec.options)
    if spec.is_causal:
      options['is_causal'] = True
    if spec.dropout and not self.deterministic:
      options |= {'dropout_rate': spec.dropout, 'dropout_rng': self.make_rng('dropout')}
    if mask is not None:
      mask = mask[:, None, None, :]
    params = self._parameters(dims, draw)
    if self.is_mutable_collection('attention') and not self.is_initializing():
      self.sow(
          'attention', 'weights',
          attn.attention_weights(spec.variant, query, key, bias, mask, params=params, **options))
    if spec.mesh is not None and spec.mesh.shape['sequence'] > 1 and not self.decode:
      return output(
          attn.sharding.sharded_attention(spec.variant,
                                          query,
                                          key,
                                          value,
                                          bias,
                                          mask,
                                          mesh=spec.mesh,
                                          axis_name='sequence',
                                          params=params,
                                          **options))
    return output(attn.VARIANTS[spec.variant].apply(params, query, key, value, bias, mask,
                                                    **options))

  def _extend(self, dims: Any, query: Array, key: Array, value: Array, bias: Any,
              mask: Array | None, draw: Array | int) -> Array:
    """Attends to all tokens so far. What a variant draws is drawn once, with the first ones."""
    spec = self.spec
    variant = attn.VARIANTS[spec.variant]
    whole = dims._replace(T=spec.max_length, S=spec.max_length)
    parameters = functools.partial(self._parameters, whole, draw)
    drawn = spec.variant in DRAWN
    params = self.variable('drawn', 'params', parameters).value if drawn else parameters()
    options = {name: x for name, x in spec.options if name not in variant.cost_options}
    make = functools.partial(variant.init_cache, params, whole, dtype=key.dtype, **options)
    cache = self.variable('cache', 'tokens', lambda: make(max_length=spec.max_length))
    output, cache.value = variant.extend(params,
                                         cache.value,
                                         query,
                                         key,
                                         value,
                                         bias,
                                         token_mask=mask)
    return output

  def _parameters(self, dims: Any, draw: Array | int) -> Any:
    """Returns the variant's parameters: learned ones, random blocks, which never change, or
    features, other ones for each `draw`.
    """
    spec = self.spec
    if not spec.sizes:
      return {}
    init = functools.partial(attn.VARIANTS[spec.variant].init, **dict(spec.sizes))
    if spec.variant not in DRAWN:
      return self.param('projections', init, dims._replace(S=spec.parameter_length))
    rng = jax.random.fold_in(jax.random.key(spec.seed), FEATURE_STREAM)
    rng = jax.random.fold_in(rng, self.instance)
    if spec.variant == 'bigbird':
      return self._random_blocks(init, rng, dims)
    return jax.lax.stop_gradient(init(jax.random.fold_in(rng, draw), dims))

  def _random_blocks(self, init: Any, rng: Array, dims: Any) -> Any:
    """Random blocks; causal, those of a sequence are the first of a longer one's."""
    if not self.spec.is_causal:
      return init(rng, dims)
    number = -(-dims.S // dict(self.spec.sizes)['block_size'])
    longest = init(rng, dims._replace(S=max(dims.S, self.spec.max_length)))
    return {name: blocks[..., :number, :] for name, blocks in longest.items()}


class LayerNorm(nn.Module):
  """Layer norm computed in float32, in and out in x's dtype."""

  @nn.compact
  def __call__(self, x: Array) -> Array:
    return nn.LayerNorm(dtype=jnp.float32, name='norm')(x.astype(jnp.float32)).astype(x.dtype)


class Block(nn.Module):
  """Self-attention, cross-attention where there is a context, MLP; each in a residual branch."""
  spec: StackSpec
  instance: int
  deterministic: bool
  decode: bool = False

  @nn.compact
  def __call__(
      self,
      x: Array,
      mask: Array | None,
      bias: Any,
      rope_positions: ArrayLike | None,
      context: Array | None,
      context_mask: Array | None,
      draw: Array | int,
  ) -> Array:
    spec = self.spec

    def attend(name: str, attention: AttentionSpec, instance: int) -> Attention:
      return Attention(attention, instance, spec.dtype, self.deterministic, self.decode, name=name)

    self_attention = attend('self_attention', spec.self_attention, self.instance)
    x = self._branch('self', x, lambda y: self_attention(y, y, mask, bias, rope_positions, draw))
    if spec.cross_attention is not None:
      cross = attend('cross_attention', spec.cross_attention, self.instance + 1)
      x = self._branch('cross', x, lambda y: cross(y, context, context_mask, draw=draw))
    return self._branch('mlp', x, self._mlp)

  def _branch(self, name: str, x: Array, function: Callable[[Array], Array]) -> Array:
    """Returns x plus the function's value, with the norm before the function or after the sum."""
    norm = LayerNorm(name=f'{name}_norm')
    y = function(norm(x) if self.spec.norm == 'pre' else x)
    y = x + nn.Dropout(self.spec.dropout, deterministic=self.deterministic)(y)
    return y if self.spec.norm == 'pre' else norm(y)

  def _mlp(self, x: Array) -> Array:
    y = nn.Dense(self.spec.mlp_dim, dtype=self.spec.dtype, name='mlp_in')(x)
    y = ACTIVATIONS[self.spec.activation](y)
    return nn.Dense(x.shape[-1], dtype=self.spec.dtype, name='mlp_out')(y)


class Stack(nn.Module):
  """Positions, then blocks, then (with the norm before) a last norm."""
  spec: StackSpec
  first_instance: int = 0
  decode: bool = False

  @nn.compact
  def __call__(
      self,
      x: Array,
      mask: Array | None = None,
      context: Array | None = None,
      context_mask: Array | None = None,
      *,
      deterministic: bool = True,
      draw: Array | int = 0,
  ) -> Array:
    """Returns [B, T, D] from embedded tokens x and, for cross-attention, context [B, S, D].

    When decoding, x goes on where the last call ended, and only the first call needs the context.
    """
    spec = self.spec
    positions: ArrayLike = np.arange(x.shape[1], dtype=np.int32)
    if self.decode:
      assert mask is not None
      positions = self._next_positions(mask)
    x = self._add_positions(x.astype(spec.dtype), positions)
    x = nn.Dropout(spec.dropout, deterministic=deterministic)(x)
    rope_positions = positions if spec.positions == 'rope' else None
    bias = self._bias()
    block = nn.remat(Block) if spec.remat else Block
    for i in range(spec.num_layers):
      instance = self.first_instance + 2 * i
      x = placement.constrain(spec.self_attention.mesh, x, 'data',
                              None if self.decode else 'sequence')
      layer = block(spec, instance, deterministic, self.decode, name=f'layer_{i}')
      x = layer(x, mask, bias, rope_positions, context, context_mask, draw)
    return LayerNorm(name='norm')(x) if spec.norm == 'pre' else x

  def _next_positions(self, mask: Array) -> Array:
    """The positions [B, T] of tokens that are real where mask is True, behind all before them."""
    length = self.variable('cache', 'length', lambda: jnp.zeros(len(mask), jnp.int32))
    positions = length.value[:, None] + jnp.cumsum(mask, 1, dtype=jnp.int32) - 1
    length.value = positions[:, -1] + 1
    return jnp.clip(positions, 0, self.spec.max_length - 1)

  def _add_positions(self, x: Array, positions: ArrayLike) -> Array:
    spec = self.spec
    if spec.positions == 'sinusoidal':
      added = attn.positions.sinusoidal(positions, spec.model_dim)
    elif spec.positions == 'learned':
      shape = spec.max_length, spec.model_dim
      table = self.param('positions', nn.initializers.normal(1.), shape, jnp.float32)
      added = attn.positions.learned(table, positions)
    else:
      return x
    return x + added.astype(spec.dtype).reshape((1,) * (3 - added.ndim) + added.shape)

  def _bias(self) -> Any:
    """Returns the position bias of self-attention, one for all layers, or None."""
    num_heads = self.spec.self_attention.num_heads
    if self.spec.positions == 'alibi':
      return attn.positions.ALiBi(attn.positions.alibi_slopes(num_heads))
    if self.spec.positions == 't5':
      table = self.param('position_bias', nn.initializers.normal(0.02), (32, num_heads),
                         jnp.float32)
      return attn.positions.T5Bias(table, bidirectional=not self.spec.self_attention.is_causal)
    return None


class Embedding(nn.Module):
  """Token embedding of unit variance; `logits` uses the same table the other way."""
  vocab_size: int
  model_dim: int

  def setup(self) -> None:
    init = nn.initializers.normal(self.model_dim**-0.5)
    self.table = self.param('table', init, (self.vocab_size, self.model_dim), jnp.float32)

  def __call__(self, tokens: Array) -> Array:
    """Returns float32 [..., D]."""
    return self.table[tokens] * self.model_dim**0.5

  def logits(self, x: Array) -> Array:
    """Returns float32 [..., V]."""
    return jnp.einsum('...d,vd->...v', x.astype(jnp.float32), self.table)


class Head(nn.Module):
  """Logits over classes, float32; over the vocabulary by the embedding where one is given."""
  num_classes: int

  @nn.compact
  def __call__(self, x: Array, tied: Embedding | None = None) -> Array:
    if tied is not None:
      return tied.logits(x)
    return nn.Dense(self.num_classes, dtype=jnp.float32, name='dense')(x.astype(jnp.float32))
