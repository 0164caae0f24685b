"""How far a variant over a mesh axis is from itself without one, as a Markdown table:
`python -m tests.sharding_parity`.

On 2, 4 and 8 virtual devices, forward and gradient, the largest difference over all calls of
tests/sharding_cases.py: plain, packed (padding, segments, ALiBi, dropout), with mask and bias
arrays, with explicit positions, with keys of another sequence. Gradients are relative to their
largest entry. Fails where a difference exceeds the tolerance of the tests.
"""

import contextlib
import sys

from tests import conftest  # noqa: F401, has as many devices
import jax
import numpy as np

from tests import sharding_cases
from tests import tolerances

DTYPES = ('float64', 'float32')


def difference(x, y) -> float:
  """The largest, of one array, relative to y where that is large."""
  x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
  assert x.shape == y.shape
  return float(np.abs(x - y).max() / max(1., np.abs(y).max()))


def largest(name: str, is_causal: bool, dtype: str) -> dict[int, tuple[float, float]]:
  """For each number of devices the largest difference of outputs, and of gradients."""
  worst = {size: (0., 0.) for size in sharding_cases.SIZES}
  for kind in sharding_cases.KINDS:
    given = sharding_cases.case(name, kind, is_causal, dtype)
    if given is None:
      continue
    output, grads = sharding_cases.both(given, None)
    for size in sharding_cases.SIZES:
      found, found_grads = sharding_cases.both(given, size)
      pairs = zip(jax.tree.leaves(found_grads), jax.tree.leaves(grads), strict=True)
      new = difference(found, output), max(difference(x, y) for x, y in pairs)
      worst[size] = max(worst[size][0], new[0]), max(worst[size][1], new[1])
  return worst


def main() -> int:
  titles = [f'{dtype}, {size}: {what}' for dtype in DTYPES for size in sharding_cases.SIZES
            for what in ('forward', 'gradient')]  # yapf: disable
  print(f'| variant | {" | ".join(titles)} |\n| --- |{" --: |" * len(titles)}', flush=True)
  good = True
  for name in sharding_cases.OPTIONS:
    for is_causal in (False, True):
      cells = [name + (' causal' if is_causal else '')]
      for dtype in DTYPES:
        with jax.enable_x64(True) if dtype == 'float64' else contextlib.nullcontext():
          worst = largest(name, is_causal, dtype)
        factor = tolerances.PERFORMER_FACTOR if name in sharding_cases.SUMMED else 1.
        most = factor * tolerances.FORWARD[dtype], factor * tolerances.GRADIENT[dtype]
        for pair in worst.values():
          good &= all(found <= wanted for found, wanted in zip(pair, most))
          cells += [f'{found:.0e}' for found in pair]
      print(f'| {" | ".join(cells)} |', flush=True)
  return 0 if good else 1


if __name__ == '__main__':
  sys.exit(main())
