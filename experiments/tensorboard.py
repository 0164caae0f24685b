"""Rows as TensorBoard's scalars."""

from pathlib import Path
import time
from typing import Any

from tensorboardX.event_file_writer import EventsWriter  # not SummaryWriter: its thread dies unseen
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from experiments.writer import naming


class TensorBoard:
  """A copy of metrics.jsonl that TensorBoard reads, made anew by each session of a run.

  So a step is there once, whatever a session that was killed has left, and a run that began
  without it has all its rows.
  """

  def __init__(self, directory: Path):
    self._directory = directory
    with naming(directory):
      directory.mkdir(exist_ok=True)
      for old in directory.glob('events.out.tfevents.*'):
        old.unlink()
      self._writer = EventsWriter(str(directory / 'events'))

  def write(self, row: dict[str, Any]) -> None:
    """Adds a row of metrics.jsonl; a number in a group, as a baseline, is named group/name.

    Raises:
      OSError: it could not be written.
    """
    values: dict[str, Any] = {}
    for name, value in row.items():
      if isinstance(value, dict):
        values |= {f'{name}/{inner}': number for inner, number in value.items()}
      elif name != 'step':
        values[name] = value
    summary = Summary(
        value=[Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()])
    with naming(self._directory):
      self._writer.write_event(Event(wall_time=time.time(), step=row['step'], summary=summary))
      self._writer.flush()

  def close(self) -> None:
    """Closes the file."""
    self._writer.close()
