"""From logits to tokens: filters, and a draw.

Every filter takes logits [..., V] and gives logits of that shape in float32 at least, HIDDEN where
a token may not be drawn. A setting is a number, or an array [...] with one for each row. Filters
compose; `filtered` applies them in the usual order, temperature first.

Ties go to the lower index everywhere.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn import axes, checks, softmax
from attn.axes import Array, ArrayLike

Setting = float | int | ArrayLike
# Settings beyond this, or below its reciprocal, mean the same.
_LARGE = 1e30


def temperature(logits: ArrayLike, value: Setting) -> Array:
  """Logits divided by a temperature; 0 leaves the best token alone.

  They are given relative to the best one's, which changes no probability, so that a small
  temperature does not make them overflow.

  Args:
    logits: [..., V].
    value: at least 0, one or [...].

  Raises:
    ValueError: a temperature that is known is negative or not finite.
  """
  logits = _check_logits(logits)
  value = _setting('temperature', value, logits, 0., np.inf, 'finite and at least 0')
  best = jnp.where(_rank(logits) == 0, jnp.zeros_like(logits), softmax.HIDDEN)
  relative = logits - softmax.finite(jnp.max(logits, -1, keepdims=True))
  # XLA may multiply by the reciprocal, which must not vanish: -inf times 0 is nan.
  divisor = jnp.where(value > 0, jnp.minimum(value, _LARGE), jnp.ones_like(value))
  return jnp.where(value > 0, relative / divisor, best)


def top_k(logits: ArrayLike, value: Setting) -> Array:
  """The k largest logits; all where k is V or more.

  Args:
    logits: [..., V].
    value: integers, at least 1, one or [...].

  Raises:
    ValueError: a k that is known is no integer or below 1.

  Source: Fan et al. 2018, section 5.2, https://arxiv.org/abs/1805.04833.
  """
  logits = _check_logits(logits)
  k = _setting('top_k', value, logits, 1, np.inf, 'an integer of at least 1', integer=True)
  return softmax.hide(logits, _rank(logits) < jnp.maximum(k, 1))


def top_p(logits: ArrayLike, value: Setting) -> Array:
  """The nucleus: a token stays if the probability strictly ahead of it is less than p.

  So the best token always stays, and p = 1 keeps all.

  Args:
    logits: [..., V].
    value: in [0, 1], one or [...]; 0 keeps the best alone.

  Raises:
    ValueError: a p that is known is out of range.

  Source: Holtzman et al. 2020, section 3.1, https://arxiv.org/abs/1904.09751.
  """
  logits = _check_logits(logits)
  p = _setting('top_p', value, logits, 0., 1., 'in [0, 1]')
  order = jnp.argsort(-logits, -1, stable=True)
  probabilities = jnp.take_along_axis(jax.nn.softmax(logits, -1), order, -1)
  total = jnp.cumsum(probabilities, -1)
  ahead = jnp.concatenate([jnp.zeros_like(total[..., :1]), total[..., :-1]], -1)
  kept = jnp.take_along_axis((ahead < p) | (ahead == 0), jnp.argsort(order, -1), -1)
  return softmax.hide(logits, kept | (p >= 1))


def min_p(logits: ArrayLike, value: Setting) -> Array:
  """The tokens whose probability is at least `value` times the best one's.

  Args:
    logits: [..., V].
    value: in [0, 1], one or [...]; 0 keeps all.

  Raises:
    ValueError: a value that is known is out of range.

  Source: Nguyen et al. 2024, section 4, https://arxiv.org/abs/2407.01082.
  """
  logits = _check_logits(logits)
  p = _setting('min_p', value, logits, 0., 1., 'in [0, 1]')
  best = jnp.max(logits, -1, keepdims=True)
  least = best + jnp.log(jnp.where(p > 0, p, jnp.ones_like(p)))
  return softmax.hide(logits, (logits >= least) | (p <= 0) | (_rank(logits) == 0))


def repetition_penalty(logits: ArrayLike, seen: ArrayLike, value: Setting) -> Array:
  """Makes tokens that were there less likely: positive logits divided by the penalty, others times.

  Args:
    logits: [..., V].
    seen: boolean [..., V], the tokens that were there.
    value: greater than 0, one or [...]; 1 changes nothing.

  Raises:
    ValueError: a penalty that is known is not positive, or seen does not fit.

  Source: Keskar et al. 2019, CTRL, section 4.1, https://arxiv.org/abs/1909.05858.
  """
  logits = _check_logits(logits)
  if not checks.is_array(seen) or seen.dtype != jnp.bool_ or seen.shape != logits.shape:
    got = f'{seen.dtype} {seen.shape}' if checks.is_array(seen) else type(seen).__name__
    raise ValueError(f'seen must be boolean [..., V] = {logits.shape}; got {got}')
  penalty = _setting('repetition_penalty',
                     value,
                     logits,
                     0.,
                     np.inf,
                     'finite and greater than 0',
                     positive=True)
  penalty = jnp.clip(penalty, 1 / _LARGE, _LARGE)
  return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


_FILTERS = (temperature, top_k, top_p, min_p)


def filtered(logits: ArrayLike,
             *,
             temperature: Setting | None = None,
             top_k: Setting | None = None,
             top_p: Setting | None = None,
             min_p: Setting | None = None) -> Array:
  """Applies the filters that are given: temperature, then top_k, top_p and min_p.

  Each sees what the one before it left, so probabilities are those at the temperature, of the
  tokens that remain.
  """
  for function, value in zip(_FILTERS, (temperature, top_k, top_p, min_p)):
    logits = logits if value is None else function(logits, value)
  return _check_logits(logits)


def sample(rng: Array, logits: ArrayLike) -> Array:
  """Draws a token from softmax(logits) for each row: int32 [...] for logits [..., V].

  The draw of row i of a batch depends on rng, i and the row's logits, and on no other row.
  """
  logits = _check_logits(logits)
  rng, rows = checks.check_key('rng', rng), logits.reshape(-1, logits.shape[-1])
  rngs = jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(len(rows)))
  tokens = jax.vmap(jax.random.categorical)(rngs, rows)
  return tokens.reshape(logits.shape[:-1]).astype(jnp.int32)


def _rank(logits: Array) -> Array:
  """How many tokens are ahead of each: larger, or as large and of a lower index."""
  return jnp.argsort(jnp.argsort(-logits, -1, stable=True), -1).astype(jnp.int32)


def _check_logits(logits: ArrayLike) -> Array:
  if not checks.is_array(logits) or not jnp.issubdtype(logits.dtype, jnp.floating):
    got = logits.dtype if checks.is_array(logits) else type(logits).__name__
    raise ValueError(f'logits must be a floating-point array [..., V]; got {got}')
  if not logits.ndim or not logits.shape[-1]:
    raise ValueError(f'logits must be [..., V] with at least one token; got {logits.shape}')
  return jnp.asarray(logits, axes.wide(logits.dtype))


def _setting(name: str,
             value: Any,
             logits: Array,
             low: float,
             high: float,
             wanted: str,
             positive: bool = False,
             integer: bool = False) -> Array:
  """A setting as [..., 1]; checked if it is known."""
  if checks.is_array(value) and integer and not jnp.issubdtype(value.dtype, jnp.integer):
    raise ValueError(f'{name} must be {wanted}; got {value.dtype}')
  if not isinstance(value, jax.core.Tracer):
    try:
      known = np.asarray(value)
    except ValueError:  # lists of different lengths
      raise ValueError(f'{name} must be {wanted}; got {value}') from None
    number = np.issubdtype(known.dtype,
                           np.integer) or not integer and jnp.issubdtype(known.dtype, jnp.floating)
    least = np.greater if positive else np.greater_equal
    if not number or not np.all(least(known, low) & (known <= high) & (known < np.inf)):
      raise ValueError(f'{name} must be {wanted}; got {value}')
    value = np.minimum(known.astype(np.int64), checks.MOST) if integer else known
  shape = jnp.shape(value)
  if shape not in ((), logits.shape[:-1]):
    raise ValueError(f'{name} must be one number or one for each row {logits.shape[:-1]} of '
                     f'logits {logits.shape}; got {shape}')
  value = jnp.asarray(value)
  value = value.astype(jnp.int32 if integer else logits.dtype)
  return value.reshape(*shape, 1) if shape else value.reshape((1,) * logits.ndim)
