"""Generation where a setting or a step is none: refused by name, or taken at its limit."""

import functools

from attn import decoding, sampling
import jax
import jax.numpy as jnp
import numpy as np
import pytest

EOS, V = 0, 4
TOKENS = jnp.array([1, 2], jnp.int32)


def step(state, tokens):
  """Every token is followed by the next one, and the last by the first."""
  return 9. * jax.nn.one_hot((tokens + 1) % V, V), state


STATE = {'row': jnp.arange(2)}
generate = functools.partial(decoding.generate, step, STATE, max_length=5)
search = functools.partial(decoding.beam_search, max_length=3, beam_size=2, eos_id=EOS)


def test_no_temperature_is_not_a_temperature_of_0():
  with pytest.raises(ValueError, match='rng must be a key unless temperature is 0; got None and'):
    generate(TOKENS, temperature=None)
  drawn = generate(TOKENS, jax.random.key(0), temperature=None)
  alike = generate(TOKENS, jax.random.key(0), temperature=1.)
  np.testing.assert_array_equal(drawn.tokens, alike.tokens)


def test_integers_of_any_width_keep_their_value():
  wide = np.array([2**32 + 1, -2**33 + 3])
  found = generate(TOKENS, temperature=0., limits=wide)
  assert found.lengths.tolist() == [5, 0]
  assert search(step, STATE, TOKENS, limits=wide).lengths[:, 0].tolist() == [3, 0]
  for tokens in (wide, np.array([1, 2**32 - 1], np.uint32), jnp.array([1, 2**32 - 1], jnp.uint32)):
    with pytest.raises(ValueError, match='tokens must fit int32; got'):
      generate(tokens, temperature=0.)


def test_a_top_k_that_is_traced_is_no_fraction():
  logits = jnp.zeros((2, V))
  with pytest.raises(ValueError, match='top_k must be an integer of at least 1; got float32'):
    jax.jit(lambda k: sampling.top_k(logits, k))(jnp.float32(2.5))


@pytest.mark.parametrize('value', [1e-37, 1e-20, np.finfo(np.float32).tiny])
def test_a_tiny_temperature_takes_the_best_and_overflows_nowhere(value):
  logits = jnp.array([[30., 20., -5.], [-3e38, 3e38, 0.], [2., 2., -np.inf], [-np.inf] * 3])
  found = jax.nn.softmax(sampling.temperature(logits, value), -1)
  np.testing.assert_array_equal(found[:3], [[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0]])


@pytest.mark.parametrize('penalty', [400., -400., lambda lengths: lengths * 1e39])
def test_a_length_penalty_beyond_the_range_of_scores_is_refused(penalty):
  with pytest.raises(ValueError, match='within the range of float32; got'):
    search(step, STATE, TOKENS, length_penalty=penalty)


@pytest.mark.parametrize('bad, match', (
    (lambda state, tokens: step(state, tokens)[0], r'a pair \(logits, state\)'),
    (lambda state, tokens: step(state, tokens)[::-1], 'floating-point logits'),
    (lambda state, tokens: (step(state, tokens)[0][:, :0], state), 'and V > 0'),
    (lambda state, tokens: (step(state, tokens)[0][0], state), 'logits .rows, V. first'),
    (lambda state, tokens: (step(state, tokens)[0][:2], state), 'with 4 rows'),
    (lambda state, tokens: None, 'a pair'),
),
                         ids=('no pair', 'swapped', 'no tokens', 'one row', 'rows of the batch',
                              'nothing'))
def test_a_step_that_is_none_is_refused(bad, match):
  with pytest.raises(ValueError, match=f'step must .*{match}'):
    search(bad, STATE, TOKENS)
  if 'with 4' not in match:
    with pytest.raises(ValueError, match=f'step must .*{match}'):
      decoding.generate(bad, STATE, TOKENS, max_length=3, temperature=0)


@pytest.mark.parametrize('dtype', [np.int8, np.uint8, np.int16, np.int64])
@pytest.mark.parametrize('make', [np.asarray, jnp.asarray])
def test_narrow_integers_keep_their_value(dtype, make):
  if make is jnp.asarray and dtype is np.int64:
    dtype = np.int32
  limits = make(np.array([5, 100], dtype))
  found = decoding.generate(step, STATE, TOKENS, max_length=40000, temperature=0., limits=limits)
  assert found.lengths.tolist() == [5, 100]
  logits, k = jnp.arange(8.).reshape(2, 4), make(np.array([1, 3], dtype))
  assert (sampling.top_k(logits, k) > -np.inf).sum(-1).tolist() == [1, 3]


@pytest.mark.parametrize('value', [1e30, 1e38, 3e38])
def test_a_huge_temperature_draws_no_forbidden_token(value):
  logits = jnp.array([[0., 1., -np.inf], [3e38, -3e38, 0.], [-np.inf] * 3])
  found = sampling.temperature(logits, value)
  assert not np.any(np.isnan(found)) and found[0, 2] == -np.inf
  np.testing.assert_allclose(jax.nn.softmax(found[0]), [0.5, 0.5, 0.])
  penalised = sampling.repetition_penalty(logits[0], jnp.ones(3, bool), 1 / value)
  assert not np.any(np.isnan(penalised)) and penalised[2] == -np.inf


@pytest.mark.parametrize('sign', [1., -1.])
def test_a_dead_end_has_no_children_whatever_its_sums_are(sign):
  """log_softmax of minus infinities is a nan, whose sign is the machine's."""
  nan = np.copysign(np.nan, sign)
  follows = np.log([.4, .3, .3, 1.])
  table = jnp.asarray(np.stack([np.zeros(4), follows, follows, np.zeros(4)]), jnp.float32)
  table = table.at[:, 3].set(-np.inf).at[3].set(nan)  # nobody writes a 3, after which comes nothing
  found = search(lambda state, tokens: (table[tokens], state), STATE, jnp.array([1, 2]),
                 beam_size=4)  # yapf: disable
  assert found.lengths[:, 0].tolist() == [1, 1] and np.all(np.isfinite(found.scores))
  table = table.at[2].set(-np.inf)  # what follows 2 is nothing
  found = search(lambda state, tokens: (table[tokens], state), STATE, jnp.array([1, 2]))
  assert found.lengths[1].tolist() == [0, 0] and found.lengths[0].min() > 0


@pytest.mark.parametrize('rng', [jnp.arange(2), jnp.zeros(3), jnp.int32(3),
                                 jax.random.split(jax.random.key(0), 2),
                                 jnp.zeros((2, 2), jnp.uint32)], ids=str)  # yapf: disable
def test_what_is_no_key_is_refused(rng):
  with pytest.raises(ValueError, match='rng must be one key such as'):
    generate(TOKENS, rng)


def test_keys_of_the_old_kind_draw_the_same():
  new = generate(TOKENS, jax.random.key(3)).tokens
  np.testing.assert_array_equal(generate(TOKENS, jax.random.PRNGKey(3)).tokens, new)


def test_functions_and_lists_that_are_none_are_refused():
  attempts = (
      ('callback must be a function or None; got int',
       lambda: generate(TOKENS, temperature=0, callback=3)),
      ('length_penalty must give numbers',
       lambda: search(step, STATE, TOKENS, length_penalty=lambda lengths: 'a')),
      ('top_p must be in', lambda: generate(TOKENS, jax.random.key(0), top_p=[1, [2]])),
  )
  for match, attempt in attempts:
    with pytest.raises(ValueError, match=match):
      attempt()
