"""The files of a benchmark: bench.json (everything), bench.csv (the cells), bench.md (tables)."""

from collections.abc import Sequence
import csv
import datetime
import importlib.metadata
import io
import os
from pathlib import Path
import platform
from typing import Any

import jax

from experiments import bench_parity
from experiments import bench_torch
from experiments import bench_tpu_report
from experiments.bench_grid import Cell, DENSE
from experiments.bench_tables import by_length, number, table
from experiments.writer import to_json

COLUMNS = ('maker', 'name', 'causal', 'dtype', 'direction', 'length', 'median', 'spread',
           'temp_bytes', 'argument_bytes', 'result_bytes', 'flops', 'share', 'roofline_seconds',
           'measured_seconds', 'compile_seconds', 'skipped')
_PACKAGES = ('jax', 'jaxlib', 'numpy', 'flax', 'optax', 'libtpu', *bench_torch.PACKAGES)


def circumstances(command: str, device: str) -> dict[str, Any]:
  """What a number depends on beside the code: device, cores, versions, date, command line."""
  versions = {'python': platform.python_version()}
  for package in _PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      pass
  return dict(device=device,
              processor=_processor(),
              cores=os.cpu_count(),
              versions=versions,
              date=datetime.datetime.now().astimezone().isoformat(timespec='seconds'),
              command=command)


def device_name() -> str:
  """The device that jax computes on."""
  device = jax.devices()[0]
  return f'{device.platform} {device.device_kind}'


def _processor() -> str:
  try:
    lines = Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
  except OSError:
    lines = []
  names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
  return names[0] if names else platform.processor() or platform.machine()


def write(result: dict[str, Any], folder: Path) -> None:
  """Writes all three files, each whole or not at all."""
  texts = {'json': to_json(result, indent=2) + '\n', 'csv': to_csv(result), 'md': markdown(result)}
  for kind, text in texts.items():
    temporary = folder / f'bench.{kind}.tmp'
    temporary.write_text(text, encoding='utf-8')
    os.replace(temporary, folder / f'bench.{kind}')


def to_csv(result: dict[str, Any]) -> str:
  """One line a cell, after lines that begin with # and say where they were measured."""
  text = io.StringIO()
  for name, value in result['circumstances'].items():
    text.write(f'# {name}: {_flat(value)}\n')
  table = csv.DictWriter(text, COLUMNS, extrasaction='ignore', lineterminator='\n')
  table.writeheader()
  for part in ('grid', 'tpu'):
    table.writerows(result.get(part, {}).get('cells', []))
  return text.getvalue()


def _flat(value: Any) -> str:
  return ', '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else str(value)


def markdown(result: dict[str, Any]) -> str:
  """All tables, each under its heading with a line on what its numbers are."""
  parts = ['# Benchmark', _bullets(result)]
  if 'grid' in result:
    parts += _grid(result['grid'])
  if 'claims' in result:
    parts += _claims(result['claims'])
  if 'decode' in result:
    parts += _decode(result['decode'])
  if 'extremes' in result:
    parts += _extremes(result['extremes'])
  if 'parity' in result:
    parts += bench_parity.sections(result['parity'])
  if 'tpu' in result:
    parts += bench_tpu_report.sections(result['tpu'])
  if result.get('missing'):
    lines = [f'- {package}: `{command}`' for package, command in result['missing'].items()]
    parts += ['## Peers that are not installed', '\n'.join(lines)]
  return '\n\n'.join(parts) + '\n'


def _bullets(result: dict[str, Any]) -> str:
  lines = [f'- {name}: {_flat(value)}' for name, value in result['circumstances'].items()]
  for dtype, rate in result.get('grid', {}).get('matmul', {}).items():
    lines.append(f'- product of 2048 x 2048 matrices, {dtype}: {rate / 1e9:.1f} GFLOP/s')
  return '\n'.join(lines)


def _grid(grid: dict[str, Any]) -> list[str]:
  parts = []
  for dtype, direction in dict.fromkeys((c['dtype'], c['direction']) for c in grid['cells']):
    what = 'forward' if direction == 'forward' else 'forward + gradient'
    chosen = lambda rows: [
        row for row in rows if (row['dtype'], row['direction']) == (dtype, direction)
    ]
    cells = chosen(grid['cells'])
    parts += [
        f'## {what}, {dtype}',
        'Milliseconds, median of alternating rounds (spread: distance of the '
        'quartiles over the median).',
        by_length(cells, lambda c: f'{1e3 * c["median"]:.4g} ({c["spread"]:.0%})'),
        'Temporary memory of the compiled program, MB.',
        by_length(cells, lambda c: number(c['temp_bytes'], 1e-6, '.4g')),
        'GFLOP of its matrix products (share of the rate of one large product).',
        by_length(cells, _work),
        _summary(chosen(grid['growth']), chosen(grid['errors'])), _NOTES
    ]
    if compared := chosen(grid['efficiency']):  # none where nothing dense was measured
      parts.append(_efficiency(compared))
  skipped = [
      f'- {c["label"]}, T {c["length"]}, {c["direction"]}, {c["dtype"]}: {c["skipped"]}'
      for c in grid['cells']
      if 'skipped' in c
  ]
  skipped += [
      f'- error of {e["label"]}, {e["direction"]}, {e["dtype"]}: {e["failed"]}'
      for e in grid['errors']
      if 'failed' in e
  ]
  return parts + (['## Not measured', '\n'.join(skipped)] if skipped else [])


_NOTES = (
    'Growth: the p of time, and of memory, ~ T^p, by least squares over the lengths. Error, own: '
    'the largest absolute difference from the same variant in float64, so for Linformer and '
    'Performer it is rounding, not approximation; dense: from float64 dense attention under the '
    'same mask. performer-pytorch adds 0.0001 to its features, and 0.000001 to causal sums, which '
    'makes it another function; that is its difference from ours.')


def _work(cell: Cell) -> str:
  return '-' if cell['flops'] is None else f'{cell["flops"] / 1e9:.4g} ({cell["share"]:.0%})'


def _summary(growth: Sequence[Cell], errors: Sequence[Cell]) -> str:
  by_label = {row['label']: row for row in errors}
  rows = []
  for row in growth:
    error = by_label.get(row['label'], {})
    rows.append([
        row['label'], *(number(row[key], 1, '.2f') for key in ('time', 'memory')),
        *(number(error.get(key), 1, '.1e') for key in ('own', 'dense'))
    ])
  heads = ['', 'growth, time', 'growth, memory']
  if not errors:
    return table(heads, [row[:len(heads)] for row in rows])
  return table([*heads, f'error at T {errors[0]["length"]}, own', 'error, dense'], rows)


def _efficiency(rows: Sequence[Cell]) -> str:
  """From which length ours beat dense attention; ≤: or shorter, never: not at the longest."""
  heads = [(against, quantity) for quantity in ('time', 'memory') for against in DENSE]
  found = {(row['label'], row['against'], row['quantity']): row for row in rows}
  lines = []
  for label in dict.fromkeys(row['label'] for row in rows):
    cells = (found.get((label, *head)) for head in heads)
    lines.append([label, *('-' if cell is None else _length(cell) for cell in cells)])
  note = ('The length from which each is below dense attention, interpolated; up to: the longest '
          'length at which both were measured.')
  return f'{note}\n\n' + table(['', *(f'{q}, {name}' for name, q in heads)], lines)


def _length(cell: Cell) -> str:
  if cell['length'] is None:
    return f'never up to {cell["longest"]}'
  return f'{"≤ " if cell["length"] <= cell["shortest"] else ""}{cell["length"]:.0f}'


def _claims(claims: Sequence[Cell]) -> list[str]:
  rows = []
  for c in claims:
    measured = [c['skipped'], '-', '-'] if 'skipped' in c else [
        f'{1e3 * c["mine_median"]:.4g} ({c["mine_spread"]:.0%})',
        f'{1e3 * c["peer_median"]:.4g} ({c["peer_spread"]:.0%})', f'{c["ratio"]:.3f}'
    ]
    rows.append(
        [c['mine'], c['peer'],
         str(c['length']), c['direction'], *measured, f'{c["target"]:.2f}'])
  return [
      '## Ours beside a peer',
      'Milliseconds (spread), medians of rounds in which the two take turns. '
      'Gradient: forward + gradient. Float32, batch 1, 8 heads of 64.',
      table(['ours', 'peer', 'T', '', 'ours', 'peer', 'ratio', 'target'], rows)
  ]


def _decode(rows: Sequence[dict[str, Any]]) -> list[str]:
  positions = [step['position'] for step in rows[0]['steps']] if rows else []
  lines = [[
      row['label'], *(f'{1e6 * step["median"]:.0f} ({step["spread"]:.0%})'
                      for step in row['steps']), f'{row["state_bytes"] / 1e6:.2f}'
  ]
           for row in rows]
  return [
      '## Decoding',
      'Microseconds of a step (spread), its token the one at the position; megabytes '
      'of a cache for as many tokens as the last. Float32, one row, 8 heads of 64.',
      table(['', *(f'position {p}' for p in positions), 'cache'], lines)
  ]


def _extremes(extremes: dict[str, Any]) -> list[str]:
  compiled = [[
      row['label'], f'{row["compile_seconds"]:.1f}',
      'yes' if row['second_call_recompiles'] else 'no'
  ] for row in extremes['compile']]
  far = [[
      row['label'],
      str(row['length']),
      str(row.get('heads', '')),
      number(row.get('seconds'), 1, '.1f'),
      number(row['temp_bytes'], 1e-6, '.0f')
  ] for row in extremes['memory'] + extremes['long']]
  length = extremes['compile'][0]['length'] if compiled else ''
  return [
      '## Extremes', f'Compiling the gradient at T {length}.',
      table(['', 'seconds', 'second call recompiles'], compiled),
      'One gradient; with fewer than 8 heads where memory did not allow more.',
      table(['', 'T', 'heads', 'seconds', 'temporary MB'], far)
  ]
