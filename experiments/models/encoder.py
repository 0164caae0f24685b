"""Encoder-only: classification of a whole input, or of each of its positions."""

from flax import linen as nn
from jax import Array
import jax.numpy as jnp

from experiments.models import layers


def pool(x: Array, mask: Array, pooling: str) -> Array:
  """Reduces x [B, T, D] to [B, D]: its first position, or the mean over the real ones."""
  if pooling == 'first':
    return x[:, 0]
  real = mask[..., None].astype(x.dtype)
  # `where` rather than a product: what stands at padding, NaN included, has no effect.
  total = jnp.sum(jnp.where(mask[..., None], x, jnp.zeros_like(x)), axis=1)
  return total / jnp.maximum(jnp.sum(real, axis=1), jnp.ones((), x.dtype))


class Encoder(nn.Module):
  """Attributes: see `build_model`; pooling is None where every position has a target."""
  vocab_size: int
  num_classes: int
  stack: layers.StackSpec
  pooling: str | None
  tie_embeddings: bool

  @nn.compact
  def __call__(self,
               batch: dict[str, Array],
               *,
               deterministic: bool = True,
               draw: Array | int = 0) -> Array:
    """Returns logits, float32 [B, T, num_classes], or [B, num_classes] when pooling."""
    embedding = layers.Embedding(self.vocab_size, self.stack.model_dim, name='embedding')
    mask = batch['input_mask']
    x = embedding(batch['inputs'])
    x = layers.Stack(self.stack, name='encoder')(x, mask, deterministic=deterministic, draw=draw)
    if self.pooling is not None:
      x = pool(x.astype(jnp.float32), mask, self.pooling)
    head = layers.Head(self.num_classes, name='head')
    return head(x, embedding if self.tie_embeddings else None)
