"""What a command line of `experiments.compare` asks for."""

from collections.abc import Callable, Sequence
import hashlib
import inspect
from pathlib import Path
import textwrap
from typing import Any, NamedTuple

from absl import flags

from experiments.config import FIELDS, UserError
from experiments.flags import define_fields, read
from experiments.sweep import Block, values_of
from experiments.writer import to_json

PROGRAM = 'python -m experiments.compare'
_HELP = f"""\
usage: {PROGRAM} --tasks=copy,mqar --attention=vanilla,local [--option=value ...]

Trains every variant on every task with several seeds, each in a workdir of its own, and writes a
report: report.html, report.md, results.csv, results.json. What has ended is not run again, so the
same command goes on where it was stopped; other seeds, tasks or values join what is there if
--directory names it. Any flag of experiments.train applies to all runs that read it.
"""
_OWN = ('tasks', 'attention', 'seeds', 'vary', 'grid', 'preset', 'directory', 'workers', 'cell',
        'dry_run', 'report')


class Request(NamedTuple):
  """What a command line asks for.

  Attributes:
    blocks: the runs.
    directory: where the comparison lives.
    workers: how many run at a time.
    cell: the only one to run, by its number in the plan; None: all.
    dry_run: whether to plan only.
    report_only: whether to report only, of what has ended.
    command: what was typed.
  """
  blocks: list[Block]
  directory: Path
  workers: int
  cell: int | None
  dry_run: bool
  report_only: bool
  command: str


def quick() -> list[Block]:
  """Five variants on three tasks with two seeds.

  python -m experiments.compare --preset=quick
  Under 25 minutes on 2 cores.
  """
  variants = ('vanilla', 'local', 'strided', 'linformer', 'performer')
  shared: dict[str, Any] = dict(eval_every=50, checkpoint_every=100)
  block = lambda task, **more: Block((task,), variants, 2, {}, {}, shared | more)
  return [
      block('copy', steps=400, length=8, eval_lengths='8,16'),
      block('mqar', steps=400, length=32, random_filler=False),
      block('majority', steps=200, length=16, eval_lengths='16,32,64')
  ]


def anchors() -> list[Block]:
  """What was published, in small form: recall with two layers and with one, in a window that grows,
  induction and associative recall.

  python -m experiments.compare --preset=anchors
  """
  shared: dict[str, Any] = dict(eval_every=100, checkpoint_every=200)
  recall = dict(steps=600, random_filler=False)
  dense = lambda task, **more: Block((task,), ('vanilla',), 2, {}, {}, shared | more)
  return [
      dense('mqar', **recall)._replace(vary={'num_layers': (2, 1)}),
      Block(('mqar',), ('local',), 2, {'window': (2, 4, 8, 16, 32, 64)}, {}, shared | recall),
      dense('induction', steps=1500),
      dense('associative_recall', steps=3000),
  ]


PRESETS: dict[str, Callable[[], list[Block]]] = {
    preset.__name__: preset for preset in (quick, anchors)
}


def _define() -> flags.FlagValues:
  values = flags.FlagValues()
  text = lambda name, default, help: flags.DEFINE_string(name, default, help, flag_values=values)
  many = lambda name, help: flags.DEFINE_multi_string(name, [], help, flag_values=values)
  flags.DEFINE_boolean('help', False, 'show this help', short_name='h', flag_values=values)
  text('tasks', '', 'tasks, with commas between them')
  text('attention', 'vanilla', 'variants, with commas between them')
  flags.DEFINE_integer('seeds', 3, 'seeds of every run, from 0', 1, flag_values=values)
  many('vary', 'a field and values that the report shows apart, as window:8,16; may be repeated')
  many(
      'grid', 'a field and values to tune, as learning_rate:1e-3,3e-3: the report takes the best '
      'for every row; may be repeated')
  text('preset', '', 'a named comparison instead of --tasks')
  text('directory', '', 'where it lives; runs/compare-DIGEST if not given')
  flags.DEFINE_integer('workers', 1, 'runs at a time, which share the cores', 1, flag_values=values)
  flags.DEFINE_integer('cell',
                       None,
                       'train only the run of this number here, as for a job array; --dry_run '
                       'lists them',
                       0,
                       flag_values=values)
  flags.DEFINE_boolean('dry_run', False, 'only list the runs', flag_values=values)
  flags.DEFINE_boolean('report', False, 'only report what has ended', flag_values=values)
  define_fields(values, leave_out=_OWN)
  return values


def help_text() -> str:
  """What --help prints."""
  values, lines = _define(), [_HELP]
  for name in _OWN:
    flag: Any = values[name]
    default = '' if flag.default in (None, []) else flag.default
    shown = f'--[no]{name}' if isinstance(flag.default, bool) else f'--{name}={default}'
    first, *rest = textwrap.wrap(flag.help.partition(';\n')[0], 70)
    lines += [f'  {shown:25} {first}', *(' ' * 28 + line for line in rest)]
  lines += ['', 'Presets (--preset=NAME):']
  for name, preset in PRESETS.items():
    lines += [f'  {name}', textwrap.indent(inspect.cleandoc(preset.__doc__ or ''), ' ' * 6)]
  return '\n'.join(lines)


def parse(argv: Sequence[str]) -> Request | None:
  """What a command line, whose first word is the program's name, asks for; None for --help.

  Raises:
    UserError: a flag that does not exist, has a wrong value, or is not read beside the others.
  """
  values = _define()
  rest = read(values, argv)
  own: dict[str, Any] = {name: values[name].value for name in ('help', *_OWN)}
  if own['help']:
    return None
  if len(rest) > 1:
    raise UserError(f'unexpected argument {rest[1]!r}; options are --name=value, and --help lists '
                    'them')
  given = {name: values[name].value for name in FIELDS if name not in _OWN and values[name].present}
  for name in ('workdir', 'seed', 'task'):
    if name in given:
      raise UserError(f'--{name} is for one run; here it is --' + {
          'workdir': 'directory',
          'seed': 'seeds',
          'task': 'tasks'
      }[name])
  if 'distributed' in given and own['cell'] is None:
    raise UserError('--distributed is for one run; here it needs --cell')
  present = {name for name in _OWN if values[name].present}
  blocks = _preset_blocks(own, present, given) if own['preset'] else _own_blocks(own, given)
  directory = Path(own['directory']).expanduser() if own['directory'] else _directory(blocks)
  return Request(blocks, directory, own['workers'], own['cell'], own['dry_run'], own['report'],
                 ' '.join((PROGRAM, *argv[1:])))


def _own_blocks(own: dict[str, Any], given: dict[str, Any]) -> list[Block]:
  vary, tune = (
      dict(values_of(text, option) for text in own[option]) for option in ('vary', 'grid'))
  clash = sorted(vary.keys() & tune.keys() | (vary.keys() | tune.keys()) & given.keys())
  if clash:
    raise UserError(f'--{clash[0]} is given twice: by itself, by --vary or by --grid')
  tasks, attention = (tuple(filter(None, own[name].split(','))) for name in ('tasks', 'attention'))
  if not tasks or not attention:
    raise UserError('--tasks and --attention must list what to compare, as --tasks=copy,mqar '
                    '--attention=vanilla,local; or give --preset')
  return [Block(tasks, attention, own['seeds'], vary, tune, given)]


def _preset_blocks(own: dict[str, Any], present: set[str], given: dict[str, Any]) -> list[Block]:
  if own['preset'] not in PRESETS:
    raise UserError(f'preset={own["preset"]} is not one of: {", ".join(PRESETS)}')
  for option in sorted({'tasks', 'attention', 'vary', 'grid'} & present):
    raise UserError(f'--{option} and --preset are both given; give one of them')
  blocks = PRESETS[own['preset']]()
  seeds = {'seeds': own['seeds']} if 'seeds' in present else {}
  return [block._replace(fixed=dict(block.fixed) | given, **seeds) for block in blocks]


def _directory(blocks: Sequence[Block]) -> Path:
  """Where a comparison lives that was given no directory: one for each plan."""
  digest = hashlib.sha256(to_json([block._asdict() for block in blocks]).encode()).hexdigest()[:8]
  return Path('runs', f'compare-{digest}')
