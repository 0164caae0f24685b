"""Which of a Config's fields the parts it chooses (variants, model, task) really read."""

from typing import Any, Collection

import attn
from experiments import tasks
from experiments.config import Config, FIELDS, UserError

# What models do with a variant's parameters, beside the sizes and options of its row.
_UPKEEP = {'linformer': ('segment',), 'performer': ('redraw_steps',)}
_CAUSAL_ONLY = frozenset({'segment'})


def variant_fields(variant: str, causal: bool = True) -> frozenset[str]:
  """The fields that an attention variant reads."""
  row = attn.VARIANTS[variant]
  names = {*row.options, *row.sizes, *_UPKEEP.get(variant, ())}
  return frozenset(names & set(FIELDS)) - (frozenset() if causal else _CAUSAL_ONLY)


def used_fields(config: Config) -> frozenset[str]:
  """The fields that a run of config reads."""
  places = config.places().values()
  used: set[str] = set()
  for place in places:
    used |= variant_fields(place.variant, place.causal) | {place.field}
  for name, field in FIELDS.items():
    group, models = field.metadata['group'], field.metadata['models']
    if field.metadata['by_task']:
      in_use = name in tasks.TASKS[config.task].options
    else:
      in_use = group != 'attention' and name != 'attention'
    if in_use and config.model in models:
      used.add(name)
  return frozenset(used)


def readers(name: str) -> str:
  """Who reads a field, in words; '' if every run does."""
  meta = FIELDS[name].metadata
  if meta['group'] == 'attention':
    variants = [variant for variant in attn.VARIANTS if name in variant_fields(variant)]
    return f'attention {", ".join(variants)}' + (' (causal)' if name in _CAUSAL_ONLY else '')
  task = ''
  if meta['by_task']:
    reading = [task for task, family in tasks.TASKS.items() if name in family.options]
    task = f'task {", ".join(reading)}'
  model = f'model {", ".join(meta["models"])}' if len(meta['models']) < 3 else ''
  return ' with '.join(filter(None, (task, model)))


def refuse_unused(config: Config, given: Collection[str]) -> None:
  """Refuses the first of the fields somebody gave a value that config does not read.

  Raises:
    UserError: names the field and what would read it.
  """
  for name in sorted(set(given) - used_fields(config)):
    if name == 'attention':
      fields = ', '.join(f'--{place.field}' for place in config.places().values())
      raise UserError(f'--attention is not read, since {fields} leaves no place for it')
    variants = sorted({place.variant for place in config.places().values()})
    raise UserError(f'--{name} is not read by task={config.task} model={config.model} '
                    f'attention={", ".join(variants)}; it belongs to {readers(name)}')


def resolved(config: Config) -> dict[str, Any]:
  """The fields a run reads, with the task's own defaults in place of zeros.

  Without min_length where it is not given, since the task's own follows from the length.
  """
  values = {name: getattr(config, name) for name in FIELDS if name in used_fields(config)}
  if not values.get('min_length'):
    values.pop('min_length', None)
  for name, default in tasks.TASKS[config.task].options.items():
    if values.get(name) == 0 and not isinstance(values[name], bool):
      values[name] = default
  return values
