"""Config: bounds and rules, each refusal naming the field, both values and the way out."""

import dataclasses

import attn
from experiments import config as config_lib
from experiments import parts
from experiments import tasks
from experiments.config import Config, FIELDS, validate
from experiments.presets import PRESETS
import pytest

BAD = [
    (dict(heads=3), 'heads=3 does not divide model_dim=64; use heads=2 or 4'),
    (dict(heads=6, kv_heads=4, model_dim=66), 'kv_heads=4 does not divide heads=6'),
    (dict(positions='rope', heads=4, model_dim=12), 'rope.*model_dim=12 / heads=4 is 3'),
    (dict(micro_batches=9, batch_size=8), 'micro_batches=9 exceeds batch_size=8; use at most 8'),
    (dict(warmup_steps=50, steps=50), 'warmup_steps=50 .*steps=50 .*use warmup_steps=5'),
    (dict(model='seq2seq', cross_attention='local'), 'cross_attention=local cannot .*vanilla'),
    (dict(attention='linformer', positions='t5'), 'attention=linformer cannot .*positions=t5'),
    (dict(attention='performer', attention_dropout=.5), 'performer cannot .*attention_dropout=0.5'),
    (dict(attention='sparse'), 'attention=sparse is not one of: .*strided'),
    (dict(task='kopy'), 'task=kopy is not one of: .*copy'),
    (dict(steps=0), 'steps must be between 1 and 2147483647; got 0'),
    (dict(learning_rate=float('nan')), 'learning_rate must be finite; got nan'),
    (dict(length=1.5), 'length must be of type int; got 1.5'),
    (dict(remat=1), 'remat must be of type bool; got 1'),
]


def test_defaults_and_presets_are_valid_and_read_all_they_set():
  validate(Config())
  for preset in PRESETS.values():
    config = Config(**preset())
    validate(config)
    tasks.make_task(config)
    assert not set(preset()) - parts.used_fields(config)


@pytest.mark.parametrize('values, message', BAD)
def test_a_value_that_cannot_be_is_refused_with_the_way_out(values, message):
  with pytest.raises(ValueError, match=message):
    validate(Config(**values))


def test_every_bound_is_checked_and_its_edge_is_allowed():
  for field in FIELDS.values():
    for bound, beyond in zip(field.metadata['bounds'], (-1, 1)):
      if bound is None:
        continue
      config_lib._check_field(field, bound)
      with pytest.raises(ValueError, match=f'{field.name} must be .*{bound}'):
        config_lib._check_field(field, bound + beyond)


def test_every_field_says_what_it_means_and_has_a_group():
  for field in FIELDS.values():
    assert len(field.metadata['help']) > 5 and field.metadata['group']


def test_warmup_is_a_tenth_unless_given():
  assert Config(steps=50).warmup == 5
  assert Config(steps=50, warmup_steps=0).warmup == 0


def test_places_of_each_family():
  places = Config(model='seq2seq', attention='local', decoder_attention='strided').places()
  assert {name: place.variant for name, place in places.items()} == {
      'encoder': 'local', 'decoder': 'strided', 'cross': 'vanilla'}  # yapf: disable
  assert places['decoder'].causal and not places['encoder'].causal
  assert list(Config(model='encoder').places()) == ['encoder']
  assert list(Config(model='decoder').places()) == ['decoder']
  crossing = Config(model='seq2seq', attention='linformer').places()['cross']
  assert crossing.variant == 'linformer' and crossing.field == 'attention'


def test_each_variant_is_accepted_where_its_row_says_so():
  for name, variant in attn.VARIANTS.items():
    config = Config(attention=name, positions='alibi')
    if {'causal', 'position_bias'} <= variant.supports:
      validate(config)
    else:
      with pytest.raises(ValueError, match=f'attention={name} cannot'):
        validate(config)


def test_config_is_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    Config().steps = 3
