"""Cross entropy as a sum and a count: pieces of a batch add up before anything is divided."""

import jax
from jax import Array
import jax.numpy as jnp


def cross_entropy(
    logits: Array,
    targets: Array,
    weights: Array,
    smoothing: float = 0.,
) -> tuple[Array, Array]:
  """Adds up the negative log likelihood of the scored targets.

  With p = softmax(logits) and V classes, a position costs -sum_v q_v log p_v, where q is the target
  mixed with the uniform distribution over all classes: (1 - smoothing) onehot + smoothing / V.

  A position of weight 0 is not looked at: its target may be anything (-100, say), its logits too,
  and its gradient is exactly 0. A scored target outside [0, V) makes the sum NaN rather than count
  as another class.

  Args:
    logits: [..., V].
    targets: [...], integers.
    weights: [...]; 1. where a position is scored, 0. where it is not, anything >= 0 in between.
    smoothing: the share of the target's mass that is spread over all classes, in [0, 1).

  Returns:
    (sum of weighted losses, sum of weights), float32 (float64 for float64 logits). Sums and counts
    of micro-batches, or of evaluation batches, are added first; the mean is sum / max(count, 1).

  Raises:
    ValueError: shapes disagree, targets are not integers, or smoothing is outside [0, 1).

  Source: Szegedy et al. 2016, section 7 (label smoothing), https://arxiv.org/abs/1512.00567.
  """
  if logits.shape[:-1] != targets.shape or weights.shape != targets.shape:
    raise ValueError('logits [..., V], targets [...] and weights [...] must agree; got '
                     f'{logits.shape}, {targets.shape} and {weights.shape}')
  if not jnp.issubdtype(targets.dtype, jnp.integer):
    raise ValueError(f'targets must be integers; got {targets.dtype}')
  if not 0. <= smoothing < 1.:
    raise ValueError(f'smoothing must be in [0, 1); got {smoothing}')
  logits = jnp.asarray(logits)
  dtype = jnp.float64 if logits.dtype == jnp.float64 else jnp.float32
  weights = jnp.asarray(weights, dtype)
  scored = weights != 0
  # Replaced before the softmax, not after: otherwise 0 * NaN would come back through the gradient.
  logits = jnp.where(scored[..., None], logits.astype(dtype), jnp.zeros((), dtype))
  targets = jnp.where(scored, targets, jnp.zeros((), targets.dtype))
  log_probs = jax.nn.log_softmax(logits, axis=-1)
  valid = (targets >= 0) & (targets < logits.shape[-1])
  hit = jnp.take_along_axis(log_probs, targets[..., None], axis=-1, mode='clip')[..., 0]
  hit = jnp.where(valid, hit, jnp.full((), jnp.nan, dtype))
  loss = -(1. - smoothing) * hit - smoothing * jnp.mean(log_probs, axis=-1)
  return jnp.sum(weights * loss), jnp.sum(weights)
