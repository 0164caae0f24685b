"""The tables of what the TPU compiler says; see bench_tpu."""

from typing import Any

from experiments.bench_tables import by_length, number, table


def sections(tpu: dict[str, Any]) -> list[str]:
  """The parts of bench.md."""
  chip, parts = tpu['chip'], []
  ran = any('measured_seconds' in cell for cell in tpu['cells'])
  parts += [
      f'## Compiled for {chip["name"]}, {"and run" if ran else "not run"}',
      'The programs are those of the TPU compiler'
      f'{"" if ran else "; nothing was measured"}. One chip: '
      f'{chip["flops"] / 1e12:.0f} TFLOP/s in bfloat16 and {chip["bandwidth"] / 1e9:.0f} GB/s '
      f'({chip["source"]}). Causal, bfloat16.'
  ]
  for direction in dict.fromkeys(cell['direction'] for cell in tpu['cells']):
    cells = [cell for cell in tpu['cells'] if cell['direction'] == direction]
    parts += [
        f'### {"forward" if direction == "forward" else "forward + gradient"}',
        'Temporary memory of the program, MB; ×: more than the chip has; p: with a Pallas kernel.',
        by_length(cells, _memory, '×'),
        'Milliseconds by the roofline: its matrix products at the peak, or (b) its arguments, '
        'results and temporaries (once written and read) at the bandwidth, whichever is more.',
        by_length(cells, lambda c: _roofline(c, chip), '×')
    ]
    if any('measured_seconds' in cell for cell in cells):
      parts += [
          'Milliseconds measured on such a chip (spread), and how many times the roofline\'s.',
          by_length(cells, _measured, '×')
      ]
  rows = [[row['label'], *(_thousands(row[key])
                           for key in ('forward', 'gradient', 'mesh'))]
          for row in tpu['longest']]
  parts += [
      '### The longest sequence',
      'In units of 1024 tokens, to an eighth, found by bisection. The last column is of 16 chips '
      'that share one sequence.',
      table(['', 'forward', 'gradient', 'gradient, 16 chips'], rows)
  ]
  rows = [[row['label'], row['direction'], row.get('skipped') or _sent(row),
           number(row.get('temp_bytes'), 1e-6, '.4g')]
          for row in tpu['collectives']]  # yapf: disable
  length = tpu['collectives'][0]['length'] if rows else 0
  parts += [
      f'### What 16 chips send, T {length}',
      'The largest array of each kind of collective, in thousands of numbers, and the temporary '
      'memory of a chip, MB.',
      table(['', '', 'sent', 'temporary MB'], rows)
  ]
  reasons = [f'- {c["label"]}, T {c["length"]}, {c["direction"]}: {c["skipped"]}'
             for c in tpu['cells'] if 'skipped' in c]  # yapf: disable
  return parts + (['### Not compiled', '\n'.join(reasons)] if reasons else [])


def _memory(cell: dict[str, Any]) -> str:
  return number(cell['temp_bytes'], 1e-6, '.4g') + (' p' if cell['kernel'] else '')


def _roofline(cell: dict[str, Any], chip: dict[str, Any]) -> str:
  if cell['roofline_seconds'] is None:
    return '-'
  moves = cell['moved_bytes'] / chip['bandwidth'] >= cell['roofline_seconds']
  return f'{1e3 * cell["roofline_seconds"]:.3g}{" (b)" if moves else ""}'


def _measured(cell: dict[str, Any]) -> str:
  seconds, roofline = cell.get('measured_seconds'), cell['roofline_seconds']
  if seconds is None:
    return '-'
  times = f', {seconds / roofline:.1f} times' if roofline else ''
  return f'{1e3 * seconds:.3g} ({cell["measured_spread"]:.0%}){times}'


def _thousands(length: int) -> str:
  return f'{length // 1024}' if length else 'none'


def _sent(row: dict[str, Any]) -> str:
  return ', '.join(f'{kind} {n / 1e3:.4g}' for kind, n in sorted(row['sent'].items())) or 'nothing'
