"""Measuring a call: its time in turns with others, its matrix products, the machine's rate."""

from collections.abc import Callable, Iterator, Sequence
import math
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MATMUL_SIZE = 2048


class Timing(NamedTuple):
  """median: seconds. spread: (upper - lower quartile) / median."""
  median: float
  spread: float


def timing(seconds: Sequence[float]) -> Timing:
  """Sums up the times of one call, in seconds."""
  middle = statistics.median(seconds)
  if len(seconds) < 2:
    return Timing(middle, 0.0)
  lower, _, upper = statistics.quantiles(seconds, n=4, method='inclusive')
  return Timing(middle, (upper - lower) / middle if middle else 0.0)


def alternate(calls: Sequence[Callable[[], Any]],
              rounds: int,
              clock: Callable[[], float] = time.perf_counter,
              before: Callable[[int, int], None] = lambda number, index: None) -> list[list[float]]:
  """Times calls in turn, so that what slows the machine for a while slows them all.

  In every round each is called once untimed and then once timed. The untimed call pays for the
  memory that the one before gave back to the system: without it whoever follows a call with large
  temporaries looks up to 30 % slower than it is.

  Args:
    calls: each computes its results, waits for them and drops them.
    rounds: how often each is timed.
    clock: seconds.
    before: told the round and the index of each turn, outside the time.

  Returns:
    for each call its times in seconds, one a round.
  """
  seconds: list[list[float]] = [[] for _ in calls]
  for number in range(rounds):
    for index, call in enumerate(calls):
      before(number, index)
      call()
      start = clock()
      call()
      seconds[index].append(clock() - start)
  return seconds


def inner_jaxprs(value: Any) -> Iterator[Any]:
  """The jaxprs inside a parameter of an equation."""
  if hasattr(value, 'eqns'):
    yield value
  elif isinstance(value, (tuple, list)):
    for item in value:
      yield from inner_jaxprs(item)


def flops(jaxpr: Any) -> int | None:
  """Floating-point operations of the matrix products in a jaxpr: 2 m n k for [m, k] @ [k, n].

  A loop's body counts as often as it runs and a conditional as its largest branch (XLA's own cost
  analysis counts a body once). None where products stand in a loop that decides while it runs how
  often it does.
  """
  total = 0
  for equation in jaxpr.eqns:
    name, params = equation.primitive.name, equation.params
    if name == 'dot_general':
      (contracted, _), _ = params['dimension_numbers']
      shape = equation.invars[0].aval.shape
      depth = math.prod(shape[axis] for axis in contracted)
      total += 2 * math.prod(equation.outvars[0].aval.shape) * depth
      continue
    counts = []
    for inner in (jaxpr for value in params.values() for jaxpr in inner_jaxprs(value)):
      count = flops(inner)
      if count is None or (name == 'while' and count):
        return None
      counts.append(count)
    if name == 'cond':
      total += max(counts, default=0)
    else:
      total += sum(counts) * (params['length'] if name == 'scan' else 1)
  return total


def matmul_rate(dtype: str, size: int = MATMUL_SIZE, rounds: int = 5) -> float:
  """Floating-point operations a second of one product [size, size] @ [size, size], median."""
  x = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
  product = jax.jit(jnp.matmul)
  seconds, = alternate([lambda: jax.block_until_ready(product(x, x))], rounds)
  return 2 * size**3 / timing(seconds).median
