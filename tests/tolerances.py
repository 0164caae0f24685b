"""Every tolerance of the attention tests, absolute and relative alike, in one place.

Inputs are of order one, so the absolute part is what binds. A looser value says why.
"""

import numpy as np

FORWARD = {'float64': 1e-12, 'float32': 2e-6, 'bfloat16': 2e-2}
GRADIENT = {'float64': 1e-11, 'float32': 1e-5, 'bfloat16': 5e-2}
# Gradients: sums of up to T products of numbers up to about 10, hence an order above the forward
# pass. In bfloat16 each input cotangent is itself rounded to 8 bits, and gradients here reach 10.

# The Performer exponentiates w.x - |x|^2 / 2, which reaches 10 to 20 in size: float32 spends one
# digit and a half there.
PERFORMER_FACTOR = 10.

# Rotations by an angle of p radians carry the rounding of p times a frequency: about p * 1e-7.
ROPE_FAR = {4095: 2e-4, 32768: 2e-3}

# The cases of data/conformance, as their README says.
CASES = {'float64': 1e-12, 'float32': 1e-5, 'bfloat16': 3e-2}
LOW_PRECISION_CASE = 1e-2

# A mean over 4096 dropout draws at rate 1/4 of weights of at most 1: five standard errors of w *
# 0.009.
DROPOUT_MEAN = 4.5e-2
DROPOUT_FRACTION = 2e-2


def assert_close(actual, expected, tolerance: float, what: str = '') -> None:
  """Equal shapes, finite, and within tolerance, absolute for small numbers and relative for large
  ones.
  """
  actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
  assert actual.shape == expected.shape, f'{what}: shape {actual.shape}, expected {expected.shape}'
  np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance, err_msg=what)


def assert_differs(actual, faulty, tolerance: float, what: str = '') -> None:
  """A result with a known fault is further away than rounding could explain."""
  actual, faulty = np.asarray(actual, np.float64), np.asarray(faulty, np.float64)
  same = actual.shape == faulty.shape and np.allclose(actual, faulty, rtol=0., atol=tolerance)
  assert not same, f'{what}: equals the known wrong answer'
