"""The trivial baselines: shapes, and shares that can be worked out on paper."""

import jax
import numpy as np
import pytest

from experiments import tasks
from experiments.tasks import TASKS
from tasks_test import CASES, draw, make


def accuracy(task, batch):
  weights = batch['weights']
  return {
      name: float(np.sum(weights * (np.asarray(guess) == batch['targets'])) / weights.sum())
      for name, guess in jax.jit(task.guesses)(batch).items()
  }


@pytest.mark.sampled(4)
@pytest.mark.parametrize('name, model', CASES)
def test_every_task_states_its_baselines(name, model):
  task = make(name, model)
  batch = draw(task)
  guesses = jax.jit(task.guesses)(batch)
  assert {'majority class', 'chance'} <= set(guesses)
  for guess in guesses.values():
    assert guess.shape == batch['targets'].shape and guess.dtype == np.int32
    assert 0 <= guess.min() and guess.max() < task.num_classes
  # A baseline that solves the task would make its accuracy say nothing.
  shares = [
      np.average(guess == batch['targets'], weights=batch['weights']) for guess in guesses.values()
  ]
  assert max(shares) < 0.75
  assert task.note


def check(name, model, expected, atol=0.03, **sizes):
  task = make(name, model, **sizes)
  got = accuracy(task, draw(task, batch_size=2048))
  for guess, share in expected.items():
    assert abs(got[guess] - share) < atol, (guess, got[guess], share)


def test_shares_of_rearranging():
  # One token in n + 1 is EOS, n from 1 to 12; 27 symbols share the rest.
  eos = 1 / 7.5
  for model in 'decoder', 'seq2seq':
    check('copy', model, {'majority class': eos, 'chance': (1 - eos) / 27})
    # In place: EOS, the middle of odd lengths, and equal symbols.
    check('reverse', model, {'source in order': eos + (6 / 90) + (72 / 90) / 27}, atol=0.02)
    check('sort', model, {'source in order': sort_in_place()}, atol=0.02)


def sort_in_place():
  rng, kept, total = np.random.default_rng(0), 0, 0
  for _ in range(5000):
    source = rng.integers(0, 27, rng.integers(1, 13))
    kept += 1 + np.sum(source == np.sort(source))
    total += 1 + len(source)
  return kept / total


def test_shares_of_recall():
  check('mqar', 'decoder', {'any value in context': 1 / 4, 'chance': 1 / 32}, num_pairs=4)
  check('induction', 'decoder', {'any token in context': 1 / 20, 'copy the last token': 0.})
  # Of 19 pairs it is the one asked for, or has its key, or a value that is the same by chance.
  share = (1 / 19) + (18 / 19) * ((1 / 10) + (9 / 10) / 10)
  check('associative_recall', 'decoder', {'any value in context': share, 'chance': 1 / 10})


def test_shares_of_encoder_tasks():
  check('majority', 'encoder', {'majority class': 1 / 4, 'chance': 1 / 4})
  check('majority', 'encoder', {'first token': 1., 'last token': 1.}, length=1)
  # Of 7 words on average, one is SEP.
  check('masked', 'encoder', {'majority class': 1 / 7, 'chance': (6 / 7) / 16})
  # The subject's 2.5 words and both closing words of 7.
  check('tagging', 'encoder', {'the word alone': 4.5 / 7, 'majority class': 1 / 7})


def test_likeliest_after_the_last_token():
  # Where the word before is shown: det -> noun 1/2, adj -> noun, noun -> SEP 1/2 (never a verb),
  # verb, SEP or BOS -> det of class 0. Per clause of 7: 1 + 1 + 1 + 2/4 words.
  check('masked', 'encoder', {'likeliest after the last token': 3.5 / 7}, atol=0.05)


@pytest.mark.parametrize('name, model, message, sizes', [
    ('mqar', 'decoder', 'length 62 with num_pairs 16', dict(length=62, num_pairs=16)),
    ('mqar', 'decoder', 'got length 63', dict(length=63)),
    ('mqar', 'decoder', 'num_pairs must be from 1 to 7', dict(vocab_size=16, num_pairs=8)),
    ('associative_recall', 'decoder', 'length must be even .* got 13', dict(length=13)),
    ('associative_recall', 'decoder', 'length must be at least 4', dict(length=2)),
    ('associative_recall', 'decoder', 'vocab_size must be at least 7', dict(vocab_size=6)),
    ('masked', 'encoder', 'length must be at least 8', dict(length=6)),
    ('masked', 'encoder', 'mask_rate must be from 0.0 to 1.0', dict(mask_rate=-.5)),
    ('copy', 'decoder', 'vocab_size must be at least 6 for task copy; got 5', dict(vocab_size=5)),
    ('copy', 'decoder', 'length must be at least 1 for task copy; got -3', dict(length=-3)),
    ('copy', 'encoder', 'task copy is for model decoder or seq2seq; got model encoder', {}),
    ('copi', 'decoder', 'task must be one of copy, reverse', {}),
])
def test_bad_sizes_are_refused(name, model, message, sizes):
  with pytest.raises(ValueError, match=message):
    make(name, model, **sizes)


def test_options_name_what_the_task_reads():
  for family in TASKS.values():
    assert 'length' in family.options and set(family.models) <= {'encoder', 'decoder', 'seq2seq'}


def test_next_token_shifts_once():
  tokens = np.array([[5, 6, 7, 8]])
  batch = tasks.next_token(tokens, np.array([[True, True, False, True]]))
  np.testing.assert_array_equal(batch['inputs'], [[5, 6, 7]])
  np.testing.assert_array_equal(batch['targets'], [[6, 7, 8]])
  np.testing.assert_array_equal(batch['weights'], [[1., 0., 1.]])
