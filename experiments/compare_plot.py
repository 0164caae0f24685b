"""The pictures of a comparison: learning curves, accuracy against length and against cost.

Lines differ in marker and dashes as well as in grey.
"""

from collections.abc import Callable, Sequence
import io
import statistics
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from experiments.bench_plot import DASHES, GREYS, MARKERS
from experiments.compare_results import Row

_COLUMNS = 2


def pictures(rows: Sequence[Row]) -> dict[str, str]:
  """Title -> an SVG, for those there is something to draw for."""
  found = {'Learning curves': _panels(rows, _curves)}
  if any(row.by_length for row in rows):
    found['Accuracy against length'] = _panels([row for row in rows if row.by_length], _lengths)
  if any(row.seconds_per_step for row in rows):
    found['Accuracy against cost'] = _panels(rows, _costs)
  return found


def _panels(rows: Sequence[Row], draw: Callable[[Any, Sequence[Row]], None]) -> str:
  """One panel for each task, as an SVG."""
  tasks = list(dict.fromkeys((row.task, row.model) for row in rows))
  height, width = -(-len(tasks) // _COLUMNS), min(len(tasks), _COLUMNS)
  with rc_context({'svg.fonttype': 'none', 'svg.hashsalt': 'attn', 'font.size': 9}):
    figure = Figure(figsize=(5.4 * width, 4. * height), layout='constrained')
    FigureCanvasSVG(figure)
    panels = figure.subplots(height, width, squeeze=False).flatten()
    for panel, (task, model) in zip(panels, tasks):
      draw(panel, [row for row in rows if (row.task, row.model) == (task, model)])
      panel.set(title=f'{task}, {model}', ylabel='held-out accuracy', ylim=(-0.03, 1.03))
      panel.grid(color='0.9')
      panel.legend(fontsize=7, framealpha=0.8)
    for panel in panels[len(tasks):]:
      panel.set_axis_off()
    text = io.StringIO()
    figure.savefig(text, format='svg', metadata={'Date': None})
  return text.getvalue()


def _style(index: int) -> dict[str, Any]:
  return dict(color=GREYS[index % len(GREYS)],
              marker=MARKERS[index % len(MARKERS)],
              linestyle=DASHES[index % len(DASHES)],
              linewidth=1.2,
              markersize=4)


def _baseline(panel: Any, rows: Sequence[Row]) -> None:
  name, accuracy = max((row.baseline for row in rows), key=lambda pair: pair[1])
  panel.axhline(accuracy, color='0.6', linewidth=0.8, label=f'best baseline: {name}')


def _curves(panel: Any, rows: Sequence[Row]) -> None:
  for index, row in enumerate(rows):
    steps = list(row.curve)
    panel.plot(steps, [statistics.fmean(row.curve[step]) for step in steps],
               label=row.label,
               **_style(index))
    panel.fill_between(steps, [min(row.curve[step]) for step in steps],
                       [max(row.curve[step]) for step in steps],
                       color=GREYS[index % len(GREYS)],
                       alpha=0.12,
                       linewidth=0)
  _baseline(panel, rows)
  panel.set_xlabel('steps (line: mean of seeds; band: least to most)')


def _lengths(panel: Any, rows: Sequence[Row]) -> None:
  for index, row in enumerate(rows):
    lengths = sorted(row.by_length)
    found = [row.by_length[length][0] for length in lengths]
    panel.errorbar(lengths, [x.mean for x in found],
                   yerr=[x.half or 0. for x in found],
                   label=row.label,
                   capsize=2,
                   **_style(index))
  lengths = sorted(rows[0].by_length)
  panel.plot(lengths, [rows[0].by_length[length][1] for length in lengths],
             color='0.6',
             linewidth=0.8,
             label='best baseline')
  panel.set(xscale='log', xlabel='length (bars: 95 % confidence)')
  panel.set_xticks(lengths, [str(length) for length in lengths])
  panel.minorticks_off()


def _costs(panel: Any, rows: Sequence[Row]) -> None:
  for index, row in enumerate(rows):
    if row.seconds_per_step is not None:
      panel.errorbar([1e3 * row.seconds_per_step], [row.accuracy.mean],
                     yerr=[row.accuracy.half or 0.],
                     label=row.label,
                     capsize=2,
                     **_style(index) | {'linestyle': 'none'})
  _baseline(panel, rows)
  panel.set(xscale='log', xlabel='ms a training step')
