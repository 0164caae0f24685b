"""Scores against a NumPy count, over batches of uneven weight."""

import dataclasses

from experiments.evaluate import count_correct, make_evaluate, MODEL
from experiments.step import stream
import jax
import numpy as np

from tests import tiny


def oracle(answer, targets, weights):
  """(right weight, weight, right rows, scored rows), position by position."""
  right = weight = exact = rows = 0.
  for row in range(len(targets)):
    good, scored = True, False
    for column in range(targets.shape[1]):
      if weights[row, column] == 0:
        continue
      scored = True
      weight += weights[row, column]
      if answer[row, column] == targets[row, column]:
        right += weights[row, column]
      else:
        good = False
    rows += scored
    exact += scored and good
  return right, weight, exact, rows


def test_counts():
  rng = np.random.default_rng(0)
  targets, answer = rng.integers(0, 2, (2, 9, 3)).astype(np.int32)
  weights = rng.choice([0., .5, 1.], (9, 3)).astype(np.float32)
  weights[4] = 0
  counts = count_correct(answer, dict(targets=targets, weights=weights))
  np.testing.assert_allclose(counts, oracle(answer, targets, weights), rtol=1e-6)


def test_counts_of_one_answer_a_row():
  batch = dict(targets=np.array([1, 2, 3], np.int32), weights=np.array([1, 1, 0], np.float32))
  assert list(map(float, count_correct(np.array([1, 0, 3], np.int32), batch))) == [1, 2, 1, 2]


def test_batches_add_up_before_one_division():
  config, params = tiny.CONFIG, tiny.new_state().params
  scores = make_evaluate(config, tiny.TASK, tiny.Model())(params)
  total, loss = np.zeros((3, 4)), 0.
  for index in range(config.eval_batches):
    batch = jax.device_get(tiny.sample(stream(config, 'eval', index), config.batch_size))
    logits = np.asarray(tiny.Model().apply({'params': params}, batch), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss -= (np.take_along_axis(log_probs, batch['targets'][..., None], -1)[..., 0] *
             batch['weights']).sum()
    answers = logits.argmax(-1), batch['inputs'], np.zeros_like(batch['targets'])
    total += [oracle(answer, batch['targets'], batch['weights']) for answer in answers]
  for name, (right, weight, exact, rows) in zip((MODEL, 'same again', 'zero'), total):
    np.testing.assert_allclose(scores[name].accuracy, right / weight, rtol=1e-6)
    np.testing.assert_allclose(scores[name].exact_match, exact / rows, rtol=1e-6)
  np.testing.assert_allclose(scores[MODEL].loss, loss / total[0, 1], rtol=1e-5)
  assert scores['zero'].loss is None
  assert list(scores)[0] == MODEL


def test_held_out_batches_are_not_training_batches():
  config = tiny.CONFIG
  batches = [tiny.sample(stream(config, name, index), 5)['inputs'].tolist()
             for name in ('data', 'eval') for index in range(3)]  # yapf: disable
  assert all(one != other for i, one in enumerate(batches) for other in batches[:i])


def test_evaluation_draws_nothing():
  evaluate = make_evaluate(dataclasses.replace(tiny.CONFIG, dropout=.5), tiny.TASK, tiny.Model(.5))
  params = tiny.new_state().params
  assert evaluate(params) == evaluate(params)
