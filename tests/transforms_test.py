"""jit, vmap, grad, checkpoint, scan, jvp, and their nestings, for every row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import harness
from tests import tolerances
from tests.points import make
from tests.points import qkv
from tests.points import T
from tests.points import uniform
from tests.rows import PRIMARY
from tests.rows import ROWS

by_row = pytest.mark.parametrize('row', PRIMARY, ids=lambda row: row.id)
SMALL = {'lead': (3,), 'T': 7, 'N': 2, 'K': 1, 'H': 4, 'Hv': 4}
NAMES = ('query', 'key', 'value')


def setup(row):
  """The function of (query, key, value, mask) alone, and its arguments; the same for all tests.

  So that jax compiles `forward` and `value_and_grad` of it once.
  """
  return _setup(row.id)


@functools.cache
def _setup(name):
  (row,) = (row for row in ROWS if row.id == name)
  arrays = qkv(**SMALL) | {'mask': uniform((3, 1, 1, 7), .7)}
  case = make(row, arrays)
  arguments = harness.to_library(case)
  params, options = arguments.pop('params'), case.get_options()

  def function(query, key, value, mask):
    return harness.call(row.name, options, {
        'query': query,
        'key': key,
        'value': value,
        'mask': mask,
        'params': params
    })

  return function, tuple(arguments[name] for name in (*NAMES, 'mask'))


def loss_of(function):
  return lambda *arguments: jnp.sum(jnp.sin(function(*arguments)))


@functools.cache
def forward(function):
  return harness.jit(function)


@functools.cache
def value_and_grad(function):
  return harness.jit(jax.value_and_grad(loss_of(function), argnums=(0, 1, 2)))


def assert_same(found, expected, factor=1.):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    tolerances.assert_close(a, b, factor * tolerances.GRADIENT['float32'])


@pytest.mark.sampled(3)
@by_row
def test_a_second_call_does_not_compile(row):
  function, arguments = setup(row)
  traced = []

  @harness.jit
  def counted(*arguments):
    traced.append(1)
    return jax.value_and_grad(loss_of(function), argnums=(0, 1, 2))(*arguments)

  counted(*arguments)
  counted(*[a if a.dtype == jnp.bool_ else a + 1 for a in arguments])
  assert len(traced) == 1 and counted._cache_size() == 1


@pytest.mark.sampled(3)
@by_row
def test_vmap_equals_a_loop_and_the_leading_axis(row):
  function, arguments = setup(row)
  whole, single = forward(function)(*arguments), forward(function)
  mapped = harness.jit(jax.vmap(function))(*arguments)
  assert_same(mapped, whole)
  assert_same(jnp.stack([single(*[a[i] for a in arguments]) for i in range(3)]), whole)


@pytest.mark.sampled(3)
@by_row
def test_vmap_of_grad_of_jit(row):
  function, arguments = setup(row)
  grad = lambda f: jax.grad(loss_of(f), argnums=(0, 1, 2))
  expected = value_and_grad(function)(*arguments)[1]
  assert_same(jax.vmap(grad(jax.jit(function)))(*arguments), expected)


@pytest.mark.sampled(3)
@by_row
def test_checkpoint_changes_nothing(row):
  function, arguments = setup(row)
  expected = value_and_grad(function)(*arguments)
  found = harness.jit(jax.value_and_grad(loss_of(jax.checkpoint(function)),
                                         argnums=(0, 1, 2)))(*arguments)
  assert_same(found, expected)


@pytest.mark.sampled(6)
@by_row
def test_gradient_of_a_scan_over_layers(row):
  """The output is the next layer's query; checkpointed, as a model with remat would."""
  function, (query, key, value, mask) = setup(row)

  def by_scan(query, key, value):
    layer = jax.checkpoint(lambda x, _: (x + function(x, key, value, mask), None))
    return jnp.sum(jnp.sin(jax.lax.scan(layer, query, None, length=2)[0]))

  def by_hand(query, key, value):
    query = query + function(query, key, value, mask)
    return jnp.sum(jnp.sin(query + function(query, key, value, mask)))

  found, expected = (
      harness.jit(jax.grad(f, argnums=(0, 1, 2)))(query, key, value) for f in (by_scan, by_hand))
  assert_same(found, expected, factor=4.)


@pytest.mark.sampled(6)
@by_row
def test_jvp_of_grad_equals_differences(row):
  """Hessian-vector products, in float64."""
  with jax.enable_x64(True):
    function, arguments = setup(row)
    arguments = tuple(a if a.dtype == jnp.bool_ else a.astype(jnp.float64) for a in arguments)
    mask, moving = arguments[3], arguments[:3]
    if row.name in ('linformer', 'performer'):
      case = make(row, {name: np.asarray(a) for name, a in zip(NAMES, moving)}, dtype='float64')
      params, options = jax.tree.map(jnp.asarray, case.get_params()), case.get_options()
      function = lambda q, k, v, mask: harness.call(row.name, options, {
          'query': q,
          'key': k,
          'value': v,
          'mask': mask,
          'params': params
      })
    grad = jax.grad(lambda *moving: loss_of(function)(*moving, mask), argnums=(0, 1, 2))
    rng = np.random.default_rng(8)
    step = tuple(jnp.asarray(rng.normal(size=a.shape)) for a in moving)
    tangent = harness.jit(lambda *moving: jax.jvp(grad, moving, step)[1])(*moving)
    jitted, size = harness.jit(grad), 1e-5
    ahead, behind = (
        jitted(*[a + sign * size * s for a, s in zip(moving, step)]) for sign in (1, -1))
    for found, high, low in zip(tangent, ahead, behind):
      np.testing.assert_allclose(found, (high - low) / (2 * size), rtol=1e-6, atol=1e-6)


def test_vanilla_under_jvp_alone():
  function, (query, key, value, mask) = setup(ROWS[0])
  step = (jnp.ones_like(query), jnp.cos(key), jnp.sin(value))

  def both_ways(*moving):
    call = lambda *moving: function(*moving, mask)
    tangent = jax.jvp(call, moving, step)[1]
    dout = jnp.cos(tangent)
    grads = jax.vjp(call, *moving)[1](dout)
    return jnp.sum(tangent * dout), sum(jnp.sum(grad * s) for grad, s in zip(grads, step))

  ahead, back = harness.jit(both_ways)(query, key, value)
  np.testing.assert_allclose(ahead, back, atol=1e-4)  # a sum that cancels


@pytest.mark.sampled(3)
@by_row
def test_vmap_over_masks_alone(row):
  """One query against many masks: what is mapped need not be everything."""
  function, (query, key, value, mask) = setup(row)
  masks = jnp.stack([mask, ~mask])
  mapped = harness.jit(jax.vmap(function, in_axes=(None, None, None, 0)))(query, key, value, masks)
  single = forward(function)
  assert_same(mapped, jnp.stack([single(query, key, value, m) for m in masks]))


def test_the_length_used_above_divides_nothing():
  assert SMALL['T'] != T and all(SMALL['T'] % row.options.get('block_size', 4) for row in ROWS)
