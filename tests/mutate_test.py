"""The table of faults keeps up with the code; `python -m tests.mutate` runs it."""

import pytest

from tests import mutate


@pytest.mark.parametrize('fault', mutate.FAULTS, ids=lambda fault: fault.what)
def test_the_text_of_a_fault_is_in_its_file_once(fault):
  assert mutate.occurrences(fault) == 1 and fault.new != fault.old
  assert (mutate.ROOT / fault.tests.partition('::')[0]).exists()
