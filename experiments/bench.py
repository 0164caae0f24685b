"""Times the variants of attention and their peers: `python -m experiments.bench --short`."""

from collections.abc import Sequence
import functools
from pathlib import Path
import shlex
import sys
import textwrap
from typing import Any, NamedTuple

from absl import flags
import attn
import jax

from experiments import bench_claims
from experiments import bench_contenders
from experiments import bench_decode
from experiments import bench_extremes
from experiments import bench_grid
from experiments import bench_parity
from experiments import bench_plot
from experiments import bench_report
from experiments import bench_torch
from experiments import bench_tpu
from experiments.bench_contenders import DIRECTIONS
from experiments.config import UserError
from experiments.flags import read

PROGRAM = 'python -m experiments.bench'
DTYPES = ('float32', 'bfloat16')
LENGTHS = '1024,2048,4096,8192,16384,32768'
TPU_LENGTHS = '1024,16384,65536,262144,1048576'
SHORT: dict[str, Any] = dict(lengths=['512', '1024', '2048'], dtypes=['float32'], rounds=3)
# What each part reads; a flag that no part reads is refused.
_GRID = {
    'batch', 'heads', 'head_dim', 'lengths', 'dtypes', 'variants', 'rounds', 'memory_gb', 'peers'
}
READS = {
    'grid': _GRID,
    'claims': {'rounds'},
    'decode': {'rounds', 'variants'},
    'extremes': {'memory_gb'},
    'parity': {'rounds', 'variants'},
    'tpu': {'batch', 'heads', 'head_dim', 'lengths', 'variants'}
}
_HELP = f"""\
usage: {PROGRAM} [--option=value ...]

Times attention variants and their peers over lengths, forward and with gradients, then the pairs of
ours and a peer that have a target. --short, --claims, --decode, --extremes, --parity and --tpu do
only what they say. Writes bench.json, bench.csv, bench.md, bench_time.png and bench_memory.png, for
--tpu bench_tpu_time.png and bench_tpu_memory.png, replacing earlier ones.
"""


def define() -> flags.FlagValues:
  """The flags, in a set of their own: the global one brings thirty of absl's own."""
  values = flags.FlagValues()
  count: dict[str, Any] = dict(lower_bound=1, flag_values=values)
  flags.DEFINE_boolean('help', False, 'show this help', short_name='h', flag_values=values)
  flags.DEFINE_boolean('short',
                       False,
                       'a grid for two minutes: causal, float32, short, 3 rounds, few peers',
                       flag_values=values)
  flags.DEFINE_boolean('claims', False, 'only the pairs that have a target', flag_values=values)
  flags.DEFINE_boolean('decode',
                       False,
                       'only decode steps: time against position, and bytes of the caches',
                       flag_values=values)
  flags.DEFINE_boolean('extremes',
                       False,
                       'only compile times, and memory and gradients at great lengths',
                       flag_values=values)
  flags.DEFINE_boolean('parity',
                       False,
                       'only whether every variant is right on the device that jax has, and its '
                       'time beside jax.nn and, on a GPU, cuDNN',
                       flag_values=values)
  flags.DEFINE_enum('tpu',
                    None,
                    list(bench_tpu.CHIPS),
                    'only what the TPU compiler says of this chip, which nobody needs to have: '
                    'memory, roofline and longest length of the causal variants',
                    flag_values=values)
  flags.DEFINE_string('out', 'bench', 'the folder to write to', flag_values=values)
  flags.DEFINE_list('variants', list(attn.VARIANTS), 'which of ours', flag_values=values)
  flags.DEFINE_boolean('peers',
                       True,
                       'also time implementations that are not ours; without them no claims',
                       flag_values=values)
  flags.DEFINE_list('lengths', LENGTHS, 'sequence lengths', flag_values=values)
  flags.DEFINE_list('dtypes', list(DTYPES), 'dtypes of the inputs', flag_values=values)
  flags.DEFINE_integer('rounds', 5, 'how often each is timed', **count)
  flags.DEFINE_integer('batch', 1, 'sequences in a batch', **count)
  flags.DEFINE_integer('heads', 8, 'heads', **count)
  flags.DEFINE_integer('head_dim', 64, 'width of a head', **count)
  flags.DEFINE_float('memory_gb',
                     8.0,
                     'contenders that need more are skipped, and named',
                     lower_bound=0.0,
                     flag_values=values)
  return values


class Request(NamedTuple):
  """A command line that makes sense. parts: which of READS run."""
  parts: tuple[str, ...]
  short: bool
  out: str
  variants: tuple[str, ...]
  lengths: tuple[int, ...]
  dtypes: tuple[str, ...]
  rounds: int
  batch: int
  heads: int
  head_dim: int
  memory_gb: float
  peers: bool
  tpu: str | None


def parse(argv: Sequence[str]) -> Request | None:
  """What a command line, whose first word is the program's name, asks for; None for --help.

  Raises:
    UserError: a flag that does not exist, has a wrong value or is read by no part that runs.
  """
  flag_values = define()
  rest = read(flag_values, argv)
  if len(rest) > 1:
    raise UserError(f'unexpected argument {rest[1]!r}; options are --name=value, and --help lists '
                    'them')
  given: dict[str, Any] = {name: flag_values[name].value for name in flag_values}
  if given['help']:
    return None
  if given['short']:
    given |= {name: SHORT[name] for name in SHORT if not flag_values[name].present}
  alone = [name for name in READS if name != 'grid' and given[name]]
  parts = alone or (['grid'] if given['short'] or not given['peers'] else ['grid', 'claims'])
  if given['short'] and alone:
    raise UserError(f'--short is about the grid, which --{alone[0]} leaves out; give one of them')
  if given['tpu'] and not flag_values['lengths'].present:
    given['lengths'] = TPU_LENGTHS.split(',')
  in_use = set().union(*(READS[part] for part in parts))
  for name in sorted(_GRID - in_use):
    if flag_values[name].present:
      raise UserError(f'--{name} is not read by --{" or --".join(parts)}; leave it out')
  _check_words('variants', given['variants'], tuple(attn.VARIANTS))
  _check_words('dtypes', given['dtypes'], DTYPES)
  given['lengths'] = _lengths(given['lengths'])
  given |= {name: tuple(dict.fromkeys(given[name])) for name in ('variants', 'dtypes')}
  return Request(parts=tuple(parts),
                 **{name: given[name] for name in Request._fields if name != 'parts'})


def _check_words(flag: str, words: Sequence[str], known: Sequence[str]) -> None:
  for word in words:
    if word not in known:
      raise UserError(f'{flag}: {word!r} is not one of: {", ".join(known)}')
  if not words:
    raise UserError(f'{flag} names nothing; use some of: {", ".join(known)}')


def _lengths(texts: Sequence[str]) -> tuple[int, ...]:
  if not texts or not all(text.isdecimal() and int(text) > 1 for text in texts):
    raise UserError(f'lengths must be integers above 1 with commas between; got {",".join(texts)}')
  return tuple(sorted({int(text) for text in texts}))


def make_grid(request: Request) -> bench_grid.Grid:
  """What the grid measures."""
  contenders = bench_contenders.ours(request.variants)
  if request.peers:
    contenders += bench_contenders.jax_peers() + bench_torch.torch_peers()
  if request.short:
    few = ('jax.nn', 'torch SDPA')
    contenders = [c for c in contenders if c.is_causal and (c.maker == 'attn' or c.name in few)]
  return bench_grid.Grid(contenders=contenders,
                         batch=request.batch,
                         heads=request.heads,
                         head_dim=request.head_dim,
                         lengths=request.lengths,
                         dtypes=request.dtypes,
                         rounds=request.rounds,
                         memory_bytes=1e9 * request.memory_gb,
                         checked=('forward',) if request.short else DIRECTIONS)


def run(request: Request, arguments: Sequence[str]) -> int:
  """Measures, writes and prints; returns 1 if one of ours failed."""
  if request.tpu and not bench_tpu.has_tpu():
    jax.config.update('jax_platforms', 'cpu')  # else jax looks for the TPU itself, and speaks
  folder = Path(request.out)
  folder.mkdir(parents=True, exist_ok=True)
  with_peers = request.peers and bool({'grid', 'claims'} & set(request.parts))
  result: dict[str, Any] = dict(circumstances=bench_report.circumstances(
      shlex.join(['python', '-m', 'experiments.bench', *arguments]), bench_report.device_name()),
                                missing=bench_torch.missing() if with_peers else {})

  def save(part: str, found: dict[str, Any]) -> None:
    bench_report.write(result | {part: found}, folder)

  if 'grid' in request.parts:
    result['grid'] = bench_grid.run(make_grid(request), functools.partial(save, 'grid'))
  if 'claims' in request.parts:
    result['claims'] = bench_claims.run(request.rounds)
  if 'decode' in request.parts:
    result['decode'] = bench_decode.run(request.rounds, request.variants)
  if 'extremes' in request.parts:
    result['extremes'] = bench_extremes.run(1e9 * request.memory_gb)
  if 'parity' in request.parts:
    result['parity'] = bench_parity.run(request.rounds, request.variants)
  if request.tpu:
    sizes = request.batch, request.heads, request.head_dim
    result['tpu'] = bench_tpu.run(request.tpu, request.lengths, request.variants, *sizes,
                                  functools.partial(save, 'tpu'))
  bench_report.write(result, folder)
  print(bench_report.markdown(result))
  files = ['bench.json', 'bench.csv', 'bench.md']
  files += [path.name for path in bench_plot.draw(result, folder)]
  print(f'everything is in {folder}: {", ".join(files)}')
  grid = result.get('grid', dict(cells=[], errors=[]))
  failed = [c for c in grid['cells'] + grid['errors'] if c['maker'] == 'attn' and 'failed' in c]
  failed += [c for c in result.get('tpu', {}).get('cells', ()) if c.get('failed')]
  errors = result.get('parity', {}).get('errors', ())
  failed += [row for row in errors if row['maker'] == 'attn' and not row['right']]
  return 1 if failed else 0


def help_text() -> str:
  """What --help prints."""
  lines, values = [_HELP], define()
  for name in values:
    if name == 'h':
      continue
    default = values[name].default
    default = ','.join(default) if isinstance(default, list) else default
    kinds = getattr(values[name].parser, 'enum_values', None)
    default = '|'.join(kinds) if kinds else default
    shown = f'--[no]{name}' if isinstance(default, bool) else f'--{name}={default}'
    lines.append(f'  {shown}')
    lines += textwrap.wrap(str(values[name].help), 90, initial_indent=' ' * 6)
  return '\n'.join(lines)


def main(argv: Sequence[str]) -> int:
  """Returns the exit status: 0, 1 if one of ours failed, 2 for a request that cannot be met."""
  try:
    request = parse(argv)
    if request is None:
      print(help_text())
      return 0
    return run(request, argv[1:])
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return error.exit_status
  except OSError as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print('\nstopped; what was finished of the grid or for the TPU is written', file=sys.stderr)
    return 130


if __name__ == '__main__':
  sys.exit(main(sys.argv))
