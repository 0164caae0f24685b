"""One experiment as one frozen dataclass: its fields, their bounds, and the rules between them.

The flags are generated from these fields (flags.py), so a field is the only place where an option
is declared. Which options a run really reads follows from the parts it chooses (parts.py).
"""

import dataclasses
import functools
import math
from typing import Any, Callable, NamedTuple

import attn
from attn.backends import IMPLEMENTATIONS

MODELS = ('encoder', 'decoder', 'seq2seq')
POSITION_BIASES = ('alibi', 't5')
MESH_AXES = ('data', 'model', 'sequence')


class UserError(Exception):
  """What a program prints as one line, not as a traceback.

  Attributes:
    exit_status: 2 where the request cannot be met, 1 where a run failed.
  """
  exit_status = 2


Choices = tuple[str, ...] | Callable[[], tuple[str, ...]] | None


def option(default: Any,
           help_text: str,
           *,
           group: str,
           choices: Choices = None,
           bounds: tuple[float | None, float | None] = (None, None),
           models: tuple[str, ...] = MODELS,
           by_task: bool = False,
           free: bool = False) -> Any:
  """A Config field.

  Args:
    default: the value when nobody says otherwise; its type is the type of the flag.
    help_text: what the option means, for --help.
    group: the heading of --help under which it stands.
    choices: the allowed values, or a function that returns them.
    bounds: the smallest and largest allowed value; None is no bound.
    models: the model families that read it.
    by_task: whether only the tasks that list it among their options read it.
    free: whether a run may be resumed with another value, because no result depends on it.
  """
  metadata = dict(help=help_text,
                  group=group,
                  choices=choices,
                  bounds=bounds,
                  models=models,
                  by_task=by_task,
                  free=free)
  return dataclasses.field(default=default, metadata=metadata)


def _tasks() -> tuple[str, ...]:
  from experiments import tasks  # Tasks are made from a Config; here only their names are wanted.
  return tuple(tasks.TASKS)


def _variants() -> tuple[str, ...]:
  return tuple(attn.VARIANTS)


def _variants_or_default() -> tuple[str, ...]:
  return ('',) + _variants()


_part = functools.partial(option, group='parts')
_variant = functools.partial(option, group='attention')
_model = functools.partial(option, group='model')
_task = functools.partial(option, group='task', by_task=True)
_training = functools.partial(option, group='training')
_run = functools.partial(option, group='run')
_place = functools.partial(_part, '', choices=_variants_or_default)
_COUNT, _SIZE, _POSITIVE, _RATE = (0, None), (1, None), (0.0, None), (0.0, 0.999)


class Place(NamedTuple):
  """One place of a model where attention stands: the variant there, the field that chose it."""
  variant: str
  causal: bool
  field: str


@dataclasses.dataclass(frozen=True)
class Config:
  """Everything that determines a run. Zero or '' in some fields means: derived from the others."""

  preset: str = _part('', 'start from a named set of values; other flags override it', free=True)
  task: str = _part('copy', 'what is learned', choices=_tasks)
  model: str = _part('decoder', 'the model family', choices=MODELS)
  attention: str = _part('vanilla', 'the attention variant', choices=_variants)
  encoder_attention: str = _place("the encoder's variant, if not --attention's",
                                  models=('encoder', 'seq2seq'))
  decoder_attention: str = _place("the decoder's variant, if not --attention's",
                                  models=('decoder', 'seq2seq'))
  cross_attention: str = _place(
      "the variant from decoder to encoder, if not --attention's (or vanilla where that cannot)",
      models=('seq2seq',))

  window: int = _variant(16,
                         'keys seen on each side of a query; causal: to its left',
                         bounds=_COUNT)
  num_global: int = _variant(1, 'leading positions that see all and are seen by all', bounds=_COUNT)
  stride: int = _variant(8, 'the stride of the pattern', bounds=_SIZE)
  summary: int = _variant(1, 'last positions of a block that later blocks see', bounds=_SIZE)
  rank: int = _variant(8, 'slots that keys (causal: of a segment) are projected to', bounds=_SIZE)
  segment: int = _variant(16, 'keys in one projected segment', bounds=_SIZE)
  num_features: int = _variant(64, 'random features', bounds=_SIZE)
  kernel: str = _variant('softmax', 'what the features stand for', choices=('softmax', 'relu'))
  redraw_steps: int = _variant(0, 'steps between draws of features; 0: one draw', bounds=_COUNT)
  num_random: int = _variant(1, 'random blocks that a block of queries sees', bounds=_COUNT)
  block_size: int = _variant(
      0,
      "tile size, which changes cost only; bigbird: positions in a block; 0: the variant's own (8)",
      bounds=_COUNT)
  step_size: int = _variant(
      0, 'logits computed at a time; changes cost only; 0: what suits the device', bounds=_COUNT)
  implementation: str = _variant(
      'auto',
      "who computes a pattern; pallas: kernels for TPU, interpreted elsewhere, and no other run",
      choices=IMPLEMENTATIONS)

  num_layers: int = _model(2, 'layers of the encoder, of the decoder, or of each', bounds=_SIZE)
  heads: int = _model(4, 'query heads', bounds=_SIZE)
  kv_heads: int = _model(0, 'key and value heads; 0: as many as heads', bounds=_COUNT)
  model_dim: int = _model(64, 'width of the residual stream', bounds=_SIZE)
  mlp_dim: int = _model(0, 'hidden width of the MLP; 0: 4 * model_dim', bounds=_COUNT)
  activation: str = _model('gelu', 'nonlinearity of the MLP', choices=('gelu', 'relu'))
  norm: str = _model('pre', 'layer norm before or after a block', choices=('pre', 'post'))
  positions: str = _model('learned',
                          'how the model knows positions',
                          choices=('learned', 'sinusoidal', 'rope', 'alibi', 't5', 'none'))
  dropout: float = _model(0.0, 'dropout on embeddings and block outputs', bounds=_RATE)
  attention_dropout: float = _model(0.0, 'dropout on attention weights', bounds=_RATE)
  tie_embeddings: bool = _model(False, 'use the input embedding as the output layer too')
  pooling: str = _model('mean',
                        'what a classifier reads of the positions',
                        choices=('mean', 'first'),
                        models=('encoder',),
                        by_task=True)
  remat: bool = _model(False, 'recompute layers in the backward pass, to save memory')
  dtype: str = _model('float32',
                      'dtype of the computation; parameters stay float32',
                      choices=('float32', 'bfloat16'))

  length: int = _task(0, 'tokens of a sequence, or most items to copy', bounds=_COUNT)
  min_length: int = _task(0, 'fewest items of a sequence whose length is drawn', bounds=_COUNT)
  vocab_size: int = _task(0, 'token ids, the five reserved ones included', bounds=_COUNT)
  num_pairs: int = _task(0, 'pairs of key and value in a sequence', bounds=_COUNT)
  random_filler: bool = _task(True, 'random tokens between pairs and queries (default); else zeros')
  num_classes: int = _task(0, 'classes to count or to agree', bounds=_COUNT)
  mask_rate: float = _task(0.0, 'chance that a word is hidden', bounds=_RATE)
  noise_rate: float = _task(0.0, 'share of tokens that are noise', bounds=_RATE)
  num_noise: int = _task(0, 'token ids that are noise', bounds=_COUNT)
  num_items: int = _task(0, 'tokens to pick out', bounds=_COUNT)
  num_queries: int = _task(0, 'what is asked for in a sequence', bounds=_COUNT)
  num_values: int = _task(0, 'values of a key', bounds=_COUNT)
  span: int = _task(0, 'most tokens of a key or a value', bounds=_COUNT)
  hops: int = _task(0, 'assignments from a value to the name asked for', bounds=_COUNT)
  depth: int = _task(0, 'deepest nesting', bounds=_COUNT)
  max_args: int = _task(0, 'most arguments of an operation', bounds=_COUNT)

  steps: int = _training(800, 'optimiser steps', bounds=(1, 2**31 - 1))
  batch_size: int = _training(64, 'sequences in a step', bounds=_SIZE)
  micro_batches: int = _training(1, 'pieces a batch is computed in, to save memory', bounds=_SIZE)
  learning_rate: float = _training(3e-3, 'peak learning rate', bounds=_POSITIVE)
  warmup_steps: int = _training(-1,
                                'linear warm-up before the cosine decay; -1: a tenth',
                                bounds=(-1, None))
  weight_decay: float = _training(0.01, "AdamW's weight decay, on matrices only", bounds=_POSITIVE)
  clip_norm: float = _training(1.0, 'largest global gradient norm; 0: any', bounds=_POSITIVE)
  label_smoothing: float = _training(0.0, 'probability spread over all classes', bounds=_RATE)
  seed: int = _training(0, 'seed of parameters, data and dropout', bounds=(0, 2**32 - 1))

  workdir: str = _run('', 'where the run lives; runs/PARTS-DIGEST if not given', free=True)
  log_every: int = _run(20, 'steps between rows of metrics.jsonl', bounds=_SIZE)
  eval_every: int = _run(200, 'steps between evaluations; 0: one, at the end', bounds=_COUNT)
  free_running: bool = _run(True,
                            'evaluate answers that the model writes itself too (default)',
                            models=('decoder', 'seq2seq'),
                            by_task=True,
                            free=True)
  eval_batches: int = _run(8, 'held-out batches of an evaluation', bounds=_SIZE)
  eval_lengths: str = _run(
      '', 'lengths to evaluate at besides, at the end: 64,128. Rows are then just so long')
  checkpoint_every: int = _run(200,
                               'steps between checkpoints; 0: one, at the end or when stopped',
                               bounds=_COUNT,
                               free=True)
  dry_run: bool = _run(False,
                       'only print what would be trained, its size and what a step costs',
                       free=True)
  keep_checkpoints: int = _run(2, 'newest checkpoints to keep', bounds=_SIZE, free=True)
  mesh: str = _run('',
                   'devices along the axes data, model and sequence, as data:4,sequence:2',
                   free=True)
  distributed: str = _run('auto',
                          'whether several processes train together, by what started them',
                          choices=('auto', 'on', 'off'),
                          free=True)
  tensorboard: bool = _run(False, 'write the rows for TensorBoard too', free=True)
  profile_steps: str = _run('', 'first and last step of a trace to write, as 10:20; not the first '
                            'of a session, which are slow',
                            free=True)

  @property
  def lengths(self) -> tuple[int, ...]:
    """The lengths that eval_lengths lists.

    Raises:
      ValueError: it is no list of different positive integers.
    """
    words = self.eval_lengths.replace(',', ' ').split()
    if not all(word.isdecimal() and int(word) for word in words) or len(set(words)) < len(words):
      raise ValueError('eval_lengths must be different positive integers, as 64,128; got '
                       f'{self.eval_lengths}')
    return tuple(map(int, words))

  @property
  def mesh_axes(self) -> dict[str, int]:
    """The sizes of the axes that mesh names.

    Raises:
      ValueError: it names others, or sizes that are none.
    """
    sizes: dict[str, int] = {}
    for word in filter(None, self.mesh.split(',')):
      name, _, size = word.partition(':')
      if name not in MESH_AXES or name in sizes or not size.isdecimal() or not int(size):
        raise ValueError(f'mesh={self.mesh} must list axes and their sizes, as data:4,sequence:2; '
                         f'axes are {", ".join(MESH_AXES)}')
      sizes[name] = int(size)
    return sizes

  @property
  def profiled(self) -> tuple[int, int] | None:
    """The first and the last step of profile_steps.

    Raises:
      ValueError: they are none of this run.
    """
    if not self.profile_steps:
      return None
    words = self.profile_steps.split(':')
    if len(words) == 2 and all(word.isdecimal() for word in words):
      first, last = map(int, words)
      if 1 <= first <= last <= self.steps:
        return first, last
    raise ValueError(f'profile_steps={self.profile_steps} must be the first and the last step to '
                     f'trace, as 10:20, between 1 and steps={self.steps}')

  @property
  def warmup(self) -> int:
    """Steps of warm-up."""
    return self.steps // 10 if self.warmup_steps < 0 else self.warmup_steps

  def supports(self, variant: str, capability: str) -> bool:
    """Whether an attention variant, with this config's options, can do what a model asks of it.

    It can attend to another sequence unless it is a pattern of positions: those of two sequences
    have nothing to do with each other.
    """
    row = attn.VARIANTS[variant]
    if capability not in row.supports:
      return False
    of_cost = set(row.cost_options)
    return capability != 'cross' or row.pattern is None or set(row.options) <= of_cost

  def places(self) -> dict[str, Place]:
    """Where attention stands in this model: 'encoder', 'decoder', 'cross' -> Place."""
    places = {}
    for name, causal in (('encoder', False), ('decoder', True), ('cross', False)):
      field = f'{name}_attention'
      if self.model not in FIELDS[field].metadata['models']:
        continue
      chosen = getattr(self, field)
      variant, source = (chosen, field) if chosen else (self.attention, 'attention')
      if name == 'cross' and not chosen and not self.supports(variant, 'cross'):
        variant = 'vanilla'
      places[name] = Place(variant, causal, source)
    return places


FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def choices(field: dataclasses.Field) -> tuple[str, ...] | None:
  """The values a field may have, or None where any will do."""
  allowed = field.metadata['choices']
  return allowed() if callable(allowed) else allowed


def validate(config: Config) -> None:
  """Checks every field alone, then the rules between fields.

  Raises:
    ValueError: names the fields, the values that clash, and the way out.
  """
  for field in FIELDS.values():
    _check_field(field, getattr(config, field.name))
  _ = config.lengths, config.profiled
  _check_mesh(config)
  _check_sizes(config)
  for name, place in config.places().items():
    _check_place(config, name, place)


def _check_field(field: dataclasses.Field, value: Any) -> None:
  name = field.name
  kind: type = type(field.default)
  if type(value) is not kind and not (kind is float and type(value) is int):
    raise ValueError(f'{name} must be of type {kind.__name__}; got {value!r}')
  allowed = choices(field)
  if allowed is not None and value not in allowed:
    raise ValueError(f'{name}={value} is not one of: {", ".join(filter(None, allowed))}')
  if isinstance(value, float) and not math.isfinite(value):
    raise ValueError(f'{name} must be finite; got {value}')
  lower, upper = field.metadata['bounds']
  if lower is not None and value < lower or upper is not None and value > upper:
    wanted = f'at least {lower}' if upper is None else f'between {lower} and {upper}'
    raise ValueError(f'{name} must be {wanted}; got {value}')


def _check_sizes(config: Config) -> None:
  heads, kv_heads, model_dim = config.heads, config.kv_heads or config.heads, config.model_dim
  if model_dim % heads:
    divisors = [n for n in range(1, model_dim + 1) if model_dim % n == 0]
    near = sorted(sorted(divisors, key=lambda n: abs(n - heads))[:2])
    raise ValueError(
        f'heads={heads} does not divide model_dim={model_dim}; use '
        f'heads={" or ".join(map(str, near))}, or a model_dim that is a multiple of {heads}')
  if heads % kv_heads:
    raise ValueError(f'kv_heads={kv_heads} does not divide heads={heads}; use a divisor of {heads}')
  if config.positions == 'rope' and model_dim // heads % 2:
    raise ValueError(
        f'positions=rope turns pairs of components, but model_dim={model_dim} / heads={heads} is '
        f'{model_dim // heads}, which is odd; use other heads or another position scheme')
  if config.micro_batches > config.batch_size:
    raise ValueError(f'micro_batches={config.micro_batches} exceeds batch_size='
                     f'{config.batch_size}; use at most {config.batch_size}')
  if config.warmup >= config.steps:
    raise ValueError(f'warmup_steps={config.warmup_steps} leaves nothing of steps={config.steps} '
                     f'to decay over; use warmup_steps={config.steps // 10}, or more steps')


def _check_mesh(config: Config) -> None:
  sizes = config.mesh_axes
  for axis, name, value in (('data', 'batch_size', config.batch_size),
                            ('model', 'heads', config.heads), ('model', 'kv_heads',
                                                               config.kv_heads or config.heads)):
    if value % sizes.get(axis, 1):
      raise ValueError(f'mesh={config.mesh} cuts {name}={value} into {sizes[axis]} along {axis}, '
                       f'which does not divide it; use a multiple of {sizes[axis]}')
  if config.implementation == 'pallas' and math.prod(sizes.values()) > 1:
    raise ValueError(f'implementation=pallas runs on one device, and mesh={config.mesh} has '
                     f'{math.prod(sizes.values())}; use implementation=auto')


def _check_place(config: Config, name: str, place: Place) -> None:
  biased = name != 'cross' and config.positions in POSITION_BIASES
  grouped = config.kv_heads not in (0, config.heads)
  needs = (
      ('causal', place.causal, f'model={config.model}, which hides later positions'),
      ('cross', name == 'cross', f'model={config.model}, which attends to another sequence'),
      ('position_bias', biased, f'positions={config.positions}, which is added to the logits'),
      ('dropout', config.attention_dropout > 0, f'attention_dropout={config.attention_dropout}'),
      ('grouped_heads', grouped, f'kv_heads={config.kv_heads} with heads={config.heads}'),
  )
  for capability, wanted, setting in needs:
    if wanted and not config.supports(place.variant, capability):
      able = [variant for variant in attn.VARIANTS if config.supports(variant, capability)]
      raise ValueError(f'{place.field}={place.variant} cannot serve {setting}; '
                       f'{place.field}={" or ".join(able)} can')
