"""What a head of attention looks at: shares of its weight, and the role they suggest.

    weights [B, N, T, S]    query tokens [B, T]    key tokens [B, S]    real [B, T], [B, S]

Source: Elhage et al. 2021, A Mathematical Framework for Transformer Circuits; Olsson et al. 2022,
In-context Learning and Induction Heads, https://arxiv.org/abs/2209.11895.
"""

from typing import NamedTuple

import numpy as np

# A share of its weight from which a head has a role.
ROLE = 0.4


class Head(NamedTuple):
  """Means over the real queries; nan where no query has such a key, or places cannot be compared.

  Attributes:
    entropy: of the weights, in nats.
    uniform: its share of the most it could be over the keys that are visible.
    distance: positions between query and key.
    previous: weight on the key before the query.
    first: weight on the first key.
    duplicate: weight on other keys with the query's token, of queries that have some.
    induction: weight on keys behind a key with the query's token, of queries that have some.
  """
  entropy: float
  uniform: float
  distance: float
  previous: float
  first: float
  duplicate: float
  induction: float

  @property
  def role(self) -> str:
    """The largest share's name if it is large, 'uniform', or nothing."""
    shares = {name: getattr(self, name) for name in ('previous', 'first', 'duplicate', 'induction')}
    name, share = max(shares.items(), key=lambda pair: np.nan_to_num(pair[1]))
    if share >= ROLE:
      return name
    return 'uniform' if self.uniform > 0.95 else ''


def judge(weights: np.ndarray, queries: np.ndarray, keys: np.ndarray, real_queries: np.ndarray,
          real_keys: np.ndarray, kind: str) -> list[Head]:
  """A Head for each of N. Weights that have signs, as a Linformer's, count by their size.

  kind is causal, full, or cross: of the keys of another sequence, whose places say nothing.
  """
  shares = np.abs(np.asarray(weights, np.float64)) * real_keys[:, None, None, :]
  total = shares.sum(-1, keepdims=True)
  shares = np.divide(shares, total, out=np.zeros_like(shares), where=total > 0)
  there = (real_queries[:, None, :] & (total[..., 0] > 0)).astype(np.float64)  # [B, N, T]
  T, S = weights.shape[-2:]
  t, s = np.arange(T)[:, None], np.arange(S)[None]
  same = (queries[:, :, None] == keys[:, None, :]) & real_keys[:, None, :]
  behind = np.pad(same, ((0, 0), (0, 0), (1, 0)))[:, :, :-1] & real_keys[:, None, :]
  if kind != 'cross':
    same &= (s < t) if kind == 'causal' else (s != t)
    # What is behind the query itself is its own next token.
    behind &= (s <= t) if kind == 'causal' else (s != t + 1)
  visible = (shares > 0).sum(-1)
  logs = np.log(np.where(shares > 0, shares, 1.))
  entropy = -(shares * logs).sum(-1)
  most = np.log(np.maximum(visible, 2))

  def mean(x: np.ndarray, among: np.ndarray) -> np.ndarray:
    number = among.sum((0, 2))
    return np.divide((x * among).sum((0, 2)),
                     number,
                     out=np.full(len(number), np.nan),
                     where=number > 0)

  def on(mask: np.ndarray, only_there: bool) -> np.ndarray:
    found = np.broadcast_to(mask[:, None], shares.shape)
    among = there * (found & (shares.sum(-1, keepdims=True) > 0)).any(-1) if only_there else there
    return mean((shares * found).sum(-1), among)

  every = lambda mask: np.broadcast_to(mask, same.shape)
  unknown = np.full(weights.shape[1], np.nan)
  columns = (mean(entropy,
                  there), mean(entropy / most,
                               there * (visible > 1)), unknown if kind == 'cross' else mean(
                                   (shares * np.abs(t - s)).sum(-1), there),
             unknown if kind == 'cross' else on(every(s == t - 1), True), on(every(s == 0), False),
             on(same, True), on(behind, True))
  return [Head(*map(float, column)) for column in zip(*columns)]
