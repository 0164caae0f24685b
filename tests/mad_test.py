"""The tasks of MAD against readers that solve every row from left to right, from its tokens."""

import itertools

import jax
import numpy as np
import pytest

from experiments import tasks
from experiments.config import Config
from experiments.models import build_model
from experiments.tasks import BOS, EOS, MASK, PAD, RESERVED
from task_guesses_test import check
from tasks_test import draw, make


def whole_rows(batch):
  """Yields (tokens, {place of a scored token: the target there}); inputs and targets overlap."""
  for inputs, targets, weights in zip(batch['inputs'], batch['targets'], batch['weights']):
    np.testing.assert_array_equal(inputs[1:], targets[:-1])
    assert set(weights) <= {0., 1.}
    yield [*inputs, targets[-1]], {at + 1: targets[at] for at in np.flatnonzero(weights)}


def recall(tokens, values, noise):
  """Reads pairs; returns {place: value} of those asked for, the pairs seen, and where noise is."""
  table, asked, noisy = {}, {}, []
  assert tokens[0] == BOS
  for at in range(1, len(tokens), 2):
    key, value = tokens[at:at + 2]
    noisy.append(key >= noise)
    if key >= noise:
      assert value >= noise
      continue
    assert RESERVED <= key < values <= value < noise
    if key in table:
      asked[at + 1] = table[key]
    table.setdefault(key, value)
  return asked, table, noisy


@pytest.mark.parametrize('length', [4, 24])
def test_in_context_recall_asks_for_every_key_seen_before(length):
  batch = draw(make('in_context_recall', 'decoder', length=length, vocab_size=RESERVED + 7))
  pairs = set()
  for tokens, scored in whole_rows(batch):
    asked, table, noisy = recall(tokens, RESERVED + 3, RESERVED + 7)
    assert asked == scored and length in asked and not any(noisy)
    pairs |= set(table.items())
  assert len(pairs) == 3 * 4  # Over the rows, every key has every value.


def test_noisy_recall_passes_over_noise():
  sizes = dict(length=24, vocab_size=RESERVED + 7 + 3, num_noise=3, noise_rate=0.4)
  batch = draw(make('noisy_recall', 'decoder', **sizes), batch_size=256)
  noise, tokens_of_noise = [], set()
  for tokens, scored in whole_rows(batch):
    asked, _, noisy = recall(tokens, RESERVED + 3, RESERVED + 7)
    assert asked == scored and len(tokens) - 1 in asked
    tokens_of_noise |= {token for token in tokens if token >= RESERVED + 7}
    noise.append(noisy)
  assert tokens_of_noise == set(range(RESERVED + 7, RESERVED + 10))
  # All but the last, and the one that it asks for, which is any of the 11 before.
  np.testing.assert_allclose(np.mean(noise, 0), [0.4 * 10 / 11] * 11 + [0.], atol=0.12)


@pytest.mark.parametrize('span, length', [(1, 9), (3, 40)])
def test_fuzzy_recall_reads_tuples_between_borders(span, length):
  task = make('fuzzy_recall',
              'decoder',
              length=length,
              vocab_size=RESERVED + 5,
              num_pairs=3,
              span=span)
  sizes, reused = set(), set()
  for tokens, scored in whole_rows(draw(task, batch_size=128)):
    runs = [tuple(run) for _, run in itertools.groupby(tokens, lambda x: x >= RESERVED + 2)]
    assert all(RESERVED <= x < RESERVED + 5 for x in tokens) and tokens[0] < RESERVED + 2
    table, asked, at = {}, {}, 0
    for key, value in itertools.zip_longest(runs[::2], runs[1::2], fillvalue=()):
      at += len(key)
      if key in table:
        asked |= {at + i: table[key][i] for i in range(len(value))}
        reused.add((len(key), len(value)))
      at += len(value)
      table.setdefault(key, value)
      whole = at < len(tokens)
      assert table[key][:len(value)] == value and (not whole or len(value) == len(table[key]))
      sizes |= {len(key), len(value)} if whole else set()
    assert asked == scored and asked and len(table) - (not runs[1::2]) <= 4
  assert sizes == set(range(1, span + 1))
  assert reused >= set(itertools.product(range(1, span + 1), repeat=2))


@pytest.mark.parametrize('length, num_items', [(8, 4), (20, 3)])
def test_selective_copy_keeps_the_order(length, num_items):
  sizes = dict(length=length, num_items=num_items, vocab_size=RESERVED + 6)
  batch = draw(make('selective_copy', 'decoder', **sizes), batch_size=256)
  context, symbols = length - num_items, set()
  for inputs, targets, weights in zip(batch['inputs'], batch['targets'], batch['weights']):
    kept = [token for token in inputs[:context] if token != PAD]
    assert list(inputs[context:]) == [MASK] * num_items
    assert list(targets) == [0] * context + kept and len(kept) == num_items
    assert list(weights) == [0.] * context + [1.] * num_items
    symbols |= set(kept)
  assert symbols == set(range(RESERVED, RESERVED + 6))
  share = np.mean(batch['inputs'][:, :context] != PAD, axis=0)
  np.testing.assert_allclose(share, num_items / context, atol=0.1)


def facts(batch):
  table = {}
  for inputs, targets, weights in zip(batch['inputs'], batch['targets'], batch['weights']):
    assert (inputs[1::2] == MASK).all()
    np.testing.assert_array_equal(weights, [0., 1.] * (len(inputs) // 2))
    assert not targets[::2].any()
    for key, value in zip(inputs[::2], targets[1::2]):
      assert table.setdefault(key, value) == value
  return table


def test_memorization_has_the_same_facts_in_every_run():
  config = Config(task='memorization', length=8, vocab_size=RESERVED + 20)
  table = facts(draw(tasks.make_task(config)))
  assert sorted(table) == list(range(RESERVED, RESERVED + 10))
  assert sorted(table.values()) == list(range(RESERVED + 10, RESERVED + 20))
  assert list(table.values()) != sorted(table.values())
  assert facts(draw(tasks.make_task(config), seed=1)) == table


def test_compression_is_written_out_again():
  task = tasks.make_task(Config(task='compression', model='seq2seq', length=5, vocab_size=8))
  batch = draw(task)
  symbols = batch['source'][:, :5]
  assert set(np.unique(symbols)) == set(range(RESERVED, 8))
  np.testing.assert_array_equal(batch['source'][:, 5], EOS)
  np.testing.assert_array_equal(batch['targets'], batch['source'])
  np.testing.assert_array_equal(batch['inputs'][:, 1:], symbols)
  assert batch['source_mask'].all() and batch['weights'].all() and task.bottleneck


def test_compression_passes_one_vector():
  """Encoder positions see themselves alone, so that only what the decoder sees can matter."""

  def changes(name, place, real=6, **options):
    config = Config(task=name, model='seq2seq', length=5, vocab_size=8, encoder_attention='local',
                    window=0, decoder_attention='vanilla', num_layers=1, model_dim=8, heads=2,
                    positions='none', **options)  # yapf: disable
    task = tasks.make_task(config)
    model = build_model(config, task)
    batch = draw(task, batch_size=2)
    batch['source_mask'] = batch['source_mask'] & (np.arange(6) < real)
    apply = jax.jit(lambda params, source: model.apply(params, batch | {'source': source}))
    params = model.init(jax.random.key(0), batch)
    other = batch['source'].copy()
    other[:, place] = MASK
    return np.abs(apply(params, batch['source']) - apply(params, other)).max() > 1e-6

  assert changes('copy', 1, min_length=5) and changes('copy', 5, min_length=5)
  assert not changes('compression', 1) and changes('compression', 5)
  assert changes('compression', 1, real=2) and not changes('compression', 0, real=2)


def test_shares_of_mad():
  # The pair asked for has any of 8 keys; another has its value by chance. Rows are long enough.
  share = (1 / 8) + (7 / 8) / 8
  expected = {'any value in context': share, 'majority class': 1 / 8, 'chance': 1 / 8}
  check('in_context_recall', 'decoder', expected, length=128)
  check('noisy_recall', 'decoder', expected, length=128)
  # One of 4 items, or the same by chance.
  expected = {'any value in context': (1 / 4) + (3 / 4) / 16, 'chance': 1 / 16}
  check('selective_copy', 'decoder', expected, length=16, num_items=4)
  check('memorization', 'decoder', {'majority class': 1 / 10, 'copy the last token': 0.},
        length=8, vocab_size=RESERVED + 20)  # yapf: disable


@pytest.mark.parametrize('name, message, sizes', [
    ('in_context_recall', 'length must be even .* got 31', dict(length=31)),
    ('in_context_recall', 'length must be at least 4', dict(length=2)),
    ('noisy_recall', 'vocab_size must be at least 23', dict(vocab_size=22)),
    ('noisy_recall', 'noise_rate must be from 0.0 to 1.0', dict(noise_rate=-0.5)),
    ('fuzzy_recall', 'length must be at least 42', dict(length=41, span=3)),
    ('fuzzy_recall', 'span must be at least 1', dict(span=-1)),
    ('selective_copy', 'length must be at least 16', dict(length=15)),
    ('memorization', 'vocab_size must be at least 7', dict(vocab_size=6)),
])
def test_bad_sizes_are_refused(name, message, sizes):
  with pytest.raises(ValueError, match=message):
    make(name, 'decoder', **sizes)
