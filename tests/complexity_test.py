"""No variant makes an array of T x S, forward or backward, and each does its own amount of work.

Sizes and products are read off the jaxpr, nothing runs: the largest intermediate at three lengths,
and its order of growth. Vanilla, which is quadratic, shows that the test can tell.
"""

import math

import attn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import jaxprs

N, K, H, RANK, FEATURES = 4, 2, 16, 32, 32
SIZES = (1024, 2048, 4096)


def root(T: int) -> int:
  return math.isqrt(T)


# Options as functions of T, and the order of growth. In the pattern variants a block size of 64
# keeps a tile below what grows; the default block size is checked by the [T, S] test.
CALLS = {
    'blockwise': (lambda T: {
        'block_size': 64
    }, 1.),
    'local': (lambda T: {
        'window': (100, 28),
        'block_size': 64
    }, 1.),
    'strided': (lambda T: {
        'stride': root(T)
    }, 1.5),
    'fixed': (lambda T: {
        'stride': root(T)
    }, 1.5),
    'longformer': (lambda T: {
        'window': (100, 28),
        'num_global': 16,
        'block_size': 64
    }, 1.),
    'bigbird': (lambda T: {
        'block_size': 64,
        'random_blocks': np.zeros((T // 64, 3), np.int32)
    }, 1.),
    'linformer': (lambda T: {}, 1.),
    'performer': (lambda T: {
        'kernel': 'softmax',
        'block_size': 64
    }, 1.),
}
FORMS = [(name, is_causal) for name in CALLS for is_causal in (False, True)]
by_form = pytest.mark.parametrize('name, is_causal', FORMS, ids=lambda x: str(x))
by_direction = pytest.mark.parametrize('direction', ['forward', 'gradient'])


def struct(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def arguments(name: str, T: int, is_causal: bool):
  """params, query, key, value as shapes alone."""
  params = {}
  if name == 'linformer':
    shape = (64, 8) if is_causal else (T, RANK)
    params = {'key_projection': struct(*shape), 'value_projection': struct(*shape)}
  elif name == 'performer':
    params = {'features': struct(FEATURES, H)}
  return params, struct(T, N, H), struct(T, K, H), struct(T, K, H)


def function(name: str, direction: str, **options):

  def forward(params, query, key, value, extra=None):
    return attn.VARIANTS[name].apply(params, query, key, value, **(extra or {}), **options)

  def gradient(params, query, key, value, extra=None):
    # A sum of squares: the cotangent depends on the output, as it does in training.
    loss = lambda *moving: jnp.sum(forward(*moving, extra)**2)
    return jax.grad(loss, argnums=(0, 1, 2, 3))(params, query, key, value)

  return forward if direction == 'forward' else gradient


def growth(sizes, amounts) -> float:
  """The exponent p of amounts ~ sizes^p between the last two."""
  return math.log(amounts[-1] / amounts[-2]) / math.log(sizes[-1] / sizes[-2])


@by_direction
@by_form
def test_largest_intermediate_grows_as_it_should(name, is_causal, direction):
  options, order = CALLS[name]
  amounts = []
  for T in SIZES:
    call = function(name, direction, is_causal=is_causal, **options(T))
    amounts.append(jaxprs.largest(call, *arguments(name, T, is_causal)))
  assert growth(SIZES, amounts) < order + .1, dict(zip(SIZES, amounts))
  assert amounts[-1] < N * SIZES[-1]**2 / 4, dict(zip(SIZES, amounts))


@by_direction
@pytest.mark.parametrize('is_causal', [False, True])
def test_vanilla_is_quadratic(is_causal, direction):
  call = function('vanilla', direction, is_causal=is_causal)
  amounts = [jaxprs.largest(call, *arguments('vanilla', T, is_causal)) for T in SIZES]
  assert growth(SIZES, amounts) > 1.9 and amounts[-1] >= N * SIZES[-1]**2


@by_direction
@by_form
def test_work_grows_as_it_should(name, is_causal, direction):
  """Multiplications in matrix products; blockwise saves memory, not work."""
  options, order = CALLS[name]
  amounts = []
  for T in SIZES:
    call = function(name, direction, is_causal=is_causal, **options(T))
    amounts.append(jaxprs.products(call, *arguments(name, T, is_causal)))
  if name == 'linformer' and is_causal:  # a slot for every 8 keys, by its definition
    order = 2.
  order = 2. if name == 'blockwise' else order
  assert .9 < growth(SIZES, amounts) < order + .1, dict(zip(SIZES, amounts))


def extras(name: str, T: int):
  """All that a variant takes beside query, key and value, of a size that is not [T, T]."""
  supports = attn.VARIANTS[name].supports
  extra = {}
  if 'key_mask' in supports:
    extra['mask'] = struct(1, 1, T, dtype=jnp.bool_)
  if 'position_bias' in supports:
    extra['bias'] = jax.tree.map(lambda a: struct(*a.shape),
                                 attn.positions.ALiBi(np.ones(N, np.float32)))
  if 'segment_ids' in supports:
    extra['segment_ids'] = struct(T, dtype=jnp.int32)
  for name in {'query_positions', 'key_positions'} & supports:
    extra[name] = struct(T, dtype=jnp.int32)
  if 'dropout' in supports:
    extra['dropout_rng'] = jax.eval_shape(lambda: jax.random.key(0))
  return extra, {'dropout_rate': .1} if 'dropout' in supports else {}


@by_direction
@by_form
def test_no_array_of_t_by_s_with_everything_on(name, is_causal, direction):
  """Masks, position bias, segments, traced positions and dropout, with default block sizes: still
  none.
  """
  T = 4096
  options = CALLS[name][0](T)
  if 'block_size' in options and name != 'bigbird':
    options['block_size'] = None
  extra, dropout = extras(name, T)
  call = function(name, direction, is_causal=is_causal, **options, **dropout)
  found = jaxprs.shapes(call, *arguments(name, T, is_causal), extra)
  square = [shape for shape in found if sum(length >= T for length in shape) >= 2]
  assert not square and max(map(math.prod, found)) < T * T


@pytest.mark.parametrize('name', ['blockwise', 'local', 'performer'])
def test_compiled_temporary_memory_is_linear(name):
  options, _ = CALLS[name]
  sizes, amounts = (1024, 2048), []
  for T in sizes:
    call = function(name, 'gradient', is_causal=True, **options(T))
    amounts.append(jaxprs.temporary_bytes(call, *arguments(name, T, True)))
  assert growth(sizes, amounts) < 1.2, amounts


def test_compiled_temporary_memory_of_vanilla_is_not():
  sizes = (512, 1024)
  amounts = [
      jaxprs.temporary_bytes(function('vanilla', 'gradient'), *arguments('vanilla', T, False))
      for T in sizes
  ]
  assert growth(sizes, amounts) > 1.7, amounts


def test_the_walk_looks_inside_loops_branches_and_custom_derivatives():
  """One [7, 9] product each inside scan, cond, jit, checkpoint and a custom derivative."""

  @jax.custom_vjp
  def custom(x):
    return jnp.outer(x, jnp.ones(9)).sum()

  custom.defvjp(lambda x: (custom(x), x), lambda x, g: (jnp.outer(x, jnp.ones(9)).sum(1) * g,))
  wide = lambda x: jnp.outer(x, jnp.ones(9)).sum()
  looped = lambda x: jax.lax.scan(lambda c, _: (c +
                                                (x[:, None] @ x[None]).sum(), None), 0., None, 5)[0]
  assert jaxprs.products(looped, struct(7)) == 5 * 49
  functions = {
      'scan': lambda x: jax.lax.scan(lambda c, _: (c + wide(x), None), 0., None, length=2)[0],
      'cond': lambda x: jax.lax.cond(x[0] > 0, wide, lambda x: x[0], x),
      'jit': jax.jit(wide),
      'checkpoint': jax.checkpoint(wide),
      'custom': custom,
      'gradient': jax.grad(custom),
  }
  for name, inside in functions.items():
    assert jaxprs.largest(inside, struct(7)) == 63, name
