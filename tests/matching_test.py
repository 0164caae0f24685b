"""matching against a comparison of its two sequences, token by token."""

import numpy as np
import pytest

from experiments.tasks import BOS, RESERVED, SEP
from task_guesses_test import check
from tasks_test import draw, make, strip


@pytest.mark.parametrize('low, length, vocab_size', [(4, 7, 21), (2, 6, 7), (2, 2, 7)])
def test_sequences_are_equal_or_differ_by_a_swap(low, length, vocab_size):
  task = make('matching', 'encoder', min_length=low, length=length, vocab_size=vocab_size)
  batch, lengths, swaps = draw(task, batch_size=2048), set(), set()
  for inputs, mask, target in zip(batch['inputs'], batch['input_mask'], batch['targets']):
    tokens = strip(inputs)
    np.testing.assert_array_equal(mask, np.arange(2 * length + 2) < len(tokens))
    cut = tokens.index(SEP)
    x, y = tokens[1:cut], tokens[cut + 1:]
    assert tokens[0] == BOS and len(x) == len(y) and min(x + y) >= RESERVED
    differ = [place for place in range(len(x)) if x[place] != y[place]]
    assert len(differ) == (0 if target else 2)
    if differ:
      i, j = differ
      assert (x[i], x[j]) == (y[j], y[i])
      swaps.add((len(x), i, j))
    lengths.add(len(x))
  assert lengths == set(range(low, length + 1))
  assert swaps == {(n, i, j) for n in lengths for j in range(n) for i in range(j)}
  assert abs(batch['targets'].mean() - 0.5) < 0.03
  np.testing.assert_array_equal(batch['weights'], 1.)
  assert set(np.unique(batch['inputs'])) - {0, BOS, SEP} == set(range(RESERVED, vocab_size))


def test_neither_sequence_tells_alone():
  batch = draw(make('matching', 'encoder', length=3, min_length=3, vocab_size=7), batch_size=8000)
  for columns in slice(1, 4), slice(5, 8):
    number = (batch['inputs'][:, columns] - RESERVED) @ [4, 2, 1]
    same, other = (np.bincount(number[batch['targets'] == c], minlength=8) for c in (1, 0))
    np.testing.assert_allclose(same / same.sum(), other / other.sum(), atol=0.03)


def test_shares_of_matching():
  # A swap moves two of n places.
  alike = (1 + np.mean([2 / n for n in (6, 7, 8)])) / 2
  shares = {'majority class': 1 / 2, 'chance': 1 / 2, 'first token': alike, 'last token': alike}
  check('matching', 'encoder', shares, length=8, min_length=6)


@pytest.mark.parametrize('message, sizes', [
    ('min_length must be from 2 to length=9', dict(length=9, min_length=1)),
    ('vocab_size must be at least 7', dict(vocab_size=6)),
])
def test_sizes_without_a_swap_are_refused(message, sizes):
  with pytest.raises(ValueError, match=message):
    make('matching', 'encoder', **sizes)
