"""Event files hold every row once, whatever happened to the run."""

import json
import shutil
import struct

from experiments import train
from experiments.tensorboard import TensorBoard
import pytest
from tensorboardX.proto.event_pb2 import Event

from tests.faults import OPTIONS


def scalars(directory):
  """(step, tag) -> value of every scalar in every event file, each of which must be there once."""
  found = {}
  for path in directory.glob('events.out.tfevents.*'):
    data = path.read_bytes()
    while data:  # a record is its length, a checksum of that, the event, a checksum of the event
      length = struct.unpack('<Q', data[:8])[0]
      event = Event.FromString(data[12:12 + length])
      data = data[16 + length:]
      for value in event.summary.value:
        assert (event.step, value.tag) not in found
        found[event.step, value.tag] = value.simple_value
  return found


def rows(path):
  """The same of metrics.jsonl."""
  found = {}
  for line in (path / 'metrics.jsonl').read_text().splitlines():
    row = json.loads(line)
    step, baselines = row.pop('step'), row.pop('baselines', {})
    found |= {(step, tag): value for tag, value in row.items()}
    found |= {(step, f'baselines/{name}'): value for name, value in baselines.items()}
  return found


def assert_same(path):
  wanted, found = rows(path), scalars(path / 'tensorboard')
  assert found.keys() == wanted.keys() and len(found) > 40
  for key, value in wanted.items():
    assert abs(found[key] - value) <= 1e-6 * abs(value), key


def test_each_step_is_there_once_after_a_kill(tmp_path):
  command = ['train', *OPTIONS, '--steps=12', f'--workdir={tmp_path}']
  assert train.main(command) == 0  # without
  assert not (tmp_path / 'tensorboard').exists()
  command.append('--tensorboard')
  assert train.main(command) == 0  # of a run that has ended
  assert_same(tmp_path)
  left = scalars(tmp_path / 'tensorboard')
  (tmp_path / 'summary.json').unlink()  # as a kill after the last row leaves it
  shutil.rmtree(tmp_path / 'checkpoints' / '12')
  assert train.main(command) == 0
  assert_same(tmp_path)
  assert scalars(tmp_path / 'tensorboard') == left


def test_what_cannot_be_written_is_named(tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError, match='File exists.*/file'):
    TensorBoard(tmp_path / 'file')
  writer = TensorBoard(tmp_path / 'events')

  def full(event):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(writer._writer, 'write_event', full)
  with pytest.raises(OSError, match='No space left on device.*/events'):
    writer.write({'step': 1, 'loss': 1.})
  writer.close()
