"""What the TPU compiler says of every variant, on a machine without a TPU: memory, work, length.

Every program is compiled for the chip, and run only where there is one. Else time is implied by the
roofline: the chip does so many operations and moves so many bytes a second at best, and the slower
of the two decides (Williams et al. 2009, https://doi.org/10.1145/1498765.1498785). The bytes are
guessed: temporaries that stay on the chip move fewer, those that are used again move more.
"""

from collections.abc import Callable
import functools
import glob
import importlib.util
import os
import re
import time
from typing import Any, NamedTuple
from unittest import mock

import attn
from attn import sharding
import jax
from jax.experimental import topologies
import jax.numpy as jnp
import numpy as np

from experiments import bench_contenders as contenders
from experiments import bench_measure
from experiments.bench_contenders import DIRECTIONS, Problem
from experiments.bench_progress import Progress
from experiments.collectives import largest
from experiments.config import UserError

CHIPS_IN_MESH, STEP = 16, 1024  # chips; the longest length is a multiple of STEP
DTYPE = 'bfloat16'
LONGEST = 2**24  # where the search for the longest ends
ROUNDS, AT_ONCE = 5, 10  # of what is measured; calls that the chip gets at once
_DEFAULTS = dict(ALLOW_MULTIPLE_LIBTPU_LOAD='1',
                 TPU_WORKER_HOSTNAMES='localhost',
                 TPU_ACCELERATOR_TYPE='v5litepod-4',
                 TPU_LOG_DIR='disabled')


class Chip(NamedTuple):
  """One kind of TPU.

  Attributes:
    kind: what jax calls it.
    one, many: names of a topology whose first chip is compiled for, and of one of CHIPS_IN_MESH.
    flops: operations a second, bfloat16.
    bandwidth: bytes a second from and to its memory.
    source: who publishes them.
  """
  kind: str
  one: str
  many: str
  flops: float
  bandwidth: float
  source: str


_DOCS = 'https://docs.cloud.google.com/tpu/docs/'
CHIPS = {
    'v4': Chip('TPU v4', 'v4:2x2x1', 'v4:2x2x4', 275e12, 1200e9, _DOCS + 'v4'),
    'v5e': Chip('TPU v5 lite', 'v5e:2x2', 'v5e:4x4', 197e12, 819e9, _DOCS + 'v5e'),
    'v5p': Chip('TPU v5', 'v5p:2x2x1', 'v5p:2x2x4', 459e12, 2765e9, _DOCS + 'v5p'),
    'v6e': Chip('TPU v6 lite', 'v6e:2x2', 'v6e:4x4', 918e12, 1600e9, _DOCS + 'v6e'),
}

Row = dict[str, Any]


def has_tpu() -> bool:
  """Whether this machine shows a TPU; jax itself would take a while to look, and speak."""
  return any(glob.glob(pattern) for pattern in ('/dev/accel[0-9]*', '/dev/vfio/[0-9]*'))


def measured(name: str, problem: Problem, direction: str, implementation: str) -> Row:
  """The time of a variant's causal form on jax's device: measured_seconds, measured_spread."""
  own = dict(implementation=implementation)
  ready = contenders.own(name, True, **(own if takes(name) else {})).prepare(problem, direction)
  seconds, = bench_measure.alternate([functools.partial(contenders.many, ready, AT_ONCE)], ROUNDS)
  timing = bench_measure.timing(seconds)
  return dict(measured_seconds=timing.median / AT_ONCE, measured_spread=timing.spread)


def takes(name: str) -> bool:
  """Whether a variant has kernels to choose."""
  return 'implementation' in attn.VARIANTS[name].options


def devices(topology: str) -> list[Any]:
  """The chips of a topology, which the compiler knows and nobody has.

  Raises:
    UserError: there is no compiler.
  """
  if importlib.util.find_spec('libtpu') is None:
    raise UserError("--tpu needs the TPU compiler: .venv/bin/pip install '.[tpu-compile]'")
  if not has_tpu():
    for name, value in _DEFAULTS.items():  # else it looks for a TPU and speaks
      os.environ.setdefault(name, value)
  return topologies.get_topology_desc(platform='tpu', topology_name=topology).devices


def compiled(chip: Chip,
             name: str,
             problem: Problem,
             direction: str,
             chips: int = 1,
             implementation: str = 'auto') -> Row:
  """What the compiler says of a variant's causal form.

  Returns:
    compile_seconds, kernel (whether a Pallas kernel is in it), flops (of the matrix products, all
    chips together), and of one chip temp_bytes, argument_bytes, result_bytes, moved_bytes
    (arguments are read, results written, temporaries both) and roofline_seconds; sent, numbers by
    kind of collective; or `skipped`, why it does not compile.
  """
  whole: jax.sharding.Sharding
  cut: jax.sharding.Sharding
  if chips > 1:
    mesh = jax.sharding.Mesh(np.array(devices(chip.many)), ('sequence',),
                             axis_types=(jax.sharding.AxisType.Auto,))  # yapf: disable
    whole, cut = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P(None, 'sequence')))
  else:
    whole = cut = jax.sharding.SingleDeviceSharding(devices(chip.one)[0])
  options, arrays = _settings(name, problem)
  if takes(name):
    options['implementation'] = implementation
  B, T, N, H, dtype = problem
  x = jax.ShapeDtypeStruct((B, T, N, H), jnp.dtype(dtype), sharding=cut)
  arrays = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), arrays)

  def over_chips(params: Any, *inputs: Any) -> Any:
    return sharding.sharded_attention(name, *inputs, mesh=mesh, axis_name='sequence', params=params,
                                      is_causal=True, **options)  # yapf: disable

  function: Any = over_chips if chips > 1 else functools.partial(
      attn.VARIANTS[name].apply, is_causal=True, **options)
  start = time.perf_counter()
  try:
    with mock.patch.object(jax, 'default_backend', lambda: 'tpu'):  # by which tiles are chosen
      traced = jax.jit(contenders.directed(function, direction)).trace(arrays, x, x, x, x)
      program = traced.lower(lowering_platforms=('tpu',)).compile()
  except Exception as error:  # pylint: disable=broad-except
    reason = _reason(error)
    return dict(skipped=reason, failed=reason.startswith('failed'))
  memory = program.memory_analysis()
  flops, temp = bench_measure.flops(traced.jaxpr), memory.temp_size_in_bytes
  inputs, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
  moved = inputs + results + 2 * temp
  roofline = None if flops is None else max(flops / chips / chip.flops, moved / chip.bandwidth)
  return dict(compile_seconds=time.perf_counter() - start,
              kernel='tpu_custom_call' in program.as_text(),
              flops=flops,
              temp_bytes=temp,
              argument_bytes=inputs,
              result_bytes=results,
              moved_bytes=moved,
              roofline_seconds=roofline,
              sent=largest(program) if chips > 1 else {})


def _settings(name: str, problem: Problem) -> tuple[dict[str, Any], Any]:
  """The options of a causal variant and the shapes of its arrays, which nobody has to make."""
  arrays = jax.eval_shape(lambda: contenders.make_arrays(name, problem, True))
  narrow = lambda a: jax.ShapeDtypeStruct(
      a.shape,
      jnp.dtype(problem.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype)
  return contenders.OPTIONS[name](problem.length), jax.tree.map(narrow, arrays)


def _reason(error: Exception) -> str:
  """Memory in numbers, and anything else in a line."""
  text = ' '.join(str(error).split())
  if found := re.search(r'\((\S+)\) exceeds available HBM \((\S+)\)', text):
    return f'needs {found[1]} of {found[2]}'
  if 'RESOURCE_EXHAUSTED' in text:
    return f'memory: {text}'[:200]
  return f'failed: {type(error).__name__}: {text}'[:200]


def longest(fits: Callable[[int], bool], known: dict[int, bool]) -> int:
  """The longest length that fits, to an eighth; 0 where STEP does not.

  known: what fits of lengths that were tried; more is added.
  """

  def ask(length: int) -> bool:
    if length not in known:
      known[length] = fits(length)
    return known[length]

  low = max((length for length, good in known.items() if good), default=0)
  high = min((length for length, good in known.items() if not good), default=0)
  while not high and low < LONGEST:
    further = max(2 * low, STEP)
    low, high = (further, 0) if ask(further) else (low, further)
  while high - low > max(STEP, low // 8):
    middle = (low + high) // 2 // STEP * STEP
    low, high = (middle, high) if ask(middle) else (low, middle)
  return low


def run(kind: str, lengths: tuple[int, ...], names: tuple[str, ...], batch: int, heads: int,
        head_dim: int, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
  """Compiles everything; save is called with the results so far after every variant.

  Returns:
    chip: its figures. cells: a dict for each variant, direction and length. longest: for each
    variant the lengths that fit one chip and CHIPS_IN_MESH. collectives: what those send.
  """
  chip = CHIPS[kind]
  names = tuple(name for name in names if 'causal' in attn.VARIANTS[name].supports)
  searches = 5  # compilations of one, about
  work = len(names) * (len(DIRECTIONS) * (len(lengths) + searches) + len(DIRECTIONS) + searches)
  progress = Progress(work, work)
  cells: list[Row] = []
  result: dict[str, Any] = dict(chip=dict(name=kind, **chip._asdict()), cells=cells, longest=[],
                                collectives=[])  # yapf: disable

  def tell(name: str, direction: str, length: int, chips: int, implementation: str = 'auto') -> Row:
    over = f'{chips} chips' if chips > 1 else 'one chip'
    progress.cell(f'compile {name} causal, {direction}, T {length}, {over}', 1)
    problem = Problem(batch, length, heads, head_dim, DTYPE)
    identity = dict(maker='attn',
                    name=name,
                    causal=True,
                    label=f'{name} causal{", XLA" if implementation == "xla" else ""}',
                    direction=direction,
                    length=length)
    row = identity | dict(dtype=DTYPE, chips=chips) | compiled(chip, name, problem, direction,
                                                               chips, implementation)
    if chips == 1 and 'skipped' not in row and jax.devices()[0].device_kind == chip.kind:
      row |= measured(name, problem, direction, implementation)
    jax.clear_caches()
    return row

  for name in names:
    far: Row = dict(label=f'{name} causal')
    for direction in DIRECTIONS:
      own = [tell(name, direction, length, 1) for length in lengths]
      cells += own
      if any(row.get('kernel') for row in own):
        cells += [tell(name, direction, length, 1, 'xla') for length in lengths]
      known = {row['length']: 'skipped' not in row for row in own}
      far[direction] = longest(lambda T: 'skipped' not in tell(name, direction, T, 1), known)
      shared = tell(name, direction, max(lengths[0], 16384), CHIPS_IN_MESH)
      result['collectives'].append(shared)
    known = {shared['length']: 'skipped' not in shared}
    guess = CHIPS_IN_MESH * max(far['gradient'], STEP)  # near where it ends
    known[guess] = 'skipped' not in tell(name, 'gradient', guess, CHIPS_IN_MESH)
    far['mesh'] = longest(lambda T: 'skipped' not in tell(name, 'gradient', T, CHIPS_IN_MESH),
                          known)
    result['longest'].append(far)
    save(result)
  progress.end()
  return result
