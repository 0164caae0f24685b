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
