"""What heads look at: scores of heads made by hand, and the program on small runs."""

import json

from experiments import heads
from experiments import inspect
from experiments import runs
from experiments import train
import numpy as np
import pytest

from tests.train_program_test import fixture_handlers  # noqa: F401  train.main sets handlers

TOKENS = np.array([[7, 8, 9, 7, 8, 9, 7, 8]])
T = TOKENS.shape[1]
REAL = np.ones((1, T), bool)


def weights_to(places):
  """A head [1, 1, T, T] whose query t looks at key places[t] alone."""
  return np.eye(T)[np.asarray(places)][None, None]


def judged(*made, real=REAL, kind='causal'):
  return heads.judge(np.concatenate(made, 1), TOKENS, TOKENS, real, real, kind)


def test_heads_made_by_hand_have_their_roles():
  t = np.arange(T)
  previous, first = weights_to(np.maximum(t - 1, 0)), weights_to(0 * t)
  duplicate = weights_to(np.where(t >= 3, t - 3, t))
  induction = weights_to(np.where(t >= 3, t - 2, 0))
  even = np.tril(np.ones((T, T)))[None, None] / (t + 1)[:, None]
  found = judged(previous, first, duplicate, induction, even)
  assert [head.role for head in found] == ['previous', 'first', 'duplicate', 'induction', 'uniform']
  assert found[0].previous == found[1].first == found[2].duplicate == found[3].induction == 1
  assert found[0].entropy == 0 and found[4].uniform == pytest.approx(1)
  assert found[4].entropy == pytest.approx(np.mean(np.log(t + 1)))
  assert found[0].distance == pytest.approx(7 / 8) and found[1].distance == pytest.approx(3.5)
  # A query looks at itself, or at its next token, of no account as a copy of it.
  assert judged(weights_to(t))[0].duplicate == 0
  assert judged(weights_to(np.minimum(t + 1, T - 1)), kind='full')[0].induction == 0
  later = judged(weights_to(np.where(t < 5, t + 3, t)), kind='full')[0]
  assert later.duplicate == pytest.approx(5 / 8)
  crossed = judged(weights_to(t), kind='cross')[0]
  assert crossed.duplicate == 1 and np.isnan(crossed.distance) and np.isnan(crossed.previous)


def test_padding_counts_nowhere():
  real = REAL & (np.arange(T) < 4)
  whole, cut = np.tril(np.ones((T, T))), np.tril(np.ones((T, T))) * real[:, None, :]
  a, b = (judged(x.reshape(1, 1, T, T), real=real)[0] for x in (whole, cut))
  assert a == b and a.first == pytest.approx(np.mean([1, 1 / 2, 1 / 3, 1 / 4]))
  signed = judged(-whole[None, None], real=real)[0]
  assert signed == a


SMALL = ('--model_dim=8 --heads=2 --num_layers=2 --length=4 --steps=3 --batch_size=4 '
         '--eval_every=0 --eval_batches=1 --nofree_running').split()


@pytest.mark.sampled(4)
@pytest.mark.parametrize('model, task, attention, names', [
    ('decoder', 'copy', 'vanilla', ['decoder layer 0', 'decoder layer 1']),
    ('decoder', 'copy', 'performer', ['decoder layer 0', 'decoder layer 1']),
    ('encoder', 'tagging', 'linformer', ['encoder layer 0', 'encoder layer 1']),
    ('seq2seq', 'copy', 'local', ['encoder layer 0', 'encoder layer 1', 'cross layer 0',
                                  'cross layer 1', 'decoder layer 0', 'decoder layer 1']),
])  # yapf: disable
def test_a_run_is_shown(tmp_path, capsys, model, task, attention, names):
  options = [x for x in SMALL if model != 'encoder' or 'free' not in x and 'length' not in x]
  assert train.main(['train', *options, f'--model={model}', f'--task={task}',
                     f'--attention={attention}', f'--workdir={tmp_path}/run']) == 0  # yapf: disable
  capsys.readouterr()
  assert inspect.main(['inspect', f'--workdir={tmp_path}/run', '--rows=3', '--row=2']) == 0
  out = capsys.readouterr().out
  made = json.loads((tmp_path / 'run' / 'inspect' / 'heads.json').read_text())
  assert list(made) == names and all(len(found) == 2 for found in made.values())
  assert all(f'| {name} head 1 |' in out for name in names)
  assert (tmp_path / 'run' / 'inspect' / 'attention.png').read_bytes()[:4] == b'\x89PNG'
  experiment, params, _ = runs.restore(runs.read_config(str(tmp_path / 'run')))
  batch = inspect._batch(experiment, None, 3)
  for place in inspect.look(experiment, params, batch):
    if attention != 'linformer':  # whose queries see nothing where all slots are padding
      np.testing.assert_allclose(place.weights.sum(-1), 1, atol=1e-5)
    if 'decoder' in place.name:
      assert not np.triu(place.weights, 1).any()
  if model != 'seq2seq':
    options = (f'--workdir={tmp_path}/run', '--prompt=BOS 5 6 SEP', f'--out={tmp_path}/there')
    assert inspect.main(['inspect', *options]) == 0
    assert (tmp_path / 'there' / 'heads.md').exists()
  else:
    assert inspect.main(['inspect', f'--workdir={tmp_path}/run', '--prompt=5']) == 2
    assert 'for encoders and decoders' in capsys.readouterr().err


@pytest.mark.parametrize('options, message', [
    ((), '--workdir must name the run'),
    (('--workdir=/nowhere',), 'is no run'),
    (('--workdir=x', '--row=64'), '--row=64 is none of the 64 sequences'),
    (('--workdir=x', 'y'), "unexpected argument 'y'"),
    (('--wordkir=x',), 'wordkir'),
])  # yapf: disable
def test_mistakes_are_one_line(capsys, options, message):
  assert inspect.main(['inspect', *options]) == 2
  err = capsys.readouterr().err
  assert err.startswith('error: ') and err.count('\n') == 1 and message in err


def test_help(capsys):
  assert inspect.main(['inspect', '--help']) == 0
  assert '--prompt=' in capsys.readouterr().out
