"""Sequence to sequence: an encoder of the source, a decoder of the target that attends to it."""

from flax import linen as nn
from jax import Array
import jax.numpy as jnp

from experiments.models import layers


class Seq2Seq(nn.Module):
  """Attributes: see `build_model` and `Task`. Source and target share the token embedding."""
  vocab_size: int
  num_classes: int
  encoder: layers.StackSpec
  decoder: layers.StackSpec
  tie_embeddings: bool
  bottleneck: bool

  @nn.compact
  def __call__(self,
               batch: dict[str, Array],
               *,
               deterministic: bool = True,
               draw: Array | int = 0,
               decode: bool = False) -> Array:
    """Returns logits, float32 [B, T, num_classes], by teacher forcing.

    Decoding, input_mask says which inputs are real, and only the first call needs the source.
    """
    embedding = layers.Embedding(self.vocab_size, self.encoder.model_dim, name='embedding')
    context, mask = None, batch.get('source_mask')
    if 'source' in batch:
      context = layers.Stack(self.encoder, name='encoder')(embedding(batch['source']),
                                                           mask,
                                                           deterministic=deterministic,
                                                           draw=draw)
      if self.bottleneck:
        real = batch['source_mask']
        place = jnp.arange(real.shape[1], dtype=jnp.int32)[None]
        mask = place == jnp.max(jnp.where(real, place, 0), 1, keepdims=True)
    x = layers.Stack(self.decoder,
                     first_instance=2 * self.encoder.num_layers,
                     decode=decode,
                     name='decoder')(embedding(batch['inputs']),
                                     batch['input_mask'] if decode else None,
                                     context,
                                     mask,
                                     deterministic=deterministic,
                                     draw=draw)
    head = layers.Head(self.num_classes, name='head')
    return head(x, embedding if self.tie_embeddings else None)
