"""The oracles' own derivatives, against central differences, and their weights, against their
outputs.
"""

import numpy as np
import pytest

from tests import oracles

T = 7
POSITIONS = {'query_positions': np.arange(T), 'key_positions': np.arange(T)}


def _inputs(rng: np.random.Generator) -> oracles.Inputs:
  visible = np.broadcast_to(rng.random((2, 1, 1, T)) > .3, (2, 4, T, T))
  return oracles.Inputs(rng.normal(size=(2, T, 4, 8)), rng.normal(size=(2, T, 2, 8)),
                        rng.normal(size=(2, T, 2, 5)), visible)


def _calls(rng: np.random.Generator):
  """One call per oracle: (inputs, dout, parameters) -> Result, and its parameters."""

  def with_positions(function, is_causal, **options):
    return lambda inputs, dout, **params: function(
        inputs, dout, is_causal=is_causal, **POSITIONS, **options, **params)

  def linformer(is_causal):
    return lambda inputs, dout, **params: oracles.linformer(
        inputs, dout, is_causal=is_causal, query_positions=np.arange(T), **params)

  slots = {
      'key_projection': rng.normal(size=(4, T, 3)),
      'value_projection': rng.normal(size=(T, 3))
  }
  segments = {
      'key_projection': rng.normal(size=(3, 2)),
      'value_projection': rng.normal(size=(4, 3, 2))
  }
  return {
      'vanilla': (with_positions(oracles.vanilla, True), {}),
      'local': (with_positions(oracles.local, False, window=(2, 1)), {}),
      'strided': (with_positions(oracles.strided, True, stride=3), {}),
      'fixed': (with_positions(oracles.fixed, True, stride=3), {}),
      'linformer': (linformer(False), slots),
      'linformer-causal': (linformer(True), segments),
      'performer-softmax': (with_positions(oracles.performer,
                                           True,
                                           features=rng.normal(size=(9, 8)),
                                           kernel='softmax'), {}),
      'performer-relu': (with_positions(oracles.performer,
                                        False,
                                        features=rng.normal(size=(19, 8)),
                                        kernel='relu'), {}),
  }


@pytest.mark.parametrize('name', _calls(np.random.default_rng(0)))
def test_derivatives_equal_central_differences(name):
  rng = np.random.default_rng(0)
  call, params = _calls(rng)[name]
  inputs, dout = _inputs(rng), rng.normal(size=(2, T, 4, 5))
  result = call(inputs, dout, **params)
  for wrt in ('query', 'key', 'value', *params):
    array = params[wrt] if wrt in params else getattr(inputs, wrt)
    step = rng.normal(size=array.shape)

    def loss(moved, wrt=wrt):
      if wrt in params:
        return (call(inputs, dout, **{**params, wrt: moved}).out * dout).sum()
      return (call(inputs._replace(**{wrt: moved}), dout, **params).out * dout).sum()

    difference = (loss(array + 1e-6 * step) - loss(array - 1e-6 * step)) / 2e-6
    np.testing.assert_allclose((result.grads[wrt] * step).sum(), difference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('name', _calls(np.random.default_rng(0)))
def test_weights_applied_to_values_give_the_output(name):
  rng = np.random.default_rng(1)
  call, params = _calls(rng)[name]
  inputs, dout = _inputs(rng), np.zeros((2, T, 4, 5))
  result = call(inputs, dout, **params)
  value = np.repeat(inputs.value, 2, axis=-2)
  np.testing.assert_allclose(np.einsum('bnts,bsnh->btnh', result.weights, value),
                             result.out,
                             atol=1e-13)


def test_bias_derivative_equals_central_differences():
  rng = np.random.default_rng(2)
  inputs, dout = _inputs(rng), rng.normal(size=(2, T, 4, 5))
  bias, step = rng.normal(size=(2, 2, 4, T, T))

  def loss(bias):
    return (oracles.attend(inputs._replace(bias=bias), dout).out * dout).sum()

  grad = oracles.attend(inputs._replace(bias=bias), dout).grads['bias']
  difference = (loss(bias + 1e-6 * step) - loss(bias - 1e-6 * step)) / 2e-6
  np.testing.assert_allclose((grad * step).sum(), difference, rtol=1e-6)
