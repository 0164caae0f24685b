"""Tables of a benchmark, in Markdown."""

from collections.abc import Callable, Sequence

from experiments.bench_grid import Cell


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A Markdown table, the first column to the left and the others to the right."""
  lines = [heads, ['---', *['--:'] * (len(heads) - 1)], *rows]
  return '\n'.join(f'| {" | ".join(cells)} |' for cells in lines)


def number(value: float | None, factor: float, form: str) -> str:
  """A number in other units; what is not known is a dash."""
  return '-' if value is None else format(value * factor, form)


def by_length(cells: Sequence[Cell], show: Callable[[Cell], str], skipped: str = 'skipped') -> str:
  """A table with a row for each label; skipped: what stands where nothing is known."""
  lengths = list(dict.fromkeys(cell['length'] for cell in cells))
  found = {(cell['label'], cell['length']): cell for cell in cells}
  labels = dict.fromkeys(cell['label'] for cell in cells)

  def text(label: str, length: int) -> str:
    cell = found[label, length]
    return skipped if 'skipped' in cell else show(cell)

  rows = [[label, *(text(label, length) for length in lengths)] for label in labels]
  return table(['', *(f'T {T}' for T in lengths)], rows)
