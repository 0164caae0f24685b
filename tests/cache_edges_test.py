"""Caches where something was once lost: long pieces, rows of padding, overflow, known lists."""

import functools

import attn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import cache_cases
from tests import harness
from tests import tolerances
from tests.cache_cases import CAUSAL


@pytest.mark.sampled(9)
@pytest.mark.parametrize('row', [row for row in CAUSAL if 'performer' not in row.id],
                         ids=lambda row: row.id)
def test_long_pieces_lose_no_key(row):
  """Compiled as for users: the order of reads and writes must not depend on rounding."""
  variant, length = attn.VARIANTS[row.name], 134
  rng = np.random.default_rng(0)
  query, key, value = (
      jnp.asarray(rng.normal(size=(1, length, 4, 4)), jnp.float32) for _ in range(3))
  params = {
      name: jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else x.dtype)
      for name, x in row.params(np.random.default_rng(7), length, 4, 4).items()
  }
  cache = variant.init_cache(params,
                             attn.check_qkv(query, key, value),
                             max_length=length,
                             **cache_cases.options(row))
  compiler = {'xla_backend_optimization_level': 3}
  extend, outputs = jax.jit(variant.extend, compiler_options=compiler), []
  for piece in (slice(0, 40), slice(40, 100), slice(100, 133), slice(133, 134)):
    output, cache = extend(params, cache, query[:, piece], key[:, piece], value[:, piece])
    outputs.append(output)
  expected = variant.apply(params, query, key, value, is_causal=True, **row.options)
  tolerances.assert_close(jnp.concatenate(outputs, 1), expected, 5e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize('c, r', [(1, 4), (5, 20), (13, 52)])
def test_a_linformer_row_of_padding_writes_no_slot(c, r):
  rng, length = np.random.default_rng(1), 2 * c + 3
  query, key, value = (
      jnp.asarray(rng.normal(size=(1, length, 2, 4)), jnp.float32) for _ in range(3))
  params = {
      name: jnp.asarray(rng.normal(size=(c, r)), jnp.float32) / 2
      for name in ('key_projection', 'value_projection')
  }
  variant = attn.VARIANTS['linformer']
  cache = variant.init_cache(params, attn.check_qkv(query, key, value), max_length=length)
  extend = harness.jit(variant.extend)
  for piece, real in ((slice(0, length - 1), True), (slice(0,
                                                           1), False), (slice(length - 1,
                                                                              length), True)):
    qkv = [x[:, piece] for x in (query, key, value)]
    output, cache = extend(params, cache, *qkv, token_mask=jnp.full((1, qkv[0].shape[1]), real))
  expected = variant.apply(params, query, key, value, is_causal=True)[:, -1:]
  tolerances.assert_close(output, expected, 2e-6)


def test_an_overflow_that_was_noted_is_no_excuse_for_the_next():
  variant, token = attn.VARIANTS['vanilla'], jnp.ones((1, 4, 1, 4))
  cache = variant.init_cache({}, attn.check_qkv(token, token, token), max_length=5)
  for _ in range(2):
    _, cache = harness.jit(variant.extend)({}, cache, token, token, token)
  assert cache.overflow.tolist() == [True]
  with pytest.raises(ValueError, match='cannot take the real ones of 4 more in the rows'):
    variant.extend({}, cache, token, token, token)


def test_state_size_of_known_random_blocks_is_that_of_their_cache():
  blocks = np.random.default_rng(0).integers(0, 3, (12, 1)).astype(np.int32)
  token = jnp.ones((1, 1, 2, 4))
  given = ({'random_blocks': blocks}, attn.check_qkv(token, token, token))
  make = functools.partial(attn.VARIANTS['bigbird'].init_cache, *given, max_length=36, block_size=3)
  size = attn.state_size('bigbird', *given, max_length=36, block_size=3)
  assert size == attn.cache.size(make()) == attn.cache.size(jax.jit(make)())


@pytest.mark.sampled(3)
@pytest.mark.parametrize('row', CAUSAL, ids=lambda row: row.id)
@pytest.mark.parametrize('lead, Hv', [((0,), 4), ((2,), 0), ((2, 0), 4)], ids=str)
def test_nothing_is_an_answer_of_its_shape(row, lead, Hv):
  """No rows, or values of no size; apply and extend, gradients too."""
  variant, length, params = attn.VARIANTS[row.name], 134, row.params(np.random.default_rng(7), 134,
                                                                     4, 4)
  query, value = jnp.ones((*lead, length, 4, 4)), jnp.ones((*lead, length, 4, Hv))

  def outputs(query, value):
    dims = attn.check_qkv(query, query, value)
    cache, found = variant.init_cache(params, dims, max_length=length,
                                      **cache_cases.options(row)), []
    for piece in (slice(0, 133), slice(133, 134)):
      qkv = [x[..., piece, :, :] for x in (query, query, value)]
      output, cache = variant.extend(params, cache, *qkv)
      found.append(output)
    whole = variant.apply(params, query, query, value, is_causal=True, **row.options)
    return sum(x.sum() for x in (whole, *found)), (whole, jnp.concatenate(found, -3))

  (whole, found), _ = jax.eval_shape(lambda *qv: jax.grad(outputs, (0, 1), has_aux=True)(*qv)[::-1],
                                     query, value)
  assert whole.shape == found.shape == value.shape


@pytest.mark.sampled(3)
@pytest.mark.parametrize('name, options, make', [
    ('linformer', {}, lambda c, r: {
        'key_projection': np.ones((c, r), np.float32),
        'value_projection': np.ones((c, r), np.float32)
    }),
    ('performer', {}, lambda c, r: {
        'features': np.ones((r, 4), np.float32)
    }),
    ('bigbird', dict(block_size=3), lambda c, r: {
        'random_blocks': -np.ones((8, r), np.int32)
    }),
],
                         ids=lambda x: x if isinstance(x, str) else '')
def test_other_arrays_than_the_cache_was_made_with_are_refused(name, options, make):
  variant, token = attn.VARIANTS[name], jnp.ones((2, 1, 2, 4))
  dims, made = attn.check_qkv(token, token, token), make(4, 3)
  cache = variant.init_cache(made, dims, max_length=12, **options)
  cast = {key: x.astype(np.float64 if x.dtype == np.float32 else np.int64)
          for key, x in made.items()}  # yapf: disable
  variant.extend(cast, cache, token, token, token)  # their width is no matter
  per_head = {key: np.stack([x, x]) for key, x in made.items()}
  for other in (make(4, 2), {key: x.astype(np.complex64) for key, x in made.items()}, per_head):
    with pytest.raises(ValueError, match='params must be those the cache was made with; .* was'):
      variant.extend(other, cache, token, token, token)


def test_narrow_position_biases_have_finite_gradients_through_a_cache():
  token, variant = jnp.ones((1, 1, 2, 4), jnp.float16), attn.VARIANTS['vanilla']
  cache = variant.init_cache({}, attn.check_qkv(token, token, token), dtype=jnp.float16,
                             max_length=3)  # yapf: disable

  def loss(slopes):
    return variant.extend({}, cache, token, token, token, attn.positions.ALiBi(slopes))[0].sum()

  assert np.all(np.isfinite(jax.grad(loss)(jnp.array([0.5, 0.25], jnp.float16))))


@pytest.mark.parametrize('name, options, match', [
    ('strided', dict(stride=0), 'stride must be at least 1; got 0'),
    ('fixed', dict(stride=3, summary=4), 'summary'),
    ('longformer', dict(window=2, num_global=-1), 'num_global must be at least 0; got -1'),
    ('local', dict(window=-1), 'window must be at least 0; got -1'),
    ('local', dict(window='wide'), 'window must be'),
])
def test_options_are_checked_as_apply_checks_them(name, options, match):
  token = jnp.ones((1, 1, 2, 4))
  dims, variant = attn.check_qkv(token, token, token), attn.VARIANTS[name]
  with pytest.raises(ValueError, match=match):
    variant.init_cache({}, dims, max_length=8, **options)
  with pytest.raises(ValueError, match=match):
    variant.apply({}, token, token, token, is_causal=True, **options)


def test_sizes_and_dtypes_are_checked():
  vanilla, token = attn.VARIANTS['vanilla'], jnp.ones((1, 1, 2, 4))
  dims = attn.check_qkv(token, token, token)
  make = functools.partial(vanilla.init_cache, {}, max_length=8)
  blocks = {'random_blocks': np.zeros((3, 4, 1), np.int32)}
  attempts = (
      (TypeError, 'dims must be attn.Dims, .* got tuple', lambda: make(tuple(dims))),
      (TypeError, 'dims must be attn.Dims', lambda: attn.VARIANTS['linformer'].init(
          jax.random.key(0), tuple(dims), rank=2)),
      (ValueError, 'dims.N must be a multiple of dims.K; got 3 and 2',
       lambda: make(dims._replace(N=3))),
      (ValueError, 'dims.K must be at least 1', lambda: make(dims._replace(K=0))),
      (ValueError, 'dims.leading must be', lambda: make(dims._replace(leading=('x',)))),
      (TypeError, 'params must be a dict .* got NoneType',
       lambda: vanilla.init_cache(None, dims, max_length=8)),
      (ValueError, 'dtype must be a floating-point dtype; got foo',
       lambda: make(dims, dtype='foo')),
      (ValueError, 'dtype must be a floating-point dtype; got None',
       lambda: make(dims, dtype=None)),
      (ValueError, 'dtype is float64, which jax has with jax_enable_x64 only',
       lambda: make(dims, dtype=np.float64)),
      (ValueError, 'N = 2 query heads; got',
       lambda: attn.VARIANTS['bigbird'].init_cache(blocks, dims, max_length=8, block_size=2)),
  )  # yapf: disable
  for error, match, attempt in attempts:
    with pytest.raises(error, match=match):
      attempt()


@pytest.mark.sampled(3)
@pytest.mark.parametrize('name, options', [
    ('local', dict(window=2**40)), ('strided', dict(stride=10**6)), ('fixed', dict(stride=10**6)),
    ('fixed', dict(stride=10**6, summary=10**6)), ('longformer', dict(window=2, num_global=10**6)),
    ('longformer', dict(window=10**6, num_global=2)), ('bigbird', dict(block_size=10**6))
], ids=str)  # yapf: disable
def test_no_cache_is_larger_than_its_sequences(name, options):
  rng, length, variant = np.random.default_rng(0), 9, attn.VARIANTS[name]
  qkv = [jnp.asarray(rng.normal(size=(2, length, 2, 4)), jnp.float32) for _ in range(3)]
  params = {'random_blocks': -np.ones((1, 1), np.int32)} if name == 'bigbird' else {}
  cache = variant.init_cache(params, attn.check_qkv(*qkv), max_length=length, **options)
  assert attn.cache.size(cache) < 6 * sum(x.nbytes for x in qkv)
  found = []
  for piece in (slice(0, 5), slice(5, 9)):
    output, cache = variant.extend(params, cache, *(x[:, piece] for x in qkv))
    found.append(output)
  expected = variant.apply(params, *qkv, is_causal=True, **options)
  tolerances.assert_close(jnp.concatenate(found, 1), expected, 2e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize('row', CAUSAL, ids=lambda row: row.id)
def test_a_cache_of_numpy_arrays_without_a_batch_is_one(row):
  rng, variant = np.random.default_rng(0), attn.VARIANTS[row.name]
  qkv = [rng.normal(size=(5, 4, 4)).astype(np.float32) for _ in range(3)]
  params = {
      name: jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else x.dtype)
      for name, x in row.params(np.random.default_rng(7), 5, 4, 4).items()
  }
  cache = variant.init_cache(params, attn.check_qkv(*qkv), max_length=5, **cache_cases.options(row))
  found, _ = variant.extend(params, jax.device_get(cache), *qkv)
  expected, _ = variant.extend(params, cache, *qkv)
  np.testing.assert_array_equal(found, expected)


def test_other_query_heads_and_options_that_are_arrays():
  variant, token = attn.VARIANTS['local'], jnp.ones((1, 1, 4, 3))
  cache = variant.init_cache({},
                             attn.check_qkv(token, token, token),
                             window=(jnp.int32(2), np.int64(0)))
  jax.jit(variant.extend)({}, cache, token, token, token)
  with pytest.raises(ValueError, match=r'\(N, K, H, Hv\) = \(4, 4, 3, 3\); got \(8, 4, 3, 3\)'):
    variant.extend({}, cache, jnp.ones((1, 1, 8, 3)), token, token)
