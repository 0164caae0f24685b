"""How far decoding through a cache is from one pass, as a Markdown table:
`python -m tests.cache_parity`.

Every causal variant in three dtypes; batches of rows of different lengths, cut at random, one token
at a time, and padded on the left. A cell is the largest difference over several seeds, between
numbers of order one. Fails where one exceeds the tolerance of the tests.
"""

import contextlib
import sys

import attn
import jax
import jax.numpy as jnp
import numpy as np

from tests import cache_cases
from tests import harness
from tests import tolerances
from tests.cache_cases import B, T

SEEDS = range(5)
LENGTHS = [17, 11, 4]
HEADINGS = ('random pieces', 'single tokens', 'left padding')


def left_padded(given: cache_cases.Sequences) -> list[cache_cases.Piece]:
  """One piece in which every row's tokens stand at the end, then a token of each."""
  found = []
  for start, stop, width in ((0, 5, 9), (5, 6, 1)):
    mask, place = np.zeros((B, width), bool), np.zeros((B, width), int)
    for b in range(B):
      number = stop - start if start else stop - b  # so that rows differ in length
      mask[b, width - number:] = True
      first = start - b if start else 0
      place[b, width - number:] = first + np.arange(number)
    at = (np.arange(B)[:, None], place)
    arrays = (jnp.asarray(np.where(mask[..., None, None],
                                   np.asarray(x)[at], np.nan), x.dtype) for x in given[:3])
    found.append(cache_cases.Piece(*arrays, mask, place))
  return found


def largest(row, dtype: str) -> list[float]:
  """The largest difference for each of HEADINGS."""
  worst = [0.] * len(HEADINGS)
  extend = harness.jit(attn.VARIANTS[row.name].extend)
  for seed in SEEDS:
    given = cache_cases.sequences(row, dtype, seed)
    expected = np.asarray(cache_cases.one_pass(row, given), np.float64)
    ways = (cache_cases.pieces(given, LENGTHS, 5,
                               seed), cache_cases.pieces(given, LENGTHS, 1,
                                                         seed), left_padded(given))
    for i, pieces in enumerate(ways):
      cache, found = cache_cases.init(row, given), []
      for piece in pieces:
        output, cache = extend(given.params,
                               cache,
                               *piece[:3],
                               token_mask=jnp.asarray(piece.token_mask))
        found.append((piece, output))
      whole, stray = cache_cases.collect(expected.shape, found)
      seen = ~np.isnan(whole)
      assert stray == 0. and seen.any()
      worst[i] = max(worst[i], float(np.max(np.abs(whole - expected)[seen])))
  return worst


def main() -> int:
  lines, good = [], True
  titles = [f'{dtype}: {heading}' for dtype in cache_cases.DTYPES for heading in HEADINGS]
  lines += [['variant', *titles], ['---'] + ['--:'] * len(titles)]
  print('\n'.join(f'| {" | ".join(line)} |' for line in lines), flush=True)
  for row in cache_cases.CAUSAL:
    cells = [row.id.replace('-causal', '')]
    for dtype in cache_cases.DTYPES:
      with jax.enable_x64(True) if dtype == 'float64' else contextlib.nullcontext():
        found = largest(row, dtype)
      # Both sides are rounded to the dtype.
      most = 2 * tolerances.FORWARD[dtype] * (tolerances.PERFORMER_FACTOR
                                              if row.name == 'performer' else 1.)
      good &= max(found) <= most
      cells += [f'{x:.0e}' + ('' if x <= most else ' FAR') for x in found]
    print(f'| {" | ".join(cells)} |', flush=True)
  print(f'{T} positions, {B} rows, {len(SEEDS)} seeds; ' +
        ('all within tolerance' if good else 'some beyond tolerance'))
  return 0 if good else 1


if __name__ == '__main__':
  sys.exit(main())
