"""Needles in filler, against a reader that looks them up with a table, from the tokens alone."""

import numpy as np
import pytest

from experiments.tasks import RESERVED, SEP
from task_guesses_test import check
from tasks_test import draw, make

THIRD = 8
VOCAB = RESERVED + 3 * THIRD + 1  # One more token of filler.


def third_of(token):
  return min((token - RESERVED) // THIRD, 2)


def read(tokens, filler=None):
  """Returns the needles (key, value) of a text in order, and adds the rest of it to `filler`."""
  found, at = [], 0
  while at < len(tokens):
    if tokens[at] == SEP:
      found.append((tokens[at + 1], tokens[at + 2]))
      at += 3
    else:
      assert third_of(tokens[at]) == 2
      filler.add(tokens[at])
      at += 1
  return found


def rows_of(batch, end):
  """Yields (text, end, places scored in the end) of whole rows, the end being so many tokens."""
  for inputs, targets, weights in zip(batch['inputs'], batch['targets'], batch['weights']):
    np.testing.assert_array_equal(inputs[1:], targets[:-1])
    tokens, weights = [*inputs, targets[-1]], [0., *weights]
    assert set(weights) == {0., 1.} and not any(weights[:-end])
    yield tokens[:-end], tokens[-end:], list(np.flatnonzero(weights[-end:]))


@pytest.mark.parametrize('name, count, queries, sizes', [
    ('needle', 1, 1, dict(length=20)),
    ('needle', 1, 1, dict(length=5)),
    ('needle_multi_key', 4, 1, dict(length=30)),
    ('needle_multi_key', 8, 1, dict(length=26, num_pairs=8)),
    ('needle_multi_query', 3, 3, dict(length=30, num_queries=3)),
])
def test_needles_are_found_by_their_keys(name, count, queries, sizes):
  batch = draw(make(name, 'decoder', vocab_size=VOCAB, **sizes), batch_size=128)
  filler, asked = set(), set()
  for text, end, scored in rows_of(batch, 3 * queries):
    needles = read(text, filler)
    table = dict(needles)
    assert len(needles) == len(table) == len(set(table.values())) == count
    assert {third_of(key) for key in table} == {0} and {third_of(v) for v in table.values()} == {1}
    questions = read(end)
    assert [table[key] for key, _ in questions] == [value for _, value in questions]
    assert len(dict(questions)) == queries and scored == list(range(2, 3 * queries, 3))
    asked |= {(number, needles.index(pair)) for number, pair in enumerate(questions)}
  assert len(asked) == queries * count  # Any of them, in any order.
  assert not filler or filler == set(range(RESERVED + 2 * THIRD, VOCAB))


def test_a_needle_may_be_anywhere():
  batch = draw(make('needle', 'decoder', length=14, vocab_size=VOCAB), batch_size=1024)
  starts = [list(row).index(SEP) for row in batch['inputs']]
  np.testing.assert_allclose(np.bincount(starts, minlength=10) / 1024, 1 / 10, atol=0.04)


@pytest.mark.parametrize('count', [1, 4])
def test_all_values_of_a_key_are_listed_in_order(count):
  batch = draw(make('needle_multi_value', 'decoder', length=30, vocab_size=VOCAB, num_values=count))
  for text, (mark, key, *values), scored in rows_of(batch, count + 2):
    assert mark == SEP and read(text, set()) == [(key, value) for value in values]
    assert third_of(key) == 0 and {third_of(value) for value in values} == {1}
    assert len(set(values)) == count and scored == list(range(2, count + 2))


@pytest.mark.parametrize('hops, num_pairs', [(1, 2), (4, 2), (3, 1)])
def test_a_variable_is_tracked_to_its_value(hops, num_pairs):
  task = make('variable_tracking',
              'decoder',
              length=32,
              vocab_size=VOCAB,
              hops=hops,
              num_pairs=num_pairs)
  asked, orders = set(), set()
  for text, end, scored in rows_of(draw(task, batch_size=128), 3):
    assigned, chains = {}, []
    for name, source in read(text, set()):
      assert name not in assigned and third_of(name) == 0
      assigned[name] = source
      if third_of(source) == 1:
        chains.append([source, name])
      else:
        next(chain for chain in chains if chain[-1] == source).append(name)  # It stands before.
    assert [len(chain) for chain in chains] == [hops + 1] * num_pairs
    (name, answer), = read(end)
    last, steps = name, 0
    while name in assigned:
      name, steps = assigned[name], steps + 1
    assert (name, steps, scored) == (answer, hops, [2])
    asked.add([chain[-1] for chain in chains].index(last))
    orders.add(tuple(third_of(source) for source in assigned.values()))
  assert len(asked) == num_pairs
  assert len(orders) == {(1, 2): 1, (4, 2): 4, (3, 1): 1}[hops, num_pairs]


def test_shares_of_needles():
  check('needle_multi_key', 'decoder', {'any value in context': 1 / 4, 'chance': 1 / 16}, length=30)
  check('needle_multi_value', 'decoder', {'any value in context': 1 / 4}, length=30)
  check('needle_multi_query', 'decoder', {'any value in context': 1 / 4}, length=30)
  check('variable_tracking', 'decoder', {'any value in context': 1 / 2}, length=30)
  check('needle', 'decoder', {'any token in context': 1 / 14, 'majority class': 1 / 16}, length=14)


@pytest.mark.parametrize('name, message, sizes', [
    ('needle', 'length must be at least 5', dict(length=4)),
    ('needle', 'vocab_size must be at least 8', dict(vocab_size=7)),
    ('needle_multi_key', 'length must be at least 14', dict(length=13)),
    ('needle_multi_key', 'vocab_size must be at least 56', dict(num_pairs=17)),
    ('needle_multi_value', 'length must be at least 17', dict(length=16)),
    ('needle_multi_query', 'length must be at least 23', dict(length=22)),
    ('variable_tracking', 'length must be at least 26', dict(length=25, hops=4)),
    ('variable_tracking', 'hops must be at least 1', dict(hops=-1)),
])
def test_bad_sizes_are_refused(name, message, sizes):
  with pytest.raises(ValueError, match=message):
    make(name, 'decoder', **sizes)
