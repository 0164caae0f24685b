"""The models of this package as step functions of `attn.decoding`."""

from typing import Any

from attn import decoding
from attn.decoding import Generated, Step
from flax import linen as nn
from jax import Array
import jax.numpy as jnp

Batch = dict[str, Array]


def begin(model: nn.Module, params: Any, batch: Batch) -> tuple[Step, Any, Array]:
  """Feeds prompts: a step function, its state behind all tokens but the last, and those [B].

  Args:
    model: a decoder or seq2seq model of `build_model`.
    params: its parameters.
    batch: inputs [B, P] and input_mask [B, P], True at the prompt's tokens, of which every row has
      at least one; and source and source_mask for a seq2seq model.
  """
  mask = batch['input_mask']
  place = jnp.arange(mask.shape[1], dtype=jnp.int32)[None]
  last = jnp.max(jnp.where(mask, place, 0), 1, keepdims=True)
  before = batch | {'input_mask': mask & (place < last)}
  _, kept = model.apply({'params': params}, before, decode=True, mutable=('cache', 'drawn'))

  def step(cache: Any, tokens: Array) -> tuple[Array, Any]:
    fed = {'inputs': tokens[:, None], 'input_mask': jnp.ones((len(tokens), 1), bool)}
    variables = {'params': params, 'drawn': kept.get('drawn', {}), 'cache': cache}
    logits, new = model.apply(variables, fed, decode=True, mutable=('cache',))
    return logits[:, 0], new['cache']

  return step, kept['cache'], jnp.take_along_axis(batch['inputs'], last, 1)[:, 0]


def answer(model: nn.Module, params: Any, batch: Batch, eos_id: int | None) -> Generated:
  """Greedy answers to a batch of a task that has an `Answer`, each as long as its target at most.

  A row is given its inputs up to its first scored target, and its source; lengths count the tokens
  up to eos_id, which is counted too.
  """
  scored = batch['weights'] > 0
  place = jnp.arange(scored.shape[1], dtype=jnp.int32)[None]
  mask = place <= jnp.argmax(scored, 1)[:, None]
  step, cache, last = begin(model, params, batch | {'input_mask': mask})
  return decoding.generate(step,
                           cache,
                           last,
                           max_length=scored.shape[1],
                           limits=jnp.sum(scored, 1, dtype=jnp.int32),
                           eos_id=eos_id,
                           temperature=0.)


def is_right(tokens: Array, batch: Batch) -> Array:
  """Which rows [B] of answers [B, T] are the scored targets throughout."""
  scored = batch['weights'] > 0
  place = jnp.arange(scored.shape[1], dtype=jnp.int32)[None]
  first = jnp.argmax(scored, 1).astype(jnp.int32)[:, None]
  wanted = jnp.take_along_axis(batch['targets'], jnp.minimum(first + place, scored.shape[1] - 1), 1)
  count = jnp.sum(scored, 1, keepdims=True)
  return jnp.all((tokens == wanted) | (place >= count), 1) & (count[:, 0] > 0)
