"""A trace of the steps that were asked for, and a plain word where there is none."""

import gzip
import json

from experiments import train
from experiments.config import Config, validate
from tests.faults import OPTIONS
import pytest


def trained(tmp_path, *more):
  return train.main(['train', *OPTIONS, '--steps=12', f'--workdir={tmp_path}', *more])


def test_a_trace_has_the_steps_asked_for(tmp_path, capsys):
  assert trained(tmp_path, '--profile_steps=4:6') == 0
  assert 'the trace of steps 4:6 is in' in capsys.readouterr().out
  trace, = (tmp_path / 'profile').rglob('*.trace.json.gz')
  events = json.loads(gzip.decompress(trace.read_bytes()))['traceEvents']
  steps = [event['args']['step_num'] for event in events if event.get('name') == 'train']
  assert steps == ['4', '5', '6']


def test_steps_that_are_past_are_told(tmp_path, capsys):
  assert trained(tmp_path) == 0
  (tmp_path / 'summary.json').unlink()
  assert trained(tmp_path, '--profile_steps=4:6') == 0
  assert 'were not all trained in this session' in capsys.readouterr().err
  assert trained(tmp_path, '--profile_steps=4:6') == 0  # which has ended
  assert 'profile_steps=4:6: nothing is left to trace' in capsys.readouterr().err
  assert not (tmp_path / 'profile').exists()


@pytest.mark.parametrize('text', ['4', '0:3', '5:4', '4:900', 'a:b', '1:2:3', ':', '-1:3'])
def test_what_is_no_range_of_steps_is_refused(text):
  with pytest.raises(ValueError, match=f'profile_steps={text} .* 1 and steps=800'):
    validate(Config(profile_steps=text))
