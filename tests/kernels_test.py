"""The Pallas kernels, interpreted: the contract's results, or a refusal that says why."""

import functools
import importlib.util
import itertools
import logging
import os
from pathlib import Path
import subprocess
import sys

import attn
from attn import backends
from attn import call as calls
from attn import kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import harness, tolerances
from tests.points import make, POINTS, qkv
from tests.rows import ROWS

LENGTH = 200  # two blocks
KERNEL = {'implementation': 'pallas', 'block_size': kernels.LANES}
SERVED = [row for row in ROWS if 'implementation' in attn.VARIANTS[row.name].options]
BLOCKWISE = {row.is_causal: row for row in SERVED if row.name == 'blockwise'}


def test_every_pattern_without_arrays_of_its_own_has_a_kernel():
  assert {row.name for row in SERVED
         } == {'blockwise', 'local', 'strided', 'fixed', 'longformer'}  # yapf: disable


@pytest.mark.sampled(2)
@pytest.mark.parametrize('row', SERVED, ids=lambda row: row.id)
def test_masks_segments_and_grouped_heads(row):
  """One row of the batch has padding with anything in it, one sees nothing."""
  rng = np.random.default_rng(3)
  arrays = qkv(lead=(3,), T=LENGTH, N=4, K=2, H=8, Hv=5)
  padding = np.arange(LENGTH) >= np.array([150, 0, 200])[:, None]
  arrays['mask'] = ~padding[:, None, None, :]
  arrays['segment_ids'] = np.sort(rng.integers(-2, 3, (3, LENGTH)), -1).astype(np.int32)
  for name in ('key', 'value'):
    arrays[name] = np.where(padding[..., None, None], np.nan, arrays[name]).astype(np.float32)
  assert harness.check(make(row, arrays, 'key_mask', options=KERNEL)) == 'compared'


@pytest.mark.parametrize(
    'is_causal, arrays', [
        (True, qkv(T=1)),
        (False, qkv(T=70, S=300)),
        (False, qkv(T=150, S=3)),
        (True, qkv(lead=(), T=130)),
        (True, qkv(lead=(2, 1), T=130, N=3, K=1, Hv=8)),
    ],
    ids=['one token', 'more keys', 'more queries', 'no leading axis', 'two leading axes'])
def test_shapes(is_causal, arrays):
  case = make(BLOCKWISE[is_causal], arrays, scale=.3, options=KERNEL)
  assert harness.check(case) == 'compared'


def test_segments_of_queries_and_of_keys():
  """Keys that no query has the segment of hold anything, and queries that see nothing too."""
  arrays = qkv(T=9, S=12)
  query, key = np.repeat([7, 8, 9], 3)[None].repeat(2, 0), np.repeat([9, 7, 4],
                                                                     4)[None].repeat(2, 0)
  arrays['query'][:, 3:6] = np.inf
  arrays['key'][:, 8:], arrays['value'][:, 8:] = np.nan, np.inf
  arrays['segment_ids'] = (query.astype(np.int32), key.astype(np.int32))
  assert harness.check(make(BLOCKWISE[False], arrays, options=KERNEL)) == 'compared'


@pytest.mark.parametrize('name', ['bfloat16', 'logits of 1e4', 'scale'])
def test_dtypes_and_sizes(name):
  assert harness.check(POINTS[name].build(BLOCKWISE[True])._replace(options=KERNEL)) == 'compared'


@pytest.mark.sampled(2)
@pytest.mark.parametrize('is_causal, shape', [
    (True, (1, 2, 256, 256)),
    (False, (2, 1, 1, 256)),
],
                         ids=str)
def test_a_bias_array(is_causal, shape):
  """Minus infinity hides; a query whose keys are all hidden gives zeros."""
  bias = np.random.default_rng(5).normal(size=shape).astype(np.float32)
  bias[..., :100] = -np.inf
  bias[1:] = -np.inf
  arrays = qkv(T=256 if is_causal else 128, S=256, N=2, K=1, H=8, Hv=8)
  case = make(BLOCKWISE[is_causal], arrays | {'bias': bias}, 'bias', options=KERNEL)
  out, grads = harness.backward(case, dout := harness.random_dout(case))
  hidden = {'bias': np.where(np.isfinite(bias), bias, 0), 'mask': np.isfinite(bias)}
  wanted = harness.expected(case._replace(arrays=arrays | hidden), dout)
  tolerances.assert_close(out, wanted.out, harness.tolerance(case, 'forward'), 'output')
  for name, grad in grads.items():
    if name != 'params':
      tolerances.assert_close(grad, wanted.grads[name], harness.tolerance(case, 'gradient'), name)


# Of what no kernel does: options, arrays, and the reason.
REFUSED = {
    'positions': (dict(query_positions=np.arange(1, 10, dtype=np.int32)), 'positions'),
    'dense mask': (dict(mask=np.ones((2, 1, 9, 9), bool)), 'mask'),
    'mask per head': (dict(mask=np.ones((2, 4, 1, 9), bool)), 'mask'),
    'ALiBi': (dict(bias=attn.positions.ALiBi(np.ones(4, np.float32))), 'a position bias'),
    'bias and mask': (dict(bias=np.ones((1, 1, 9, 9), np.float32),
                           mask=np.ones((2, 1, 1, 9), bool)), 'no mask'),
    'odd length with bias': (dict(bias=np.ones((1, 1, 9, 9), np.float32)), 'multiples of 128'),
    'dropout': (dict(dropout_rate=.5, dropout_rng=jax.random.key(0)), 'dropout'),
    'small blocks': (dict(block_size=64), 'multiple of 128 up to 1024; got 64'),
    'steps': (dict(step_size=64), 'step_size = 64'),
    'float16': (dict(dtype=jnp.float16), 'float16'),
    'nothing': (dict(length=0), 'empty'),
}  # yapf: disable


@pytest.mark.parametrize('name', REFUSED)
def test_a_refusal_says_why_and_auto_computes(name, monkeypatch):
  options, reason = REFUSED[name]
  options = dict(options)
  dtype = options.pop('dtype', jnp.float32)
  query, key, value = (jnp.asarray(x[:, :options.get('length', 9)], dtype) for x in
                       itertools.islice(qkv(T=9, Hv=8).values(), 3))  # yapf: disable
  options.pop('length', None)
  attend = functools.partial(attn.blockwise_attention, query, key, value, is_causal=True, **options)
  with pytest.raises(NotImplementedError, match=reason):
    attend(implementation='pallas')
  monkeypatch.setattr(backends, '_for_tpu', lambda: True)
  np.testing.assert_array_equal(attend(implementation='auto'), attend(implementation='xla'))


def test_float64_and_a_word_that_is_no_implementation_are_refused():
  x = jnp.ones((4, 1, 8))
  with jax.enable_x64(True), pytest.raises(NotImplementedError, match='jax_enable_x64'):
    attn.local_attention(x, x, x, window=2, implementation='pallas')
  with pytest.raises(ValueError,
                     match="implementation must be one of auto, xla, pallas; got 'gpu'"):
    attn.local_attention(x, x, x, window=2, implementation='gpu')


def test_a_table_that_would_take_minutes_is_refused():
  x = jax.ShapeDtypeStruct((2**20, 1, 8), jnp.float32)
  attend = functools.partial(attn.blockwise_attention, is_causal=True, implementation='pallas')
  with pytest.raises(NotImplementedError, match='table of 1048576 pairs of blocks'):
    jax.eval_shape(attend, x, x, x)


def test_blocks_are_few_and_small():
  blocks = lambda T, S, size=None: kernels._blocks(
      call._replace(query=np.empty((1, 1, T, 0)), key=np.empty((1, S, 0))), size)
  x = jnp.ones((4, 1, 8))
  _, call, _ = calls.prepare(x,
                             x,
                             x,
                             None,
                             None,
                             is_causal=True,
                             scale=None,
                             query_positions=None,
                             key_positions=None,
                             segment_ids=None,
                             dropout_rate=0.,
                             dropout_rng=None)
  assert blocks(1, 512) == ((128, 512), 1)
  assert blocks(513, 1100) == ((384, 384), 6)
  assert blocks(513, 1100, 128) == ((128, 128), 45)
  assert blocks(2**18, 2**18) == ((512, 512), 2**18)
  assert blocks(2**19, 2**19) == ((1024, 1024), 2**18)


def test_where_devices_share_a_call():
  """A kernel cannot be cut into parts by the compiler, nor say which axes its result varies on."""
  mesh = jax.make_mesh((2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  x = jnp.asarray(qkv(T=10)['query'])
  attend = functools.partial(attn.local_attention, window=2, implementation='pallas')
  over = functools.partial(jax.shard_map, lambda x: attend(x, x, x), mesh=mesh,
                           in_specs=jax.P('data'), out_specs=jax.P('data'))  # yapf: disable
  with pytest.raises(NotImplementedError, match='shard_map over data, which needs check_vma=False'):
    jax.jit(over())(x)
  np.testing.assert_allclose(jax.jit(over(check_vma=False))(x), attend(x, x, x), rtol=1e-6)
  with pytest.raises(NotImplementedError, match='mesh axis'):
    attn.sharding.sharded_attention('local', x, x, x, mesh=mesh, axis_name='data', window=2,
                                    implementation='pallas')  # yapf: disable


def programs(function, *arrays):
  """Whether a kernel is in what is traced."""
  return 'pallas_call' in str(jax.make_jaxpr(function)(*arrays))


@pytest.fixture
def one_device(monkeypatch):
  monkeypatch.setattr(backends, '_for_tpu', lambda: True)
  monkeypatch.setattr(jax, 'device_count', lambda: 1)


def test_auto_chooses_where_a_kernel_may_be_compiled(one_device, monkeypatch, caplog):
  x = jnp.asarray(qkv(T=130)['query'])
  auto = lambda name, **options: programs(
      lambda x: attn.VARIANTS[name].apply({}, x, x, x, is_causal=True, **options), x)
  backends._say.cache_clear()
  with caplog.at_level(logging.INFO, 'attn'):
    assert auto('blockwise') and auto('local', window=5) and auto('local', window=5)
    assert not auto('strided', stride=5) and not auto('blockwise', implementation='xla')
    assert auto('strided', stride=5, implementation='pallas')
  said = [record.getMessage() for record in caplog.records]
  assert len(said) == len(set(said)) == 4 and 'every pair' in said[2]
  monkeypatch.setattr(jax, 'device_count', lambda: 4)
  assert not auto('blockwise')
  with jax.set_mesh(jax.make_mesh((8,), ('data',))):
    inside = jax.shard_map(lambda x: attn.blockwise_attention(x, x, x), in_specs=jax.P(None),
                           out_specs=jax.P(None), check_vma=False)  # yapf: disable
    assert programs(inside, x)
  monkeypatch.setattr(backends, '_for_tpu', lambda: False)
  assert not auto('blockwise')


@pytest.mark.sampled(2)
@pytest.mark.parametrize('implementation', ['auto', 'pallas'])
def test_further_derivatives_and_vmap(one_device, implementation):
  """Those beyond the first are XLA's; on this platform 'auto' is XLA throughout."""
  x = jnp.asarray(qkv(lead=(2, 1), T=130, N=2, K=2, Hv=8)['query'])

  def value(implementation, x):
    output = jax.vmap(functools.partial(attn.local_attention, window=3, is_causal=True,
                                        implementation=implementation))(x, x, x)  # yapf: disable
    return jnp.sum(jnp.sin(output))

  def derivatives(implementation):
    first = jax.grad(functools.partial(value, implementation))
    return first(x), harness.jit(jax.grad(lambda x: jnp.sum(jnp.cos(first(x)))))(x)

  for found, wanted in zip(derivatives(implementation), derivatives('xla')):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='needs `tpu-compile`')
def test_a_program_made_here_compiles_for_tpu_with_its_kernel():
  program = """
import functools
from unittest import mock
from experiments import bench_tpu
import attn, jax, jax.numpy as jnp
chip = jax.sharding.SingleDeviceSharding(bench_tpu.devices('v5e:2x2')[0])
def check(name, H, dtype, implementation='auto', bias=None, **options):
  x = jax.ShapeDtypeStruct((2, 1024, 2, H), dtype, sharding=chip)
  mask = jax.ShapeDtypeStruct((2, 1, 1, 1024), bool, sharding=chip) if bias is None else None
  call = functools.partial(attn.VARIANTS[name].apply, {}, is_causal=True, **options,
                           implementation=implementation)
  loss = lambda x, mask, bias: jnp.sum(call(x, x, x, bias, mask).astype(jnp.float32))
  for function in (loss, jax.grad(loss)):
    lowered = jax.jit(function).trace(x, mask, bias).lower(lowering_platforms=('tpu',))
    assert 'tpu_custom_call' in lowered.compile().as_text(), (name, H, dtype)
for H in (64, 128, 80):
  check('blockwise', H, jnp.bfloat16)
check('local', 64, jnp.float32, window=100)
check('longformer', 64, jnp.bfloat16, window=100, num_global=3)
check('strided', 64, jnp.bfloat16, 'pallas', stride=30)
check('fixed', 64, jnp.bfloat16, 'pallas', stride=30, summary=2)
check('blockwise', 64, jnp.bfloat16,
      bias=jax.ShapeDtypeStruct((1, 2, 1024, 1024), jnp.float32, sharding=chip))
"""
  environment = os.environ | {'PYTHONPATH': str(Path(__file__).parents[1]), 'XLA_FLAGS': ''}
  subprocess.run([sys.executable, '-P', '-c', program], env=environment, check=True)
