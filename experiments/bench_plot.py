"""bench_time.png and bench_memory.png: time and memory against length; bench_tpu_time.png and
bench_tpu_memory.png: what the TPU compiler says of them.

Lines differ in marker and dashes as well as in grey, and carry their names at their ends.
"""

from collections.abc import Sequence
import math
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.bench_contenders import DIRECTIONS
from experiments.bench_grid import Cell, curve

MARKERS = 'osD^v<>Ph*Xp8dH'
DASHES = ('-', '--', ':', '-.', (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))
GREYS = ('0.0', '0.25', '0.45')
_End = tuple[float, int, str, str]  # amount, length, name, grey
_QUANTITIES = {
    'grid': (('median', 'time', 'seconds', 1.0), ('temp_bytes', 'memory', 'temporary MB', 1e-6)),
    'tpu': (('roofline_seconds', 'tpu_time', 'seconds by the roofline, not run', 1.0),
            ('temp_bytes', 'tpu_memory', 'temporary MB, compiled and not run', 1e-6)),
}


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
  """Draws the first dtype of the grid and of the TPU's; returns the files' paths."""
  return [path for part in _QUANTITIES if part in result for path in _draw(result, part, folder)]


def _draw(result: dict[str, Any], part: str, folder: Path) -> list[Path]:
  cells = result[part]['cells']
  cells = [cell for cell in cells if cell['dtype'] == cells[0]['dtype']]
  paths = []
  for quantity, name, unit, factor in _QUANTITIES[part]:
    figure = Figure(figsize=(15, 13), layout='constrained')
    FigureCanvasAgg(figure)
    forms = sorted({cell['causal'] for cell in cells})
    axes = figure.subplots(2, len(forms), sharex=True, sharey='row', squeeze=False)
    ends = {}
    for row, direction in enumerate(DIRECTIONS):
      for column, causal in enumerate(forms):
        chosen = [c for c in cells if (c['direction'], c['causal']) == (direction, causal)]
        panel = axes[row][column]
        ends[panel] = _lines(panel, chosen, quantity, factor)
        what = 'forward' if direction == 'forward' else 'forward + gradient'
        panel.set_title(f'{what}, {"causal" if causal else "full"}')
      axes[row][0].set_ylabel(unit)
    for panel, its_ends in ends.items():  # Last, since panels share their limits.
      _name(panel, its_ends)
    what = result[part].get('chip', {}).get('name') or result['circumstances']['device']
    figure.suptitle(_title(result, f'{cells[0]["dtype"]}, {what}'), fontsize=9)
    paths.append(folder / f'bench_{name}.png')
    figure.savefig(paths[-1], dpi=110)
  return paths


def _title(result: dict[str, Any], what: str) -> str:
  found = result['circumstances']
  versions = ', '.join(f'{name} {version}' for name, version in found['versions'].items())
  return (f'{what}, {found["processor"]}, {found["cores"]} cores, '
          f'{found["date"]}\n{versions}\n{found["command"]}')


def _lines(axes: Any, cells: Sequence[Cell], quantity: str, factor: float) -> list[_End]:
  """One line a contender; returns the ends of the lines, from the lowest."""
  ends: list[_End] = []
  for index, name in enumerate(dict.fromkeys(cell['name'] for cell in cells)):
    points = curve(cells, quantity, name=name)
    lengths = sorted(length for length in points if points[length] > 0)
    if not lengths:
      continue
    amounts = [points[length] * factor for length in lengths]
    grey = GREYS[index % len(GREYS)]
    axes.plot(lengths,
              amounts,
              color=grey,
              marker=MARKERS[index % len(MARKERS)],
              linestyle=DASHES[index % len(DASHES)],
              linewidth=1.2,
              markersize=5)
    ends.append((amounts[-1], lengths[-1], name, grey))
  axes.set(xscale='log', yscale='log', xlabel='length T')
  axes.set_xticks(sorted({cell['length'] for cell in cells}),
                  [str(length) for length in sorted({cell['length'] for cell in cells})])
  axes.minorticks_off()
  axes.grid(color='0.9')
  return sorted(ends)


def _name(axes: Any, ends: Sequence[_End]) -> None:
  """Writes the names right of the axes, as near to their line's last point as the others let."""
  if not ends:
    return
  low, high = map(math.log, axes.get_ylim())
  places = spread([(math.log(amount) - low) / (high - low) for amount, *_ in ends], 0.034)
  for place, (amount, length, name, grey) in zip(places, ends):
    axes.annotate(name,
                  xy=(length, amount),
                  xytext=(1.03, place),
                  textcoords='axes fraction',
                  color=grey,
                  fontsize=8,
                  va='center',
                  annotation_clip=False,
                  arrowprops=dict(arrowstyle='-', color='0.75', linewidth=0.6))


def spread(places: Sequence[float], gap: float) -> list[float]:
  """Rising places moved apart to at least gap, together about where they were."""
  groups: list[list[float]] = []  # [sum of (place - gap * index in the group), number]
  for place in places:
    groups.append([place, 1])
    while len(groups) > 1 and (groups[-2][0] / groups[-2][1] + gap * groups[-2][1]
                               > groups[-1][0] / groups[-1][1]):
      total, number = groups.pop()
      groups[-1][0] += total - gap * groups[-1][1] * number
      groups[-1][1] += number
  return [total / number + gap * i for total, number in groups for i in range(int(number))]
