"""The files of a workdir that are rows and records: metrics.jsonl, config.json, summary.json."""

import contextlib
import errno
import json
import math
import os
from pathlib import Path
from typing import Any, Callable, Iterator


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
  with naming(path):
    with open(temporary, 'w', encoding='utf-8') as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
  """Says of what goes wrong inside which file it is about; a full disk does not."""
  try:
    yield
  except OSError as error:
    raise OSError(error.errno, error.strerror, str(path)) from error


class MetricsFile:
  """metrics.jsonl: one row per line, steps increasing, never half a line.

  Opening it for a run that continues from a step drops every later row, a torn last line too, so
  a row is never there twice. `mirror` is told every row that is there or comes.
  """

  def __init__(self, path: Path, step: int, mirror: Callable[[dict[str, Any]], None] | None = None):
    text = path.read_text(encoding='utf-8') if path.exists() else ''
    kept = ''.join(f'{line}\n' for line in text.split('\n') if _is_row_until(line, step))
    if kept != text or not path.exists():
      _replace(path, kept)
    if mirror is not None:
      for line in kept.splitlines():
        mirror(json.loads(line))
    self._path, self._mirror, self._file = path, mirror, os.open(path, os.O_WRONLY | os.O_APPEND)

  def write(self, row: dict[str, Any]) -> None:
    """Appends a row in a single write; a row that does not fit is torn, and opening drops it.

    Raises:
      OSError: it could not be written as a whole.
    """
    data = (to_json(row) + '\n').encode()
    with naming(self._path):
      if os.write(self._file, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if self._mirror is not None:
      self._mirror(row)

  def sync(self) -> None:
    """Waits until the rows are on the disk: before a checkpoint that builds on them."""
    with naming(self._path):
      os.fsync(self._file)

  def close(self) -> None:
    os.close(self._file)


class NoFile:
  """A MetricsFile that writes nothing, for all processes of a run but the first."""

  def write(self, row: dict[str, Any]) -> None:
    """Does nothing."""

  def sync(self) -> None:
    """Does nothing."""


def _is_row_until(line: str, step: int) -> bool:
  try:
    return json.loads(line)['step'] <= step
  except (ValueError, KeyError, TypeError):
    return False
