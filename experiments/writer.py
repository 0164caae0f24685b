"""The files of a workdir that are rows and records: metrics.jsonl, config.json, summary.json."""

import json
import math
import os
from pathlib import Path
from typing import Any


def to_json(value: Any, indent: int | None = None) -> str:
  """Strict JSON: a number that is not finite becomes the string 'nan', 'inf' or '-inf'."""

  def strict(item: Any) -> Any:
    if isinstance(item, dict):
      return {key: strict(inner) for key, inner in item.items()}
    if isinstance(item, (list, tuple)):
      return [strict(inner) for inner in item]
    return str(item) if isinstance(item, float) and not math.isfinite(item) else item

  return json.dumps(strict(value), allow_nan=False, indent=indent)


def write_json(path: Path, value: Any) -> None:
  """Writes a file that holds all of value or does not change, whenever the process dies."""
  _replace(path, to_json(value, indent=2) + '\n')


def _replace(path: Path, text: str) -> None:
  temporary = path.with_name(path.name + '.tmp')
  with open(temporary, 'w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)


class MetricsFile:
  """metrics.jsonl: one row per line, steps increasing, never half a line.

  Opening it for a run that continues from a step drops every later row, a torn last line too, so
  a row is never there twice.
  """

  def __init__(self, path: Path, step: int):
    text = path.read_text(encoding='utf-8') if path.exists() else ''
    kept = ''.join(f'{line}\n' for line in text.split('\n') if _is_row_until(line, step))
    if kept != text or not path.exists():
      _replace(path, kept)
    self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

  def write(self, row: dict[str, Any]) -> None:
    """Appends a row in a single write."""
    os.write(self._file, (to_json(row) + '\n').encode())

  def sync(self) -> None:
    """Waits until the rows are on the disk: before a checkpoint that builds on them."""
    os.fsync(self._file)

  def close(self) -> None:
    os.close(self._file)


def _is_row_until(line: str, step: int) -> bool:
  try:
    return json.loads(line)['step'] <= step
  except (ValueError, KeyError, TypeError):
    return False
