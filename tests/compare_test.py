"""Comparisons: their plans, their statistics and reports, and runs that are stopped or fail."""

import base64
import html.parser
import json
import os
from pathlib import Path
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree

from experiments import anchors
from experiments import compare
from experiments import compare_request
from experiments import compare_report
from experiments import compare_results
from experiments import flags
from experiments import sweep
from experiments.config import Config, UserError
from experiments.sweep import Block
import pytest

SMALL = ('--model_dim=8 --heads=2 --num_layers=1 --steps=6 --batch_size=4 --length=4 '
         '--eval_every=2 --eval_batches=1 --checkpoint_every=2').split()


def plan(tmp_path, *options):
  return sweep.plan(compare_request.parse(['compare', *options]).blocks, tmp_path)


def test_a_plan_is_the_product_of_its_choices_each_run_once(tmp_path):
  options = ('--tasks=copy,majority', '--attention=vanilla,local', '--seeds=2', '--vary=window:2,4',
             '--grid=learning_rate:1e-3,3e-3', '--steps=50')
  found = plan(tmp_path, *options)
  # vanilla reads no window, so it is there once for both.
  assert len(found.cells) == 2 * (1 + 2) * 2 * 2 == len({cell.path for cell in found.cells})
  assert found.cells == plan(tmp_path, *options).cells
  for cell in found.cells:
    assert flags.parse(['train', *sweep.arguments(cell)]) == cell.config
    assert cell.config.steps == 50
    assert ('window' in dict(cell.vary)) == (cell.config.attention == 'local')
  assert {cell.config.model for cell in found.cells} == {'decoder', 'encoder'}


def test_what_is_not_defined_is_left_out_with_its_reason(tmp_path):
  found = plan(tmp_path, '--tasks=copy', '--attention=vanilla,linformer', '--positions=alibi')
  assert {cell.config.attention for cell in found.cells} == {'vanilla'}
  (name, reason), = found.undefined
  assert name == 'copy-linformer' and 'cannot serve positions=alibi' in reason


@pytest.mark.parametrize('options, message', [
    ((), '--tasks and --attention must list what to compare'),
    (('--tasks=copi',), 'copi is not one of: copy'),
    (('--tasks=copy', '--attention=locl'), 'locl is not one of: vanilla'),
    (('--tasks=copy', '--window=3'), '--window is read by no run'),
    (('--tasks=copy', '--vary=window=3'), 'must be a field and its values'),
    (('--tasks=copy', '--vary=wind:3'), 'must be a field and its values'),
    (('--tasks=copy', '--grid=steps:3,x'), 'values of steps are of type int'),
    (('--tasks=copy', '--grid=steps:3', '--steps=4'), '--steps is given twice'),
    (('--tasks=copy', '--seed=3'), '--seed is for one run; here it is --seeds'),
    (('--tasks=copy', '--distributed=on'), '--distributed is for one run; here it needs --cell'),
    (('--tasks=copy', '--workdir=x'), 'here it is --directory'),
    (('--tasks=copy', '--preset=quick'), '--tasks and --preset are both given'),
    (('--preset=fast',), 'preset=fast is not one of: quick, anchors'),
    (('--tasks=copy', '--cell=9'), '--cell=9 is none of the 3 runs, 0 to 2'),
    (('--tasks=copy', 'local'), "unexpected argument 'local'"),
    (('--tasks=mqar', '--model=encoder'), 'there is nothing to compare'),
    (('--tsk=copy',), 'tsk'),
])  # yapf: disable
def test_mistakes_are_one_line(tmp_path, capsys, options, message):
  assert compare.main(['compare', f'--directory={tmp_path}', *options]) == 2
  err = capsys.readouterr().err
  assert err.startswith('error: ') and err.count('\n') == 1 and message in err
  assert not list(tmp_path.iterdir())


def test_help_and_presets(tmp_path, capsys):
  assert compare.main(['compare', '--help']) == 0
  shown = capsys.readouterr().out
  for name in ('tasks', 'grid', 'cell', 'workers', *compare_request.PRESETS):
    assert name in shown
  for name, preset in compare_request.PRESETS.items():
    cells = sweep.plan(preset(), tmp_path).cells
    assert cells and not sweep.plan(preset(), tmp_path).undefined, name
  quick = sweep.plan(compare_request.quick(), tmp_path).cells
  assert len(quick) == 5 * 3 * 2
  assert compare.main(['compare', '--preset=quick', '--dry_run', f'--directory={tmp_path}/x']) == 0
  assert '  29      majority-performer-s1' in capsys.readouterr().out
  assert not (tmp_path / 'x').exists()


def test_intervals_are_students():
  one, two, three = (compare_results.estimate(x) for x in ([.5], [.4, .6], [.1, .2, .3]))
  assert one == (0.5, None, 1)
  # t(0.975) is 12.706 with one degree of freedom and 4.303 with two.
  assert two.mean == pytest.approx(.5) and two.half == pytest.approx(12.706 * .1, rel=1e-4)
  assert three.half == pytest.approx(4.303 * .1 / 3**.5, rel=1e-3)


@pytest.mark.parametrize('config, accuracy, expected', [
    (Config(task='mqar'), 1.0, (1.0, 'reproduced')),
    (Config(task='mqar'), 0.96, (1.0, 'near')),
    (Config(task='mqar'), 0.5, (1.0, 'not')),
    (Config(task='mqar', num_layers=1), 0.27, (0.25, 'reproduced')),
    (Config(task='mqar', num_layers=1), 0.9, (0.25, 'not')),
    (Config(task='mqar', attention='local'), 1.0, (None, 'no anchor')),
    (Config(task='induction'), 0.99, (0.97, 'reproduced')),
    (Config(task='copy'), 1.0, (None, 'no anchor')),
    (Config(task='listops', model='encoder', length=64), 0.36, (None, 'no anchor')),
    (Config(task='listops', model='encoder', length=1999, attention='local'), 0.17,
     (0.1582, 'reproduced')),
])  # yapf: disable
def test_verdicts(config, accuracy, expected):
  assert anchors.verdict(config, accuracy) == expected


def summary(accuracy, free=None, by_length=(), **more):
  score = lambda accuracy, free=None: dict(
      loss=1., accuracy=accuracy, exact_match=accuracy, free_running=free)
  scores = lambda accuracy: {
      'model': score(accuracy, free),
      'chance': score(.1),
      'first': score(.2)
  }
  return dict(device='cpu', scores=scores(accuracy),
              by_length={length: scores(x) for length, x in by_length},
              parameters=1234, step_flops=2 * 10**6, step_bytes=3 * 10**6, decode_bytes=400,
              seconds_per_step=.005, seconds_of_last_session=9.) | more  # yapf: disable


@pytest.fixture(name='results')
def fixture_results(tmp_path):
  """A comparison of which most runs ended, one failed and one has not ended."""
  options = ('--tasks=copy', '--attention=vanilla,local', '--seeds=2',
             '--grid=learning_rate:1e-3,3e-3', '--eval_lengths=4,8')  # yapf: disable
  made = plan(tmp_path, *options)
  failures = {}
  for index, cell in enumerate(made.cells):
    cell.path.mkdir(parents=True)
    best = dict(cell.tune)['learning_rate'] == 3e-3
    if index == 1:
      failures[cell.path] = tmp_path / 'failure.json'
      failures[cell.path].write_text(json.dumps(dict(status=1, said='step 4 <is> not finite')))
    elif index != 5:
      found = summary(.9 if best else .5, .8, [('4', .9), ('8', .3)])
      (cell.path / 'summary.json').write_text(json.dumps(found))
      rows = [{'step': step, 'eval_accuracy': step / 10} for step in (1, 2)]
      lines = [json.dumps(row) for row in ({'step': 0, 'loss': 1.}, *rows)]
      (cell.path / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
  return made, failures, tmp_path


def test_rows_take_the_best_point_and_name_what_is_missing(results):
  made, failures, _ = results
  found = compare_results.collect(made, failures)
  assert [row.label for row in found.rows] == ['vanilla', 'local']
  for row in found.rows:
    assert row.tune == (('learning_rate', 3e-3),) and row.accuracy.mean == pytest.approx(.9)
    assert row.accuracy.seeds == row.planned == 2 and row.baseline == ('first', .2)
    assert row.by_length[8][0].mean == pytest.approx(.3) and row.curve == {1: [.1] * 2, 2: [.2] * 2}
  assert list(found.failed.values()) == ['exit status 1: step 4 <is> not finite']
  assert found.unfinished == [made.cells[5].name]
  same, different = compare_results.equal(found.rows)
  assert 'steps=800' in same and 'length=12' in same and not different


class Reader(html.parser.HTMLParser):
  """Collects what a page would load, and checks that its tags are closed."""

  def __init__(self):
    super().__init__()
    self.open, self.loads, self.text = [], [], []

  def handle_starttag(self, tag, attrs):
    self.loads += [value for name, value in attrs if name in ('src', 'href')]
    if tag not in ('meta', 'img'):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text.append(data)


def test_reports_are_whole_and_hold_themselves(results):
  made, failures, tmp_path = results
  files = compare_report.write(made, failures, tmp_path, 'python -m <compare>')
  assert set(files) == {'report.html', 'report.md', 'results.csv', 'results.json'}
  page = (tmp_path / 'report.html').read_text()
  reader = Reader()
  reader.feed(page)
  assert not reader.open and 'width=device-width' in page
  pictures = [load for load in reader.loads if load.startswith('data:image/svg+xml;base64,')]
  assert len(pictures) == len(reader.loads) == 3
  for picture in pictures:
    svg = base64.b64decode(picture.partition(',')[2]).decode()
    xml.etree.ElementTree.fromstring(svg)
    assert 'local' in svg and 'best baseline' in svg
  text = ' '.join(reader.text)
  expected = ('vanilla (best, learning_rate=0.003)', '0.900 ± 0.000', '0.200 (first)',
              'step 4 <is> not finite', f'not finished: {made.cells[5].name}', 'accuracy at length',
              'python -m <compare>', 'The same in all runs')
  for words in expected:
    assert words in text, words
  lines = (tmp_path / 'results.csv').read_text().splitlines()
  assert len(lines) == 1 + 6 and 'model_accuracy' in lines[0]
  loaded = json.loads((tmp_path / 'results.json').read_text())
  assert len(loaded['rows']) == 2 and len(loaded['runs']) == 6 and len(loaded['failed']) == 1
  assert '| local (best, learning_rate=0.003) | 0.900' in (tmp_path / 'report.md').read_text()


BROWSER = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))),
               None)


@pytest.mark.skipif(BROWSER is None, reason='no Chromium is installed here')
def test_a_browser_shows_the_report(results):
  made, failures, tmp_path = results
  compare_report.write(made, failures, tmp_path, 'compare')
  page = subprocess.run([BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--dump-dom',
                         f'--user-data-dir={tmp_path}/browser', f'file://{tmp_path}/report.html'],
                        capture_output=True, text=True, check=True, timeout=120)  # yapf: disable
  assert 'accuracy at length' in page.stdout and page.stdout.count('<img') == 3


def test_a_report_of_nothing_says_so(tmp_path, capsys):
  options = ('--tasks=copy', f'--directory={tmp_path}', '--report', '--seeds=1')
  assert compare.main(['compare', *options]) == 0
  assert 'not finished: copy-vanilla-s0' in (tmp_path / 'report.md').read_text()
  assert '1 runs, 0 of them done' in capsys.readouterr().out


def command(tmp_path, *options):
  environment = os.environ | {
      'JAX_PLATFORMS': 'cpu',
      'PYTHONPATH': str(Path(__file__).parents[1]),
      'XLA_FLAGS': os.environ['XLA_FLAGS'].replace('device_count=8', 'device_count=1'),
      'JAX_NUM_PROCESSES': '2'  # which is not of the comparison's own runs
  }
  return subprocess.Popen([sys.executable, '-P', '-m', 'experiments.compare', *SMALL, *options,
                           f'--directory={tmp_path}'], env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)  # yapf: disable


@pytest.mark.long
def test_a_comparison_survives_being_killed_stopped_and_a_run_that_fails(tmp_path):
  """The second run cannot stay finite; the first is killed, then stopped, then ends."""
  options = ('--tasks=copy', '--seeds=1', '--vary=learning_rate:1e-3,1e30', '--clip_norm=0',
             '--nofree_running', '--steps=100')  # yapf: disable
  cells = plan(tmp_path, *SMALL, *options).cells
  first = next(cell for cell in cells if dict(cell.vary)['learning_rate'] == 1e-3)

  def wait_for_step(least):
    end = time.monotonic() + 120
    while time.monotonic() < end:
      steps = [int(path.name) for path in first.path.glob('checkpoints/*') if path.name.isdigit()]
      if max(steps, default=0) >= least:
        return max(steps)
      time.sleep(0.1)
    raise TimeoutError(first.path)

  process = command(tmp_path, *options)
  reached = wait_for_step(2)
  process.kill()  # which ends its worker too, when that has saved
  process.communicate()
  process = command(tmp_path, *options)
  while '2 runs' not in process.stdout.readline():  # from here on it heeds signals
    pass
  reached = wait_for_step(reached + 2)
  process.send_signal(signal.SIGTERM)
  out, err = process.communicate(timeout=120)
  assert process.returncode == 143 and 'the same command goes on from here' in out, err
  assert not first.is_done and f'not finished: {first.name}' in (tmp_path / 'report.md').read_text()
  process = command(tmp_path, *options)
  out, err = process.communicate(timeout=300)
  assert process.returncode == 1 and first.is_done, err
  report = (tmp_path / 'report.md').read_text()
  assert re.search(r'failed: copy-vanilla-learning_rate=1e\+30-s0: exit status 1: .*not finite',
                   report)
  assert json.loads((first.path / 'summary.json').read_text())['step'] == 100


def test_one_cell_runs_alone_as_in_a_job_array(tmp_path, monkeypatch):
  found = []
  from experiments import train
  monkeypatch.setattr(train, 'train', lambda config: found.append(config) or 0)
  options = ('--tasks=copy,reverse', '--seeds=2', '--cell=3', f'--directory={tmp_path}')
  assert compare.main(['compare', *options]) == 0
  config, = found
  assert (config.task, config.seed) == ('reverse', 1)


def test_a_cell_that_fails_alone_is_in_the_report(tmp_path, capsys):
  options = ['compare', *SMALL, '--tasks=copy', '--seeds=1', '--learning_rate=1e30',
             '--clip_norm=0', '--nofree_running', f'--directory={tmp_path}']  # yapf: disable
  assert compare.main([*options, '--cell=0']) == 1
  assert 'is not finite' in capsys.readouterr().err
  assert compare.main([*options, '--report']) == 1
  assert re.search('failed: copy-vanilla-s0: exit status 1: .*not finite',
                   (tmp_path / 'report.md').read_text())


def test_fields_that_differ_are_named():
  block = Block(('copy',), ('vanilla',), 1, {'num_layers': (1, 2)}, {}, {})
  one = compare_results.estimate([1.])
  rows = [compare_results.Row('copy', 'decoder', '', cell.config, (), one, None, ('chance', 0.),
                              None, '', {}, {}, 1, 1, 1, 1, 1., 1)
          for cell in sweep.plan([block], Path('x')).cells]  # yapf: disable
  assert compare_results.equal(rows)[1] == ['num_layers=1, 2']


def test_no_plan_without_a_field_somebody_reads(tmp_path):
  block = Block(('copy',), ('vanilla',), 1, {}, {'window': (1, 2)}, {})
  with pytest.raises(UserError, match='--window is read by no run of this comparison'):
    sweep.plan([block], tmp_path)
