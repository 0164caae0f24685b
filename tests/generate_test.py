"""The generating program as a person meets it, on runs of a few steps."""

import io
import re
import shutil
import sys

from experiments import decode
from experiments import generate
from experiments import train
from experiments.config import Config
from experiments.models import build_model
from experiments.tasks import make_task
from experiments.workdir import Workdir
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import harness
from tests.train_program_test import fixture_handlers  # noqa: F401  train.main sets handlers

SMALL = ('--model_dim=8', '--heads=2', '--num_layers=1', '--length=4', '--vocab_size=9',
         '--steps=6', '--batch_size=4', '--eval_every=0', '--eval_batches=1')  # yapf: disable


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """The workdirs of one decoder and one seq2seq model."""
  root = tmp_path_factory.mktemp('runs')
  for model in ('decoder', 'seq2seq'):
    options = (*SMALL, f'--model={model}', f'--workdir={root / model}', '--nofree_running')
    assert train.main(['train', *options]) == 0
  return root


def run(capsys, *options):
  capsys.readouterr()
  status = generate.main(['generate', *options])
  return status, *capsys.readouterr()


@pytest.mark.sampled(2)
@pytest.mark.parametrize('model', ['decoder', 'seq2seq'])
def test_answers_come_a_line_for_each_prompt(runs, capsys, model, monkeypatch):
  workdir = f'--workdir={runs / model}'
  status, out, err = run(capsys, workdir, '--prompt=5 6 7', '--prompt=8', '--log_probs')
  assert status == 0 and 'step 6 of 6' in err
  lines = out.splitlines()
  assert [line.split(' -> ')[0] for line in lines] == ['5 6 7', '8']
  end = r'( \.\.\. \(no room for more\))?'
  assert all(re.fullmatch(rf'.* -> ((\w+) \(-?\d+\.\d{{3}}\) ?)+{end}', line) for line in lines)
  words = re.sub(r' \(.*?\)', '', out)
  monkeypatch.setattr(sys, 'stdin', io.StringIO('5, 6 7\n\n8\n'))
  status, again, _ = run(capsys, workdir)
  assert status == 0 and again.replace('5, 6', '5 6') == words
  # The room is the model's 10 (or 5) positions, of which framing takes some.
  longest = max(len(line.split(' -> ')[1].split()) for line in words.splitlines())
  assert longest <= (10 if model == 'decoder' else 5)


def test_greedy_is_what_the_model_finds_best_at_every_place(runs, capsys):
  """The answer beside logits of whole passes over what has been written so far."""
  experiment, params, _ = generate.load(str(runs / 'decoder'))
  _, out, _ = run(capsys, f'--workdir={runs / "decoder"}', '--prompt=5 6', '--max_length=4')
  tokens = [1, 5, 6, 3]  # BOS 5 6 SEP
  forward = harness.jit(
      lambda inputs: experiment.model.apply({'params': params}, {'inputs': inputs}, draw=0))
  for word in out.split(' -> ')[1].split():
    padded = np.zeros((1, 10), np.int32)
    padded[0, :len(tokens)] = tokens
    best = int(jnp.argmax(forward(jnp.asarray(padded))[0, len(tokens) - 1]))
    assert word == ('EOS' if best == 2 else str(best))
    tokens.append(best)


def test_beams_are_listed_best_first(runs, capsys):
  status, out, _ = run(capsys, f'--workdir={runs / "decoder"}', '--prompt=5 6', '--beam_size=4',
                       '--num_results=3', '--log_probs')
  scores = [float(x) for x in re.findall(r'\[score (-\d+\.\d+) log-probability -\d', out)]
  assert status == 0 and len(scores) == 3 and scores == sorted(scores, reverse=True)


def test_raw_prompts_are_framed_by_hand(runs, capsys, tmp_path):
  workdir = f'--workdir={runs / "decoder"}'
  path = tmp_path / 'prompts'
  path.write_text('bos 5 6 sep\n')
  _, framed, _ = run(capsys, workdir, '--prompt=5 6')
  _, raw, _ = run(capsys, workdir, '--raw', f'--file={path}')
  assert raw.split(' -> ')[1] == framed.split(' -> ')[1]


def test_a_bad_line_is_told_with_its_number_and_the_others_are_answered(runs, capsys, monkeypatch):
  workdir = f'--workdir={runs / "decoder"}'
  monkeypatch.setattr(sys, 'stdin', io.StringIO('5 6\n\n5 x\n8\n'))
  status, out, err = run(capsys, workdir)
  assert status == 2 and [line.split(' -> ')[0] for line in out.splitlines()] == ['5 6', '8']
  assert "error: standard input, line 3: prompt '5 x': 'x' is no token" in err


def test_a_run_may_be_read_while_it_is_locked_and_is_left_as_it_is(runs, capsys):
  directory = runs / 'decoder'
  experiment, _, _ = generate.load(str(directory))
  files = lambda: {path: path.stat().st_mtime_ns for path in directory.rglob('*')}
  workspace = Workdir(experiment.config)
  try:
    before = files()
    status, out, _ = run(capsys, f'--workdir={directory}', '--prompt=5 6')
    assert status == 0 and out and files() == before
  finally:
    workspace.close()


def test_a_damaged_checkpoint_is_passed_over(runs, capsys, tmp_path):
  directory = tmp_path / 'run'
  shutil.copytree(runs / 'decoder', directory)
  steps = sorted(int(path.name) for path in (directory / 'checkpoints').iterdir())
  newest = directory / 'checkpoints' / str(steps[-1])
  shutil.copytree(newest, newest.with_name(str(steps[-1] + 1)))
  for path in newest.with_name(str(steps[-1] + 1)).rglob('*'):
    if path.is_file():
      path.write_bytes(b'')
  status, out, err = run(capsys, f'--workdir={directory}', '--prompt=5 6')
  assert status == 0 and out and f'checkpoint of step {steps[-1] + 1} cannot be read' in err
  shutil.rmtree(directory / 'checkpoints')
  status, _, err = run(capsys, f'--workdir={directory}', '--prompt=5 6')
  assert status == 2 and 'has no checkpoint yet' in err
  assert not (directory / 'checkpoints').exists()


def test_a_task_without_an_end_says_how_much_is_written(tmp_path, capsys):
  options = [option for option in SMALL if not option.startswith('--length')]
  assert train.main([
      'train', *options, '--length=8', '--task=induction', '--model=decoder',
      f'--workdir={tmp_path}', '--nofree_running'
  ]) == 0
  status, out, err = run(capsys, f'--workdir={tmp_path}', '--prompt=5 3 6 7 3')
  assert status == 0 and 'no token that ends an answer' in err
  assert len(out.split(' -> ')[1].split()) == 8 - 5 + 1 and 'SEP among them' in err
  for prompt in ('5 6 7', '5 SEP 6', '5 SEP 6 SEP 7', 'SEP SEP', '5 SEP MASK SEP'):
    status, out, err = run(capsys, f'--workdir={tmp_path}', f'--prompt={prompt}')
    assert status == 2 and not out and 'is none of the task' in err
  _, out, err = run(capsys, f'--workdir={tmp_path}', '--prompt=5 3 6 7 3', '--max_length=1')
  assert len(out.split(' -> ')[1].split()) == 1 and 'no token' not in err


def test_draws_depend_on_the_seed_alone(runs, capsys):
  draw = lambda seed: run(capsys, f'--workdir={runs / "decoder"}', '--prompt=5 6', f'--seed={seed}',
                          '--temperature=5', '--repetition_penalty=1.5')[1]
  assert draw(0) == draw(0)
  assert len({draw(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize('options, message', [
    ((), '--workdir must name the run'),
    (('--workdir=nowhere',), 'is no run: it has no config.json'),
    (('--workdir=RUN', '--prompt=5 x'), "'x' is no token"),
    (('--workdir=RUN', '--prompt=5 99'), 'the vocabulary is 0 to 8; got 99'),
    (('--workdir=RUN', '--prompt=5 5 5 5 5'), 'made for at most 4 symbols; got 5'),
    (('--workdir=RUN', '--raw', '--prompt=5 5 5 5 5 5 5 5 5 5 5'),
     'is 11 tokens long; the model reads at most 10'),
    (('--workdir=RUN', '--raw', '--prompt='), 'at least one token'),
    (('--workdir=RUN', '--prompt='), 'at least one token'),
    (('--workdir=RUN', '--prompt=5 SEP 6'), 'symbols are the numbers from 5 on'),
    (('--workdir=RUN', '--prompt=0 5'), '--raw takes it as it stands'),
    (('--workdir=RUN', '--prompt=5', '--max_length=9'), 'leaves room for, 8 of the 10'),
    (('--workdir=RUN', '--prompt=5', '--file=x'), 'give one of them'),
    (('--workdir=RUN', '--file=/nowhere'), 'cannot be read from /nowhere'),
    (('--workdir=RUN', '--prompt=5', '--top_k=2'), '--top_k is not read at temperature 0'),
    (('--workdir=RUN', '--prompt=5', '--num_results=2'), 'without --beam_size'),
    (('--workdir=RUN', '--prompt=5', '--beam_size=2', '--temperature=1'), 'by a beam search'),
    (('--workdir=RUN', '--prompt=5', '--beam_size=2', '--num_results=3'), 'exceeds --beam_size=2'),
    (('--workdir=RUN', '--prompt=5', '--repetition_penalty=0'), 'must be greater than 0'),
    (('--workdir=RUN', '5 6'), 'a prompt of several words is written --prompt="7 9 8"'),
    (('--workdir=RUN', '--promt=5'), 'promt'),
],
                         ids=str)
def test_a_mistake_is_one_line_and_status_2(runs, capsys, options, message):
  options = [option.replace('RUN', str(runs / 'decoder')) for option in options]
  status, out, err = run(capsys, *options)
  lines = [line for line in err.splitlines() if not line.startswith(('copy, ', 'a prompt: '))]
  assert status == 2 and not out
  assert len(lines) == 1 and lines[0].startswith('error: ') and message in lines[0]


def test_help_lists_every_flag(capsys):
  status, out, _ = run(capsys, '--help')
  assert status == 0
  for name in generate.Request._fields[:-1]:
    if name not in ('prompts', 'settings'):
      assert f'--{name}=' in out or f'--[no]{name}' in out, name


@pytest.mark.sampled(6)
@pytest.mark.parametrize('attention, positions', [('vanilla', 'rope'), ('local', 'learned'),
                                                  ('bigbird', 't5'), ('linformer', 'sinusoidal'),
                                                  ('performer', 'none'), ('strided', 'alibi')])
@pytest.mark.parametrize('model', ['decoder', 'seq2seq'])
def test_steps_of_a_model_give_its_logits(model, attention, positions):
  """Prompts of different lengths, padded on the right, then the rest token by token."""
  config = Config(model=model,
                  attention=attention,
                  positions=positions,
                  length=4,
                  segment=3,
                  rank=2,
                  num_features=8,
                  kv_heads=2,
                  model_dim=16,
                  num_layers=2,
                  window=3)
  task = make_task(config)
  module, batch = build_model(config, task), task.sample(jax.random.key(1), 3)
  params = harness.jit(
      lambda: module.init({'params': jax.random.key(0)}, batch, draw=0)['params'])()
  lengths, T = np.array([1, 3, 2]), batch['inputs'].shape[1]

  @harness.jit
  def steps(params, batch):
    mask = jnp.arange(3)[None] < jnp.asarray(lengths)[:, None]
    prompt = batch | {'inputs': batch['inputs'][:, :3], 'input_mask': mask}
    step, cache, last = decode.begin(module, params, prompt)
    places = jnp.asarray(lengths)[:, None] + jnp.arange(T - 4)[None]
    rest = jnp.take_along_axis(batch['inputs'], places, 1)
    fed = jnp.concatenate([last[:, None], rest], 1)
    _, logits = jax.lax.scan(lambda cache, tokens: step(cache, tokens)[::-1], cache, fed.T)
    return jnp.moveaxis(logits, 0, 1)

  expected = harness.jit(lambda p, b: module.apply({'params': p}, b, draw=0))(params, batch)
  found = steps(params, batch)
  for b, length in enumerate(lengths):
    np.testing.assert_allclose(found[b], expected[b, length - 1:length + T - 4], atol=2e-5)
