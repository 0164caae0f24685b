"""The three model families, built from a Config for a task."""

import functools
from typing import Any

import attn
from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments.config import Config, FIELDS, Place, validate
from experiments.models import layers
from experiments.models.decoder import Decoder
from experiments.models.encoder import Encoder
from experiments.models.seq2seq import Seq2Seq
from experiments.tasks import Task

BIGBIRD_BLOCK = 8


def _attention(config: Config, place: Place, key_length: int,
               mesh: Mesh | None) -> layers.AttentionSpec:
  """Collects what the variant at a place needs; key_length is the most keys it will see."""
  variant = attn.VARIANTS[place.variant]
  options = {name: getattr(config, name) for name in variant.options if name in FIELDS}
  sizes = {name: getattr(config, name) for name in variant.sizes}
  if place.variant == 'bigbird':  # whose blocks are a part of what it computes
    options['block_size'] = config.block_size or BIGBIRD_BLOCK
    sizes |= {'block_size': options['block_size'], 'is_causal': place.causal}
  for name in ('block_size', 'step_size'):  # 0: the variant's own
    if not options.get(name, 1):
      del options[name]
  return layers.AttentionSpec(
      variant=place.variant,
      options=tuple(options.items()),
      sizes=tuple(sizes.items()),
      parameter_length=config.segment if place.causal else key_length,
      num_heads=config.heads,
      num_kv_heads=config.kv_heads or config.heads,
      is_causal=place.causal,
      max_length=key_length,
      dropout=config.attention_dropout,
      seed=config.seed,
      mesh=mesh,
  )


def _stack(
    config: Config,
    length: int,
    self_attention: layers.AttentionSpec,
    cross_attention: layers.AttentionSpec | None = None,
) -> layers.StackSpec:
  return layers.StackSpec(
      num_layers=config.num_layers,
      model_dim=config.model_dim,
      mlp_dim=config.mlp_dim or 4 * config.model_dim,
      activation=config.activation,
      norm=config.norm,
      positions=config.positions,
      max_length=length,
      dropout=config.dropout,
      remat=config.remat,
      dtype=jnp.dtype(config.dtype),
      self_attention=self_attention,
      cross_attention=cross_attention,
  )


def build_model(config: Config, task: Task, mesh: Mesh | None = None) -> nn.Module:
  """Builds the model of config.model for a task.

      variables = model.init({'params': rng}, batch)
      logits = model.apply(variables, batch, deterministic=False, draw=n, rngs={'dropout': rng})

  With decode=True and mutable=('cache', 'drawn') a decoder keeps what its attention needs of the
  batch's tokens, and goes on from there when it is given what it kept; see `experiments.decode`.

  `draw` numbers the draw of Performer features: those of a layer are a function of (config.seed,
  layer, draw), computed in the graph, so that another number recompiles nothing.

  With a mesh (see `experiments.placement`) its activations are cut over devices.

  Raises:
    ValueError: the choices clash; the message names them and the way out.
  """
  validate(config)
  if config.tie_embeddings and not (task.per_position and task.num_classes == task.vocab_size):
    raise ValueError(f'tie_embeddings needs targets that are tokens, but task {config.task} has '
                     f'{task.num_classes} classes and {task.vocab_size} tokens; use '
                     'tie_embeddings=False')
  places, source, target = config.places(), task.input_length, task.target_length
  attention = functools.partial(_attention, config, mesh=mesh)
  sizes: dict[str, Any] = {
      'vocab_size': task.vocab_size,
      'num_classes': task.num_classes,
      'tie_embeddings': config.tie_embeddings
  }
  if config.model == 'encoder':
    stack = _stack(config, source, attention(places['encoder'], source))
    return Encoder(stack=stack, pooling=None if task.per_position else config.pooling, **sizes)
  self_attention = attention(places['decoder'], target)
  if config.model == 'decoder':
    return Decoder(stack=_stack(config, target, self_attention), **sizes)
  cross_attention = attention(places['cross'], source)
  return Seq2Seq(encoder=_stack(config, source, attention(places['encoder'], source)),
                 decoder=_stack(config, target, self_attention, cross_attention),
                 bottleneck=task.bottleneck,
                 **sizes)


def param_count(params: Any) -> int:
  """Counts the numbers in a tree of parameters."""
  return sum(x.size for x in jax.tree.leaves(params))
