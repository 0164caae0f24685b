"""scripts/tpu, beside a gcloud that only notes what it was told."""

import os
from pathlib import Path
import subprocess

import pytest

SCRIPT = Path(__file__).parents[1] / 'scripts' / 'tpu'


@pytest.fixture
def call(tmp_path):
  gcloud, told = tmp_path / 'gcloud', tmp_path / 'told'
  gcloud.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" END >>{told}\n')
  gcloud.chmod(0o755)

  def run(*words):
    environment = os.environ | {'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'TMPDIR': str(tmp_path)}
    result = subprocess.run([SCRIPT, *words], env=environment, text=True, capture_output=True,
                            check=False)  # yapf: disable
    return result, told.read_text() if told.exists() else ''

  return run


def test_it_prints_and_runs_only_if_told_to(call):
  words = ('mine', '--zone=us-west4-a', '--', 'scripts/generate', '--prompt=7 9 8')
  result, told = call(*words)
  assert not result.returncode and not told
  assert result.stdout.startswith('gcloud compute tpus tpu-vm ssh mine --zone=us-west4-a '
                                  '--worker=all ')
  result, told = call('--run', *words)
  assert not result.returncode
  assert told.splitlines() == ['compute', 'tpus', 'tpu-vm', 'ssh', 'mine', '--zone=us-west4-a',
                               '--worker=all', r'--command=cd attn && scripts/generate '
                               r'--prompt=7\ 9\ 8', 'END']  # yapf: disable


def test_what_it_prints_is_what_a_shell_would_run(call, tmp_path):
  words = ('mine', '--zone=z', '--', 'scripts/train', "--workdir=it's mine")
  printed = call(*words)[0].stdout
  subprocess.run(['bash', '-c', printed], check=True,
                 env=os.environ | {'PATH': f'{tmp_path}:{os.environ["PATH"]}'})  # yapf: disable
  once = (tmp_path / 'told').read_text()
  assert call('--run', *words)[1] == 2 * once


def test_copy_sends_the_last_commit_and_sets_it_up(call):
  result, told = call('mine', '--zone=z', '--project=p', '--copy')
  archive, copy, setup = result.stdout.splitlines()
  assert not result.returncode and not told
  assert archive.startswith('git archive ') and ' mine:attn.tar.gz --zone=z --project=p ' in copy
  assert "tpu-compile" in setup and '--worker=all' in setup


@pytest.mark.parametrize('words, message', [
    ((), 'the name of a TPU VM'),
    (('mine', '--', 'ls'), 'the --zone=ZONE of mine'),
    (('mine', '--zone=z'), 'needs --copy, or -- and a command'),
    (('mine', '--zone=z', '--copy', '--', 'ls'), 'two calls'),
    (('mine', '--zone=z', 'ls'), 'put -- before a command'),
    (('mine', '--zone', 'z'), '--zone is no option of it, or lacks its =VALUE'),
])
def test_a_mistake_is_one_line(call, words, message):
  result, told = call(*words)
  assert result.returncode == 2 and message in result.stderr and not told
  assert len(result.stderr.splitlines()) == 1
