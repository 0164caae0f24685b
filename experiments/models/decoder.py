"""Decoder-only: the next token at every position, from those up to it."""

from flax import linen as nn
from jax import Array

from experiments.models import layers


class Decoder(nn.Module):
  """Attributes: see `build_model`."""
  vocab_size: int
  num_classes: int
  stack: layers.StackSpec
  tie_embeddings: bool

  @nn.compact
  def __call__(self,
               batch: dict[str, Array],
               *,
               deterministic: bool = True,
               draw: Array | int = 0,
               decode: bool = False) -> Array:
    """Returns logits, float32 [B, T, num_classes]; decoding, input_mask says what is real."""
    embedding = layers.Embedding(self.vocab_size, self.stack.model_dim, name='embedding')
    mask = batch['input_mask'] if decode else None
    x = layers.Stack(self.stack, decode=decode, name='decoder')(embedding(batch['inputs']),
                                                                mask,
                                                                deterministic=deterministic,
                                                                draw=draw)
    head = layers.Head(self.num_classes, name='head')
    return head(x, embedding if self.tie_embeddings else None)
