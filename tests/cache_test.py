"""Caches: however a batch is cut into pieces, the outputs are those of one pass."""

import contextlib
import dataclasses
import functools

import attn
from attn import stores
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import cache_cases
from tests import harness
from tests import tolerances
from tests.cache_cases import B, CAUSAL, H, HV, K, N, T

LENGTHS = [17, 11, 4]
BY_ID = {row.id: row for row in CAUSAL}
BIASED = [row for row in CAUSAL if 'position_bias' in row.supports]
FACTOR = {'performer': tolerances.PERFORMER_FACTOR}

every_row = pytest.mark.parametrize('row', CAUSAL, ids=lambda row: row.id)


def some(*ids):
  return pytest.mark.parametrize('row', [BY_ID[i] for i in ids], ids=ids)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
  """So that short sequences are kept in several parts."""
  monkeypatch.setattr(stores, 'PART', 4)


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


def precision(dtype):
  return jax.enable_x64(True) if dtype == 'float64' else contextlib.nullcontext()


def extend_of(row):
  return harness.jit(attn.VARIANTS[row.name].extend)


def close(found, expected, row, dtype='float64', lengths=LENGTHS):
  for b, length in enumerate(lengths):
    tolerances.assert_close(found[b, :length],
                            np.asarray(expected, np.float64)[b, :length],
                            tolerances.FORWARD[dtype] * FACTOR.get(row.name, 1.), f'row {b}')


@pytest.mark.sampled(4)
@pytest.mark.parametrize('dtype', ['float64', 'bfloat16'])
@every_row
def test_any_pieces_equal_one_pass(row, dtype):
  with precision(dtype):
    given = cache_cases.sequences(row, dtype)
    found, stray, cache = cache_cases.run(row, given, LENGTHS, 5, 1, extend_of(row))
    close(found, cache_cases.one_pass(row, given), row, dtype)
  assert stray == 0.
  assert cache.length.tolist() == LENGTHS
  assert not cache.overflow.any()


@pytest.mark.sampled(3)
@every_row
def test_steps_in_a_scan_equal_one_pass(row, x64):
  given = cache_cases.sequences(row, 'float64')
  variant = attn.VARIANTS[row.name]

  def step(cache, token):
    output, cache = variant.extend(given.params, cache, *(x[:, None] for x in token))
    return cache, output[:, 0]

  @functools.partial(jax.jit, donate_argnums=0, compiler_options=harness.COMPILER_OPTIONS)
  def steps(cache, *tokens):
    return jax.lax.scan(step, cache, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))

  cache, outputs = steps(cache_cases.init(row, given), *given[:3])
  close(np.moveaxis(np.asarray(outputs), 0, 1),
        cache_cases.one_pass(row, given),
        row,
        lengths=[T] * B)
  assert cache.length.tolist() == [T] * B


@some('local-causal', 'bigbird-heads-causal', 'linformer-causal', 'performer-causal')
def test_one_long_call_is_taken_in_by_chunks(row, x64):
  given = cache_cases.sequences(row, 'float64')
  cache = dataclasses.replace(cache_cases.init(row, given), chunk=3)
  output, after = extend_of(row)(given.params, cache, *given[:3])
  close(output, cache_cases.one_pass(row, given), row, lengths=[T] * B)
  assert after.length.tolist() == [T] * B


@pytest.mark.sampled(3)
@every_row
def test_rows_are_apart(row):
  """A row's outputs do not depend on its neighbours, and rows of a cache can be reordered."""
  given, extend = cache_cases.sequences(row, 'float32'), extend_of(row)
  alone, _, cache = cache_cases.run(row, given, [9, 11, 4], 5, 1, extend)
  close(alone, cache_cases.one_pass(row, given), row, 'float32', [9, 11, 4])
  other = given._replace(key=given.key.at[1:].multiply(jnp.nan), value=given.value.at[1:].add(9.))
  beside, *_ = cache_cases.run(row, other, [9, 11, 4], 5, 1, extend)
  np.testing.assert_array_equal(alone[0], beside[0])

  rows = np.array([2, 0, 2])
  more, mask = [x[:, :5] for x in given[:3]], jnp.ones((B, 5), bool)
  expected, after = extend(given.params, cache, *more, token_mask=mask)
  moved = jax.tree.map(lambda x: x[rows], cache)
  found, moved = extend(given.params, moved, *(x[rows] for x in more), token_mask=mask)
  np.testing.assert_array_equal(found, expected[rows])
  jax.tree.map(np.testing.assert_array_equal, moved, jax.tree.map(lambda x: x[rows], after))


@pytest.mark.sampled(3)
@pytest.mark.parametrize('row, bias', [(row, 'ALiBi') for row in BIASED] +
                         [(BY_ID['bigbird-heads-causal'], 'T5'), (BY_ID['local-causal'], 'T5')],
                         ids=lambda x: getattr(x, 'id', x))
def test_position_biases(row, bias, x64):
  given = cache_cases.sequences(row, 'float64')
  if bias == 'ALiBi':
    made = attn.positions.ALiBi(jnp.asarray(attn.positions.alibi_slopes(N)))
  else:
    table = np.random.default_rng(3).normal(size=(8, N))
    made = attn.positions.T5Bias(jnp.asarray(table), bidirectional=False, max_distance=16)
  found, *_ = cache_cases.run(row, given, LENGTHS, 5, 2, extend_of(row), bias=made)
  close(found, cache_cases.one_pass(row, given, bias=made), row)


@pytest.mark.sampled(3)
@some('vanilla-causal', 'strided-causal', 'bigbird-heads-causal', 'linformer-causal',
      'performer-causal')
def test_vmap_equals_a_batch(row, x64):
  given = cache_cases.sequences(row, 'float64')
  variant = attn.VARIANTS[row.name]
  one = given._replace(query=given.query[0], key=given.key[0], value=given.value[0])

  def sequence(query, key, value):
    outputs, cache = [], cache_cases.init(row, one)
    for piece in (slice(0, 7), slice(7, 8), slice(8, T)):
      output, cache = variant.extend(given.params, cache, query[piece], key[piece], value[piece])
      outputs.append(output)
    return jnp.concatenate(outputs)

  close(harness.jit(jax.vmap(sequence))(*given[:3]),
        cache_cases.one_pass(row, given),
        row,
        lengths=[T] * B)


@pytest.mark.sampled(3)
@some('local-causal', 'linformer-causal', 'performer-causal', 'bigbird-causal', 'vanilla-causal')
def test_gradients_go_through_a_cache(row, x64):
  given = cache_cases.sequences(row, 'float64')
  weight = jnp.asarray(np.random.default_rng(5).normal(size=(B, T, N, HV)))

  def in_pieces(query, key, value):
    cache, outputs = cache_cases.init(row, given), []
    for piece in (slice(0, 9), slice(9, T)):
      output, cache = attn.VARIANTS[row.name].extend(given.params, cache, query[:, piece],
                                                     key[:, piece], value[:, piece])
      outputs.append(output)
    return jnp.sum(weight * jnp.concatenate(outputs, 1))

  def whole(*qkv):
    output = attn.VARIANTS[row.name].apply(given.params, *qkv, is_causal=True, **row.options)
    return jnp.sum(weight * output)

  found, expected = (harness.jit(jax.grad(f, (0, 1, 2)))(*given[:3]) for f in (in_pieces, whole))
  for a, b, name in zip(found, expected, ('query', 'key', 'value')):
    tolerances.assert_close(a, b, tolerances.GRADIENT['float64'], name)


@some('vanilla-causal', 'local-causal', 'bigbird-causal', 'linformer-causal')
def test_tokens_beyond_the_end_are_refused(row, x64):
  given = cache_cases.sequences(row, 'float64')
  variant, extend = attn.VARIANTS[row.name], extend_of(row)
  cache = cache_cases.init(row, given, max_length=11)
  with pytest.raises(ValueError, match='max_length = 11 cannot take T = 17 tokens'):
    extend(given.params, cache, *given[:3])
  first, rest = ([x[:, piece] for x in given[:3]] for piece in (slice(0, 8), slice(8, 13)))
  _, cache = extend(given.params, cache, *first)
  with pytest.raises(ValueError, match='that holds .8, 8, 8. tokens .* rows ..0., .1., .2..'):
    variant.extend(given.params, cache, *rest)
  mask = jnp.asarray([[True] * 5, [True] * 3 + [False] * 2, [False, True] * 2 + [False]])
  output, after = extend(given.params, cache, *rest, token_mask=mask)
  assert after.overflow.tolist() == [True, False, False]
  assert after.length.tolist() == [11, 11, 10]
  assert not np.any(output[0, 3:]) and np.all(np.isfinite(output))
  expected = cache_cases.one_pass(row, given)
  tolerances.assert_close(output[:2, :3], expected[:2, 8:11], 1e-12)
  with pytest.raises(ValueError,
                     match=r'max_length = 11 was given more tokens in the rows \[\[0\]'):
    attn.cache.check(after)
  attn.cache.check(cache)


@some('local-causal', 'longformer-causal', 'performer-causal')
def test_a_cache_that_does_not_grow_needs_no_length(row):
  given = cache_cases.sequences(row, 'float32')
  cache = cache_cases.init(row, given, max_length=None)
  longer = cache_cases.init(row, given, max_length=10**6)
  assert attn.cache.size(cache) == attn.cache.size(longer)
  for _ in range(3):
    _, cache = extend_of(row)(given.params, cache, *given[:3])
  assert cache.length.tolist() == [3 * T] * B and not cache.overflow.any()


def stored(slots, dtype_bytes=4):
  """Bytes of keys, values and positions of so many slots."""
  return B * slots * (K * (H + HV) * dtype_bytes + 4)


SIZES = {
    'vanilla-causal': stored(T),
    'blockwise-causal': stored(T),
    'local-causal': stored(3 + 1),
    'strided-causal': stored(3 + 3 * 6),  # the window, and ceil(17 / 3) of each residue
    'fixed-causal': stored(3 + 2 * 5),  # the block, and 2 of each of the 5 that may be earlier
    'longformer-causal': stored(3 + 2),
    # r = 3 slots of each of the 4 segments that may be earlier, projected per query head
    'linformer-causal': stored(4) + B * 3 * 4 * (N * (H + HV) * 4 + 4),
    'performer-causal': B * K * 19 * (2 + HV) * 4,
    'performer-relu-causal': B * K * 19 * (2 + HV) * 4,
}
SIZES['longformer-causal'] = stored(2 + 1 + 2)


@pytest.mark.parametrize('name', SIZES)
def test_state_size(name):
  row, given = BY_ID[name], cache_cases.sequences(BY_ID[name], 'float32')
  size = attn.state_size(row.name,
                         given.params,
                         given.dims,
                         max_length=T,
                         **cache_cases.options(row))
  cache = cache_cases.init(row, given)
  assert size == sum(x.nbytes for x in jax.tree.leaves(cache))
  assert size == SIZES[name] + B * (4 + 1)  # length and overflow


def test_bigbird_keeps_what_its_blocks_can_still_reach():
  # Block 1 is listed until 3, block 2 by 4, block 3 until 6: one place serves 1 and then 4.
  blocks = np.full((8, 1), -1, np.int32)
  blocks[[3, 4, 5, 6, 7], 0] = [1, 2, 3, 3, 4]
  place = attn.variants.bigbird._place(attn.variants.bigbird.choose(jnp.asarray(blocks), True))
  assert place.tolist() == [-1, 0, 1, 2, 0, -1, -1, -1]
  given = cache_cases.sequences(BY_ID['bigbird-causal'], 'float32')
  make = lambda params: attn.VARIANTS['bigbird'].init_cache(
      params, given.dims, max_length=16, block_size=2)
  known = make({'random_blocks': blocks})
  traced = jax.jit(make)({'random_blocks': blocks})
  assert known.kept.listed.positions.shape == (B, 3 * 2)
  assert traced.kept.listed.positions.shape == (B, 8 * 2)
  nothing = make({'random_blocks': blocks[:, :0]})
  assert nothing.kept.listed.positions.shape == (B, 0)


@pytest.mark.parametrize('lists', ['traced', 'none', 'no columns'])
def test_bigbird_lists(lists, x64):
  row = BY_ID['bigbird-causal']
  given = cache_cases.sequences(row, 'float64')
  blocks = given.params['random_blocks']
  if lists != 'traced':
    blocks = jnp.full_like(blocks, -1) if lists == 'none' else blocks[:, :0]
  given = given._replace(params={'random_blocks': blocks})

  def decode(params, query, key, value):
    cache = attn.VARIANTS['bigbird'].init_cache(params,
                                                given.dims,
                                                dtype=query.dtype,
                                                max_length=T,
                                                block_size=2)
    outputs = []
    for piece in (slice(0, 9), slice(9, 10), slice(10, T)):
      output, cache = attn.VARIANTS['bigbird'].extend(params, cache, query[:, piece], key[:, piece],
                                                      value[:, piece])
      outputs.append(output)
    return jnp.concatenate(outputs, 1)

  if lists == 'traced':
    found = harness.jit(decode)(given.params, *given[:3])
  else:
    found = harness.jit(functools.partial(decode, given.params))(*given[:3])
  close(found, cache_cases.one_pass(row, given), row, lengths=[T] * B)


@some('vanilla-causal', 'strided-causal', 'bigbird-causal', 'linformer-causal', 'fixed-causal')
def test_a_loop_of_steps_copies_no_store(row, monkeypatch):
  """What XLA holds beside the donated cache is far less than the cache: it writes in place."""
  monkeypatch.setattr(stores, 'PART', 1024)
  variant, length = attn.VARIANTS[row.name], 4096
  options = cache_cases.options(row) | {
      'strided': {
          'stride': 64
      },
      'fixed': {
          'stride': 8
      }
  }.get(row.name, {})
  params = {
      name: jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else x.dtype)
      for name, x in row.params(np.random.default_rng(7), length, N, 64).items()
  }
  token = jnp.ones((1, 1, N, 64))
  dims = attn.check_qkv(token, token, token)
  cache = jax.eval_shape(
      functools.partial(variant.init_cache, params, dims, max_length=length, **options))

  def steps(cache, token):

    def body(_, carry):
      output, cache = variant.extend(params, carry[1], *[carry[0]] * 3)
      return output, cache

    return jax.lax.fori_loop(0, 8, body, (token, cache))

  compiled = jax.jit(steps, donate_argnums=0).lower(cache, token).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < attn.cache.size(cache) / 3


def test_errors_name_what_is_wrong():
  row = BY_ID['local-causal']
  given = cache_cases.sequences(row, 'float32')
  local, vanilla = attn.VARIANTS['local'], attn.VARIANTS['vanilla']
  cache = cache_cases.init(row, given)
  qkv, dims = given[:3], given.dims
  attempts = (
      (TypeError, 'cache of local needs option window; its options are: window',
       lambda: local.init_cache({}, dims)),
      (TypeError, 'cache of local has no option stride',
       lambda: local.init_cache({}, dims, window=3, stride=2)),
      (TypeError, 'cache of local has no option block_size',
       lambda: local.init_cache({}, dims, window=3, block_size=2)),
      (TypeError, 'cache of performer needs array features',
       lambda: attn.VARIANTS['performer'].init_cache({}, dims)),
      (ValueError, 'max_length must say how many tokens a cache of vanilla may hold',
       lambda: vanilla.init_cache({}, dims)),
      (ValueError, 'max_length must be', lambda: vanilla.init_cache({}, dims, max_length=0)),
      (ValueError, 'dtype must be a floating-point dtype; got int32',
       lambda: vanilla.init_cache({}, dims, max_length=3, dtype=jnp.int32)),
      (ValueError, 'cache must be one of vanilla; got one of local',
       lambda: vanilla.extend({}, cache, *qkv)),
      (TypeError, 'cache must be what init_cache returns; got dict',
       lambda: vanilla.extend({}, {}, *qkv)),
      (ValueError, r'batch axes of the cache, \(3,\); got \(2,\)',
       lambda: local.extend({}, cache, *(x[:2] for x in qkv))),
      (ValueError, 'T = 4 queries and S = 17 keys',
       lambda: local.extend({}, cache, qkv[0][:, :4], *qkv[1:])),
      (NotImplementedError, 'no bias array',
       lambda: local.extend({}, cache, *qkv, jnp.zeros((1, 1, 1, T)))),
      (NotImplementedError, 'performer_attention has no bias', lambda: attn.VARIANTS['performer'].
       extend({}, cache, *qkv, attn.positions.ALiBi(np.ones(N, np.float32)))),
      (ValueError, r'token_mask must be boolean \[..., T\] = \(3, 17\), .*; got int32 \(3, 17\)',
       lambda: local.extend({}, cache, *qkv, token_mask=jnp.ones((3, 17), jnp.int32))),
      (ValueError, r'token_mask must be boolean .*; got bool \(17,\)',
       lambda: local.extend({}, cache, *qkv, token_mask=jnp.ones(17, bool))),
      (ValueError, 'key and value must have the heads and sizes of the cache',
       lambda: local.extend({}, cache, qkv[0], *(x[:, :, :1] for x in qkv[1:]))),
      (ValueError, 'dtype of the cache, float32; got bfloat16',
       lambda: local.extend({}, cache, *(x.astype(jnp.bfloat16) for x in qkv))),
      (ValueError, 'random_blocks must list 9 blocks of block_size = 2 for max_length = 17; got',
       lambda: attn.VARIANTS['bigbird'].init_cache(
           {'random_blocks': np.zeros((8, 1), np.int32)}, dims, max_length=17, block_size=2)),
      (ValueError, 'name must be one of', lambda: attn.state_size('dense', {}, dims)),
  )
  for error, match, attempt in attempts:
    with pytest.raises(error, match=match):
      attempt()


def test_no_tokens_change_nothing():
  row = BY_ID['vanilla-causal']
  given = cache_cases.sequences(row, 'float32')
  cache = cache_cases.init(row, given)
  output, after = attn.VARIANTS['vanilla'].extend({}, cache, *(x[:, :0] for x in given[:3]))
  assert output.shape == (B, 0, N, HV)
  jax.tree.map(np.testing.assert_array_equal, after, cache)
