"""Every fault that tests/faults.py knows costs a real run no more than it must."""

import re

import pytest

from tests import faults


@pytest.fixture(scope='module')
def bench(tmp_path_factory):
  return faults.Bench(tmp_path_factory.mktemp('faults'))


@pytest.mark.sampled(100)
@pytest.mark.parametrize('name, said', [
    ('SIGTERM', 'saved at step'),
    ('SIGINT', 'saved at step'),
    ('flipped byte', 'checkpoint of step 20 is damaged'),
    ('truncated file', 'checkpoint of step 20 is damaged'),
    ('empty step directory', 'checkpoint of step 20 is damaged'),
    ('deleted metadata', 'checkpoint of step 20 is damaged'),
    ('foreign directory', ''),
    ('torn metrics line', ''),
    ('disk full', 'No space left on device.*newest checkpoint is of step 20'),
    ('read-only workdir', 'cannot be written to: Read-only file system'),
    ('read-only checkpoints', 'cannot be written to: Read-only file system'),
    ('another config', 'learning_rate=0.003 there, 0.001 now'),
    ('two writers', 'is in use by process'),
    ('NaN at step 25', 'Last good checkpoint: step 20'),
])
def test_a_fault(bench, name, said):
  if name in faults.NEED_MOUNT and not faults.can_mount():
    pytest.skip('no file system can be mounted here')
  outcome = faults.FAULTS[name](bench)
  assert re.search(said, outcome.seen)
  assert outcome.resumed >= outcome.whole


def test_all_are_tried():
  tried = test_a_fault.pytestmark[0].args[1]
  assert [name for name, _ in tried] == list(faults.FAULTS)


@pytest.mark.long
def test_kills_in_a_save(bench):
  assert faults.kills_in_a_save(bench, 2).statuses == (-9, 0)
