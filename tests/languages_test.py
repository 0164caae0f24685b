"""Tasks of formal languages and addition against plain Python that reads the tokens of each row."""

import numpy as np
import pytest

from experiments.tasks import BOS, EOS, RESERVED, SEP
from task_guesses_test import check
from tasks_test import draw, make, ORDERS, strip

CLASSIFIERS = [(name, model)
               for name in ('parity', 'even_pairs', 'cycle_navigation', 'modular_arithmetic')
               for model in ('encoder', 'decoder')]
WRITERS = [(name, model) for name in ('addition', *ORDERS) for model in ('decoder', 'seq2seq')]


def solve(name, symbols, num_classes):
  """Tells the class of a string of symbols from 0 on."""
  if name == 'parity':
    return ''.join('ab'[x] for x in symbols).count('b') % 2
  if name == 'even_pairs':
    text = ''.join('ab'[x] for x in symbols)
    return sum(text[i:i + 2] in ('ab', 'ba') for i in range(len(text))) % 2
  if name == 'cycle_navigation':
    cycle = list(range(num_classes))
    for x in symbols:  # Turns the cycle under the walker.
      turn = (0, 1, -1)[x]
      cycle = cycle[turn:] + cycle[:turn]
    return cycle[0]
  assert all((x >= num_classes) == i % 2 for i, x in enumerate(symbols))
  words = [*map(str, range(num_classes)), '+', '-', '*']
  return eval(''.join(words[x] for x in symbols)) % num_classes  # pylint: disable=eval-used


def read_decoder(task, batch):
  """Yields source and answer of each row, of which exactly the answer is scored."""
  for inputs, targets, weights in zip(batch['inputs'], batch['targets'], batch['weights']):
    np.testing.assert_array_equal(inputs[1:], targets[:-1])
    tokens = strip(np.append(inputs, targets[-1]))
    cut = tokens.index(SEP)
    source, answer = tokens[1:cut], tokens[cut + 1:]
    assert tokens[0] == BOS and min(source) >= RESERVED
    assert task.answer.frame(source) == ([], tokens[:cut + 1])
    np.testing.assert_array_equal(np.flatnonzero(weights), np.arange(cut, cut + len(answer)))
    assert set(weights) <= {0., 1.}
    yield source, answer


def read_encoder(batch):
  """Yields source and class of each row."""
  time = batch['inputs'].shape[1]
  for inputs, mask, target in zip(batch['inputs'], batch['input_mask'], batch['targets']):
    tokens = strip(inputs)
    np.testing.assert_array_equal(mask, np.arange(time) < len(tokens))
    assert tokens[0] == BOS and min(tokens[1:]) >= RESERVED
    yield tokens[1:], target
  np.testing.assert_array_equal(batch['weights'], np.ones(len(batch['inputs'])))


def read_seq2seq(task, batch):
  """Yields source and answer of each row, of which exactly the answer is scored."""
  for source, mask, inputs, targets, weights in zip(
      *(batch[x] for x in ('source', 'source_mask', 'inputs', 'targets', 'weights'))):
    np.testing.assert_array_equal(inputs, [BOS, *targets[:-1]])
    source, answer = strip(source), strip(targets)
    np.testing.assert_array_equal(mask, np.arange(len(mask)) < len(source))
    np.testing.assert_array_equal(weights, np.arange(len(weights)) < len(answer))
    assert task.answer.frame(source[:-1]) == (source, [BOS]) and source[-1] == EOS
    yield source[:-1], answer


def read_classified(task, model, batch):
  """Yields the symbols of each row from 0 on, and its class."""
  if model == 'encoder':
    pairs = read_encoder(batch)
  else:
    assert task.answer.eos_id is None
    pairs = read_decoder(task, batch)
  for source, answer in pairs:
    if model == 'decoder':
      answer, = answer
      answer -= RESERVED
    yield [x - RESERVED for x in source], answer


@pytest.mark.parametrize('num_classes', [5, 3])
@pytest.mark.parametrize('name, model', CLASSIFIERS)
def test_classes_of_strings(name, model, num_classes):
  if name in ('parity', 'even_pairs'):
    sizes, num_classes, num_symbols = {}, 2, 2
  else:
    sizes = dict(num_classes=num_classes)
    num_symbols = 3 if name == 'cycle_navigation' else num_classes + 3
  task = make(name, model, length=9, **sizes)
  lengths, symbols, classes = set(), set(), set()
  for source, answer in read_classified(task, model, draw(task, batch_size=256)):
    assert answer == solve(name, source, num_classes), source
    lengths.add(len(source))
    symbols.update(source)
    classes.add(answer)
  assert lengths == set(range(1, 10, 2 if name == 'modular_arithmetic' else 1))
  assert symbols == set(range(num_symbols)) and classes == set(range(num_classes))


@pytest.mark.parametrize('name, model', CLASSIFIERS)
def test_strings_of_one_length(name, model):
  task = make(name, model, length=7, min_length=7)
  assert {len(x) for x, _ in read_classified(task, model, draw(task))} == {7}


def read_dyck(task, batch, num_classes):
  """Yields the length and the greatest depth of each row, and checks it against a stack."""
  assert task.answer is None
  closing = RESERVED + num_classes
  for inputs, targets, weights in zip(batch['inputs'], batch['targets'], batch['weights']):
    np.testing.assert_array_equal(inputs[1:], targets[:-1])
    tokens = strip(np.append(inputs, targets[-1]))
    assert tokens[0] == BOS and tokens[-1] == EOS
    stack, deepest, scored = [], 0, []
    for place, token in enumerate(tokens[1:-1]):
      if token < closing:
        stack.append(token)
        deepest = max(deepest, len(stack))
      else:
        assert token == stack.pop() + num_classes
        scored.append(place)
    assert not stack and min(tokens[1:-1]) >= RESERVED
    np.testing.assert_array_equal(np.flatnonzero(weights), scored)
    assert set(weights) <= {0., 1.}
    yield len(tokens) - 2, deepest


@pytest.mark.parametrize('depth, num_classes', [(1, 2), (3, 8), (9, 3)])
def test_dyck_is_balanced(depth, num_classes):
  task = make('dyck', 'decoder', length=9, depth=depth, num_classes=num_classes)
  batch = draw(task, batch_size=512)
  lengths, deepest = zip(*read_dyck(task, batch, num_classes))
  assert set(lengths) == {2, 4, 6, 8}
  assert set(deepest) == set(range(1, min(depth, 4) + 1))
  assert set(batch['inputs'].ravel()) >= set(range(RESERVED, RESERVED + 2 * num_classes))


def test_dyck_of_one_length():
  task = make('dyck', 'decoder', length=6, min_length=6)
  assert {length for length, _ in read_dyck(task, draw(task), 8)} == {6}


def read_written(task, model, batch):
  assert task.answer.eos_id == EOS
  return (read_seq2seq if model == 'seq2seq' else read_decoder)(task, batch)


def number(digits):
  """Reads a number whose least significant digit is first; it has no zero to spare."""
  text = ''.join('0123456789'[x - RESERVED] for x in reversed(digits))
  assert text == str(int(text))
  return int(text)


@pytest.mark.parametrize('sizes', [dict(length=5), dict(length=3, min_length=3), dict(length=1)])
@pytest.mark.parametrize('model', ['decoder', 'seq2seq'])
def test_addition_adds(model, sizes):
  task, counts, sums, digits = make('addition', model, **sizes), set(), set(), set()
  for source, answer in read_written(task, model, draw(task, batch_size=512)):
    plus = source.index(RESERVED + 10)
    first, second = source[:plus], source[plus + 1:]
    assert answer.pop() == EOS and number(answer) == number(first) + number(second)
    counts.add((len(first), len(second)))
    sums.add(len(answer) - max(len(first), len(second)))
    digits.update(first, second)
  each = range(sizes.get('min_length', 1), sizes['length'] + 1)
  assert counts == {(a, b) for a in each for b in each}
  assert sums == {0, 1} and digits == set(range(RESERVED, RESERVED + 10))


@pytest.mark.parametrize('name, model', WRITERS)
def test_written_answers_of_one_length(name, model):
  task = make(name, model, length=3, min_length=3)
  for source, _ in read_written(task, model, draw(task)):
    assert len(source) == (7 if name == 'addition' else 3)


@pytest.mark.parametrize('model', ['encoder', 'decoder'])
def test_shares_of_classes(model):
  # Lengths 1 to 4: at 1 the symbol tells all, at the others nothing.
  one_in_four = (1 + 3 / 2) / 4
  ends = 'first symbol alone', 'last symbol alone'
  check('parity', model, dict.fromkeys(ends, one_in_four) | {'majority class': .5}, length=4)
  check('even_pairs', model, {'majority class': one_in_four, 'chance': .5}, length=4)
  # Two moves: three of nine pairs end at 0, and one in three leaves the other move alone.
  check('cycle_navigation',
        model,
        dict.fromkeys((*ends, 'majority class'), 1 / 3) | {'chance': 1 / 5},
        length=2,
        min_length=2)
  # a + b and a - b are even; a * b is 0 in 9 of 25, and is a (or b) as often.
  check('modular_arithmetic',
        model,
        dict.fromkeys((*ends, 'majority class'), (1 / 5 + 1 / 5 + 9 / 25) / 3),
        length=3,
        min_length=3)


def test_shares_of_dyck():
  kinds = dict.fromkeys(('majority class', 'chance'), 1 / 2)
  # (()) and ()() are equally likely; only the last bracket of (()) is not the one opened last.
  expected = kinds | {'bracket opened last': 3 / 4 + 1 / 4 / 2}
  check('dyck', 'decoder', expected, length=4, min_length=4, num_classes=2)
  check('dyck', 'decoder', {'bracket opened last': 1.}, depth=1, length=8)


@pytest.mark.parametrize('model', ['decoder', 'seq2seq'])
def test_shares_of_written_answers(model):
  # Of 2n + 1 tokens, n from 1 to 12, the first n and EOS.
  check('duplicate_string', model, {'source in order': 90 / 168, 'majority class': 12 / 168})
  check('duplicate_string', model, {'majority class': 156 / 168 / 2}, vocab_size=RESERVED + 2)
  # In place: the first symbol, the last of an even number, and EOS; 27 symbols share the rest.
  check('odds_first', model, {'source in order': (30 + 60 / 27) / 90})
  # Of 100 sums 45 have two digits; the first number is the first digit of 10, and the EOS behind it
  # and once more behind that is right once in each.
  check('addition',
        model, {
            'first number': (.1 + 1) / 2.45,
            'majority class': 1 / 2.45,
            'chance': 1.45 / 2.45 / 10
        },
        length=1)


@pytest.mark.parametrize('name, model, message, sizes', [
    ('parity', 'encoder', 'min_length must be from 1 to length=3', dict(length=3, min_length=4)),
    ('even_pairs', 'decoder', 'length must be at least 1 for task even_pairs', dict(length=-1)),
    ('cycle_navigation', 'encoder', 'num_classes must be at least 2', dict(num_classes=1)),
    ('modular_arithmetic', 'encoder', 'num_classes must be from 2 to 46340',
     dict(num_classes=46341)),
    ('modular_arithmetic', 'decoder',
     'lengths 1, 3 and so on; none is from min_length=2 to length=2', dict(length=2, min_length=2)),
    ('dyck', 'decoder', 'lengths 2, 4 and so on; none is from min_length=5 to length=5',
     dict(length=5, min_length=5)),
    ('dyck', 'decoder', 'length must be at least 2 for task dyck; got 1', dict(length=1)),
    ('dyck', 'decoder', 'depth must be at least 1', dict(depth=-1)),
    ('dyck', 'decoder', 'num_classes must be at least 2', dict(num_classes=1)),
    ('dyck', 'encoder', 'task dyck is for model decoder; got model encoder', {}),
    ('addition', 'decoder', 'length must be at least 1 for task addition', dict(length=-1)),
    ('addition', 'encoder', 'task addition is for model decoder or seq2seq', {}),
])
def test_bad_sizes_are_refused(name, model, message, sizes):
  with pytest.raises(ValueError, match=message):
    make(name, model, **sizes)
