"""What is checked and timed on the device that jax has; here the CPU stands for any."""

import jax
import pytest

from experiments import bench
from experiments import bench_accuracy
from experiments import bench_contenders
from experiments import bench_parity
from experiments import bench_tpu
from experiments import bench_tpu_report
from experiments.bench_contenders import Problem


@pytest.fixture(autouse=True)
def small(monkeypatch):
  monkeypatch.setattr(bench_accuracy, 'LENGTH', 32)
  monkeypatch.setattr(bench_parity, 'CPU_SIZES', (32, 2))
  with jax.numpy_dtype_promotion('standard'):  # which jax.nn relies on
    yield


ARGUMENTS = ['bench', '--parity', '--variants=local', '--rounds=1']


def test_variants_are_compared_and_timed(tmp_path, capsys):
  assert bench.main([*ARGUMENTS, f'--out={tmp_path}']) == 0
  text = capsys.readouterr().out
  assert 'No accelerator is at hand: these are figures of the CPU.' in text
  lines = [line for line in text.splitlines() if line.startswith('| ')]
  assert sum(line.endswith('| right |') for line in lines) == 4  # with jax.nn, full and causal
  assert any(line.startswith('| jax.nn causal |') and '| 1.000 |' in line for line in lines)
  assert (tmp_path / 'bench.md').read_text() in text


def test_what_is_wrong_or_does_not_run_is_said(tmp_path, capsys, monkeypatch):
  true = bench_contenders.reference
  wrong = lambda name, *rest: [x * (1.01 if name == 'local' else 1) for x in true(name, *rest)]
  monkeypatch.setattr(bench_contenders, 'reference', wrong)
  prepare = bench_contenders.prepare_jax

  def failing(build, problem, direction):
    if problem.dtype == 'bfloat16' and direction == 'gradient':
      raise RuntimeError('no\nmemory')
    return prepare(build, problem, direction)

  monkeypatch.setattr(bench_contenders, 'prepare_jax', failing)
  assert bench.main([*ARGUMENTS, f'--out={tmp_path}']) == 1
  text = capsys.readouterr().out
  assert text.count('**wrong**') == 2 and '- local causal, gradient: RuntimeError: no' in text


def test_a_tpu_is_also_asked_for_each_implementation(monkeypatch):
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  labels = [c.label for c in bench_parity._contenders(['local', 'performer'])]
  assert {'local xla', 'local pallas causal', 'performer', 'jax.nn'} < set(labels)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert 'cuDNN causal' in [c.label for c in bench_parity._contenders(['local'])]


def test_measured_beside_the_roofline():
  row = bench_tpu.measured('local', Problem(1, 32, 2, 8, 'float32'), 'forward', 'xla')
  assert row['measured_seconds'] > 0 and row['measured_spread'] >= 0
  cell = dict(roofline_seconds=2e-3, measured_seconds=5e-3, measured_spread=.1)
  assert bench_tpu_report._measured(cell) == '5 (10%), 2.5 times'
