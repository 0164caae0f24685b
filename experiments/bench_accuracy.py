"""How far a contender's results are from float64, at one moderate length.

own: from the float64 run of the variant that computes the same, for the same numbers; for the
variants that approximate dense attention this is rounding alone, not how well they approximate it.
dense: from dense attention in float64 NumPy under the pattern's mask; for exact patterns only.
"""

from collections.abc import Sequence
from typing import Any

import attn
import numpy as np

from experiments import bench_contenders as contenders
from experiments.bench_contenders import Contender, Problem

LENGTH = 512


def dense(inputs: Sequence[np.ndarray], mask: np.ndarray) -> list[np.ndarray]:
  """Softmax attention and its gradients, float64.

  Args:
    inputs: query, key, value and the output's gradient, [B, T, N, H].
    mask: bool [T, S] or [N, T, S], True = visible; every query sees a key.

  Returns:
    output and the gradients of query, key and value, [B, T, N, H].
  """
  q, k, v, d_output = (x.astype(np.float64) for x in inputs)
  scale = q.shape[-1]**-0.5
  logits = np.where(mask, np.einsum('btnh,bsnh->bnts', q, k) * scale, -np.inf)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  d_weights = np.einsum('btnh,bsnh->bnts', d_output, v)
  d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * scale
  return [
      np.einsum('bnts,bsnh->btnh', weights, v),
      np.einsum('bnts,bsnh->btnh', d_logits, k),
      np.einsum('bnts,btnh->bsnh', d_logits, q),
      np.einsum('bnts,btnh->bsnh', weights, d_output),
  ]


def visible(name: str, is_causal: bool, problem: Problem) -> np.ndarray | None:
  """The pattern of a variant, bool [T, T] or [N, T, T]; None where it has none."""
  variant = attn.VARIANTS[name]
  if variant.pattern is None:
    return None
  options, arrays = contenders.settings(name, problem, is_causal)
  T = problem.length
  show = lambda **own: np.asarray(variant.visibility(T, T, is_causal=is_causal, **options, **own))
  if not arrays:
    return show()
  heads = range(problem.heads)  # each has its own random blocks
  return np.stack([show(**{key: array[n] for key, array in arrays.items()}) for n in heads])


def largest(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
  """The largest absolute difference; as many of wanted as there are of found."""
  return max(float(np.abs(a - b).max()) for a, b in zip(found, wanted))


def errors(contender: Contender, problem: Problem, direction: str) -> dict[str, Any]:
  """The largest absolute errors of a contender's results, `own` and (or None) `dense`."""
  numbers = contender.prepare(problem, direction).numbers()
  name, is_causal = contender.variant, contender.is_causal
  mask = visible(name, is_causal, problem)
  exact = None if mask is None else dense(contenders.draw(problem), mask)
  return dict(own=largest(numbers, contenders.reference(name, is_causal, problem, direction)),
              dense=None if exact is None else largest(numbers, exact))
