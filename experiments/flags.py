"""The command line: absl flags generated from Config's fields, and --help."""

import dataclasses
import difflib
import inspect
import textwrap
from typing import Any, Sequence

from absl import flags

from experiments import config as config_lib
from experiments import parts
from experiments import tasks
from experiments.config import Config, FIELDS, UserError
from experiments.presets import PRESETS

_HEADINGS = {
    'parts': 'The parts of the experiment',
    'attention': 'Options of the attention variants',
    'model': 'The model',
    'task': 'Sizes of the task (0: its own default, in parentheses)',
    'training': 'Training',
    'run': 'The run',
}
_INTRODUCTION = """\
usage: {program} [--option=value ...]

Trains one model on one task, says how good it is beside the trivial baselines, and keeps
everything in its workdir. The same command again resumes a run that was stopped. For example:

  {program} --task=copy --model=seq2seq --attention=local --window=16
"""


def parse(argv: Sequence[str]) -> Config | None:
  """The validated Config that a command line asks for, or None where it asks for --help.

  Args:
    argv: the program's name, then its arguments.

  Raises:
    UserError: a flag that does not exist, has a wrong value, or is read by no chosen part; a stray
      argument.
  """
  values = _define()
  rest = read(values, argv)
  if values['help'].value:
    return None
  if len(rest) > 1:
    raise UserError(_stray(rest[1]))
  given = {name: values[name].value for name in FIELDS if values[name].present}
  config = Config(**(_preset(values['preset'].value) | given))
  try:
    config_lib.validate(config)
    tasks.make_task(config)
  except ValueError as error:
    raise UserError(str(error)) from None
  parts.refuse_unused(config, given)
  return config


def read(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
  """Parses argv into values; returns what is no flag, the program's name first.

  Raises:
    UserError: a flag that does not exist or has a wrong value, in one line.
  """
  try:
    return values(list(argv))
  except flags.UnrecognizedFlagError as error:
    name = error.flagname.replace('-', '_').removeprefix('no_')
    if error.flagname.startswith(('no-', 'no_')) and name in values:
      raise UserError(f'--{error.flagname} is no flag; did you mean --no{name}?') from None
    raise UserError(' '.join(str(error).replace(' ?', '?').split())) from None
  except flags.Error as error:
    raise UserError(' '.join(str(error).replace(' ?', '?').split())) from None


def _define() -> flags.FlagValues:
  """One flag for each field, in a set of its own: the global one brings thirty of absl's own."""
  values = flags.FlagValues()
  flags.DEFINE_boolean('help', False, 'show this help', short_name='h', flag_values=values)
  define_fields(values)
  return values


def define_fields(values: flags.FlagValues, leave_out: Sequence[str] = ()) -> None:
  """Defines a flag for each field of Config but those left out."""
  for name, field in FIELDS.items():
    if name in leave_out:
      continue
    default: Any = field.default
    meta, allowed = field.metadata, config_lib.choices(field)
    bounds = dict(zip(('lower_bound', 'upper_bound'), meta['bounds']))
    if allowed is not None:
      flags.DEFINE_enum(name, default, allowed, meta['help'], flag_values=values)
    elif isinstance(default, bool):
      flags.DEFINE_boolean(name, default, meta['help'], flag_values=values)
    elif isinstance(default, int):
      flags.DEFINE_integer(name, default, meta['help'], flag_values=values, **bounds)
    elif isinstance(default, float):
      flags.DEFINE_float(name, default, meta['help'], flag_values=values, **bounds)
    else:
      flags.DEFINE_string(name, default, meta['help'], flag_values=values)


def _preset(name: Any) -> dict[str, Any]:
  if not name:
    return {}
  if name not in PRESETS:
    raise UserError(f'preset={name} is not one of: {", ".join(PRESETS)}')
  return PRESETS[name]()


def _stray(argument: str) -> str:
  name, equals, value = argument.partition('=')
  near = difflib.get_close_matches(name, FIELDS, n=1)
  if near:
    return f'unexpected argument {argument!r}; did you mean --{near[0]}{equals}{value}?'
  return f'unexpected argument {argument!r}; options are --name=value, and --help lists them'


def help_text(program: str) -> str:
  """What --help prints."""
  lines = [_INTRODUCTION.format(program=program)]
  for group, heading in _HEADINGS.items():
    lines.append(f'{heading}:')
    for field in FIELDS.values():
      if field.metadata['group'] == group:
        lines.extend(_describe(field))
    lines.append('')
  if PRESETS:
    lines.append('Presets (--preset=NAME):')
    for name, preset in PRESETS.items():
      lines += [f'  {name}', textwrap.indent(inspect.cleandoc(preset.__doc__ or ''), ' ' * 6)]
  return '\n'.join(lines).rstrip()


def _describe(field: dataclasses.Field) -> list[str]:
  name, text = field.name, field.metadata['help']
  shown = f'--[no]{name}' if isinstance(field.default, bool) else f'--{name}={field.default}'
  if name == 'task':
    text += ': ' + ', '.join(
        f'{task} ({" ".join(family.models)})' for task, family in tasks.TASKS.items())
  elif (allowed := config_lib.choices(field)) is not None and '' not in allowed:
    text += ': ' + ', '.join(allowed)
  if field.metadata['group'] == 'task' and not isinstance(field.default, bool):
    text += '. For ' + ', '.join(f'{task} ({family.options[name]})'
                                 for task, family in tasks.TASKS.items()
                                 if name in family.options)
  elif readers := parts.readers(name):
    text += f'. For {readers}'
  first, *rest = textwrap.wrap(text, 72) or ['']
  return [f'  {shown:25} {first}'] + [' ' * 28 + line for line in rest]
