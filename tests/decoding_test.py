"""Generation and beam search: beside exhaustive search, and with every kind of cache."""

import collections
import functools

import attn
from attn import decoding
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import cache_cases
from tests import decoding_oracles
from tests import harness
from tests.cache_cases import CAUSAL
from tests.case_runners_other import normaliser

EOS, START, L, V = 0, 1, 4, 3


def tables(seed, batch, length=L, size=V):
  """Probabilities [B, length, V, V] of first-order models with one or two sure moves."""
  probs = np.random.default_rng(seed).dirichlet(np.ones(size) * 0.7, (batch, length, size))
  return probs.astype(np.float64)


def batch_step(probs):
  """The step of a batch whose row b has the model probs[b]; the state says which, and the time."""

  def step(state, tokens):
    row, number = state['row'], state['number']
    logits = jnp.log(jnp.asarray(probs))[row, jnp.minimum(number, probs.shape[1] - 1), tokens]
    return logits, {'row': row, 'number': number + 1}

  B = len(probs)
  state = {'row': jnp.arange(B, dtype=jnp.int32), 'number': jnp.zeros(B, jnp.int32)}
  return step, state, jnp.full(B, START, jnp.int32)


def rescored(probs, tokens, length):
  """The log-probability of tokens[:length], by teacher forcing."""
  before = (START, *tokens[:length - 1])
  return sum(np.log(probs[i, a, b]) for i, (a, b) in enumerate(zip(before, tokens[:length])))


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


def test_greedy_generation_follows_the_best_token(x64):
  probs = tables(0, 6)
  found = decoding.generate(*batch_step(probs), max_length=L, eos_id=EOS, pad_id=-7, temperature=0)
  for b in range(6):
    best = decoding_oracles.greedy(probs[b])
    assert found.lengths[b] == len(best)
    assert found.tokens[b].tolist() == [*best, *[-7] * (L - len(best))]
    assert np.sum(found.log_probs[b]) == pytest.approx(rescored(probs[b], best, len(best)))


@pytest.mark.parametrize('pad_id', [EOS, 2, -1])
def test_padding_may_be_any_number(pad_id, x64):
  """A pad that is also a token, or the end, changes neither lengths nor what a row goes on with."""
  probs = tables(1, 8)
  generate = functools.partial(decoding.generate,
                               *batch_step(probs),
                               jax.random.key(0),
                               max_length=L,
                               eos_id=EOS)
  expected, found = generate(pad_id=-5), generate(pad_id=pad_id)
  np.testing.assert_array_equal(found.lengths, expected.lengths)
  np.testing.assert_array_equal(found.log_probs, expected.log_probs)
  assert 0 < np.sum(np.asarray(found.lengths) < L)
  for b, length in enumerate(found.lengths.tolist()):
    np.testing.assert_array_equal(found.tokens[b, :length], expected.tokens[b, :length])
    assert found.tokens[b, length:].tolist() == [pad_id] * (L - length)


def test_limits_end_rows_and_the_loop_ends_with_the_last():
  calls = []
  probs = np.full((3, 1, V, V), 1 / V)
  probs[..., EOS] = 0.
  found = decoding.generate(*batch_step(probs),
                            jax.random.key(0),
                            max_length=50,
                            limits=jnp.asarray([3, 0, 5]),
                            eos_id=EOS,
                            pad_id=-1,
                            callback=lambda i, tokens, log_probs: calls.append((int(i), tokens)))
  jax.effects_barrier()
  assert found.lengths.tolist() == [3, 0, 5]
  assert [i for i, _ in calls] == list(range(5))
  np.testing.assert_array_equal(np.stack([tokens for _, tokens in calls], 1), found.tokens[:, :5])
  assert found.tokens[1].tolist() == [-1] * 50
  assert found.state['number'].tolist() == [5] * 3


def test_draws_of_a_row_do_not_depend_on_its_neighbours():
  probs = tables(2, 5, length=12)
  options = dict(max_length=12, eos_id=EOS, temperature=1.3, top_p=0.95)
  step, state, tokens = batch_step(probs)
  whole = decoding.generate(step, state, tokens, jax.random.key(3), **options)
  part = decoding.generate(step, jax.tree.map(lambda x: x[:2], state), tokens[:2],
                           jax.random.key(3), **options)
  for a, b in zip(whole[:3], part[:3]):
    np.testing.assert_array_equal(a[:2], b)


def test_draws_have_the_filtered_probabilities():
  B = 4000
  step, state, tokens = batch_step(np.broadcast_to(tables(4, 1, 1, 5), (B, 1, 5, 5)))
  settings = dict(temperature=jnp.full(B, 0.7), top_k=3)
  found = decoding.generate(step, state, tokens, jax.random.key(0), max_length=1, **settings)
  logits, _ = step(state, tokens)
  expected = jax.nn.softmax(attn.sampling.filtered(logits[:1], temperature=0.7, top_k=3))[0]
  share = np.bincount(found.tokens[:, 0], minlength=5) / B
  np.testing.assert_allclose(share, expected, atol=5 * 0.5 / B**0.5)


def test_repetition_penalty_counts_new_tokens_and_those_given(x64):
  probs = np.tile([0.1, 0.6, 0.2, 0.1], (2, 1, 4, 1))
  seen = jnp.asarray([[False] * 4, [True, False, True, True]])
  found = decoding.generate(*batch_step(probs),
                            max_length=4,
                            temperature=0.,
                            seen=seen,
                            repetition_penalty=4.)
  # log p is negative, so a seen token has four times its log p: first 1, then 2, then 1 again.
  assert found.tokens.tolist() == [[1, 2, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize('norm', ['power0', 'power1', 'power2', 'gnmt0p6'])
@pytest.mark.parametrize('eos', [EOS, None])
def test_a_wide_beam_is_exhaustive_search(norm, eos, x64):
  probs = tables(5, 4)
  search = harness.jit(
      functools.partial(decoding.beam_search,
                        batch_step(probs)[0],
                        beam_size=27,
                        num_results=5,
                        max_length=L,
                        eos_id=eos,
                        pad_id=-1,
                        length_penalty=normaliser(norm)))
  found = search(*batch_step(probs)[1:])
  for b in range(4):
    end = -2 if eos is None else eos
    every = decoding_oracles.hypotheses(probs[b], START, end)
    norms = {len(t): decoding_oracles.normaliser(norm, len(t)) for t in every}
    best = sorted(((log / norms[len(t)], log, t) for t, log in every.items()), reverse=True)[:5]
    for i, (score, log, tokens) in enumerate(best):
      assert found.tokens[b, i].tolist() == [*tokens, *[-1] * (L - len(tokens))]
      assert found.scores[b, i] == pytest.approx(score)
      assert found.log_probs[b, i] == pytest.approx(log)
      assert found.lengths[b, i] == len(tokens)


@pytest.mark.parametrize('width', [1, 2, 3, 8, 64])
def test_scores_are_those_of_rescoring_at_any_width(width, x64):
  probs = tables(6, 5, length=7, size=4)
  found = decoding.beam_search(*batch_step(probs),
                               beam_size=width,
                               max_length=7,
                               eos_id=EOS,
                               pad_id=-1,
                               length_penalty=0.8)
  for b, i in np.ndindex(5, width):
    tokens, length = found.tokens[b, i].tolist(), int(found.lengths[b, i])
    if not length:
      assert found.scores[b, i] == -np.inf
      continue
    assert EOS not in tokens[:length - 1]
    assert tokens[length - 1] == EOS or length == 7
    assert found.log_probs[b, i] == pytest.approx(rescored(probs[b], tokens, length))
    assert found.scores[b, i] == pytest.approx(found.log_probs[b, i] / length**0.8)
  assert np.all(np.diff(np.where(np.isinf(found.scores), -1e9, found.scores)) <= 0)
  if width == 1:
    continuing = [decoding_oracles.greedy(p) for p in probs]
    score = lambda p, t: rescored(p, t, len(t)) / len(t)**0.8
    assert all(found.scores[b, 0] >= score(probs[b], t) - 1e-12 for b, t in enumerate(continuing))


def test_rows_of_a_beam_search_do_not_depend_on_their_neighbours(x64):
  probs = tables(7, 6, length=6, size=4)
  step, state, tokens = batch_step(probs)
  options = dict(beam_size=3, max_length=6, eos_id=EOS, length_penalty=1.)
  whole = decoding.beam_search(step, state, tokens, **options)
  for b in range(6):
    alone = decoding.beam_search(step, jax.tree.map(lambda x: x[b:b + 1], state), tokens[b:b + 1],
                                 **options)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[b], y[0]), whole, alone)


def test_the_search_goes_on_while_a_running_hypothesis_can_win(x64):
  """A short end of log 1/2 is found first; the sure way of five tokens has the better mean."""
  probs = np.zeros((1, 6, 3, 3))
  probs[0, 0, 1] = [0.5, 0.5, 0.]
  probs[0, 1:4, 1] = [0.01, 0.99, 0.]
  probs[0, 4, 1] = [0.99, 0.01, 0.]
  probs[0, 5, 1] = [0.5, 0.5, 0.]
  found = decoding.beam_search(*batch_step(probs), beam_size=2, max_length=6, eos_id=EOS)
  assert found.tokens[0, 0].tolist() == [1, 1, 1, 1, 0, 0]
  assert found.lengths[0, 0] == 5


def test_and_stops_when_none_can(x64):
  """Without a penalty a log-probability only falls: behind a sure end nothing is looked at."""
  probs = np.tile([0.9, 0.05, 0.05], (1, 1, 3, 1))
  steps = []
  step, state, tokens = batch_step(probs)

  def counted(state, tokens):
    jax.debug.callback(lambda: steps.append(1))
    return step(state, tokens)

  decoding.beam_search(counted,
                       state,
                       tokens,
                       beam_size=3,
                       num_results=1,
                       max_length=50,
                       eos_id=EOS,
                       length_penalty=0.)
  jax.effects_barrier()
  assert len(steps) == 1


def cached_step(row, given, embed):
  """A one-layer model whose logits are its attention's outputs, on the row's cache."""
  variant = attn.VARIANTS[row.name]

  def step(cache, tokens):
    q, k, v = (table[tokens][:, None] for table in embed)
    output, cache = variant.extend(given.params, cache, q, k, v)
    return output.reshape(len(tokens), -1)[:, :V] * 3., cache

  return step


@pytest.mark.sampled(3)
@pytest.mark.parametrize('row', CAUSAL, ids=lambda row: row.id)
def test_beams_reorder_every_cache(row, x64):
  """Each hypothesis has the log-probability that one pass over its tokens gives it."""
  given, rng = cache_cases.sequences(row, 'float64'), np.random.default_rng(8)
  shapes = ((cache_cases.N, cache_cases.H), (cache_cases.K, cache_cases.H), (cache_cases.K,
                                                                             cache_cases.HV))
  embed = tuple(jnp.asarray(rng.normal(size=(V, *shape))) for shape in shapes)
  length = 9

  @harness.jit
  def search(first):
    return decoding.beam_search(cached_step(row, given, embed),
                                cache_cases.init(row, given),
                                first,
                                beam_size=4,
                                max_length=length,
                                eos_id=EOS,
                                pad_id=0)

  @harness.jit
  def one_pass(tokens):
    whole = jnp.pad(tokens, ((0, 0), (0, cache_cases.T - tokens.shape[1])))
    q, k, v = (table[whole] for table in embed)
    output = attn.VARIANTS[row.name].apply(given.params, q, k, v, is_causal=True, **row.options)
    return jax.nn.log_softmax(output.reshape(*whole.shape, -1)[..., :V] * 3.)

  first = jnp.asarray([1, 2, 1])
  found = search(first)
  orders = collections.Counter()
  for i in range(4):
    fed = np.concatenate([first[:, None], found.tokens[:, i]], 1)
    log_probs = np.asarray(one_pass(jnp.asarray(fed)))
    for b in range(3):
      n = int(found.lengths[b, i])
      total = sum(log_probs[b, t, fed[b, t + 1]] for t in range(n))
      assert found.log_probs[b, i] == pytest.approx(total, abs=1e-11)
      orders[tuple(fed[b, 1:])] += 1
  assert len(orders) > 3


def test_one_program_serves_all_prompts_and_lengths():
  row = next(row for row in CAUSAL if row.name == 'local')
  given = cache_cases.sequences(row, 'float32')
  rng = np.random.default_rng(9)
  embed = tuple(
      jnp.asarray(rng.normal(size=(V, n, d)), jnp.float32) for n, d in ((4, 8), (2, 8), (2, 6)))
  variant, traces = attn.VARIANTS['local'], []

  def run(how, prompts, lengths, rng):
    traces.append(how)
    mask = jnp.arange(prompts.shape[1])[None] < lengths[:, None] - 1
    cache = variant.init_cache({}, given.dims, window=3)
    q, k, v = (table[prompts] for table in embed)
    _, cache = variant.extend({}, cache, q, k, v, token_mask=mask)
    last = jnp.take_along_axis(prompts, lengths[:, None] - 1, 1)[:, 0]
    step = cached_step(row, given, embed)
    if how == 'beam':
      return decoding.beam_search(step, cache, last, beam_size=3, max_length=6, eos_id=EOS)
    return decoding.generate(step, cache, last, rng, max_length=6, eos_id=EOS)

  run = jax.jit(run, static_argnames='how')
  for how in ('generate', 'beam'):
    for i in range(100):
      prompts = jnp.asarray(rng.integers(0, V, (3, 8)), jnp.int32)
      run(how, prompts, jnp.asarray(rng.integers(1, 9, 3), jnp.int32), jax.random.key(i))
  assert traces == ['generate', 'beam'] and run._cache_size() == 2


def test_errors_name_what_is_wrong():
  step, state, tokens = batch_step(tables(0, 2))
  generate = functools.partial(decoding.generate, step, state, tokens, max_length=3)
  search = functools.partial(decoding.beam_search, step, state, tokens, max_length=3, eos_id=EOS)
  widen = lambda state, tokens: (step(state, tokens)[0], state | {'more': tokens})
  cast = lambda state, tokens: (step(state, tokens)[0], state | {'row': jnp.zeros(2)})
  attempts = (
      ('rng must be a key unless temperature is 0', generate),
      ('rng must be a key such as jax.random.key.0.; got int', lambda: generate(0)),
      ('pad_id must be an integer that fits int32; got 1.5',
       lambda: generate(jax.random.key(0), pad_id=1.5)),
      ('pad_id must be an integer', lambda: search(beam_size=2, pad_id=2**40)),
      ('eos_id must be one of the V = 3 tokens', lambda: generate(jax.random.key(0), eos_id=3)),
      ('max_length must be', lambda: generate(jax.random.key(0), max_length=0)),
      (r'limits must be integers \[B\] = \(2,\); got int32 \(3,\)',
       lambda: generate(jax.random.key(0), limits=jnp.ones(3, jnp.int32))),
      ('seen is read with a repetition_penalty only',
       lambda: generate(temperature=0., seen=jnp.ones((2, V), bool))),
      (r'tokens must be integers \[B\]',
       lambda: decoding.generate(step, state, tokens[:, None], max_length=3, temperature=0)),
      (r"state\['row'\] must lead with the batch axis B = 2 of tokens; got \(\)",
       lambda: decoding.generate(step, {'row': jnp.int32(0)}, tokens, max_length=3, temperature=0)),
      ('step must return a state of the structure it was given',
       lambda: decoding.generate(widen, state, tokens, max_length=3, temperature=0)),
      (r"step must keep shape and dtype of state\['row'\], int32 \(2,\); got float32 \(2,\)",
       lambda: decoding.generate(cast, state, tokens, max_length=3, temperature=0)),
      (r'step must return floating-point logits \[rows, V\] first, with 2', lambda: decoding.
       generate(lambda state, tokens: (tokens, state), state, tokens, max_length=3, temperature=0)),
      ('num_results must be at most beam_size; got 4 and 2',
       lambda: search(beam_size=2, num_results=4)),
      ('beam_size must be', lambda: search(beam_size=0)),
      ('length_penalty must be a number or a function',
       lambda: search(beam_size=2, length_penalty='x')),
      ('length_penalty must give positive normalisers',
       lambda: search(beam_size=2, length_penalty=lambda lengths: lengths - 2)),
  )
  for match, attempt in attempts:
    with pytest.raises(ValueError, match=match):
      attempt()


def test_a_limit_cuts_a_row_of_a_beam_search_as_max_length_does(x64):
  probs = tables(10, 5, length=6, size=4)
  step, state, tokens = batch_step(probs)
  search = functools.partial(decoding.beam_search,
                             step,
                             state,
                             tokens,
                             beam_size=5,
                             eos_id=EOS,
                             pad_id=-1,
                             length_penalty=0.7)
  limits = [6, 3, 1, 0, 9]
  found = search(max_length=6, limits=jnp.asarray(limits))
  for b, limit in enumerate(limits):
    if not limit:
      assert np.all(found.scores[b] == -np.inf) and np.all(found.tokens[b] == -1)
      continue
    alone = search(max_length=min(limit, 6))
    for name in ('lengths', 'log_probs', 'scores'):
      np.testing.assert_array_equal(getattr(found, name)[b], getattr(alone, name)[b])
    np.testing.assert_array_equal(found.tokens[b, :, :min(limit, 6)], alone.tokens[b])
    assert np.all(found.tokens[b, :, limit:] == -1)
