"""The grid: every contender at every length, forward and with gradients, in every dtype.

Contenders of one dtype, length and direction take turns; see bench_measure.alternate.
"""

from collections.abc import Callable, Iterator, Sequence
import itertools
from typing import Any, NamedTuple

import jax

from experiments import bench_accuracy
from experiments import bench_curves
from experiments import bench_measure
from experiments.bench_contenders import Contender, DIRECTIONS, logits_bytes, Problem, Ready
from experiments.bench_progress import Progress

Cell = dict[str, Any]
IDENTITY = ('name', 'maker', 'causal', 'label', 'direction', 'dtype')
DENSE = ('vanilla', 'jax.nn')
PREPARE = 10.0  # calls at T = 1024 that preparing takes, about
CHECK = 2 * PREPARE  # the same of comparing with float64


class Grid(NamedTuple):
  """What to measure.

  memory_bytes: contenders that need more are left out. checked: the directions whose errors are
  computed, which takes two more compilations each.
  """
  contenders: Sequence[Contender]
  batch: int
  heads: int
  head_dim: int
  lengths: Sequence[int]
  dtypes: Sequence[str]
  rounds: int
  memory_bytes: float
  checked: Sequence[str] = DIRECTIONS

  def problem(self, length: int, dtype: str) -> Problem:
    return Problem(self.batch, length, self.heads, self.head_dim, dtype)


def _work(length: int, direction: str) -> float:
  """Of one call: 1 forward at T = 1024. Between the linear and the quadratic contenders'."""
  return (length / 1024)**1.5 * (3 if direction == 'gradient' else 1)


def run(grid: Grid, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
  """Measures everything.

  Args:
    grid: what.
    save: called with the results so far after every group of turns.

  Returns:
    matmul: operations a second by dtype. cells: a dict for each contender, length, direction and
    dtype, with `skipped`, the reason, where it was not measured. growth, efficiency and errors: a
    dict for each contender, direction and dtype.
  """
  groups = list(itertools.product(grid.dtypes, grid.lengths, DIRECTIONS))
  turn = 2 * grid.rounds + 1
  work = sum((PREPARE + turn * _work(length, direction)) * len(grid.contenders)
             for _, length, direction in groups)
  work += CHECK * len(grid.dtypes) * len(grid.contenders) * len(grid.checked)
  progress = Progress(len(groups) * len(grid.contenders), work)
  result: dict[str, Any] = dict(matmul={}, cells=[], growth=[], efficiency=[], errors=[])
  for dtype in grid.dtypes:
    result['matmul'][dtype] = bench_measure.matmul_rate(dtype)
    result['errors'] += _errors(grid, dtype, progress)
    for _, length, direction in (group for group in groups if group[0] == dtype):
      result['cells'] += _group(grid, dtype, length, direction, result['matmul'][dtype], progress)
      result |= _curves(result['cells'])
      save(result)
      jax.clear_caches()
  progress.end()
  return result


def _identity(contender: Contender, direction: str, dtype: str) -> Cell:
  return dict(name=contender.name,
              maker=contender.maker,
              causal=contender.is_causal,
              label=contender.label,
              direction=direction,
              dtype=dtype)


def _errors(grid: Grid, dtype: str, progress: Progress) -> Iterator[Cell]:
  length = min(bench_accuracy.LENGTH, grid.lengths[0])
  for contender, direction in itertools.product(grid.contenders, grid.checked):
    progress.turn(f'errors of {contender.label}, {direction}, {dtype}', CHECK, plain=True)
    identity = _identity(contender, direction, dtype) | dict(length=length)
    try:
      yield identity | bench_accuracy.errors(contender, grid.problem(length, dtype), direction)
    except Exception as error:  # pylint: disable=broad-except
      yield identity | dict(own=None, dense=None, failed=_reason(error))


def _reason(error: Exception) -> str:
  """One line."""
  return f'{type(error).__name__}: {" ".join(str(error).split())}'[:200]


def prepare(contender: Contender, grid: Grid, problem: Problem,
            direction: str) -> tuple[Ready | None, Cell]:
  """The contender, unless it needs too much memory or fails; what is known of the cell."""
  limit = grid.memory_bytes
  needed = contender.least_bytes(problem, direction)
  what = 'its [T, T] logits' if contender.least_bytes is logits_bytes else 'its sums by position'
  if needed > limit:
    return None, dict(skipped=f'{what} need {needed / 1e9:.1f} GB')
  try:
    ready = contender.prepare(problem, direction)
    if (ready.temp_bytes or 0) > limit:
      return None, dict(skipped=f'its program needs {(ready.temp_bytes or 0) / 1e9:.1f} GB')
    ready.run()
  except Exception as error:  # pylint: disable=broad-except
    return None, dict(skipped=f'failed: {_reason(error)}', failed=True)
  return ready, dict(temp_bytes=ready.temp_bytes,
                     flops=ready.flops,
                     compile_seconds=ready.compile_seconds)


def _group(grid: Grid, dtype: str, length: int, direction: str, rate: float,
           progress: Progress) -> list[Cell]:
  """The cells of contenders that take turns."""
  problem, work = grid.problem(length, dtype), _work(length, direction)
  title = f'{dtype} T {length} {direction}'
  cells: list[Cell] = []
  measured: list[tuple[Cell, Ready]] = []
  for contender in grid.contenders:
    progress.cell(f'{title} {contender.label}', PREPARE + work)
    ready, known = prepare(contender, grid, problem, direction)
    cell = _identity(contender, direction, dtype) | dict(length=length) | known
    cells.append(cell)
    if ready is None:
      progress.skip(2 * grid.rounds * work)
    else:
      measured.append((cell, ready))

  def before(number: int, index: int) -> None:
    what = f'{title} round {number + 1}/{grid.rounds}: {measured[index][0]["label"]}'
    progress.turn(what, 2 * work, plain=not index)

  seconds = bench_measure.alternate([ready.run for _, ready in measured],
                                    grid.rounds,
                                    before=before)
  for (cell, _), times in zip(measured, seconds):
    median, spread = bench_measure.timing(times)
    share = None if cell['flops'] is None else cell['flops'] / median / rate
    cell |= dict(median=median, spread=spread, share=share, seconds=times)
  return cells


def curve(cells: Sequence[Cell], quantity: str, **chosen: Any) -> dict[int, float]:
  """A quantity by length, of the cells that have it and whose entries are as chosen."""
  return {
      cell['length']: cell[quantity]
      for cell in cells
      if cell.get(quantity) is not None and all(cell[key] == chosen[key] for key in chosen)
  }


def _curves(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
  """Growth exponents of all, and from which length ours beat dense attention."""
  growth, efficiency = [], []
  seen = {(cell['label'], cell['direction'], cell['dtype']): cell for cell in cells}
  for cell in seen.values():
    identity = {key: cell[key] for key in IDENTITY}
    amounts = {name: curve(cells, name, **identity) for name in ('median', 'temp_bytes')}
    growth.append(identity | dict(time=bench_curves.growth(amounts['median']),
                                  memory=bench_curves.growth(amounts['temp_bytes'])))
    if cell['maker'] != 'attn' or cell['name'] == 'vanilla':
      continue
    for dense in DENSE:
      chosen = {key: cell[key] for key in ('causal', 'direction', 'dtype')} | dict(name=dense)
      for quantity, mine in amounts.items():
        other = curve(cells, quantity, **chosen)
        common = sorted(mine.keys() & other.keys())
        if common:
          efficiency.append(identity | dict(against=dense,
                                            quantity='time' if quantity == 'median' else 'memory',
                                            length=bench_curves.efficiency_length(mine, other),
                                            shortest=common[0],
                                            longest=common[-1]))
  return dict(growth=growth, efficiency=efficiency)
