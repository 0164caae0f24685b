"""From runs that have ended to the rows of a comparison: means over seeds, baselines, verdicts."""

from collections.abc import Mapping, Sequence
import json
import math
from pathlib import Path
import statistics
from typing import Any, NamedTuple

from scipy import stats

from experiments import anchors
from experiments.config import Config, FIELDS
from experiments.evaluate import MODEL
from experiments.parts import resolved
from experiments.sweep import Cell, Plan, SUMMARY

CONFIDENCE = 0.95


class Estimate(NamedTuple):
  """A mean over seeds; half: of its 95 % confidence interval by Student's t, None for one seed."""
  mean: float
  half: float | None
  seeds: int

  def __str__(self) -> str:
    # An accuracy is nowhere farther than 1 from another.
    half = '' if self.half is None else f' ± {min(self.half, 1.):.3f}'
    return f'{self.mean:.3f}{half}'


def estimate(values: Sequence[float]) -> Estimate:
  """The mean of what seeds gave, and how sure it is."""
  count = len(values)
  if count < 2:
    return Estimate(statistics.fmean(values), None, count)
  quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
  return Estimate(statistics.fmean(values),
                  quantile * statistics.stdev(values) / math.sqrt(count), count)


class Row(NamedTuple):
  """A variant on a task, at the best point of the tuning grid.

  Attributes:
    task, model, label: of what; label is the variant with what varies beside it.
    config: of one of its runs.
    tune: the point of the grid.
    accuracy: held out, at the end.
    free_running: of answers the model writes itself, or None.
    baseline: the best trivial one's name and accuracy.
    published: the published accuracy, or None.
    verdict: see `anchors.verdict`.
    by_length: length -> accuracy there, and the best trivial one.
    curve: step -> accuracies of the seeds.
    parameters, decode_bytes, step_flops, step_bytes: see `costs.Costs`.
    seconds_per_step: the median over seeds, or None.
    planned: how many seeds there are to be.
  """
  task: str
  model: str
  label: str
  config: Config
  tune: tuple[tuple[str, Any], ...]
  accuracy: Estimate
  free_running: Estimate | None
  baseline: tuple[str, float]
  published: float | None
  verdict: str
  by_length: dict[int, tuple[Estimate, float]]
  curve: dict[int, list[float]]
  parameters: int
  decode_bytes: int | None
  step_flops: int | None
  step_bytes: int
  seconds_per_step: float | None
  planned: int


class Results(NamedTuple):
  """All there is to report.

  Attributes:
    rows: in the plan's order.
    cells: the runs that ended, as (cell, summary).
    failed: name -> what it said.
    unfinished: names of runs that have not ended.
    undefined: (name, reason).
  """
  rows: list[Row]
  cells: list[tuple[Cell, dict[str, Any]]]
  failed: dict[str, str]
  unfinished: list[str]
  undefined: list[tuple[str, str]]


def collect(plan: Plan, failures: Mapping[Path, Path]) -> Results:
  """Reads what the runs of a plan have left; failures: where those that failed have said why."""
  done = [(cell, _json(cell.path / SUMMARY)) for cell in plan.cells if cell.is_done]
  left = [cell for cell in plan.cells if not cell.is_done]
  failed = {cell.name: _failure(failures[cell.path]) for cell in left if cell.path in failures}
  unfinished = [cell.name for cell in left if cell.path not in failures]
  groups: dict[tuple, dict[tuple, list[tuple[Cell, dict]]]] = {}
  planned: dict[tuple, int] = {}
  for cell in plan.cells:
    planned[(_key(cell), cell.tune)] = planned.get((_key(cell), cell.tune), 0) + 1
  for cell, summary in done:
    groups.setdefault(_key(cell), {}).setdefault(cell.tune, []).append((cell, summary))
  rows = []
  for key, points in groups.items():
    best = max(points.values(), key=lambda runs: _accuracies(runs).mean)
    rows.append(_row(best, planned[(key, best[0][0].tune)]))
  return Results(rows, done, failed, unfinished, plan.undefined)


def _key(cell: Cell) -> tuple:
  """What one row of the report is about."""
  return cell.config.task, cell.config.model, cell.config.attention, cell.vary


def _json(path: Path) -> Any:
  return json.loads(path.read_text(encoding='utf-8'))


def _failure(path: Path) -> str:
  found = _json(path)
  return f'exit status {found["status"]}: {found["said"]}'


def _accuracies(runs: Sequence[tuple[Cell, dict]]) -> Estimate:
  return estimate([summary['scores'][MODEL]['accuracy'] for _, summary in runs])


def _row(runs: Sequence[tuple[Cell, dict]], planned: int) -> Row:
  cell, first = runs[0]
  summaries = [summary for _, summary in runs]
  accuracy = _accuracies(runs)
  free = [summary['scores'][MODEL]['free_running'] for summary in summaries]
  seconds = [s['seconds_per_step'] for s in summaries if s['seconds_per_step'] is not None]
  published, verdict = anchors.verdict(cell.config, accuracy.mean)
  by_length = {}
  for length in first['by_length']:
    there = [summary['by_length'][length] for summary in summaries]
    by_length[int(length)] = (estimate([scores[MODEL]['accuracy'] for scores in there]),
                              best_baseline(there)[1])
  return Row(
      task=cell.config.task,
      model=cell.config.model,
      label=' '.join((cell.config.attention, *(f'{k}={v}' for k, v in cell.vary))),
      config=cell.config,
      tune=cell.tune,
      accuracy=accuracy,
      free_running=None if None in free else estimate(free),
      baseline=best_baseline([summary['scores'] for summary in summaries]),
      published=published,
      verdict=verdict,
      by_length=by_length,
      curve=_curve([cell.path for cell, _ in runs]),
      seconds_per_step=statistics.median(seconds) if seconds else None,
      planned=planned,
      **{name: first[name] for name in ('parameters', 'decode_bytes', 'step_flops', 'step_bytes')})


def best_baseline(scores: Sequence[dict[str, dict]]) -> tuple[str, float]:
  """The trivial baseline with the best mean accuracy, of several seeds' scores."""
  means = {
      name: statistics.fmean(each[name]['accuracy']
                             for each in scores) for name in scores[0] if name != MODEL
  }
  return max(means.items(), key=lambda pair: pair[1])


def _curve(paths: Sequence[Path]) -> dict[int, list[float]]:
  """Held-out accuracy at every step where all seeds have been evaluated."""
  seeds = []
  for path in paths:
    lines = (path / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()
    found = (json.loads(line) for line in lines)
    seeds.append({row['step']: row['eval_accuracy'] for row in found if 'eval_accuracy' in row})
  return {
      step: [seed[step] for seed in seeds] for step in sorted(set.intersection(*map(set, seeds)))
  }


def equal(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
  """What was the same in all rows of a task, and what was not: field=value, field=value, value."""
  values = [resolved(row.config) for row in rows]
  same: list[str] = []
  different: list[str] = []
  for name in FIELDS:
    group = FIELDS[name].metadata['group']
    if group not in ('model', 'task', 'training') or name == 'seed':
      continue
    found = list(dict.fromkeys(each.get(name) for each in values))
    (same if len(found) == 1 else different).append(f'{name}={", ".join(map(str, found))}')
  return [text for text in same if not text.endswith('=None')], different
