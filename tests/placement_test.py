"""Training on a mesh is training on one device, and a run goes on where another layout left it."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments import placement
from experiments import train
from experiments.config import Config, validate
from tests import tolerances

SMALL = ('--model_dim=16 --heads=4 --num_layers=1 --steps=6 --batch_size=8 --eval_every=3 '
         '--eval_batches=1 --log_every=1 --checkpoint_every=3 --warmup_steps=1').split()


def trained(path, *options):
  assert train.main(['train', *SMALL, *options, f'--workdir={path}']) == 0
  return [json.loads(line) for line in (path / 'metrics.jsonl').read_text().splitlines()]


def assert_same(rows, wanted):
  assert [row['step'] for row in rows] == [row['step'] for row in wanted]
  for row, other in zip(rows, wanted):
    assert row.keys() == other.keys()
    for name in row.keys() - {'baselines'}:
      tolerances.assert_close(row[name], other[name], 2e-4, name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize('options', [
    ('--task=copy', '--length=7', '--attention=local', '--window=3', '--dropout=0.1',
     '--attention_dropout=0.1', '--positions=t5'),
    ('--task=copy', '--length=7', '--model=seq2seq', '--kv_heads=2', '--micro_batches=2'),
    ('--task=majority', '--model=encoder', '--length=15', '--attention=performer',
     '--num_features=8'),
], ids=['decoder', 'seq2seq', 'encoder'])  # yapf: disable
def test_a_mesh_changes_nothing(tmp_path, options):
  wanted = trained(tmp_path / 'one', *options)
  assert_same(trained(tmp_path / 'mesh', *options, '--mesh=data:2,model:2,sequence:2'), wanted)


def test_a_run_goes_on_on_another_layout(tmp_path):
  options = ('--task=copy', '--length=7', '--nofree_running')
  wanted = trained(tmp_path / 'one', *options)
  half = tmp_path / 'half'
  trained(half, *options, '--mesh=data:4,model:2')
  for name in ('summary.json', 'checkpoints/6'):  # so that it goes on from step 3
    (half / name).rename(tmp_path / name.replace('/', '-'))
  assert_same(trained(half, *options, '--mesh=sequence:8'), wanted)


def test_processes_share_a_run_or_are_refused(monkeypatch):
  config = Config(task='copy', batch_size=64)
  assert placement.make_mesh(config) is None  # alone
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  assert placement.make_mesh(config).shape['data'] == 8
  with pytest.raises(ValueError, match='batch_size=60 is no multiple of their 8 devices'):
    placement.make_mesh(dataclasses.replace(config, batch_size=60))
  with pytest.raises(ValueError, match='mesh=data:4 uses 4 devices; the 2 processes have 8'):
    placement.make_mesh(dataclasses.replace(config, mesh='data:4'))


def test_every_device_keeps_its_part():
  config = Config(task='copy', mesh='data:2,model:4', model_dim=16, heads=4, length=4)
  experiment = train.build(config)
  params = experiment.abstract.params['decoder']['layer_0']
  shard = lambda leaf: leaf.sharding.shard_shape(leaf.shape)
  assert shard(params['self_attention']['query']['kernel']) == (8, 1, 4)
  assert shard(params['self_attention']['out']['kernel']) == (1, 4, 8)
  assert shard(params['mlp_in']['kernel']) == (8, 16)
  assert shard(params['mlp_out']['kernel']) == (16, 8)
  whole = sum(leaf.size for leaf in jax.tree.leaves(experiment.abstract))
  here = sum(np.prod(shard(leaf)) for leaf in jax.tree.leaves(experiment.abstract))
  assert here < whole / 4, 'all large ones are cut by all eight devices'


@pytest.mark.parametrize('mesh, message', [
    ('data', 'must list axes and their sizes'),
    ('rows:2', 'axes are data, model, sequence'),
    ('data:0', 'must list axes'),
    ('data:2,data:2', 'must list axes'),
    ('data:3', 'cuts batch_size=64 into 3 along data, which does not divide it'),
    ('model:8', 'cuts heads=4 into 8 along model'),
])
def test_a_mesh_that_does_not_fit_is_refused(mesh, message):
  with pytest.raises(ValueError, match=message):
    validate(Config(mesh=mesh))


def test_too_few_devices_and_tokens_are_told(tmp_path, capsys):
  with pytest.raises(ValueError, match='mesh=data:16 needs 16 devices; there are 8.*XLA_FLAGS'):
    placement.make_mesh(Config(mesh='data:16'))
  assert train.main(['train', '--task=copy', '--length=6', '--mesh=sequence:4',
                     f'--workdir={tmp_path}']) == 2  # yapf: disable
  err = capsys.readouterr().err
  assert err.count('\n') == 1 and 'T = 14 is no multiple of the 4 devices along sequence' in err
