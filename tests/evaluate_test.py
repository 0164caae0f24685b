"""Scores against a NumPy count, over batches of uneven weight."""

import dataclasses

from experiments import decode
from experiments.config import Config
from experiments.evaluate import count_correct, make_evaluate, MODEL
from experiments.models import build_model
from experiments.step import stream
from experiments.tasks import make_task
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import harness
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


def written_by_hand(forward, batch, eos_id):
  """Greedy answers by whole passes over what has been written so far, and which are right."""
  inputs = np.array(batch['inputs'])
  scored = np.asarray(batch['weights']) > 0
  first, count = scored.argmax(1), scored.sum(1)
  right = np.ones(len(inputs), bool)
  for b, (start, number) in enumerate(zip(first, count)):
    row = {name: np.array(x[b:b + 1]) for name, x in batch.items()}
    row['inputs'][0, start + 1:] = 0
    for t in range(start, start + number):
      token = int(np.argmax(forward(row)[0, t]))
      right[b] &= token == batch['targets'][b, t]
      if token == eos_id:
        right[b] &= t == start + number - 1
        break
      if t + 1 < inputs.shape[1]:
        row['inputs'][0, t + 1] = token
  return right


@pytest.mark.sampled(3)
@pytest.mark.parametrize('task, model', [('copy', 'decoder'), ('sort', 'seq2seq'),
                                         ('induction', 'decoder')])
def test_free_running_is_what_whole_passes_write(task, model):
  """On a model that is right about some of its answers: it is told which token to prefer."""
  config = Config(task=task,
                  model=model,
                  length=4,
                  vocab_size=7,
                  model_dim=16,
                  num_layers=1,
                  batch_size=64,
                  eval_batches=2)
  made = make_task(config)
  module = build_model(config, made)
  batch = made.sample(stream(config, 'eval', 0), 64)
  params = harness.jit(
      lambda: module.init({'params': jax.random.key(3)}, batch, draw=0)['params'])()
  eos_id = made.answer.eos_id
  bias = params['head']['dense']['bias']
  params['head']['dense']['bias'] = bias.at[eos_id if eos_id else 5].set(1.)
  forward = harness.jit(lambda row: module.apply({'params': params}, row, draw=0))
  found = [made.sample(stream(config, 'eval', i), 64) for i in range(2)]
  right = np.concatenate([written_by_hand(forward, batch, eos_id) for batch in found])
  scores = make_evaluate(config, made, module)(params)
  assert scores[MODEL].free_running == pytest.approx(right.mean())
  off = make_evaluate(dataclasses.replace(config, free_running=False), made, module)(params)
  assert off[MODEL].free_running is None and off[MODEL][:3] == scores[MODEL][:3]
  if task == 'induction':  # one token: no difference
    assert right.any() and scores[MODEL].free_running == scores[MODEL].exact_match


def test_an_answer_is_right_throughout_or_wrong():
  batch = dict(weights=jnp.asarray([[0, 1, 1, 0]] * 4, jnp.float32),
               targets=jnp.asarray([[9, 5, 2, 0]] * 4, jnp.int32))
  tokens = jnp.asarray([[5, 2, 0, 0], [5, 2, 7, 7], [5, 0, 2, 0], [2, 0, 0, 0]], jnp.int32)
  assert decode.is_right(tokens, batch).tolist() == [True, True, False, False]
  nothing = batch | {'weights': jnp.zeros((4, 4))}
  assert not decode.is_right(tokens, nothing).any()
