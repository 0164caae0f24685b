"""AdamW with warm-up, cosine decay and clipping."""

from typing import Any, Callable

import jax
import optax

from experiments.config import Config


def _promoting(function: Callable[..., Any]) -> Callable[..., Any]:
  """Lets optax mix its integer step count with floats under strict promotion too."""

  def call(*args: Any) -> Any:
    with jax.numpy_dtype_promotion('standard'):
      return function(*args)

  return call


def learning_rate(config: Config) -> optax.Schedule:
  """Linear warm-up from 0 to the peak, then half a cosine down to 0 at config.steps.

  Source: Loshchilov & Hutter 2017, SGDR, section 3, https://arxiv.org/abs/1608.03983.
  """
  return _promoting(
      optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, config.warmup, config.steps))


def is_decayed(params: Any) -> Any:
  """Which leaves weight decay touches: all but vectors, biases and norm scales."""

  def decayed(path: Any, leaf: Any) -> bool:
    return leaf.ndim > 1 and getattr(path[-1], 'key', '') not in ('bias', 'scale')

  return jax.tree_util.tree_map_with_path(decayed, params)


def make_optimizer(config: Config) -> optax.GradientTransformation:
  """AdamW on gradients clipped to a global norm.

  Source: Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101.
  """
  clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
  adamw = optax.adamw(learning_rate(config), weight_decay=config.weight_decay, mask=is_decayed)
  chain = optax.chain(clip, adamw)
  return optax.GradientTransformation(chain.init, _promoting(chain.update))
