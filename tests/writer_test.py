"""Rows that are whole, in order and once; records that are whole or absent."""

import json
import os

from experiments.writer import MetricsFile, to_json, write_json
import pytest


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_appended_as_whole_lines(tmp_path, monkeypatch):
  path, writes, real = tmp_path / 'metrics.jsonl', [], os.write
  monkeypatch.setattr(os, 'write', lambda file, data: writes.append(data) or real(file, data))
  metrics = MetricsFile(path, 0)
  metrics.write(dict(step=1, loss=.5))
  metrics.write(dict(step=2, loss=float('nan')))
  metrics.sync()
  metrics.close()
  assert rows(path) == [dict(step=1, loss=.5), dict(step=2, loss='nan')]
  assert all(data.count(b'\n') == 1 and data.endswith(b'\n') for data in writes)


@pytest.mark.parametrize('torn', ['', '{"step": 4, "lo', '{"step": 4}', '{"step": 2', '\x00\x00'])
@pytest.mark.parametrize('step', [0, 2, 3])
def test_opening_drops_later_rows_and_a_torn_line(tmp_path, torn, step):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n' + torn)
  metrics = MetricsFile(path, step)
  metrics.write(dict(step=step + 1))
  metrics.close()
  assert [row['step'] for row in rows(path)] == list(range(1, step + 2))


def test_a_row_that_lacks_only_its_end_is_ended(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n{"step": 2}')
  metrics = MetricsFile(path, 2)
  metrics.write(dict(step=3))
  metrics.close()
  assert [row['step'] for row in rows(path)] == [1, 2, 3]


def test_opening_leaves_a_good_file_as_it_is(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\n')
  before = path.stat().st_ino
  MetricsFile(path, 1).close()
  assert path.stat().st_ino == before


def test_a_record_changes_as_a_whole(tmp_path, monkeypatch):
  path = tmp_path / 'summary.json'
  write_json(path, dict(a=1))

  def die(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, 'fsync', die)
  with pytest.raises(KeyboardInterrupt):
    write_json(path, dict(a=2))
  assert json.loads(path.read_text()) == dict(a=1)


def test_json_is_strict():
  values = dict(a=[float('inf'), -float('inf')], b=(1, dict(c=float('nan'))), d=None)
  assert json.loads(to_json(values), parse_constant=pytest.fail) == dict(a=['inf', '-inf'],
                                                                         b=[1, dict(c='nan')],
                                                                         d=None)
