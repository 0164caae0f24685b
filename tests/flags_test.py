"""The command line: what it accepts, and one clear line for what it does not."""

import dataclasses

import attn
from experiments import flags
from experiments import parts
from experiments import tasks
from experiments.config import Config, FIELDS, UserError
import jax
import pytest

REFUSED = [
    ('--atention=local', "Unknown command line flag 'atention'. Did you mean: attention"),
    ('--attention=performer --window=8', '--window is not read .*performer; .*attention local'),
    ('--heads=3 --model_dim=64', 'heads=3 does not divide model_dim=64'),
    ('steps=5', 'did you mean --steps=5?'),
    ('--seed=1 steps=5', 'did you mean --steps=5?'),
    ('-- step=5', 'did you mean --steps=5?'),
    ('banana', "unexpected argument 'banana'"),
    ('--steps', 'Missing value for flag --steps'),
    ('--steps=x', 'flag --steps=x'),
    ('--steps=0', '0 is not an integer in the range'),
    ('--attention=lokal', 'value should be one of <.*local'),
    ('--preset=nosuch', 'preset=nosuch is not one of'),
    ('--model=encoder', 'copy'),
    ('--cross_attention=vanilla', '--cross_attention is not read .*model seq2seq'),
    ('--attention=local --decoder_attention=vanilla', '--attention is not read'),
    ('--num_pairs=3', '--num_pairs is not read .*task mqar'),
    ('--attention=local --window=8 --kernel=relu', '--kernel is not read .*performer'),
    ('--task=listops --pooling=first', '--pooling is not read by task=listops model=decoder'),
    ('--task=listops --model=encoder --nofree_running', '--free_running is not read'),
    ('--task=parity --model=decoder --pooling=first', '--pooling is not read .*with model encoder'),
    ('--task=parity --model=encoder --nofree_running',
     '--free_running is not .*with model decoder'),
    ('--vocab_size=2', 'vocab_size'),
    ('--no-remat', '--no-remat is no flag; did you mean --noremat?'),
    ('--no_remat', '--no_remat is no flag; did you mean --noremat?'),
    ('--no-such', "Unknown command line flag 'no-such'"),
    ('--verbosity=1', "Unknown command line flag 'verbosity'"),
]


def parse(line):
  return flags.parse(['train', *line.split()])


@pytest.mark.parametrize('line, message', REFUSED)
def test_a_refusal_is_one_line(line, message):
  with pytest.raises(UserError, match=message) as caught:
    parse(line)
  assert '\n' not in str(caught.value)


def test_no_flag_gives_the_default():
  assert parse('') == Config()


def test_every_field_is_a_flag():
  values = flags._define()
  given = dict(length=9, tie_embeddings=True, dropout=0.25, kv_heads=2, workdir='x', norm='post')
  line = ' '.join(f'--{name}={value}' for name, value in given.items())
  assert parse(line) == dataclasses.replace(Config(), **given)
  assert set(FIELDS) | {'help', 'h'} == set(values)


@pytest.mark.parametrize('name', attn.VARIANTS)
def test_an_option_of_a_variant_is_read_or_refused(name):
  for field in FIELDS.values():
    if field.metadata['group'] != 'attention':
      continue
    line = f'--attention={name} --{field.name}={field.default}'
    if field.name in parts.variant_fields(name):
      parse(line)
    else:
      with pytest.raises(UserError, match=f'--{field.name} is not read'):
        parse(line)


def test_every_option_of_a_variant_is_a_field():
  for variant in attn.VARIANTS.values():
    sizes = dict.fromkeys(variant.sizes, 2)
    arrays = variant.init(jax.random.key(0), attn.Dims((), 4, 4, 2, 2, 8, 8), **sizes)
    assert {*variant.options, *variant.sizes} - set(arrays) <= set(FIELDS)


@pytest.mark.parametrize('task', tasks.TASKS)
def test_an_option_of_a_task_is_read_or_refused(task):
  model = tasks.TASKS[task].models[0]
  for field in FIELDS.values():
    if field.metadata['group'] != 'task':
      continue
    line = f'--task={task} --model={model} --{field.name}={field.default}'
    if field.name in tasks.TASKS[task].options:
      parse(line)
    else:
      with pytest.raises(UserError, match=f'--{field.name} is not read'):
        parse(line)


def test_segment_belongs_to_the_causal_linformer():
  parse('--attention=linformer --segment=4')
  with pytest.raises(UserError, match='--segment is not read'):
    parse('--task=majority --model=encoder --attention=linformer --segment=4')


def test_a_flag_overrides_its_preset(monkeypatch):
  monkeypatch.setitem(flags.PRESETS, 'small', lambda: dict(length=5, steps=30))
  config = parse('--preset=small --steps=40')
  assert (config.length, config.steps) == (5, 40)


def test_help_shows_every_flag_with_who_reads_it():
  assert parse('--help') is None and parse('-h') is None
  text = flags.help_text('prog')
  for name in FIELDS:
    assert f'--{name}=' in text or f'--[no]{name} ' in text
  words = ' '.join(text.split())
  assert 'For attention strided, fixed' in words and 'For model seq2seq' in words
  assert 'mqar (decoder)' in words and 'pairs of key and value in a sequence. For mqar (4)' in words
  assert max(map(len, text.splitlines())) <= 100
