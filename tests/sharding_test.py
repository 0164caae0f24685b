"""Every variant over a mesh axis is the variant without one, and sends no more than it must."""

import dataclasses
import functools
import importlib.util
import json
import os
from pathlib import Path
import subprocess
import sys

import attn
from attn import ring, sharding
import jax
import jax.numpy as jnp
import numpy as np
from experiments.collectives import sent
import pytest

from tests import harness
from tests import sharding_cases
from tests import tolerances
from tests.sharding_cases import B, H, K, M, N, T

CASES = [(one, size)
         for kinds, sizes in ((('plain',), (8,)), (sharding_cases.KINDS, (4,)))
         for one in sharding_cases.cases('float32', kinds)
         for size in sizes]


@pytest.mark.sampled(8)
@pytest.mark.parametrize('case, size', CASES, ids=[f'{one.id}-{size}' for one, size in CASES])
def test_a_mesh_changes_nothing(case, size):
  output, grads = sharding_cases.both(case, size)
  wanted, wanted_grads = sharding_cases.both(case, None)
  factor = tolerances.PERFORMER_FACTOR if case.name in sharding_cases.SUMMED else 1.
  tolerances.assert_close(output, wanted, factor * tolerances.FORWARD['float32'])
  for what, wanted_grad in wanted_grads.items():
    for x, y in zip(jax.tree.leaves(grads[what]), jax.tree.leaves(wanted_grad), strict=True):
      scale = max(1., float(np.abs(y).max()))
      tolerances.assert_close(x / scale, y / scale, factor * tolerances.GRADIENT['float32'], what)


def compiled(name, size, length, gradient=False, params=None, **options):
  """The program of one device, for `length` tokens on each."""
  shape = lambda heads: jax.ShapeDtypeStruct((1, length * size, heads, H), jnp.float32)

  def loss(query, key, value):
    output = sharding.sharded_attention(name,
                                        query,
                                        key,
                                        value,
                                        mesh=sharding_cases.mesh(size),
                                        axis_name='sequence',
                                        params=params,
                                        **options)
    return jnp.sum(output**2) if gradient else output

  function = jax.grad(loss, argnums=(0, 1, 2)) if gradient else loss
  sharded = jax.sharding.NamedSharding(sharding_cases.mesh(size), jax.P(None, 'sequence'))
  jitted = jax.jit(function,
                   in_shardings=(sharded,) * 3,
                   out_shardings=None if gradient else sharded)
  return jitted.lower(shape(N), shape(K), shape(K)).compile()


@pytest.mark.parametrize('gradient', [False, True])
def test_a_window_talks_to_its_neighbours_alone(gradient):
  found = sent(compiled('local', 8, 32, gradient, window=5, is_causal=not gradient))
  assert found and {kind for kind, *_ in found} == {'collective-permute'}
  for _, numbers, pairs in found:
    assert pairs and all(abs(a - b) == 1 for a, b in pairs)
    assert numbers <= 5 * K * H, 'no more than the keys that are reached'


@pytest.mark.parametrize('is_causal', [False, True])
@pytest.mark.parametrize('gradient', [False, True])
def test_keys_go_round_and_are_never_gathered(is_causal, gradient):
  found = sent(compiled('blockwise', 8, 32, gradient, is_causal=is_causal))
  assert found and {kind for kind, *_ in found} == {'collective-permute'}
  assert max(numbers for _, numbers, _ in found) <= 32 * N * H


def test_a_performer_sends_its_sums_alone():
  params = dict(features=attn.orthogonal_features(jax.random.key(0), M, H))
  for is_causal in (False, True):
    found = sent(compiled('performer', 8, 64, params=params, is_causal=is_causal))
    assert {kind for kind, *_ in found} == {'collective-permute' if is_causal else 'all-reduce'}
    assert max(numbers for _, numbers, _ in found) <= K * M * H


def test_a_linformer_sends_its_slots_alone():
  R = 4
  params = dict(key_projection=jnp.ones((8 * 64, R)), value_projection=jnp.ones((8 * 64, R)))
  found = sent(compiled('linformer', 8, 64, params=params, is_causal=False))
  assert {kind for kind, *_ in found} == {'all-reduce'}
  assert max(numbers for _, numbers, _ in found) <= 2 * K * R * H


def test_a_ring_keeps_nothing_of_a_visit():
  small, large = (
      compiled('blockwise', size, 256, True, is_causal=True).memory_analysis() for size in (2, 8))
  assert large.temp_size_in_bytes < 1.3 * small.temp_size_in_bytes


HAS_COMPILER = importlib.util.find_spec('libtpu') is not None


@pytest.mark.skipif(not HAS_COMPILER, reason='needs the extra `tpu-compile`')
def test_the_tpu_compiler_agrees():
  root = str(Path(__file__).parents[1])
  environment = os.environ | {'PYTHONPATH': root, 'XLA_FLAGS': ''}
  command = [sys.executable, '-P', '-m', 'tests.tpu_programs']
  out = subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout
  rows = [json.loads(line) for line in out.splitlines() if line.startswith('{')]
  assert len(rows) == 2 * len({row['name'] for row in rows}) == 12
  for row in rows:
    assert set(row['sent']) == {'collective-permute'}, row
    most = {'local': 128 * 8 * 64, 'performer': 8 * 128 * 64}.get(row['name'], 1024 * 8 * 64)
    assert row['sent']['collective-permute'] <= most, row
    assert row['neighbours'] or row['name'] != 'local', row


@pytest.mark.sampled(3)
@pytest.mark.parametrize('size', [2, 3, 8])
def test_halves_are_spread_so_that_causal_work_is_alike(size):
  here = ring.Ring('sequence', size, 4, 4, False, ())
  there = lambda x: ring.exchanged(x, 0, here)
  spread = functools.partial(jax.shard_map,
                             mesh=sharding_cases.mesh(size),
                             in_specs=jax.P('sequence'),
                             out_specs=jax.P('sequence'))
  places = np.asarray(spread(there)(jnp.arange(4 * size, dtype=jnp.int32)))
  assert sorted(places) == list(range(4 * size))
  assert len(set(places.reshape(size, 4).sum(1))) == 1, 'a query at t sees t + 1 keys'
  back = spread(lambda x: ring.exchanged_back(there(x), 0, here))
  np.testing.assert_array_equal(back(jnp.arange(4 * size, dtype=jnp.int32)), np.arange(4 * size))


def refused(error, match, name='local', size=4, given=None, **options):
  arrays = dict(query=jnp.zeros((B, T, N, H)), key=jnp.zeros((B, T, K, H)),
                value=jnp.zeros((B, T, K, H))) | (given or {})  # yapf: disable
  with pytest.raises(error, match=match):
    jax.eval_shape(
        functools.partial(sharding.sharded_attention,
                          name,
                          mesh=sharding_cases.mesh(size),
                          axis_name='sequence',
                          **options), **arrays)


def test_what_does_not_fit_is_refused():
  cut = {name: jnp.zeros((B, 30, n, H)) for name, n in (('query', N), ('key', K), ('value', K))}
  refused(ValueError, 'T = 30 is no multiple of the 4 devices .* pad to 32', given=cut, window=2)
  refused(ValueError, 'name must be one of vanilla', name='lokal')
  with pytest.raises(ValueError, match='axis_name must be an axis of the mesh, sequence; got .x.'):
    sharding.sharded_attention('local', *(jnp.zeros((B, T, n, H)) for n in (N, K, K)), window=2,
                               mesh=sharding_cases.mesh(2), axis_name='x')  # yapf: disable
  refused(TypeError, 'local has no option stride; its options are: window', stride=2)
  refused(TypeError, 'local needs option window')
  refused(ValueError, 'mask .* key axis', window=2, given=dict(mask=jnp.ones((B, 1, 1, 12), bool)))
  refused(ValueError, 'bias .* key axis of 32, of all devices', window=2,
          given=dict(bias=jnp.zeros((B, 1, T, 12))))  # yapf: disable
  features = dict(features=jnp.ones((M, H)))
  segments = dict(segment_ids=jnp.zeros((B, T), jnp.int32))
  refused(NotImplementedError, 'performer_attention has no segment_ids: over a mesh axis',
          name='performer', params=features, given=segments)  # yapf: disable
  places = dict(query_positions=jnp.zeros((B, T), jnp.int32))
  refused(NotImplementedError, 'performer_attention has no query_positions: over a mesh axis',
          name='performer', params=features, given=places, is_causal=True)  # yapf: disable
  projections = dict(key_projection=jnp.ones((3, 2)), value_projection=jnp.ones((3, 2)))
  refused(ValueError, 'whole segments of key_projection\'s 3 rows; got S = 8 keys',
          name='linformer', params=projections, is_causal=True)  # yapf: disable
  projections = dict(key_projection=jnp.ones((20, 2)), value_projection=jnp.ones((20, 2)))
  refused(ValueError, 'S_max = 20 rows .* there are S = 32 keys', name='linformer',
          params=projections)  # yapf: disable
  blocks = dict(random_blocks=jnp.zeros((3, 1), jnp.int32))
  refused(ValueError, 'must list 8 blocks of block_size = 4 for T = 32 on all devices',
          name='bigbird', params=blocks, block_size=4)  # yapf: disable


def test_batch_and_heads_may_be_sharded_too():
  mesh = jax.make_mesh((2, 2, 2), ('data', 'model', 'sequence'),
                       axis_types=(jax.sharding.AxisType.Auto,) * 3)
  rng = np.random.default_rng(0)
  place = lambda *shape: jax.device_put(
      jnp.asarray(rng.standard_normal(shape), jnp.float32),
      jax.sharding.NamedSharding(mesh, jax.P('data', 'sequence', 'model')))
  query, key, value = place(B, T, N, H), place(B, T, K, H), place(B, T, K, H)
  options = dict(window=3, is_causal=True)
  output = harness.jit(
      functools.partial(sharding.sharded_attention,
                        'local',
                        mesh=mesh,
                        axis_name='sequence',
                        **options))(query, key, value)
  wanted = attn.local_attention(*map(np.asarray, (query, key, value)), **options)
  tolerances.assert_close(output, wanted, tolerances.FORWARD['float32'])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Absolute:
  """A position bias that is no function of distances."""
  table: jax.Array

  def __call__(self, query_positions, key_positions):
    query, key = (jnp.asarray(x, jnp.float32) for x in (query_positions, key_positions))
    query, key = query[..., None, :, None], key[..., None, None, :]
    table = self.table.reshape((1,) * (query.ndim - 3) + (-1, 1, 1))
    return table * jnp.cos(0.3 * query) + jnp.sin(0.2 * key) * table


FLOATS = lambda *shape: jnp.asarray(np.random.default_rng(4).standard_normal(shape), jnp.float32)
HEADS = dict(query=N, key=K, value=K)
EDGES = {
    'absolute bias': dict(bias=Absolute(FLOATS(N))),
    'queries placed': dict(query_positions=np.arange(5, 5 + T)),
    'keys placed': dict(key_positions=np.arange(T)[::-1].copy()),
    'no tokens': {
        name: jnp.zeros((B, 0, n, H)) for name, n in HEADS.items()
    },
    'a token each': {
        name: FLOATS(B, 4, n, H) for name, n in HEADS.items()
    },
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize('name', ['blockwise', 'local', 'strided', 'fixed', 'longformer'])
@pytest.mark.parametrize('edge', list(EDGES))
def test_edges(name, edge):
  given = sharding_cases.case(name, 'plain', True, 'float32')
  given = given._replace(arrays=given.arrays | EDGES[edge])
  output, grads = sharding_cases.both(given, 4)
  wanted, wanted_grads = sharding_cases.both(given, None)
  tolerances.assert_close(output, wanted, tolerances.FORWARD['float32'])
  for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted_grads), strict=True):
    scale = max(1., float(np.abs(y).max(initial=0.)))
    tolerances.assert_close(x / scale, y / scale, tolerances.GRADIENT['float32'])


def test_keys_of_a_longer_sequence_when_only_queries_are_placed():
  query, key, value = FLOATS(B, 8, N, H), FLOATS(B, T, K, H), FLOATS(B, T, K, H)
  options = dict(query_positions=np.arange(T - 8, T), is_causal=True)
  output = harness.jit(functools.partial(sharding.sharded_attention, 'blockwise',
                                         mesh=sharding_cases.mesh(4), axis_name='sequence',
                                         **options))(query, key, value)  # yapf: disable
  tolerances.assert_close(output, attn.blockwise_attention(query, key, value, **options),
                          tolerances.FORWARD['float32'])


@pytest.mark.parametrize('name', ['blockwise', 'local'])
def test_a_gradient_has_a_derivative(name):
  given = sharding_cases.case(name, 'plain', True, 'float32')
  query, key, value = (given.arrays[x] for x in ('query', 'key', 'value'))

  def twice(attend):
    loss = lambda query: jnp.sum(attend(query, key, value)**2)
    return harness.jit(lambda query: jax.jvp(jax.grad(loss), (query,), (query,))[1])(query)

  found = twice(functools.partial(sharding.sharded_attention, name, mesh=sharding_cases.mesh(4),
                                  axis_name='sequence', **given.options))  # yapf: disable
  wanted = twice(functools.partial(attn.VARIANTS[name].attention, **given.options))
  scale = float(jnp.abs(wanted).max())
  tolerances.assert_close(found / scale, wanted / scale, tolerances.GRADIENT['float32'])


def test_sums_of_small_features_are_not_lost_beside_none():
  given = sharding_cases.case('performer', 'plain', True, 'float32')
  given = given._replace(arrays=given.arrays | {'key': 8 * given.arrays['key']})
  (output, _), (wanted, _) = (sharding_cases.both(given, size) for size in (4, None))
  tolerances.assert_close(output, wanted, tolerances.PERFORMER_FACTOR * 2e-6)
