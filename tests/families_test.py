"""The table of small runs: its cells, its order, and where a run is stopped."""

import json
import subprocess

from experiments import families
from experiments import flags
import pytest

SUMMARY = dict(
    scores=dict(model=dict(accuracy=.98765), chance=dict(accuracy=.1), majority=dict(accuracy=.25)))


def test_a_cell_has_the_best_baseline_beside_the_model():
  assert families.cell(SUMMARY) == '0.988 (majority 0.250)'
  model = SUMMARY['scores']['model'] | dict(exact_match=.5, free_running=.25)
  written = dict(scores=SUMMARY['scores'] | dict(model=model))
  assert families.cell(written) == '0.988 (majority 0.250); 0.500, 0.250'


def test_every_run_is_one_that_the_program_accepts():
  for family, task in families.FAMILIES.items():
    for variant, options in families.VARIANTS.items():
      assert flags.parse(['', f'--model={family}', f'--attention={variant}', *task, *options])


def test_the_table_has_a_row_for_each_variant(capsys, monkeypatch):
  runs = []
  monkeypatch.setattr(families, 'run', lambda workdir, options: runs.append(workdir) or SUMMARY)
  assert families.main([]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == '| accuracy (best baseline) | encoder | decoder | seq2seq |'
  assert [line.split()[1] for line in lines[2:]] == list(families.VARIANTS)
  assert len(set(runs)) == len(runs) == 3 * len(families.VARIANTS)


def test_a_run_that_fails_ends_it_with_its_status(monkeypatch):

  def fail(*_):
    raise subprocess.CalledProcessError(2, 'train')

  monkeypatch.setattr(families, 'run', fail)
  assert families.main([]) == 2


@pytest.mark.parametrize('rows, halfway', [('', False), ('{"step": 40}\n', False),
                                           ('{"step": 40}\n{"step": 50}\n', True)])
def test_a_run_is_stopped_halfway(tmp_path, rows, halfway):
  assert not families._halfway(tmp_path)
  (tmp_path / 'config.json').write_text(json.dumps(dict(config=dict(steps=100))))
  (tmp_path / 'metrics.jsonl').write_text(rows)
  assert families._halfway(tmp_path) == halfway
