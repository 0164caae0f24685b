"""What a curve over lengths says: its order of growth, and where it passes below another."""

from collections.abc import Mapping
import math

import numpy as np

Curve = Mapping[int, float]  # length -> seconds or bytes


def growth(curve: Curve) -> float | None:
  """The p of amount ~ length^p, by least squares in logarithms; None with fewer than 2 points.

  Amounts of 0 have no logarithm and are left out.
  """
  points = [(length, amount) for length, amount in curve.items() if amount > 0]
  if len(points) < 2:
    return None
  x, y = np.log(np.array(points, float)).T
  x -= x.mean()
  return float(x @ y / (x @ x))


def efficiency_length(curve: Curve, dense: Curve) -> float | None:
  """The smallest length from which a curve stays below another, up to the longest both have.

  Between two measured lengths it is interpolated, linearly in the logarithms of length and ratio.

  Returns:
    the length; the shortest of both where it is below from the start; None where it is not below
    at the longest, or nothing can be compared.
  """
  lengths = sorted(
      length for length in curve.keys() & dense.keys() if curve[length] > 0 and dense[length] > 0)
  ratios = [math.log(curve[length] / dense[length]) for length in lengths]
  if not lengths or ratios[-1] >= 0:
    return None
  last = max((i for i, ratio in enumerate(ratios) if ratio >= 0), default=-1)
  if last < 0:
    return float(lengths[0])
  share = ratios[last] / (ratios[last] - ratios[last + 1])
  return lengths[last] * (lengths[last + 1] / lengths[last])**share
