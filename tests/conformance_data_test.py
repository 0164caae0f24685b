"""Runs every case of data/conformance: equal to each out_* array, different from each bad_* array.

A case in index.json without a runner fails, and so does an array of a case that its runner does
not compute: nothing is passed over in silence.
"""

import contextlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import case_runners
from tests import case_runners_other  # noqa: F401  registers its runners
from tests import tolerances

FOLDER = pathlib.Path(__file__).parent / 'data' / 'conformance'
INDEX = {case['id']: case for case in json.loads((FOLDER / 'index.json').read_text())}
DTYPES = ('float64', 'float32', 'bfloat16')

ROPE = ('out_half', 'out_interleaved', 'out_partial4', 'out_scores')

# Case, array, dtype: where the case's own notes, or the arithmetic, ask for another tolerance.
OVERRIDES = {
    ('05', 'out_a', 'bfloat16'): tolerances.LOW_PRECISION_CASE,
    ('05', 'out_b', 'bfloat16'): tolerances.LOW_PRECISION_CASE,
    **{
        ('18', name, 'float32'): tolerances.ROPE_FAR[32768] for name in ROPE
    },
    # A sum of 8 products of size up to 4, both factors rounded to 8 bits.
    ('18', 'out_scores', 'bfloat16'): 2e-1,
}


def _load(case_id: str, dtype: str) -> dict[str, np.ndarray]:
  with np.load(FOLDER / INDEX[case_id]['file']) as data:
    return {
        name:
            array.astype(jnp.dtype(dtype))
            if name.startswith('in_') and array.dtype == np.float64 else array
        for name, array in ((name, data[name]) for name in data.files)
    }


def _compare(name: str, computed, expected: np.ndarray, tolerance: float) -> None:
  for found in computed if isinstance(computed, list) else [computed]:
    if name.startswith('bad_'):
      tolerances.assert_differs(found, expected, tolerance, name)
    elif expected.dtype == np.float64:
      tolerances.assert_close(found, expected, tolerance, name)
    else:
      np.testing.assert_array_equal(np.asarray(found), expected, err_msg=name)


@pytest.mark.parametrize('case_id, dtype', [(i, dtype) for i in INDEX for dtype in DTYPES])
def test_case(case_id, dtype):
  assert case_id in case_runners.RUNNERS, f'no runner for {case_id}: {INDEX[case_id]["title"]}'
  data = _load(case_id, dtype)
  with jax.enable_x64(True) if dtype == 'float64' else contextlib.nullcontext():
    computed = case_runners.RUNNERS[case_id](data, dtype)
  results = {name for name in data if name.startswith(('out_', 'bad_'))}
  assert set(computed) == results
  for name in sorted(results):
    tolerance = OVERRIDES.get((case_id, name, dtype), tolerances.CASES[dtype])
    _compare(name, computed[name], data[name], tolerance)


def test_index_names_every_file_and_array():
  assert {case['file'] for case in INDEX.values()} == {path.name for path in FOLDER.glob('*.npz')}
  for case in INDEX.values():
    with np.load(FOLDER / case['file']) as data:
      assert {
          name: [str(data[name].dtype), list(data[name].shape)] for name in data.files
      } == case['arrays']
