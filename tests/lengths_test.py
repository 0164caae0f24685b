"""Evaluation at other lengths than those trained on."""

import json

from experiments import train
from experiments.config import Config
from experiments.models import build_model
from experiments.tasks import at_length
from experiments.tasks import make_task
import jax
import numpy as np
import pytest

from tests import harness
from tests.train_program_test import fixture_handlers  # noqa: F401  train.main sets handlers

SMALL = ('--model_dim=8', '--heads=2', '--num_layers=1', '--steps=3', '--batch_size=4',
         '--eval_every=0', '--eval_batches=1')  # yapf: disable


@pytest.mark.parametrize('task, model', [('copy', 'decoder'), ('sort', 'seq2seq'),
                                         ('majority', 'encoder')])
def test_every_row_has_the_length_asked_for(task, model):
  at = at_length(Config(task=task, model=model, length=3), 7)
  batch = jax.jit(at.sample, static_argnums=1)(jax.random.key(0), 32)
  scored = np.asarray(batch['weights']).reshape(32, -1).sum(1)
  tokens = np.asarray(batch['input_mask']).sum(1) if model == 'encoder' else scored
  np.testing.assert_array_equal(tokens, 8)  # and a BOS, or an EOS


@pytest.mark.sampled(3)
@pytest.mark.parametrize('options', [
    ('--task=copy', '--attention=bigbird', '--block_size=4'),
    ('--task=majority', '--model=encoder', '--attention=linformer'),
    ('--task=induction', '--attention=performer', '--vocab_size=9'),
], ids=str)  # yapf: disable
def test_a_run_is_evaluated_at_every_length(tmp_path, capsys, options):
  command = ['train', *SMALL, *options, '--length=6', '--eval_lengths=3, 12',
             f'--workdir={tmp_path}']  # yapf: disable
  assert train.main(command) == 0
  shown = capsys.readouterr().out
  assert 'evaluating at length 12' in shown and 'the model at other lengths' in shown
  summary = json.loads((tmp_path / 'summary.json').read_text())
  assert list(summary['by_length']) == ['3', '12']
  for scores in summary['by_length'].values():
    assert set(scores) == set(summary['scores'])
    assert scores['model']['loss'] > 0 and 0 <= scores['model']['accuracy'] <= 1
    free = scores['model']['free_running']
    assert free is None if 'majority' in options[0] else 0 <= free <= scores['model']['exact_match']
  assert train.main(command) == 0
  assert 'the model at other lengths' in capsys.readouterr().out


def test_a_causal_model_of_random_blocks_is_one_function_at_any_length():
  config = Config(attention='bigbird', block_size=2, num_random=2, length=9, heads=2, model_dim=8)
  model = build_model(config, make_task(config))
  tokens = jax.random.randint(jax.random.key(0), (2, 20), 5, 30)
  params = model.init({'params': jax.random.key(1)}, {'inputs': tokens}, draw=0)
  apply = harness.jit(lambda tokens: model.apply(params, {'inputs': tokens}, draw=0))
  np.testing.assert_allclose(apply(tokens[:, :13]), apply(tokens)[:, :13], atol=2e-6)


@pytest.mark.parametrize('lengths', ['x', '0', '5,5', '-3', '4;5'])
def test_lengths_that_are_none_are_refused(tmp_path, capsys, lengths):
  assert train.main(['train', *SMALL, f'--eval_lengths={lengths}', f'--workdir={tmp_path}/x']) == 2
  assert 'eval_lengths must be different positive integers' in capsys.readouterr().err


def test_a_length_that_the_task_has_not_is_refused(tmp_path, capsys):
  options = ('--task=mqar', '--eval_lengths=33', f'--workdir={tmp_path}/x')
  assert train.main(['train', *SMALL, *options]) == 2
  assert 'length must be even' in capsys.readouterr().err
