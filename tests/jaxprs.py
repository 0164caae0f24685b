"""Reading jaxprs: the sizes of all intermediates, inside loops, branches and custom derivatives
too.
"""

import math
from typing import Any, Iterator

import jax

from experiments.bench_measure import flops
from experiments.bench_measure import inner_jaxprs


def equations(jaxpr) -> Iterator[Any]:
  """All equations, those of inner jaxprs included."""
  for equation in jaxpr.eqns:
    yield equation
    for value in equation.params.values():
      for inner in inner_jaxprs(value):
        yield from equations(inner)


def shapes(function, *arguments) -> set[tuple[int, ...]]:
  """Shapes of every array that tracing `function` makes or captures; arguments may be
  jax.ShapeDtypeStruct.
  """
  closed = jax.make_jaxpr(function)(*arguments)
  found = {
      tuple(variable.aval.shape)
      for equation in equations(closed.jaxpr)
      for variable in (*equation.outvars, *equation.invars)
      if hasattr(variable.aval, 'shape')
  }
  return found | {tuple(constant.shape) for constant in closed.consts if hasattr(constant, 'shape')}


def largest(function, *arguments) -> int:
  """Elements of the largest array."""
  return max((math.prod(shape) for shape in shapes(function, *arguments)), default=0)


def products(function, *arguments) -> int:
  """Multiplications in the matrix products of `function`, a loop's counted as often as it runs."""
  return flops(jax.make_jaxpr(function)(*arguments).jaxpr) // 2


def temporary_bytes(function, *arguments) -> int:
  """Memory the compiled program needs beside arguments and results."""
  compiled = jax.jit(function).lower(*arguments).compile()
  return compiled.memory_analysis().temp_size_in_bytes
