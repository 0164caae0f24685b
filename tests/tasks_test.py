"""Tasks against checkers that solve every row again with NumPy loops, from the batch alone."""

import functools
import hashlib
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import tasks
from experiments.config import Config
from experiments.tasks import BOS, EOS, MASK, PAD, RESERVED, SEP, TASKS
from experiments.tasks import grammar

CASES = [(name, model) for name, family in TASKS.items() for model in family.models]
CATEGORIES = 'det', 'adj', 'noun', 'verb'
ORDERS = {
    'copy': list,
    'reverse': lambda x: x[::-1],
    'sort': sorted,
    'duplicate_string': lambda x: x + x,
    'odds_first': lambda x: x[::2] + x[1::2],
}


@functools.lru_cache
def make(name, model, **sizes):
  """Returns a task, the same one each time, so that it compiles once."""
  return tasks.make_task(Config(task=name, model=model, **sizes))


def draw(task, seed=0, batch_size=64):
  batch = jax.jit(task.sample, static_argnums=1)(jax.random.key(seed), batch_size)
  return {name: np.asarray(x) for name, x in batch.items()}


def strip(row):
  """Returns the tokens before the padding at the end, and checks that nothing follows it."""
  row = list(row)
  count = len(row) - row[::-1].index(next(x for x in row[::-1] if x != PAD))
  assert PAD not in row[:count]
  return row[:count]


@pytest.mark.sampled(2)
@pytest.mark.parametrize('name, model', CASES)
def test_batches_keep_the_format(name, model):
  task = make(name, model)
  batch = draw(task, batch_size=8)
  time = task.target_length
  fields = {
      'decoder': {'inputs', 'targets', 'weights'},
      'seq2seq': {'source', 'source_mask', 'inputs', 'targets', 'weights'},
      'encoder': {'inputs', 'input_mask', 'targets', 'weights'},
  }
  assert set(batch) == fields[model]
  assert batch['inputs'].shape == (8, time)
  assert batch['targets'].shape == batch['weights'].shape
  assert batch['targets'].shape == ((8, time) if task.per_position else (8,))
  if model == 'seq2seq':
    assert batch['source'].shape == batch['source_mask'].shape == (8, task.input_length)
  else:
    assert task.input_length == time
  for field, array in batch.items():
    dtype = {'weights': np.float32, 'input_mask': bool, 'source_mask': bool}.get(field, np.int32)
    assert array.dtype == dtype, field
  for field in {'source', 'inputs'} & set(batch):
    assert batch[field].min() >= 0 and batch[field].max() < task.vocab_size
  assert batch['targets'].min() >= 0 and batch['targets'].max() < task.num_classes
  assert (batch['weights'].reshape(8, -1).sum(1) > 0).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize('name, model', CASES)
def test_a_batch_is_a_function_of_its_key(name, model):
  task = make(name, model)
  first, again, other = draw(task, 0), draw(task, 0), draw(task, 1)
  for field in first:
    np.testing.assert_array_equal(first[field], again[field])
  assert (first['inputs'] != other['inputs']).any()
  rows = {row.tobytes() for row in first['inputs']}
  assert len(rows) > 32  # Rows differ from each other.


def digests():
  """Of a batch of every task for every model, a line each."""
  lines = []
  for name, model in CASES:
    total = hashlib.sha256()
    for field, array in sorted(draw(make(name, model), batch_size=4).items()):
      total.update(field.encode() + array.tobytes())
    lines.append(f'{name} {model} {total.hexdigest()}')
  return '\n'.join(lines)


def test_batches_do_not_depend_on_the_process():
  """Another process, whose sets and dictionaries may have another order, draws the same."""
  code = 'import tasks_test; print(tasks_test.digests())'
  here = os.path.dirname(__file__)
  env = os.environ | {
      'PYTHONPATH': os.pathsep.join([here, os.path.dirname(here)]),
      'JAX_PLATFORMS': 'cpu'
  }
  seed = '1' if os.environ.get('PYTHONHASHSEED') == '0' else '0'
  other = subprocess.run([sys.executable, '-c', code],
                         env=env | {
                             'PYTHONHASHSEED': seed
                         },
                         check=True,
                         capture_output=True,
                         text=True).stdout
  assert other.splitlines() == digests().splitlines() and len(other.splitlines()) == len(CASES)


@pytest.mark.parametrize('name', ORDERS)
def test_rearranged_in_one_sequence(name):
  task = make(name, 'decoder', length=7, vocab_size=12)
  batch, counts = draw(task), set()
  for inputs, targets, weights in zip(batch['inputs'], batch['targets'], batch['weights']):
    np.testing.assert_array_equal(inputs[1:], targets[:-1])
    tokens = strip(np.append(inputs, targets[-1]))
    cut = tokens.index(SEP)
    source, answer = tokens[1:cut], tokens[cut + 1:]
    assert tokens[0] == BOS and min(source) >= RESERVED
    assert answer == ORDERS[name](source) + [EOS]
    scored = [i for i, weight in enumerate(weights) if weight]
    assert [targets[i] for i in scored] == answer
    assert scored == list(range(cut, cut + len(answer)))
    counts.add(len(source))
  assert counts == set(range(1, 8))


@pytest.mark.parametrize('name', ORDERS)
def test_rearranged_from_a_source(name):
  batch = draw(make(name, 'seq2seq', length=7, vocab_size=12))
  for source, mask, inputs, targets, weights in zip(
      *(batch[x] for x in ('source', 'source_mask', 'inputs', 'targets', 'weights'))):
    source, answer = strip(source), strip(targets)
    assert source.pop() == EOS and min(source) >= RESERVED
    assert answer == ORDERS[name](source) + [EOS]
    assert inputs[0] == BOS
    np.testing.assert_array_equal(inputs[1:], targets[:-1])
    np.testing.assert_array_equal(mask, np.arange(8) <= len(source))
    np.testing.assert_array_equal(weights, np.arange(len(weights)) < len(answer))


@pytest.mark.parametrize('random_filler', [False, True])
def test_mqar_has_the_published_layout(random_filler):
  task = make('mqar', 'decoder', length=64, vocab_size=32, num_pairs=4, random_filler=random_filler)
  batch = draw(task, batch_size=256)
  gaps, filler = [], []
  for inputs, targets, weights in zip(batch['inputs'], batch['targets'], batch['weights']):
    keys, values = inputs[:8:2], inputs[1:8:2]
    assert len(set(keys)) == len(set(values)) == 4
    assert 1 <= keys.min() and keys.max() < 16 <= values.min() and values.max() < 32
    scored = np.flatnonzero(weights)
    assert sorted(inputs[scored]) == sorted(keys)
    assert scored.min() >= 8 and (scored % 2 == 0).all()
    table = dict(zip(keys, values))
    for place in scored:
      assert targets[place] == table[inputs[place]]
    rest = np.setdiff1d(np.arange(8, 64), scored)
    assert not targets[rest].any()
    gaps.append((scored - 8) // 2 + 1)
    filler.append(inputs[rest])
  if random_filler:
    assert set(np.concatenate(filler)) == set(range(32))
  else:
    assert not np.concatenate(filler).any()
  shares = np.bincount(np.concatenate(gaps), minlength=29)[1:] / 256
  np.testing.assert_allclose(shares, slot_shares(28), atol=0.1)


def slot_shares(slots, draws=4, a=0.01, trials=2000):
  """Returns how often each of the slots is drawn, by NumPy's own sampling without replacement."""
  weights = a * np.arange(1, slots + 1)**(a - 1)
  rng = np.random.default_rng(0)
  picks = [
      rng.choice(slots, draws, replace=False, p=weights / weights.sum()) for _ in range(trials)
  ]
  return np.bincount(np.concatenate(picks), minlength=slots) / trials


def test_induction_asks_for_what_followed_the_trigger():
  batch = draw(make('induction', 'decoder', length=12))
  places = set()
  for inputs, targets, weights in zip(batch['inputs'], batch['targets'], batch['weights']):
    assert list(np.flatnonzero(weights)) == [11]
    first, last = np.flatnonzero(inputs == SEP)
    assert last == 11 and targets[11] == inputs[first + 1]
    assert (inputs[inputs != SEP] >= RESERVED).all()
    places.add(first)
  assert places == set(range(10))


@pytest.mark.parametrize('length', [4, 14])
def test_associative_recall_asks_for_the_value_of_a_key(length):
  batch = draw(make('associative_recall', 'decoder', length=length, vocab_size=RESERVED + 7))
  tables = set()
  for inputs, targets, weights in zip(batch['inputs'], batch['targets'], batch['weights']):
    table = {}
    for key, value in inputs[:-2].reshape(-1, 2):
      assert RESERVED <= key < RESERVED + 3 <= value < RESERVED + 7
      assert table.setdefault(key, value) == value
    np.testing.assert_array_equal(inputs[1:], targets[:-1])
    assert inputs[-2] == SEP and targets[-1] == table[inputs[-1]]
    assert list(np.flatnonzero(weights)) == [length - 1]
    tables |= set(table.items())
  assert len(tables) == 3 * 4  # Over the rows, every key has every value.


@pytest.mark.parametrize('length, num_classes', [(9, 3), (2, 2), (1, 2)])
def test_majority_has_one_winner(length, num_classes):
  batch = draw(make('majority', 'encoder', length=length, num_classes=num_classes), batch_size=512)
  lengths, leads = set(), set()
  for inputs, mask, target in zip(batch['inputs'], batch['input_mask'], batch['targets']):
    tokens = strip(inputs)
    np.testing.assert_array_equal(mask, np.arange(length + 1) < len(tokens))
    assert tokens[0] == BOS
    counts = [tokens.count(RESERVED + c) for c in range(num_classes)]
    assert sum(counts) == len(tokens) - 1
    lead = counts[target] - max(counts[:target] + counts[target + 1:])
    assert lead > 0
    lengths.add(len(tokens) - 1)
    leads.add(lead)
  assert lengths == set(range((length + 1) // 2, length + 1))
  assert 1 in leads
  share = np.bincount(batch['targets'], minlength=num_classes) / 512
  np.testing.assert_allclose(share, 1 / num_classes, atol=0.09)


def parse(words, num_classes):
  """Reads clauses with a recursive-descent reader; returns the tag of each word."""
  kinds = [('stop', 0) if w == SEP else
           (CATEGORIES[(w - RESERVED) // num_classes], (w - RESERVED) % num_classes) for w in words]
  tags, at = [], 0

  def take(kind, agreement, tag):
    nonlocal at
    assert kinds[at] == (kind, agreement)
    tags.append(tag)
    at += 1

  def phrase(shift):
    agreement = kinds[at][1]
    take('det', agreement, 1 + shift)
    if kinds[at][0] == 'adj':
      take('adj', agreement, 2 + shift)
    take('noun', agreement, 3 + shift)
    return agreement

  while at < len(kinds):
    take('verb', phrase(0), 4)
    phrase(4)
    take('stop', 0, 8)
  return tags


@pytest.mark.parametrize('length', [8, 33])
def test_tagging_follows_the_grammar(length):
  task = make('tagging', 'encoder', length=length, num_classes=3)
  batch, sizes = draw(task), set()
  for inputs, mask, targets, weights in zip(
      *(batch[x] for x in ('inputs', 'input_mask', 'targets', 'weights'))):
    tokens = strip(inputs)
    tags = [0] + parse(tokens[1:], 3)
    assert tokens[0] == BOS and list(targets) == tags + [0] * (length + 1 - len(tags))
    np.testing.assert_array_equal(mask, np.arange(length + 1) < len(tokens))
    np.testing.assert_array_equal(weights, targets > 0)
    sizes.add(len(tokens))
  assert len(sizes) > (2 if length == 8 else 10)


def restore(inputs, num_classes):
  """Tells every hidden word of a text from the words around it."""
  words = list(inputs)
  closed = 0

  def category(word):
    return 'stop' if word in (SEP, BOS) else CATEGORIES[(word - RESERVED) // num_classes]

  for at in range(1, len(words)):
    before = category(words[at - 1])
    if words[at] == MASK:
      after = category(words[at + 1]) if at + 1 < len(words) else 'end'
      if before in ('verb', 'stop'):
        kind, shown = 'det', words[at + 1]
      elif before == 'noun':
        kind, shown = 'verb', words[at - 1]
      else:
        kind, shown = ('adj' if after == 'noun' else 'noun'), words[at - 1]
      word = RESERVED + CATEGORIES.index(kind) * num_classes + (shown - RESERVED) % num_classes
      words[at] = SEP if kind == 'verb' and closed % 2 else word
    closed += category(words[at]) in ('verb', 'stop')
  return words


@pytest.mark.parametrize('mask_rate', [0.01, 0.4])
def test_hidden_words_can_be_told(mask_rate):
  task = make('masked', 'encoder', length=40, num_classes=3, mask_rate=mask_rate)
  batch, hidden_share = draw(task, batch_size=256), []
  for inputs, mask, targets, weights in zip(
      *(batch[x] for x in ('inputs', 'input_mask', 'targets', 'weights'))):
    tokens, hidden = strip(inputs), np.flatnonzero(inputs == MASK)
    np.testing.assert_array_equal(hidden, np.flatnonzero(weights))
    np.testing.assert_array_equal(mask, np.arange(41) < len(tokens))
    assert len(hidden) and hidden.min() > 0 and (np.diff(hidden) > 1).all()
    np.testing.assert_array_equal(np.where(inputs == MASK, MASK, targets), inputs)
    parse(strip(targets)[1:], 3)
    assert restore(tokens, 3) == strip(targets)
    hidden_share.append(len(hidden) / (len(tokens) - 1))
  assert np.mean(hidden_share) < (0.1 if mask_rate == 0.01 else 0.35)


def test_a_tag_for_every_role():
  tags = draw(make('tagging', 'encoder'))['targets']
  assert set(np.unique(tags)) == set(range(grammar.NUM_TAGS))
