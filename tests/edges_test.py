"""Calls at the edges of the contract: each once went wrong, or was accepted and misread."""

import functools
from typing import NamedTuple

import attn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.harness import jit

T = 9
OPTIONS = {
    'vanilla': {}, 'blockwise': {'block_size': 4}, 'local': {'window': 3, 'block_size': 4},
    'strided': {'stride': 3, 'block_size': 4}, 'fixed': {'stride': 3},
    'longformer': {'window': 2, 'num_global': 1, 'block_size': 4}, 'bigbird': {'block_size': 2},
}  # yapf: disable
TILED = [name for name in OPTIONS if name not in ('vanilla', 'bigbird')]


def normal(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def qkv(B=2):
  return normal(B, T, 4, 8), normal(B, T, 2, 8, seed=1), normal(B, T, 2, 8, seed=2)


def params(name):
  if name == 'performer':
    return {'features': normal(16, 8, seed=3)}
  if name == 'linformer':
    return {'key_projection': normal(T, 3, seed=3), 'value_projection': normal(T, 3, seed=4)}
  if name == 'bigbird':
    return {'random_blocks': np.array([[-1], [3], [4], [0], [2]], np.int32)}
  return {}


def causal_params(name):
  return {
      key: array[:4] for key, array in params(name).items()
  } if name == 'linformer' else params(name)


def apply(name, *arrays, **options):
  made = causal_params(name) if options.get('is_causal') else params(name)
  return attn.VARIANTS[name].apply(made, *arrays, **OPTIONS.get(name, {}), **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize('name', TILED)
@pytest.mark.parametrize('offset', [-1e9, -3e38, 1e6])
def test_a_large_common_bias_changes_nothing_but_rounding(name, offset):
  """The usual additive mask over a whole row: the sum must not be lost beside the maximum."""
  q, k, v = qkv()
  q, k = jnp.round(q), jnp.round(k)  # whole logits: each is rounded once, when the offset comes
  bias = jnp.full((1, 1, T, T), offset, jnp.float32)
  own = {key: x for key, x in OPTIONS[name].items() if key != 'block_size'}
  visible = attn.VARIANTS[name].visibility(T, T, **own)[None, None]

  def loss(function, v):
    output = function(q, k, v)
    return jnp.sum(jnp.sin(output)), output

  grad = lambda f: jax.jit(jax.grad(functools.partial(loss, f), has_aux=True))(v)
  ours = grad(lambda q, k, v: apply(name, q, k, v, bias, scale=1.))
  dense = grad(lambda q, k, v: attn.vanilla_attention(q, k, v, bias, visible, scale=1.))
  for a, b in zip(ours, dense):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize('options', [
    {'is_causal': True},
    {'is_causal': True, 'query_positions': np.zeros(1, int), 'key_positions': np.zeros(1, int)},
    {'segment_ids': np.zeros(1, int)},
], ids=['plain', 'positions', 'segments'])  # yapf: disable
def test_performer_never_loses_the_only_key(options):
  q, k = jnp.array([[[100., 0.]]]), jnp.array([[[0., 100.]]])
  v = jnp.array([[[3., 4.]]])
  output = attn.performer_attention(q, k, v, features=jnp.eye(2), scale=1., **options)
  np.testing.assert_allclose(output, v)


@pytest.mark.sampled(2)
@pytest.mark.parametrize('name', attn.VARIANTS)
@pytest.mark.parametrize('is_causal', [False, True])
def test_nan_queries_of_a_row_that_sees_nothing(name, is_causal):
  q, k, v = qkv()
  mask = jnp.array([False, True]).reshape(2, 1, 1, 1)  # a key axis of 1, too
  function = lambda q: apply(name, q.at[0].set(jnp.nan), k, v, None, mask, is_causal=is_causal)

  def both(q):
    output, pull = jax.vjp(function, q)
    return output, pull(jnp.ones_like(output))[0]

  output, gradient = jit(both)(q)
  assert not np.any(output[0]) and np.all(np.isfinite(gradient))


@pytest.mark.parametrize('name', ['linformer', 'performer'])
def test_no_queries_and_a_mask(name):
  q, k, v = qkv()
  assert apply(name, q[:, :0], k, v, None, jnp.ones((1, 1, 0, 1), bool)).shape == (2, 0, 4, 8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize('name', attn.VARIANTS)
@pytest.mark.parametrize('is_causal', [False, True])
def test_an_empty_batch(name, is_causal):
  assert apply(name, *qkv(B=0), is_causal=is_causal).shape == (0, T, 4, 8)


@pytest.mark.parametrize('name', ['blockwise', 'strided', 'linformer', 'performer'])
def test_shard_map_sums_the_gradient_of_shared_keys(name):
  mesh = jax.make_mesh((2,), ('d',), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec
  q, k, v = qkv(B=4)
  k, v = k[:1], v[:1]
  block = {'block_size': 4} if name == 'performer' else {}
  function = functools.partial(apply, name, is_causal=True, **block)
  sharded = jax.shard_map(lambda q, k, v: function(q, jnp.repeat(k, 2, 0), jnp.repeat(v, 2, 0)),
                          mesh=mesh,
                          in_specs=(spec('d'), spec(), spec()),
                          out_specs=spec('d'))
  whole = lambda q, k, v: function(q, jnp.repeat(k, 4, 0), jnp.repeat(v, 4, 0))
  grad = lambda f: jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), argnums=(0, 1, 2)))
  for a, b in zip(grad(sharded)(q, k, v), grad(whole)(q, k, v)):
    np.testing.assert_allclose(a, b, atol=1e-5)


class Shifted(NamedTuple):
  """A position bias of a user's own, with an integer beside its parameter."""
  table: jax.Array
  shift: jax.Array

  def __call__(self, query_positions, key_positions):
    distance = key_positions[..., None, None, :] - query_positions[..., None, :, None] + self.shift
    return self.table[:, None, None] * distance.astype(jnp.float32)


@pytest.mark.parametrize('name', TILED)
def test_a_position_bias_may_hold_integers_and_numpy(name):
  q, k, v = qkv(B=1)
  own = {key: x for key, x in OPTIONS[name].items() if key != 'block_size'}
  visible = attn.VARIANTS[name].visibility(T, T, **own)[None, None]
  with jax.numpy_rank_promotion('allow'):
    ours = jit(jax.grad(lambda t: apply(name, q, k, v, Shifted(t, jnp.int32(1))).sum()))
    dense = jit(
        jax.grad(
            lambda t: attn.vanilla_attention(q, k, v, Shifted(t, jnp.int32(1)), visible).sum()))
    np.testing.assert_allclose(ours(normal(4)), dense(normal(4)), atol=1e-4)
  bias = attn.positions.T5Bias(np.ones((8, 4), np.float32), bidirectional=True)
  np.testing.assert_allclose(jit(functools.partial(apply, name))(q, k, v, bias),
                             jit(functools.partial(apply, name))(q, k, v),
                             atol=2e-6)


@pytest.mark.parametrize('wrong, message', [
    (lambda q: attn.positions.ALiBi(8), 'slopes must be .* got 8'),
    (lambda q: attn.positions.ALiBi(np.ones((4, 1))), 'slopes'),
    (lambda q: attn.positions.T5Bias(np.ones(8), True), 'table'),
    (lambda q: attn.vanilla_attention(q, q, q, is_causal='no'), 'is_causal'),
    (lambda q: attn.local_attention(q, q, q, window=1, is_causal=None), 'is_causal'),
    (lambda q: attn.vanilla_attention(q, q, q, lambda a, b: a), 'bias must .*Partial'),
    (lambda q: attn.positions.rope(q, np.arange(3)), 'positions'),
])
def test_what_would_be_misread_is_refused(wrong, message):
  with pytest.raises(ValueError, match=message):
    wrong(normal(2, T, 4, 8))


def test_jax_nn_options_given_when_built_are_kept():
  q, k, v = qkv()
  build = attn.interop.jax_nn_attention_fn
  np.testing.assert_array_equal(
      build('vanilla', is_causal=True, scale=.1)(q, k, v),
      attn.vanilla_attention(q, k, v, is_causal=True, scale=.1))
  for wrong in ({
      'mask': np.ones((T, T), bool),
      'key_value_seq_lengths': np.array([3, 4])
  }, {
      'query_seq_lengths': np.array([3, 4, 5])
  }):
    with pytest.raises(ValueError, match='must have'):
      build('vanilla')(q, k, v, **wrong)
  with pytest.raises(NotImplementedError, match='default_matmul_precision'):
    attn.interop.linen_attention_fn('vanilla')(q, k, v, precision='highest')


@pytest.mark.sampled(4)
@pytest.mark.parametrize('name', TILED)
def test_a_second_eager_call_compiles_nothing(name, caplog):
  q, k, v = qkv()
  call = lambda: jax.block_until_ready(jax.grad(lambda q: apply(name, q, k, v).sum())(q))
  compiled = lambda: [r for r in caplog.records if 'Compiling' in r.getMessage()]
  jax.clear_caches()
  with jax.log_compiles(), caplog.at_level('WARNING'):
    call()
    assert compiled()
    caplog.clear()
    call()
    assert not compiled()


@pytest.mark.sampled(4)
@pytest.mark.parametrize('name', TILED)
@pytest.mark.parametrize('step_size', [1, 64])
def test_float64_in_steps_of_any_size(name, step_size):
  """Where x64 is on, an index that is not told its dtype is int64, and slices want one dtype."""
  with jax.enable_x64(True):
    arrays = [x.astype(jnp.float64) for x in qkv()]
    loss = lambda *arrays: jnp.sum(apply(name, *arrays, is_causal=True, step_size=step_size)**2)
    found = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays)
    own = {key: x for key, x in OPTIONS[name].items() if key != 'block_size'}
    visible = attn.VARIANTS[name].visibility(T, T, is_causal=True, **own)[None, None]
    dense = lambda *arrays: jnp.sum(attn.vanilla_attention(*arrays, mask=visible)**2)
    expected = jax.jit(jax.value_and_grad(dense, (0, 1, 2)))(*arrays)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12), found,
                 expected)


MANY = {
    'vanilla': {}, 'blockwise': {}, 'local': {'window': 512}, 'strided': {'stride': 512},
    'fixed': {'stride': 512}, 'longformer': {'window': 512, 'num_global': 8},
}  # yapf: disable


@pytest.mark.sampled(2)
@pytest.mark.parametrize('sharded', [False, True], ids=['whole', 'sharded'])
@pytest.mark.parametrize('name', list(MANY))
def test_a_small_gradient_outlives_many_keys_in_float16(name, sharded):
  """Of what comes back, a query's share of each key's is below float16's smallest number."""
  arrays = [normal(1, 1024, n, 8, seed=n) / 8 for n in (2, 1, 1)]
  attend = functools.partial(attn.VARIANTS[name].attention, **MANY[name])
  if sharded:
    mesh = jax.make_mesh((4,), ('sequence',), axis_types=(jax.sharding.AxisType.Auto,))
    attend = functools.partial(attn.sharding.sharded_attention, name, mesh=mesh,
                               axis_name='sequence', **MANY[name])  # yapf: disable

  def gradient(dtype):
    loss = lambda *x: jnp.sum(attend(*x).astype(jnp.float32)) * 2.**-17
    return jit(jax.grad(loss, 2))(*(x.astype(dtype) for x in arrays)).astype(jnp.float32)

  found, wanted = gradient(jnp.float16), gradient(jnp.float32)
  assert jnp.linalg.norm(found - wanted) < .06 * jnp.linalg.norm(wanted)
