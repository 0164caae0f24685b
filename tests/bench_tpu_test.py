"""What the TPU compiler says, and what is made of it."""

import importlib.util
import json
import os
from pathlib import Path
import subprocess
import sys

import attn
from experiments import bench
from experiments import bench_plot
from experiments import bench_report
from experiments import bench_tpu
from experiments.config import UserError
import pytest

HAS_COMPILER = importlib.util.find_spec('libtpu') is not None


@pytest.mark.parametrize('limit', [0, 1023, 1024, 5000, 17 * 1024, 2**20 - 1, 2**24])
@pytest.mark.parametrize('tried', [(), (1024, 16384), (2**15,)])
def test_the_longest_is_found_to_an_eighth(limit, tried):
  asked = []

  def fits(length):
    asked.append(length)
    return length <= limit

  known = {length: length <= limit for length in tried}
  found = bench_tpu.longest(fits, known)
  assert found <= limit and (limit - found <= max(1024, found // 8) or found == bench_tpu.LONGEST)
  assert not found % 1024 and len(asked) == len(set(asked)) < 20 and not set(asked) & set(tried)


def test_why_a_program_does_not_compile_is_short():
  memory = RuntimeError('RESOURCE_EXHAUSTED: the memory required for HLO temporaries (132.75G) '
                        'exceeds available HBM (15.75G).')
  assert bench_tpu._reason(memory) == 'needs 132.75G of 15.75G'
  assert bench_tpu._reason(ValueError('no\n such')) == 'failed: ValueError: no such'


def test_lengths_are_of_a_chip_and_what_is_not_read_is_refused():
  request = bench.parse(['bench', '--tpu=v6e'])
  assert request.parts == ('tpu',) and request.lengths[-1] == 2**20
  assert bench.parse(['bench', '--tpu=v5e', '--lengths=64']).lengths == (64,)
  with pytest.raises(UserError, match='--dtypes is not read by --tpu'):
    bench.parse(['bench', '--tpu=v5e', '--dtypes=float32'])
  with pytest.raises(UserError, match='tpu'):
    bench.parse(['bench', '--tpu=v1'])


def test_who_has_no_compiler_is_told_what_to_install(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  assert bench.main(['bench', '--tpu=v5e', f'--out={tmp_path}']) == 2
  assert "pip install '.[tpu-compile]'" in capsys.readouterr().err


def row(length, **more):
  return dict(maker='attn', name='local', label='local causal', causal=True, dtype='bfloat16',
              direction='forward', length=length) | more  # yapf: disable


@pytest.fixture
def result():
  """A variant that fits at one length, bound by memory, and not at another."""
  fits = dict(compile_seconds=1., kernel=True, flops=2e12, temp_bytes=3e6, argument_bytes=4,
              result_bytes=5, moved_bytes=6e11, roofline_seconds=6e11 / 819e9)  # yapf: disable
  chip = dict(name='v5e') | bench_tpu.CHIPS['v5e']._asdict()
  shared = row(16384, temp_bytes=7e6, sent={'collective-permute': 8000})
  return dict(circumstances=bench_report.circumstances('bench', 'cpu'),
              tpu=dict(chip=chip,
                       cells=[row(1024, **fits),
                              row(65536, skipped='needs 99G of 15.75G', failed=False)],
                       longest=[dict(label='local causal', forward=9216, gradient=0, mesh=2**20)],
                       collectives=[shared]))  # yapf: disable


def test_tables_files_and_pictures_say_that_nothing_was_run(result, tmp_path):
  bench_report.write(result, tmp_path)
  text = (tmp_path / 'bench.md').read_text()
  assert '## Compiled for v5e, not run' in text and '197 TFLOP/s' in text and '819 GB/s' in text
  lines = text.splitlines()
  assert '| local causal | 3 p | × |' in lines and '| local causal | 733 (b) | × |' in lines
  assert '| local causal | 9 | none | 1024 |' in lines
  assert '| local causal | forward | collective-permute 8 | 7 |' in lines
  assert '- local causal, T 65536, forward: needs 99G of 15.75G' in lines
  assert 'needs 99G' in (tmp_path / 'bench.csv').read_text()
  names = [path.name for path in bench_plot.draw(result, tmp_path)]
  assert names == ['bench_tpu_time.png', 'bench_tpu_memory.png']
  assert all((tmp_path / name).stat().st_size > 10_000 for name in names)


@pytest.mark.skipif(not HAS_COMPILER, reason='needs the extra `tpu-compile`')
def test_the_compiler_takes_every_variant_and_says_when_memory_ends():
  program = """
import json
from experiments import bench_tpu
from experiments.bench_contenders import Problem
import attn
ask = lambda name, T, direction: bench_tpu.compiled(
    bench_tpu.CHIPS['v5e'], name, Problem(1, T, 2, 128, 'bfloat16'), direction)
print(json.dumps({name: [ask(name, 1024, d) for d in ('forward', 'gradient')]
                  for name in attn.VARIANTS} | {
    'far': ask('vanilla', 2**17, 'forward'),
    'mesh': bench_tpu.compiled(bench_tpu.CHIPS['v5e'], 'local',
                               Problem(1, 4096, 2, 128, 'bfloat16'), 'gradient', 16)}))
"""
  environment = os.environ | {'PYTHONPATH': str(Path(__file__).parents[1]), 'XLA_FLAGS': ''}
  out = subprocess.run([sys.executable, '-P', '-c', program], env=environment, text=True,
                       capture_output=True, check=True).stdout  # yapf: disable
  rows = json.loads(out.splitlines()[-1])
  for name in attn.VARIANTS:
    for said in rows[name]:
      assert 'skipped' not in said, said
      assert said['kernel'] == (name in ('blockwise', 'local', 'longformer'))
      assert said['argument_bytes'] >= 3 * 1024 * 2 * 128 * 2 and said['roofline_seconds'] > 0
  assert rows['vanilla'][0]['flops'] == 4 * 1024**2 * 2 * 128
  assert rows['far']['skipped'].startswith('needs ') and not rows['far']['failed']
  assert rows['mesh']['sent'] == {'collective-permute': 128 * 2 * 128}  # the window
