"""listops against a reader and evaluator of its tokens, and against what is known of its shares."""

import statistics

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from experiments.tasks import BOS, listops, RESERVED, SEP
from task_guesses_test import accuracy
from tasks_test import draw, make, strip

SMALL = dict(length=20, min_length=8, depth=3, max_args=4)
OPERATORS = {
    '[MIN': min,
    '[MAX': max,
    '[MED': lambda x: int(statistics.median(x)),
    '[SM': lambda x: sum(x) % 10
}


class Reader:
  """Reads one expression: its value, its depth in levels, the most arguments, its own digits."""

  def __init__(self, tokens):
    self.words = [listops.TOKENS[token - RESERVED] for token in tokens]
    self.at = self.most = 0
    self.counts = set()
    self.value, self.depth = self.read()
    assert self.at == len(self.words) and self.depth > 1

  def read(self):
    word = self.words[self.at]
    self.at += 1
    if word.isdecimal():
      return int(word), 1
    assert word in OPERATORS
    values, depths = [], []
    while self.words[self.at] != ']':
      value, depth = self.read()
      values.append(value)
      depths.append(depth)
    self.at += 1
    self.counts.add(len(values))
    self.own = [value for value, depth in zip(values, depths) if depth == 1]  # the root's, at last
    return OPERATORS[word](values), 1 + max(depths)


def read_rows(batch, length):
  """Checks the layout of encoder rows; returns a reader of each."""
  readers = []
  for inputs, mask in zip(batch['inputs'], batch['input_mask']):
    tokens = strip(inputs)
    assert tokens[0] == BOS
    np.testing.assert_array_equal(mask, np.arange(length + 1) < len(tokens))
    readers.append(Reader(tokens[1:]))
  np.testing.assert_array_equal(batch['targets'], [reader.value for reader in readers])
  np.testing.assert_array_equal(batch['weights'], 1.)
  return readers


def check_bounds(readers, low, high, depth, max_args):
  sizes = {len(reader.words) for reader in readers}
  assert low <= min(sizes) and max(sizes) <= high
  assert max(reader.depth for reader in readers) == depth
  assert set.union(*(reader.counts for reader in readers)) == set(range(2, max_args + 1))
  return sizes


def test_a_class_is_the_value():
  readers = read_rows(draw(make('listops', 'encoder', **SMALL), batch_size=512), 20)
  assert check_bounds(readers, 8, 20, 3, 4) == set(range(8, 21))


def test_the_decoder_writes_the_value():
  batch, readers = draw(make('listops', 'decoder', **SMALL), batch_size=512), []
  for inputs, targets, weights in zip(batch['inputs'], batch['targets'], batch['weights']):
    np.testing.assert_array_equal(inputs[1:], targets[:-1])
    tokens = strip(np.append(inputs, targets[-1]))
    assert tokens[0] == BOS and tokens[-2] == SEP
    readers.append(Reader(tokens[1:-2]))
    assert tokens[-1] == RESERVED + readers[-1].value
    np.testing.assert_array_equal(weights, np.arange(len(weights)) == len(tokens) - 2)
  check_bounds(readers, 8, 20, 3, 4)
  frame, end, _ = make('listops', 'decoder').answer
  assert frame(tokens[1:-2]) == ([], tokens[:-1]) and end is None
  with pytest.raises(ValueError, match='numbers from 5 on'):
    frame([15, SEP])


def test_the_full_form():
  readers = read_rows(draw(make('listops', 'encoder', **listops.FULL), batch_size=64), 1999)
  sizes = check_bounds(readers, 501, 1999, 10, 10)
  assert min(sizes) < 600 and max(sizes) > 1600


def length_shares(depth, max_args, length):
  """Returns how likely each number of tokens is for an expression of so many levels at most."""
  argument = np.eye(1, length + 1, 1)[0]
  for _ in range(depth - 1):
    power, root = np.eye(1, length + 1)[0], np.zeros(length + 1)
    for count in range(1, max_args + 1):
      power = np.convolve(power, argument)[:length + 1]
      if count > 1:
        root[2:] += power[:-2] / (max_args - 1)
    argument = 0.75 * np.eye(1, length + 1, 1)[0] + 0.25 * root
  return root


@pytest.mark.parametrize('depth, max_args', [(2, 5), (4, 3), (5, 6)])
def test_lengths_are_as_likely_as_in_the_published_generator(depth, max_args):
  sizes = dict(length=40, min_length=5, depth=depth, max_args=max_args)
  batch = draw(make('listops', 'encoder', **sizes), batch_size=20_000)
  shares = np.bincount(batch['input_mask'].sum(1) - 1, minlength=41) / 20_000
  expected = length_shares(depth, max_args, 40)
  expected[:5] = 0
  np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.01)


def test_operators_and_digits_are_as_likely_as_one_another():
  tokens = draw(make('listops', 'encoder'), batch_size=4000)['inputs'] - RESERVED
  for group in range(10), range(10, 14):
    counts = [np.sum(tokens == symbol) for symbol in group]
    np.testing.assert_allclose(counts / np.sum(counts), 1 / len(group), atol=0.01)


def test_shares_are_the_published_ones():
  task = make('listops', 'encoder')
  shares = accuracy(task, draw(task, batch_size=20_000))
  published = {'majority class': .115, 'first token': .243, 'first token and own digits': .433}
  for name, share in published.items():
    assert abs(shares[name] - share) < 0.02, (name, shares[name])


@pytest.mark.parametrize('model', ['encoder', 'decoder'])
def test_own_digits_are_those_of_the_root(model):
  task = make('listops', model, **SMALL)
  batch, seen = draw(task, batch_size=512), set()
  guesses = jax.jit(task.guesses)(batch)
  for row, inputs in enumerate(batch['inputs']):
    tokens = [token for token in strip(inputs)[1:] if token != SEP]
    if model == 'decoder' and batch['weights'][row, -1] == 0:
      tokens.pop()  # the answer
    own, first = Reader(tokens).own, int(guesses['first token'].reshape(512, -1)[row, -1])
    operator = listops.TOKENS[tokens[0] - RESERVED]
    shift = RESERVED if model == 'decoder' else 0
    wanted = shift + OPERATORS[operator](own) if own else first
    assert (guesses['first token and own digits'][row] == wanted).all()
    seen.add((operator, bool(own)))
  assert len(seen) == 8


def test_a_batch_is_the_same_however_it_is_asked_for():
  task = make('listops', 'encoder', **SMALL)
  keys = jax.random.split(jax.random.key(3), 4)
  sample = lambda key: task.sample(key, 5)
  alone = [sample(key) for key in keys]
  wanted = jax.tree.map(lambda *rows: np.stack(rows), *alone)
  scanned = lambda keys: jax.lax.scan(lambda carry, key: (carry, sample(key)), 0, keys)[1]
  looped = lambda keys: jax.lax.map(lambda i: sample(keys[i]), jnp.arange(4))
  for ask in (jax.vmap(sample), jax.jit(jax.vmap(sample)), jax.jit(scanned), jax.jit(looped)):
    jax.tree.map(np.testing.assert_array_equal, ask(keys), wanted)
  jitted = jax.jit(sample)
  jax.tree.map(np.testing.assert_array_equal, jitted(keys[0]), alone[0])
  assert len({row.tobytes() for row in wanted['inputs'].reshape(20, -1)}) == 20


@pytest.mark.parametrize('message, sizes', [
    ('none has from 30 to 40 tokens', dict(length=40, min_length=30, depth=2)),
    ('none has from 5 to 6 tokens', dict(length=6, min_length=5, max_args=2)),
    ('length must be at least 4', dict(length=3)),
    ('min_length must be from 4 to length=9', dict(length=9, min_length=3)),
    ('depth must be at least 2', dict(depth=1)),
    ('max_args must be at least 2', dict(max_args=1)),
])
def test_sizes_no_expression_has_are_refused(message, sizes):
  with pytest.raises(ValueError, match=message):
    make('listops', 'encoder', **sizes)
