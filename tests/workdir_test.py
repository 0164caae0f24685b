"""Whose directory it is: refused where it is in use, something else's or another config's."""

import dataclasses
import json
from pathlib import Path

from experiments.config import Config, FIELDS, UserError
from experiments.workdir import identity, locate, Workdir
import pytest


def open_and_close(config):
  workdir = Workdir(config)
  workdir.close()
  return workdir


@pytest.fixture(name='config')
def fixture_config(tmp_path):
  return Config(workdir=str(tmp_path / 'run'))


def test_it_records_config_versions_and_commit(config):
  path = open_and_close(config).path
  record = json.loads((path / 'config.json').read_text())
  assert record['config'] == dataclasses.asdict(config)
  assert record['versions']['jax'] and record['versions']['python']
  assert record['commit'] is None or len(record['commit']) in (40, 41)


def test_another_config_is_refused_with_every_difference(config):
  open_and_close(config)
  other = dataclasses.replace(config, heads=2, learning_rate=.5)
  message = r'heads=4 there, 2 now; learning_rate=0.003 there, 0.5 now.*another --workdir'
  with pytest.raises(UserError, match=message):
    Workdir(other)
  assert not open_and_close(config).warnings


def test_fields_without_effect_on_results_may_change(config):
  open_and_close(config)
  free = {name: FIELDS[name].default for name in FIELDS if FIELDS[name].metadata['free']}
  names = {'preset', 'workdir', 'checkpoint_every', 'keep_checkpoints', 'free_running', 'dry_run',
           'distributed', 'mesh', 'tensorboard', 'profile_steps'}  # yapf: disable
  assert set(free) == names
  other = dict(checkpoint_every=7, keep_checkpoints=5, preset='x', free_running=False)
  open_and_close(dataclasses.replace(config, **other))


def test_a_field_one_side_lacks_is_a_difference(config):
  path = open_and_close(config).path / 'config.json'
  record = json.loads(path.read_text())
  del record['config']['norm']
  record['config']['removed'] = 3
  path.write_text(json.dumps(record))
  with pytest.raises(UserError, match=r'norm=\(absent\) there, pre now; removed=3 there'):
    Workdir(config)


def test_it_serves_one_at_a_time(config):
  first = Workdir(config)
  with pytest.raises(UserError, match=r'in use by process \d+'):
    Workdir(config)
  first.close()
  open_and_close(config)


def test_a_directory_with_other_things_is_left_alone(tmp_path):
  (tmp_path / 'thesis.tex').write_text('')
  with pytest.raises(UserError, match='thesis.tex'):
    Workdir(Config(workdir=str(tmp_path)))
  assert [path.name for path in tmp_path.iterdir()] == ['thesis.tex']


def test_what_a_kill_during_the_start_leaves_is_taken_over(tmp_path):
  for name in ('lock', 'config.json.tmp'):
    (tmp_path / name).write_text('')
  open_and_close(Config(workdir=str(tmp_path)))


def test_a_place_that_cannot_be_written_to_is_found_at_once(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='cannot be written to'):
    Workdir(Config(workdir=str(tmp_path / 'file' / 'run')))


def test_a_damaged_record_is_one_line(config):
  path = open_and_close(config).path / 'config.json'
  for text in ('', '{', '[]', '{"config": {}}'):
    path.write_text(text)
    with pytest.raises(UserError, match='config.json is damaged'):
      Workdir(config)


def test_other_versions_are_told(config):
  path = open_and_close(config).path / 'config.json'
  record = json.loads(path.read_text())
  record['versions']['jax'] = '0.0.1'
  path.write_text(json.dumps(record))
  assert len(open_and_close(config).warnings) == 1
  assert 'started with jax 0.0.1' in open_and_close(config).warnings[0]


def test_the_default_place_depends_on_the_configuration_alone(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  config = Config(task='copy', model='seq2seq', attention='local')
  assert locate(config) == locate(dataclasses.replace(config, keep_checkpoints=9))
  assert locate(config) != locate(dataclasses.replace(config, seed=1))
  assert locate(config).parent == Path('runs').absolute()
  assert locate(config).name.startswith('copy-seq2seq-local-vanilla-')
  assert set(identity(config)) < set(FIELDS)
