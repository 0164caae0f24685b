"""The program as a person meets it: exit statuses, one line for each error, resuming, SIGTERM."""

import json
import os
import re
import signal

from experiments import costs
from experiments import train
import pytest

from tests import tiny
from tests.writer_test import rows

SMALL = ('--model_dim=8', '--heads=2', '--num_layers=1', '--length=4', '--steps=6',
         '--batch_size=4', '--log_every=2', '--eval_every=3', '--eval_batches=2')  # yapf: disable

REFUSED = [
    ('--atention=local', 'attention'),
    ('--attention=performer --window=8', '--window is not read'),
    ('--heads=3 --model_dim=64', 'heads=3'),
    ('steps=5', '--steps=5'),
    ('--workdir=/dev/null/run', 'cannot be written to'),
]


@pytest.fixture(autouse=True)
def fixture_handlers():
  """Puts the signal handlers back that the program replaces."""
  before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
  yield
  for number, handler in before:
    signal.signal(number, handler)


def main(*options):
  return train.main(['train', *options])


@pytest.mark.parametrize('line, message', REFUSED)
def test_a_mistake_is_one_line_and_status_2(capsys, line, message):
  assert main(*line.split()) == 2
  out, err = capsys.readouterr()
  assert not out and err.count('\n') == 1 and err.startswith('error: ') and message in err


def test_help_is_status_0(capsys):
  assert main('--help') == 0
  assert '--attention=vanilla' in capsys.readouterr().out


def test_a_run_from_start_to_end_and_again(capsys, tmp_path):
  options = (*SMALL, f'--workdir={tmp_path}')
  assert main(*options) == 0
  first = capsys.readouterr().out
  assert re.search(r'model +\| +\d', first) and 'chance' in first and str(tmp_path) in first
  summary = json.loads((tmp_path / 'summary.json').read_text())
  found = rows(tmp_path / 'metrics.jsonl')
  assert summary['scores']['model']['accuracy'] == found[-1]['eval_accuracy']
  assert summary['step'] == 6 and len(summary['params_digest']) == 64
  assert {path.name for path in tmp_path.iterdir()} == {
      'checkpoints', 'config.json', 'lock', 'metrics.jsonl', 'summary.json'}  # yapf: disable
  assert main(*options) == 0
  again = capsys.readouterr().out
  assert again.startswith('this run has ended') and first.endswith(again.split('\n', 1)[1])
  (tmp_path / 'summary.json').unlink()  # As a kill just before the end leaves it.
  assert main(*options) == 0
  again = json.loads((tmp_path / 'summary.json').read_text())
  assert again['scores'] == summary['scores']
  assert again['params_digest'] == summary['params_digest']
  assert rows(tmp_path / 'metrics.jsonl') == found
  assert main(*options, '--seed=1') == 2
  assert 'seed=0 there, 1 now' in capsys.readouterr().err


def test_sigterm_finishes_the_step_and_saves(capsys, tmp_path, monkeypatch):

  def compile_step(*arguments):
    (step, made), count = costs.compile_step(*arguments), []

    def and_signal(state):
      count.append(0)
      if len(count) == 4:
        os.kill(os.getpid(), signal.SIGTERM)
      return step(state)

    return and_signal, made

  monkeypatch.setattr(train, 'compile_step', compile_step)
  assert main(*SMALL, f'--workdir={tmp_path}') == 0
  assert 'stopped and saved at step 4 of 6; the same command resumes' in capsys.readouterr().out
  assert (tmp_path / 'checkpoints' / '4').is_dir()
  assert not (tmp_path / 'summary.json').exists()


def test_a_dry_run_says_what_a_run_costs_and_leaves_nothing(capsys, tmp_path):
  assert main(*SMALL, f'--workdir={tmp_path}/run', '--dry_run') == 0
  out = capsys.readouterr().out
  assert 'MFLOP of matrix products a step' in out and 'kB to decode a sequence' in out
  assert re.search(r'copy, decoder, attention vanilla: 1,\d\d\d parameters', out)
  assert not list(tmp_path.iterdir())


def test_sigint_ends_with_its_own_status(tmp_path, monkeypatch):
  monkeypatch.setattr(train, '_run', lambda *_: os.kill(os.getpid(), signal.SIGINT))
  assert main(*SMALL, f'--workdir={tmp_path}') == 130
  assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL, 'a second one ends it at once'


def test_a_run_that_is_not_finite_is_status_1(capsys, tmp_path, monkeypatch):
  tiny_task = tiny.poisoned(tiny.CONFIG, 3)
  monkeypatch.setattr(train, 'make_task', lambda _: tiny_task)
  monkeypatch.setattr(train, 'build_model', lambda *_: tiny.Model())
  monkeypatch.setattr(costs, '_decode_bytes', lambda *_: None)  # that model does not decode
  assert main(*SMALL, f'--workdir={tmp_path}', '--checkpoint_every=2') == 1
  err = capsys.readouterr().err
  assert err.count('\n') == 1 and 'step 4 is not finite' in err and 'step 2' in err
  assert rows(tmp_path / 'metrics.jsonl')[-1]['loss'] == 'nan'


def test_what_a_part_cannot_do_is_one_line(capsys, tmp_path, monkeypatch):

  def build(*_):
    raise NotImplementedError('performer: no\nsuch thing')

  monkeypatch.setattr(train, 'build_model', build)
  assert main(*SMALL, f'--workdir={tmp_path}/run') == 2
  assert capsys.readouterr().err == 'error: performer: no such thing\n'
  assert not (tmp_path / 'run').exists()
