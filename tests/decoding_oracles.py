"""Sampling filters, exhaustive search and losses in plain Python and NumPy, from their
definitions.
"""

import itertools
import math

import numpy as np


def top_p(probs: np.ndarray, p: float) -> np.ndarray:
  """Holtzman et al. 2020, section 3.1: a token stays if the mass strictly ahead of it is below p;
  never empty.

  Ahead: larger probability, or the same and a lower index.
  """
  order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
  kept, ahead = np.zeros(len(probs), bool), 0.
  for rank, i in enumerate(order):
    kept[i] = rank == 0 or ahead < p or p >= 1.
    ahead += probs[i]
  return kept


def top_k(logits: np.ndarray, k: int, ties: str) -> np.ndarray:
  """The k largest: ties='index' keeps the lower indices, ties='all' whatever equals the k-th."""
  order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k]
  if ties == 'all':
    return logits >= logits[order[-1]]
  return np.isin(np.arange(len(logits)), order)


def softmax(logits: np.ndarray) -> np.ndarray:
  weights = np.exp(logits - logits.max())
  return weights / weights.sum()


def normaliser(name: str, length: int) -> float:
  """'power<a>': length^a. 'gnmt<a>' (Wu et al. 2016, equation 14): ((5 + length) / 6)^a; 0p6 reads
  0.6.
  """
  kind, alpha = (name[:5], name[5:]) if name.startswith('power') else (name[:4], name[4:])
  exponent = float(alpha.replace('p', '.'))
  return float(length)**exponent if kind == 'power' else ((5. + length) / 6.)**exponent


def hypotheses(probs: np.ndarray, start: int = 1, end: int = 0) -> dict[tuple[int, ...], float]:
  """Every sequence that ends with `end` or is cut at probs.shape[0] tokens, with its log
  probability.
  """
  found = {}
  steps, size, _ = probs.shape
  for length in range(1, steps + 1):
    for tokens in itertools.product(range(size), repeat=length):
      ended = tokens[-1] == end
      if end in tokens[:-1] or not (ended or length == steps):
        continue
      chances = [probs[i, p, n] for i, (p, n) in enumerate(zip((start,) + tokens, tokens))]
      found[tokens] = sum(math.log(c) if c > 0. else -math.inf for c in chances)
  return found


def best(probs: np.ndarray, norm: str, count: int) -> list[tuple[tuple[int, ...], float, float]]:
  """The `count` best (tokens, log probability, score), best first."""
  scored = [(tokens, log, log / normaliser(norm, len(tokens)))
            for tokens, log in hypotheses(probs).items()]
  return sorted(scored, key=lambda item: -item[2])[:count]


def greedy(probs: np.ndarray, start: int = 1, end: int = 0) -> tuple[int, ...]:
  tokens = []
  for step in probs:
    tokens.append(int(np.argmax(step[tokens[-1] if tokens else start])))
    if tokens[-1] == end:
      break
  return tuple(tokens)


def cross_entropy(logits, targets, weights, smoothing=0.) -> tuple[float, float]:
  """Sum over weighted positions of -(1 - e) log p[target] - e mean_v log p[v], and the sum of
  weights.
  """
  total = 0.
  for at in np.ndindex(*targets.shape):
    if weights[at]:
      log_probs = np.log(softmax(logits[at]))
      total -= weights[at] * (
          (1. - smoothing) * log_probs[targets[at]] + smoothing * log_probs.mean())
  return total, float(np.sum(weights))


def warmup_cosine(step: int, warmup: int, total: int, peak: float) -> float:
  if step < warmup:
    return peak * step / warmup
  return peak * (1. + math.cos(math.pi * min(1., (step - warmup) / (total - warmup)))) / 2.
