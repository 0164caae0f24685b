"""Position schemes in NumPy float64 and plain loops, from the papers' equations and the authors'
published rules.
"""

import math

import numpy as np


def sinusoidal(positions: np.ndarray, dim: int) -> np.ndarray:
  """Vaswani et al. 2017, section 3.5: PE(p, 2i) = sin(p / 10000^(2i/d)), PE(p, 2i+1) = cos(the
  same).
  """
  table = np.zeros(positions.shape + (dim,))
  for *b, j in np.ndindex(*table.shape):
    angle = int(positions[tuple(b)]) / 10000.**((j - j % 2) / dim)
    table[(*b, j)] = math.sin(angle) if j % 2 == 0 else math.cos(angle)
  return table


def rope(x, positions, base=10000., interleaved=False, dim=None) -> np.ndarray:
  """RoFormer (Su et al. 2021), equation 15: pair i of the first dim components turns by p *
  base^(-2i/d).
  """
  out, dim = np.array(x, np.float64), x.shape[-1] if dim is None else dim
  positions = np.broadcast_to(positions, x.shape[:-2])
  for *b, n in np.ndindex(*x.shape[:-1]):
    for i in range(dim // 2):
      first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
      angle = int(positions[tuple(b)]) * base**(-2 * i / dim)
      a, c = float(x[(*b, n, first)]), float(x[(*b, n, second)])
      out[(*b, n, first)] = a * math.cos(angle) - c * math.sin(angle)
      out[(*b, n, second)] = a * math.sin(angle) + c * math.cos(angle)
  return out


def alibi_slopes(num_heads: int) -> np.ndarray:
  """Press et al. 2022, and the rule of their code where num_heads is no power of two.

  2^(-8/n), 2^(-16/n), ... for n a power of two; else those of the power of two below, followed by
  every other slope of the power of two above.
  """
  below = 2**int(math.floor(math.log2(num_heads)))
  slopes = [2.**(-8. * (i + 1) / below) for i in range(below)]
  above = [2.**(-8. * (i + 1) / (2 * below)) for i in range(2 * below)]
  return np.array((slopes + above[::2])[:num_heads])


def alibi(slopes, query_positions, key_positions) -> np.ndarray:
  """-slope * distance, [..., N, T, S]; the encoder's symmetric form, which equals the causal one
  for s <= t.
  """
  distance = np.abs(
      np.asarray(query_positions)[..., :, None] - np.asarray(key_positions)[..., None, :])
  return -np.asarray(slopes, np.float64)[:, None, None] * distance[..., None, :, :]


def t5_bucket(relative: int, bidirectional: bool, num_buckets=32, max_distance=128) -> int:
  """Raffel et al. 2020: half the buckets one per distance, the others logarithmic up to
  max_distance.

  relative is key - query. The floor of the logarithm is taken by comparing integer powers, hence
  exact.
  """
  offset, distance = 0, max(-relative, 0)
  if bidirectional:
    num_buckets //= 2
    offset, distance = (num_buckets if relative > 0 else 0), abs(relative)
  exact = num_buckets // 2
  if distance < exact:
    return offset + distance
  steps, bucket = num_buckets - exact, exact
  while (bucket < num_buckets - 1 and distance**steps * exact**(bucket + 1 - exact)
         >= max_distance**(bucket + 1 - exact) * exact**steps):
    bucket += 1
  return offset + bucket


def t5_buckets(query_positions,
               key_positions,
               bidirectional,
               num_buckets=32,
               max_distance=128) -> np.ndarray:
  """int [..., T, S]."""
  relative = np.asarray(key_positions)[..., None, :] - np.asarray(query_positions)[..., :, None]
  buckets = np.zeros(relative.shape, int)
  for at in np.ndindex(*relative.shape):
    buckets[at] = t5_bucket(int(relative[at]), bidirectional, num_buckets, max_distance)
  return buckets


def t5_bias(table, query_positions, key_positions, bidirectional) -> np.ndarray:
  """table [num_buckets, N] looked up: [..., N, T, S]."""
  buckets = t5_buckets(query_positions, key_positions, bidirectional, table.shape[0])
  return np.moveaxis(np.asarray(table, np.float64)[buckets], -1, -3)
