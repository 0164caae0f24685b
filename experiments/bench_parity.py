"""Whether every variant is right on jax's device, and its time beside dense attention there.

Right: at one moderate length, in float32 with exact products, the results differ from those in
float64 on the CPU by no more than LIMITS. Times are those of bfloat16, causal, and are of many
calls that the device gets at once, so that what the host needs for a call does not count.
"""

from collections.abc import Sequence
import functools
import itertools
from typing import Any

import attn
import jax

from experiments import bench_accuracy
from experiments import bench_contenders as contenders
from experiments import bench_measure
from experiments.bench_contenders import Contender, DIRECTIONS, Problem
from experiments.bench_progress import Progress
from experiments.bench_tables import table

BATCH, HEADS, HEAD_DIM, PEER = 1, 8, 64, 'jax.nn causal'
# By platform: the length that is timed, and calls at once. A CPU shows that the program works.
SIZES, CPU_SIZES = (8192, 20), (512, 1)
# Largest error relative to the largest result: sums of up to T products in float32. A Performer
# exponentiates numbers of about 10, which costs it a digit.
LIMITS = {'forward': 1e-5, 'gradient': 1e-4}
PERFORMER, BFLOAT16 = 10, 2e-2

Row = dict[str, Any]


def _contenders(names: Sequence[str]) -> list[Contender]:
  """The variants, on a TPU also by kernels and by XLA, and dense attention."""
  found = contenders.ours(names)
  if jax.default_backend() == 'tpu':
    found += [
        contenders.own(name, is_causal, implementation=implementation) for name in names
        if 'implementation' in attn.VARIANTS[name].options
        for implementation in ('xla', 'pallas')
        for is_causal in (False, True)
    ]
  found += [peer for peer in contenders.jax_peers() if peer.name == 'jax.nn']
  if jax.default_backend() == 'gpu':
    found += contenders.cudnn_peers()
  return found


def run(rounds: int, names: Sequence[str]) -> dict[str, Any]:
  """Compares and times.

  Returns:
    platform, length of the timed calls, errors: for each contender and direction its error, limit
    and whether it is right, or `failed`, why it did not run. times: for each causal contender and
    direction the median and spread in seconds, and the ratio to PEER.
  """
  device = jax.devices()[0]
  length, at_once = CPU_SIZES if device.platform == 'cpu' else SIZES
  found = _contenders(names)
  timed = [contender for contender in found if contender.is_causal]
  progress = Progress(2 * (len(found) + len(timed)),
                      len(DIRECTIONS) * (len(found) + (rounds + 2) * len(timed)))
  errors: list[Row] = []
  for contender, direction in itertools.product(found, DIRECTIONS):
    progress.cell(f'errors of {contender.label}, {direction}', 1)
    row: Row = dict(label=contender.label, maker=contender.maker, direction=direction)
    try:
      errors.append(row | _error(contender, direction))
    except Exception as error:  # pylint: disable=broad-except
      errors.append(row | dict(right=False, failed=f'{type(error).__name__}: {error}'[:200]))
  times: list[Row] = []
  for direction in DIRECTIONS:
    times += _times(timed, Problem(BATCH, length, HEADS, HEAD_DIM, 'bfloat16'), direction, rounds,
                    at_once, progress)  # yapf: disable
    jax.clear_caches()
  progress.end()
  return dict(platform=device.platform, length=length, errors=errors, times=times)


def _error(contender: Contender, direction: str) -> Row:
  dtype = 'bfloat16' if contender.name == 'cuDNN' else 'float32'  # which it does not have
  problem = Problem(BATCH, bench_accuracy.LENGTH, HEADS, HEAD_DIM, dtype)
  wanted = contenders.reference(contender.variant, contender.is_causal, problem, direction)
  with jax.default_matmul_precision('highest'):
    numbers = contender.prepare(problem, direction).numbers()
  error = bench_accuracy.largest(numbers, wanted) / max(abs(x).max() for x in wanted)
  factor = PERFORMER if contender.variant == 'performer' else 1
  limit = LIMITS[direction] * factor if dtype == 'float32' else BFLOAT16
  return dict(error=error, limit=limit, right=bool(error <= limit))


def _times(timed: Sequence[Contender], problem: Problem, direction: str, rounds: int, at_once: int,
           progress: Progress) -> list[Row]:
  rows: list[Row] = []
  calls = []
  for contender in timed:
    progress.cell(f'compile {contender.label}, {direction}', 2)
    row: Row = dict(label=contender.label, direction=direction)
    try:
      ready = contender.prepare(problem, direction)
      ready.run()
      calls.append((row, functools.partial(contenders.many, ready, at_once)))
    except Exception as error:  # pylint: disable=broad-except
      row['failed'] = f'{type(error).__name__}: {error}'[:200]
    rows.append(row)
  before = lambda number, index: progress.turn(
      f'{direction}, round {number + 1}/{rounds}: {calls[index][0]["label"]}', 1)
  for (row, _), seconds in zip(
      calls, bench_measure.alternate([call for _, call in calls], rounds, before=before)):
    timing = bench_measure.timing(seconds)
    row |= dict(median=timing.median / at_once, spread=timing.spread)
  peer = next((row['median'] for row in rows if row['label'] == PEER and 'median' in row), None)
  for row in rows:
    if peer is not None and 'median' in row:
      row['ratio'] = row['median'] / peer
  return rows


def sections(parity: Row) -> list[str]:
  """The parts of bench.md."""
  none = parity['platform'] == 'cpu'
  said = 'No accelerator is at hand: these are figures of the CPU. ' if none else ''
  parts = [
      '## Parity', f'{said}The largest error relative to the largest result, from float64 on the '
      f'CPU, in float32 at T {bench_accuracy.LENGTH}; cuDNN in bfloat16.',
      table(['', *DIRECTIONS, 'limits', ''], _by_label(parity['errors'], _shown_error))
  ]
  parts += [
      f'Milliseconds (spread) in bfloat16, T {parity["length"]}, {BATCH} row, {HEADS} heads of '
      f'{HEAD_DIM}, and the ratio to {PEER}.',
      table(['', *(f'{d}{what}' for d in DIRECTIONS for what in ('', ', ratio'))],
            _by_label(parity['times'], _shown_time))
  ]  # yapf: disable
  reasons = [f'- {row["label"]}, {row["direction"]}: {row["failed"]}'
             for row in parity['errors'] + parity['times'] if 'failed' in row]  # yapf: disable
  return parts + (['### Failed', '\n'.join(reasons)] if reasons else [])


def _by_label(rows: Sequence[Row], show: Any) -> list[list[str]]:
  labels = dict.fromkeys(row['label'] for row in rows)
  return [[label, *show([row for row in rows if row['label'] == label])] for label in labels]


def _shown_error(rows: Sequence[Row]) -> list[str]:
  right = all(row['right'] for row in rows)
  limits = ', '.join(f'{row["limit"]:.0e}' for row in rows if 'limit' in row)
  return [*(f'{row["error"]:.1e}' if 'error' in row else 'failed' for row in rows), limits,
          'right' if right else '**wrong**']  # yapf: disable


def _shown_time(rows: Sequence[Row]) -> list[str]:
  shown = []
  for row in rows:
    shown += [f'{1e3 * row["median"]:.3g} ({row["spread"]:.0%})' if 'median' in row else 'failed',
              f'{row["ratio"]:.3f}' if 'ratio' in row else '-']  # yapf: disable
  return shown
