"""What a person sees: plain lines in a pipe, a bar and a bold row at a terminal."""

import io
from pathlib import Path

from experiments import report as report_lib
from experiments.config import Config
from experiments.report import Report, settings
import pytest
from rich.console import Console

ROW = dict(step=2, loss=.5, accuracy=.75)
EVALUATED = dict(step=4, loss=.25, accuracy=1., eval_loss=.3, eval_accuracy=.9,
                 eval_exact_match=.8)  # yapf: disable
SUMMARY = dict(step=4,
               scores=dict(model=dict(loss=.3, accuracy=.9, exact_match=.8),
                           chance=dict(loss=None, accuracy=.25, exact_match=0.)))


def shown(monkeypatch, terminal):
  """What a whole run prints."""
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.delenv('NO_COLOR', raising=False)
  monkeypatch.delenv('FORCE_COLOR', raising=False)
  out, config = io.StringIO(), Config(steps=4, log_every=2, warmup_steps=0)
  monkeypatch.setattr(report_lib, 'Console',
                      lambda **kw: Console(**kw, file=out, force_terminal=terminal))
  report = Report(config)
  report.start('learns [nothing]', 1234, 'cpu', Path('/x/run'), 1)
  with report.progress(1) as update:
    for row in (ROW, dict(ROW, step=3), EVALUATED):
      update(row)
  report.result(SUMMARY, Path('/x/run'))
  return out.getvalue()


def test_piped_lines_are_plain(monkeypatch):
  text = shown(monkeypatch, False)
  assert text.isascii() and '\x1b' not in text and '\r' not in text
  lines = text.splitlines()
  assert lines[0] == 'copy, decoder, attention vanilla: 1,234 parameters on cpu'
  assert '  learns [nothing]' in lines and '  resumed at step 1 of 4' in lines
  steps = [line for line in lines if line.startswith('step ')]
  assert [line.split()[1] for line in steps] == ['2/4', '4/4']
  assert 'held-out: loss 0.3000 accuracy 0.9000 exact match 0.8000' in steps[1]


def test_the_table_has_the_baselines_beside_the_model(monkeypatch):
  lines = [line.split('|')[1:-1] for line in shown(monkeypatch, False).splitlines() if '|' in line]
  assert [[cell.strip() for cell in line] for line in lines] == [
      ['', 'loss', 'accuracy', 'exact match'],
      ['model', '0.3000', '0.9000', '0.8000'],
      ['chance', '', '0.2500', '0.0000'],
  ]


def test_a_terminal_gets_a_bar_with_the_numbers(monkeypatch):
  text = shown(monkeypatch, True)
  for part in ('\x1b[', '4/4', 'steps/s loss 0.2500', 'step 4  held-out: loss 0.3000', '0:00:00'):
    assert part in text


def test_settings_resolve_a_size_but_not_a_switch():
  assert 'random_filler=False' in settings(Config(task='mqar', random_filler=False))
  assert 'num_pairs=4 random_filler=True' in settings(Config(task='mqar'))


def test_settings_are_what_is_read_and_what_is_unusual():
  text = settings(Config(attention='local', norm='post', steps=7))
  assert 'window=16' in text and 'norm=post' in text and 'steps=7' in text
  assert 'length=12' in text, "the task's own default in place of 0"
  for absent in ('stride', 'dropout', 'num_pairs', 'workdir', 'attention', 'log_every', 'mlp_dim'):
    assert f'{absent}=' not in text


@pytest.mark.parametrize('config, words', [
    (Config(model='seq2seq', attention='local'), 'encoder local, decoder local, cross vanilla'),
    (Config(model='seq2seq'), 'attention vanilla'),
])
def test_the_first_line_names_every_variant(monkeypatch, config, words):
  out = io.StringIO()
  monkeypatch.setattr(report_lib, 'Console', lambda **kw: Console(**kw, file=out))
  Report(config).start('', 1, 'cpu', Path('/'), 0)
  assert words in out.getvalue()
