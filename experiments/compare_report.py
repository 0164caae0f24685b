"""The report of a comparison: report.html, report.md, results.csv, results.json."""

import base64
from collections.abc import Mapping, Sequence
import csv
import dataclasses
import html
import io
from pathlib import Path
from typing import Any

from experiments import compare_plot
from experiments.bench_report import circumstances
from experiments.compare_results import collect, equal, Results, Row
from experiments.costs import Costs
from experiments.evaluate import MODEL
from experiments.sweep import Cell, Plan
from experiments.writer import write_json

_COLUMNS = ('variant', 'accuracy', 'free running', 'best baseline', 'published', 'verdict',
            'parameters', 'decode state', 'MFLOP a step', 'ms a step', 'step memory', 'seeds')
_READING = (
    'Accuracy is held out, counted over scored positions, after the last step: the mean over seeds '
    'and its 95 % confidence interval (Student\'s t). Free running is the share of whole answers '
    'that are right when the model writes them itself. At or below the best baseline nothing was '
    'learned. Verdicts compare with what was published of the same setting; small forms of a task '
    'stand beside the published form only where the claim is the same. MFLOP counts matrix '
    'products; memory is what the compiled step needs beside parameters and optimiser.')
_STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 75rem; padding: 1rem; }
table { border-collapse: collapse; font-size: 0.85rem; }
td, th { border-bottom: 1px solid #ccc; padding: 0.25rem 0.6rem; text-align: right; }
td:first-child, th:first-child { text-align: left; white-space: nowrap; }
div.wide { overflow-x: auto; margin-bottom: 1rem; }
img { max-width: 100%; height: auto; }
code { word-break: break-all; }
"""


def write(plan: Plan, failures: Mapping[Path, Path], directory: Path, command: str) -> list[str]:
  """Writes the report of what has ended; returns the files' names."""
  results = collect(plan, failures)
  devices = dict.fromkeys(summary['device'] for _, summary in results.cells)
  found = circumstances(command, ', '.join(devices) or 'no device')
  write_json(directory / 'results.json', _json(results, found))
  (directory / 'results.csv').write_text(_csv(results), encoding='utf-8')
  (directory / 'report.md').write_text(markdown(results, found), encoding='utf-8')
  (directory / 'report.html').write_text(_html(results, found), encoding='utf-8')
  return ['report.html', 'report.md', 'results.csv', 'results.json']


def short(plan: Plan, directory: Path) -> str:
  """The tables alone, for a terminal."""
  del directory
  results = collect(plan, {})
  return '\n\n'.join(f'{name}\n{_markdown_table(table)}' for name, table in _tables(results))


def _tables(results: Results) -> list[tuple[str, list[list[str]]]]:
  """Task -> its table, the header first."""
  tasks = dict.fromkeys((row.task, row.model) for row in results.rows)
  found = []
  for task, model in tasks:
    rows = [row for row in results.rows if (row.task, row.model) == (task, model)]
    lines = [list(_COLUMNS), *(_cells(row) for row in rows)]
    kept = [i for i in range(len(_COLUMNS)) if any(line[i] for line in lines[1:])]
    found.append((f'{task}, {model}', [[line[i] for i in kept] for line in lines]))
  return found


def _cells(row: Row) -> list[str]:
  name, baseline = row.baseline
  tuned = ''.join(f', {field}={value}' for field, value in row.tune)
  seconds = row.seconds_per_step
  return [
      row.label + (f' (best{tuned})' if tuned else ''),
      str(row.accuracy), '' if row.free_running is None else str(row.free_running),
      f'{baseline:.3f} ({name})', '' if row.published is None else f'{row.published:.3f}',
      row.verdict, f'{row.parameters:,}',
      _bytes(row.decode_bytes), '' if row.step_flops is None else f'{row.step_flops / 1e6:,.0f}',
      '' if seconds is None else f'{1e3 * seconds:.1f}',
      _bytes(row.step_bytes),
      f'{row.accuracy.seeds}' + (f' of {row.planned}' if row.accuracy.seeds < row.planned else '')
  ]


def _bytes(count: int | None) -> str:
  if count is None:
    return ''
  return f'{count / 1e6:.1f} MB' if count >= 1e6 else f'{count / 1e3:.1f} kB'


def _length_table(rows: Sequence[Row]) -> list[list[str]]:
  """Accuracy of each row of a task at every length."""
  rows = [row for row in rows if row.by_length]
  if not rows:
    return []
  lengths = sorted({length for row in rows for length in row.by_length})
  lines = [['accuracy at length', *map(str, lengths)]]
  lines += [[
      row.label, *(str(row.by_length[length][0]) if length in row.by_length else ''
                   for length in lengths)
  ]
            for row in rows]
  lines.append([
      'best baseline',
      *(f'{rows[0].by_length[length][1]:.3f}' if length in rows[0].by_length else ''
        for length in lengths)
  ])
  return lines


def _sections(results: Results) -> list[tuple[str, list[list[list[str]]], list[str]]]:
  """For each task its heading, its tables, and sentences on what was equal."""
  found = []
  for (heading, table) in _tables(results):
    rows = [row for row in results.rows if f'{row.task}, {row.model}' == heading]
    same, different = equal(rows)
    notes = [f'The same in all runs: {" ".join(same)}; and the data of each seed.']
    if different:
      notes.append(f'Not the same: {"; ".join(different)}.')
    tables = [table] + ([_length_table(rows)] if _length_table(rows) else [])
    found.append((heading, tables, notes))
  return found


def _missing(results: Results) -> list[str]:
  lines = [f'failed: {name}: {said}' for name, said in results.failed.items()]
  lines += [f'not finished: {name}' for name in results.unfinished]
  return lines + [f'not defined: {name}: {reason}' for name, reason in results.undefined]


def _where(found: dict[str, Any]) -> str:
  versions = ', '.join(f'{name} {version}' for name, version in found['versions'].items())
  return (f'{found["date"]}, {found["device"]}, {found["processor"]}, {found["cores"]} cores; '
          f'{versions}')


def markdown(results: Results, found: dict[str, Any]) -> str:
  """report.md."""
  lines = ['# Comparison', '', f'`{found["command"]}`', '', _where(found), '', _READING, '']
  for heading, tables, notes in _sections(results):
    lines += [f'## {heading}', '']
    for table in tables:
      lines += [_markdown_table(table), '']
    lines += [*notes, '']
  missing = _missing(results)
  if missing:
    lines += ['## Missing', '', *(f'- {line}' for line in missing), '']
  return '\n'.join(lines)


def _markdown_table(table: Sequence[Sequence[str]]) -> str:
  rules = ['---', *['--:'] * (len(table[0]) - 1)]
  return '\n'.join(f'| {" | ".join(line)} |' for line in (table[0], rules, *table[1:]))


def _html(results: Results, found: dict[str, Any]) -> str:
  escape = html.escape
  body = [f'<h1>Comparison</h1><p><code>{escape(found["command"])}</code></p>',
          f'<p>{escape(_where(found))}</p><p>{escape(_READING)}</p>']  # yapf: disable
  for heading, tables, notes in _sections(results):
    body.append(f'<h2>{escape(heading)}</h2>')
    for table in tables:
      head = ''.join(f'<th>{escape(cell)}</th>' for cell in table[0])
      lines = (''.join(f'<td>{escape(cell)}</td>' for cell in line) for line in table[1:])
      rows = ''.join(f'<tr>{line}</tr>' for line in lines)
      body.append(f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>')
    body += [f'<p>{escape(note)}</p>' for note in notes]
  for title, svg in (compare_plot.pictures(results.rows) if results.rows else {}).items():
    data = base64.b64encode(svg.encode()).decode()
    body.append(f'<h2>{title}</h2><img alt="{title}" src="data:image/svg+xml;base64,{data}">')
  missing = _missing(results)
  if missing:
    body.append('<h2>Missing</h2><ul>' + ''.join(f'<li>{escape(x)}</li>' for x in missing) +
                '</ul>')
  return ('<!doctype html><html lang="en"><head><meta charset="utf-8">'
          '<meta name="viewport" content="width=device-width, initial-scale=1">'
          f'<title>Comparison</title><style>{_STYLE}</style></head><body>\n' + '\n'.join(body) +
          '\n</body></html>\n')


def _csv(results: Results) -> str:
  """One line a run, with its configuration."""
  text = io.StringIO()
  fields = [_run(cell, summary) for cell, summary in results.cells]
  if fields:
    writer = csv.DictWriter(text, list(fields[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows(fields)
  return text.getvalue()


def _run(cell: Cell, summary: dict[str, Any]) -> dict[str, Any]:
  scores = {f'model_{name}': value for name, value in summary['scores'][MODEL].items()}
  costs = {name: summary[name] for name in (*Costs._fields, 'seconds_per_step')}
  return dict(name=cell.name) | scores | costs | dataclasses.asdict(cell.config)


def _json(results: Results, found: dict[str, Any]) -> dict[str, Any]:
  plain = lambda row: row._asdict() | {
      'config': dataclasses.asdict(row.config),
      'accuracy': row.accuracy._asdict(),
      'free_running': None if row.free_running is None else row.free_running._asdict(),
      'by_length': {str(length): dict(accuracy=at._asdict(), baseline=baseline)
                    for length, (at, baseline) in row.by_length.items()},
      'curve': {str(step): values for step, values in row.curve.items()}
  }  # yapf: disable
  return dict(circumstances=found,
              rows=[plain(row) for row in results.rows],
              runs=[dict(name=cell.name, summary=summary) for cell, summary in results.cells],
              failed=results.failed,
              unfinished=results.unfinished,
              undefined=dict(results.undefined))
