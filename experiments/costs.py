"""What a run costs: matrix products and memory of a training step, bytes of a decode state."""

import statistics
import time
from typing import Any, Callable, NamedTuple

import attn
from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments import decode
from experiments.bench_measure import flops
from experiments.config import Config
from experiments.step import make_train_step, State
from experiments.tasks import Task


class Costs(NamedTuple):
  """Of one run.

  Attributes:
    parameters: how many numbers are learned.
    step_flops: floating-point operations of a step's matrix products; None where they are not
      known before it runs.
    step_bytes: memory that a step needs beside the state, as compiled here.
    decode_bytes: what decoding one sequence keeps of it; None for an encoder.
  """
  parameters: int
  step_flops: int | None
  step_bytes: int
  decode_bytes: int | None


Step = Callable[[State], tuple[State, dict[str, Any]]]


def compile_step(config: Config,
                 task: Task,
                 model: nn.Module,
                 abstract: State,
                 mesh: Mesh | None = None) -> tuple[Step, Costs]:
  """The training step, compiled for states of the shapes `abstract`, and what it costs."""
  jitted: Any = make_train_step(config, task, model, mesh, abstract)
  traced = jitted.trace(abstract)
  compiled = traced.lower().compile()
  memory = compiled.memory_analysis()
  parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract.params))
  return compiled, Costs(parameters, flops(traced.jaxpr.jaxpr), memory.temp_size_in_bytes,
                         _decode_bytes(config, task, model, abstract.params))


def _decode_bytes(config: Config, task: Task, model: nn.Module, params: Any) -> int | None:
  if config.model == 'encoder':
    return None
  batch = {}
  for name, mask, length in (('inputs', 'input_mask', task.target_length), ('source', 'source_mask',
                                                                            task.input_length)):
    batch[name] = jax.ShapeDtypeStruct((1, length), jnp.int32)
    batch[mask] = jax.ShapeDtypeStruct((1, length), jnp.bool_)
  state = jax.eval_shape(lambda params, batch: decode.begin(model, params, batch)[1], params, batch)
  return attn.cache.size(state)


class StepTimer:
  """How long steps take. What comes before the first row, and evaluations, are not counted."""

  def __init__(self) -> None:
    self._last: float | None = None
    self._seconds: list[float] = []

  def around(self, report: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """A function that is told every step's row, takes the time, and tells report."""

    def told(row: dict[str, Any]) -> None:
      now = time.monotonic()
      if self._last is not None and 'eval_loss' not in row:
        self._seconds.append(now - self._last)
      report(row)
      self._last = time.monotonic()

    return told

  @property
  def seconds_per_step(self) -> float | None:
    """The median; None if no step could be timed."""
    return statistics.median(self._seconds) if self._seconds else None
