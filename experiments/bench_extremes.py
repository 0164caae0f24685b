"""What a curve does not show: compile times, recompilation, memory and length at the far end."""

from collections.abc import Callable
import functools
import time
from typing import Any

import attn
import jax
import jax.numpy as jnp

from experiments import bench_contenders as contenders
from experiments.bench_contenders import Contender, Problem
from experiments.bench_progress import Progress

BATCH, HEADS, HEAD_DIM = 1, 8, 64
COMPILE_LENGTH, MEMORY_LENGTH, LONG_LENGTH = 4096, 16384, 65536


def compile_twice(contender: Contender, problem: Problem) -> dict[str, Any]:
  """Times a gradient's compilation, and tells whether a second call traces it again.

  compile_seconds: what the first call takes longer than the second, which has other numbers.
  """
  options, arrays = contenders.settings(contender.variant, problem, contender.is_causal)
  variant = attn.VARIANTS[contender.variant]
  apply = functools.partial(variant.apply, is_causal=contender.is_causal, **options)
  traces = 0

  def counted(*inputs: Any) -> Any:
    nonlocal traces
    traces += 1
    return contenders.directed(apply, 'gradient')(*inputs)

  def call(*inputs: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*inputs))
    return time.perf_counter() - start

  function = jax.jit(counted)
  parameters = jax.tree.map(jnp.asarray, arrays)
  inputs = tuple(map(jnp.asarray, contenders.draw(problem)))
  seconds, first = call(parameters, *inputs), traces
  seconds -= call(parameters, *(x * 2 for x in inputs))
  return dict(compile_seconds=seconds, second_call_recompiles=traces > first)


def long_gradient(contender: Contender, length: int, memory_bytes: float) -> dict[str, Any]:
  """One gradient of a long sequence: seconds and memory, with one head if memory needs it."""
  for heads in (HEADS, 1):
    ready = contender.prepare(Problem(BATCH, length, heads, HEAD_DIM, 'float32'), 'gradient')
    temp_bytes = ready.temp_bytes or 0
    if temp_bytes <= memory_bytes:
      ready.run()
      start = time.perf_counter()
      ready.run()
      return dict(heads=heads, seconds=time.perf_counter() - start, temp_bytes=temp_bytes)
  return dict(heads=1, temp_bytes=temp_bytes, skipped=f'needs {temp_bytes / 1e9:.1f} GB')


def run(memory_bytes: float) -> dict[str, Any]:
  """compile: for each variant at T 4096. memory: of blockwise at T 16384. long: at T 65536."""
  own = contenders.ours()
  parts: list[tuple[str, Contender, Callable[[Contender], dict[str, Any]]]] = []
  problem = Problem(BATCH, COMPILE_LENGTH, HEADS, HEAD_DIM, 'float32')
  parts += [('compile', c, lambda c: compile_twice(c, problem)) for c in own]
  parts += [('memory', c, _blockwise_memory) for c in own if c.name == 'blockwise']
  parts += [('long', c, lambda c: long_gradient(c, LONG_LENGTH, memory_bytes))
            for c in own
            if c.label in ('local', 'local causal', 'performer causal')]
  result: dict[str, Any] = dict(compile=[], memory=[], long=[])
  lengths = dict(compile=COMPILE_LENGTH, memory=MEMORY_LENGTH, long=LONG_LENGTH)
  progress = Progress(len(parts), len(parts))
  for section, contender, measure in parts:
    progress.cell(f'{section}: {contender.label}, T {lengths[section]}, gradient', 1)
    row = dict(label=contender.label, length=lengths[section])
    result[section].append(row | measure(contender))
    jax.clear_caches()
  progress.end()
  return result


def _blockwise_memory(contender: Contender) -> dict[str, Any]:
  problem = Problem(BATCH, MEMORY_LENGTH, HEADS, HEAD_DIM, 'float32')
  return dict(temp_bytes=contender.prepare(problem, 'gradient').temp_bytes)
