"""Two processes train one run: as one process does, stopped by one signal, and after a death."""

import os
from pathlib import Path
import re
import signal
import socket
import subprocess
import sys
import time

from experiments import processes
from experiments.config import UserError
import pytest

from tests.kill_resume import last_step
from tests.placement_test import assert_same, SMALL, trained

MESH = '--mesh=data:2,sequence:2'
OPTIONS = ('--task=copy', '--length=7', '--attention=local', '--window=3', '--nofree_running',
           '--eval_every=0', '--steps=12')  # yapf: disable


def start(workdir, *options):
  """Both processes, each with two devices, in one run."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  environment = os.environ | {
      'PYTHONPATH': str(Path(__file__).parents[1]),
      'XLA_FLAGS': os.environ['XLA_FLAGS'].replace('device_count=8', 'device_count=2'),
      'JAX_COORDINATOR_ADDRESS': f'localhost:{port}',
      'JAX_NUM_PROCESSES': '2'
  }
  command = [sys.executable, '-P', '-m', 'experiments.train', *SMALL, *OPTIONS, *options,
             f'--workdir={workdir}']  # yapf: disable
  return [subprocess.Popen(command, env=environment | {'JAX_PROCESS_ID': str(i)}, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
          for i in range(2)]  # yapf: disable


def ended(pair):
  said = [[re.sub(r'\[Gloo\].*\n', '', text) for text in process.communicate(timeout=240)]
          for process in pair]  # yapf: disable
  return [process.returncode for process in pair], said


def test_two_processes_are_one_run_through_a_signal_and_a_death(tmp_path):
  wanted = trained(tmp_path / 'one', *OPTIONS)
  workdir = tmp_path / 'two'
  pair = start(workdir, MESH, '--checkpoint_every=1')
  while last_step(workdir) < 4:
    assert pair[0].poll() is None and pair[1].poll() is None, ended(pair)
    time.sleep(0.01)
  pair[1].send_signal(signal.SIGTERM)  # only the second
  status, said = ended(pair)
  assert status == [0, 0], said
  assert 'stopped and saved at step' in said[0][0] and not said[1][0], 'the first one speaks'
  stopped = last_step(workdir)
  assert (workdir / 'checkpoints' / str(stopped)).is_dir() and stopped < 12
  pair = start(workdir, MESH, '--checkpoint_every=1')
  while last_step(workdir) < stopped + 2:
    assert pair[0].poll() is None and pair[1].poll() is None, ended(pair)
    time.sleep(0.01)
  for process in pair:
    process.kill()
  ended(pair)
  status, said = ended(start(workdir))  # all devices along data
  assert status == [0, 0] and 'resumed at step' in said[0][0], said
  rows = trained(workdir, *OPTIONS, MESH)  # which has ended
  assert_same(rows, wanted)


def test_a_workdir_that_the_first_cannot_have_ends_both(tmp_path):
  (tmp_path / 'thesis.tex').write_text('')
  status, said = ended(start(tmp_path))
  assert status == [2, 2], said
  assert 'is not empty and no run' in said[0][1]
  assert 'the first process cannot use the workdir' in said[1][1]


def test_who_cannot_be_joined_is_told(monkeypatch):
  for name in ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID',
               'SLURM_STEP_NUM_TASKS'):
    monkeypatch.delenv(name, raising=False)
  processes.join('off')
  processes.join('auto')  # alone
  monkeypatch.setenv('SLURM_NTASKS', '2')  # as a batch script has, which is one process
  processes.join('auto')
  with pytest.raises(UserError, match='distributed=on: .* set JAX_COORDINATOR_ADDRESS=HOST:PORT'):
    processes.join('on')
