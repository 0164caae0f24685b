"""The library inside jax.nn, linen and nnx call sites, against those libraries' own attention and
the oracle.
"""

import attn
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import harness
from tests.points import qkv
from tests.points import T

TOLERANCE = {'rtol': 2e-5, 'atol': 2e-5}
SAME = {
    'vanilla': {},
    'blockwise': {
        'block_size': 4
    },
    'local': {
        'window': 100
    }
}  # equal to dense attention
MASKS = {
    'none': None,
    'padding': np.broadcast_to(np.arange(T) < np.array([T, 6])[:, None, None, None], (2, 1, 1, T)),
    'causal': np.tril(np.ones((2, 1, T, T), bool))
}


def inputs(dim: int = 12) -> jax.Array:
  return jnp.asarray(np.random.default_rng(0).normal(size=(2, T, dim)).astype(np.float32))


def test_vanilla_equals_jax_nn():
  """Where the two agree: no fully masked row, square causal."""
  query, key, value = (jnp.asarray(array) for array in qkv(Hv=8).values())
  bias = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, T, T)).astype(np.float32))
  for options in ({}, {
      'is_causal': True
  }, {
      'scale': .3
  }, {
      'bias': bias
  }, {
      'mask': jnp.asarray(MASKS['padding'])
  }):
    for function in (attn.vanilla_attention, attn.blockwise_attention):
      found, expected = harness.jit(lambda *arrays, function=function, options=options: (function(
          *arrays, **options), jax.nn.dot_product_attention(*arrays, **options)))(query, key, value)
      np.testing.assert_allclose(found, expected, **TOLERANCE)


# linen.


def linen_pair(attention_fn, **options):
  make = lambda **kw: nn.MultiHeadDotProductAttention(num_heads=3, qkv_features=12, **options, **kw)
  return make(), make(attention_fn=attention_fn)


@pytest.mark.parametrize('name', SAME)
@pytest.mark.parametrize('mask', MASKS)
def test_linen_module_gives_what_its_own_attention_gives(name, mask):
  theirs, ours = linen_pair(attn.interop.linen_attention_fn(name, **SAME[name]))
  x = inputs()
  mask = None if MASKS[mask] is None else jnp.asarray(MASKS[mask])
  variables = harness.jit(theirs.init)(jax.random.key(0), x)

  def loss(module, variables):
    out = module.apply(variables, x, mask=mask)
    return jnp.sum(jnp.sin(out)), out

  (_,
   expected), theirs_grad = harness.jit(jax.value_and_grad(lambda v: loss(theirs, v),
                                                           has_aux=True))(variables)
  (_, found), ours_grad = harness.jit(jax.value_and_grad(lambda v: loss(ours, v),
                                                         has_aux=True))(variables)
  np.testing.assert_allclose(found, expected, **TOLERANCE)
  for a, b in zip(jax.tree.leaves(ours_grad), jax.tree.leaves(theirs_grad), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_linen_takes_the_float_masks_linen_makes():
  theirs, ours = linen_pair(attn.interop.linen_attention_fn('vanilla'))
  x = inputs()
  mask = nn.make_causal_mask(jnp.ones((2, T)))
  assert mask.dtype == jnp.float32
  variables = harness.jit(theirs.init)(jax.random.key(0), x)
  found, expected = harness.jit(
      lambda variables: [module.apply(variables, x, mask=mask) for module in (ours, theirs)])(
          variables)
  np.testing.assert_allclose(found, expected, **TOLERANCE)


@pytest.mark.parametrize('name', ['vanilla', 'blockwise'])
def test_linen_cached_decode_equals_the_whole(name):
  _, ours = linen_pair(attn.interop.linen_attention_fn(name, **SAME[name]))
  _, cached = linen_pair(attn.interop.linen_attention_fn(name, **SAME[name]), decode=True)
  x = inputs()
  whole, variables = harness.jit(
      lambda x: ours.init_with_output(jax.random.key(0), x, mask=jnp.asarray(MASKS['causal'])))(x)
  cache = harness.jit(lambda x: cached.init(jax.random.key(0), x)['cache'])(x)
  step = harness.jit(
      lambda cache, x: cached.apply({
          **variables, 'cache': cache
      }, x, mutable=['cache']))
  for t in range(T):
    out, changed = step(cache, x[:, t:t + 1])
    cache = changed['cache']
    np.testing.assert_allclose(out[:, 0], whole[:, t], **TOLERANCE)


def test_linen_dropout_is_the_modules():
  """Dropped in training, not when deterministic; without broadcasting over batch or heads."""
  fn = attn.interop.linen_attention_fn('vanilla')
  module = nn.MultiHeadDotProductAttention(num_heads=3,
                                           qkv_features=12,
                                           dropout_rate=.5,
                                           attention_fn=fn,
                                           broadcast_dropout=False)
  x = inputs()
  variables = module.init(jax.random.key(0), x, deterministic=True)
  apply = lambda seed, deterministic: module.apply(
      variables, x, deterministic=deterministic, rngs={'dropout': jax.random.key(seed)})
  np.testing.assert_array_equal(apply(0, True), apply(1, True))
  np.testing.assert_array_equal(apply(0, False), apply(0, False))
  assert not np.allclose(apply(0, False), apply(1, False))


@pytest.mark.parametrize('name, options', [('strided', {
    'stride': 3
}), ('fixed', {
    'stride': 3
}), ('local', {
    'window': 2
}), ('performer', {}), ('linformer', {})])
def test_linen_and_the_function_agree(name, options):
  rng = np.random.default_rng(2)
  params = {
      'performer': {
          'features': rng.normal(size=(16, 4))
      },
      'linformer': {
          'key_projection': rng.normal(size=(T, 5)),
          'value_projection': rng.normal(size=(T, 5))
      }
  }.get(name, {})
  params = {k: jnp.asarray(v, jnp.float32) for k, v in params.items()}
  fn = attn.interop.linen_attention_fn(name, params=params or None, **options)
  query, key, value = (jnp.asarray(array) for array in qkv(N=3, K=3, H=4, Hv=4).values())
  mask = jnp.asarray(MASKS['padding'])
  both = harness.jit(lambda *arrays: (attn.VARIANTS[name].apply(params, *arrays, None, mask, **
                                                                options), fn(*arrays, mask=mask)))
  np.testing.assert_array_equal(*both(query, key, value))
  _, ours = linen_pair(fn)
  out = harness.jit(lambda x: ours.init_with_output(jax.random.key(0), x, mask=mask)[0])(
      x := inputs())
  assert out.shape == x.shape and np.isfinite(out).all()


def test_linen_asked_for_what_cannot_be_given():
  query, key, value = (jnp.asarray(array) for array in qkv(K=4).values())
  for name, options in (('vanilla', {}), ('blockwise', {})):
    fn = attn.interop.linen_attention_fn(name, **options)
    with pytest.raises((NotImplementedError, ValueError), match='broadcast_dropout'):
      fn(query,
         key,
         value,
         dropout_rate=.5,
         dropout_rng=jax.random.key(0),
         deterministic=False,
         broadcast_dropout=True)
  performer = attn.interop.linen_attention_fn('performer', params={'features': jnp.ones((4, 8))})
  with pytest.raises(NotImplementedError, match='performer.*bias'):
    performer(query, key, value, bias=jnp.ones((1, 1, T, T)))
  with pytest.raises((KeyError, ValueError), match='loacl'):
    attn.interop.linen_attention_fn('loacl', window=3)


# nnx.


def nnx_pair(attention_fn, **options):
  make = lambda **kw: nnx.MultiHeadAttention(
      num_heads=3, in_features=12, qkv_features=12, rngs=nnx.Rngs(0), **options, **kw)
  return make(decode=False), make(decode=False, attention_fn=attention_fn)


@pytest.mark.parametrize('name', SAME)
@pytest.mark.parametrize('mask', MASKS)
def test_nnx_module_gives_what_its_own_attention_gives(name, mask):
  theirs, ours = nnx_pair(attn.interop.nnx_attention_fn(name, **SAME[name]))
  mask = None if MASKS[mask] is None else jnp.asarray(MASKS[mask])
  np.testing.assert_allclose(ours(inputs(), mask=mask), theirs(inputs(), mask=mask), **TOLERANCE)


@pytest.mark.parametrize('name', SAME)
def test_nnx_is_causal(name):
  theirs, ours = nnx_pair(attn.interop.nnx_attention_fn(name, **SAME[name]))
  expected = theirs(inputs(), mask=jnp.asarray(MASKS['causal']))
  np.testing.assert_allclose(ours(inputs(), is_causal=True), expected, **TOLERANCE)


@pytest.mark.parametrize('name', ['vanilla', 'blockwise'])
def test_nnx_cached_decode_equals_the_whole(name):
  """With nnx's own decode mask; and with is_causal, where nnx's own attention would see slot 0
  only.
  """
  _, ours = nnx_pair(attn.interop.nnx_attention_fn(name, **SAME[name]))
  x = inputs()
  whole = ours(x, mask=jnp.asarray(MASKS['causal']))
  ours.init_cache(x.shape)
  for t in range(T):
    out = ours(x[:, t:t + 1], decode=True)
    np.testing.assert_allclose(out[:, 0], whole[:, t], **TOLERANCE)


def test_nnx_causal_decode_is_right_or_refused():
  _, ours = nnx_pair(attn.interop.nnx_attention_fn('vanilla'))
  x = inputs()
  whole = ours(x, mask=jnp.asarray(MASKS['causal']))
  ours.init_cache(x.shape)
  for t in range(3):
    try:
      out = ours(x[:, t:t + 1], decode=True, is_causal=True)
    except ValueError as error:
      assert 'positions' in str(error)
      return
    np.testing.assert_allclose(out[:, 0], whole[:, t], **TOLERANCE)


def test_nnx_gradients_and_dropout():
  fn = attn.interop.nnx_attention_fn('vanilla')
  theirs, ours = nnx_pair(fn)
  loss = lambda module: jnp.sum(jnp.sin(module(inputs())))
  for a, b in zip(jax.tree.leaves(nnx.grad(loss)(ours)),
                  jax.tree.leaves(nnx.grad(loss)(theirs)),
                  strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
  _, dropping = nnx_pair(fn, dropout_rate=.5, broadcast_dropout=False)
  first, second = (dropping(inputs(), deterministic=False) for _ in range(2))
  assert not np.allclose(first, second)
  np.testing.assert_array_equal(dropping(inputs(), deterministic=True),
                                dropping(inputs(), deterministic=True))


def test_names_are_checked_when_a_function_is_made():
  makers = (attn.interop.linen_attention_fn, attn.interop.nnx_attention_fn,
            attn.interop.jax_nn_attention_fn)
  for make in makers:
    with pytest.raises(ValueError, match='name must be one of vanilla'):
      make('dense')
    with pytest.raises(TypeError, match='local_attention has no windw; its own are: window'):
      make('local', windw=3)
    with pytest.raises(TypeError, match='local_attention has no features'):
      make('local', {'features': np.ones((3, 4), np.float32)}, window=3)
  for make in makers[:2]:
    with pytest.raises(TypeError, match='local_attention needs window'):
      make('local')
  makers[2]('local')  # jax.nn's call may say local_window_size
