"""A trace of some steps of a run: what the device and the host did, and when."""

from pathlib import Path
from typing import Any

import jax

from experiments.costs import Step


class Profiler:
  """Traces some steps; several sessions write beside each other.

  Attributes:
    done: whether the trace is written.
  """

  def __init__(self, first: int, last: int, directory: Path):
    self._first, self._last, self._directory = first, last, str(directory)
    self._tracing = self.done = False

  def around(self, train_step: Step, start: int) -> Step:
    """train_step, of which the call after step `start` is the first; it is traced in its turn."""
    step = start

    def traced(state: Any) -> Any:
      nonlocal step
      step += 1
      if step == self._first:
        jax.profiler.start_trace(self._directory)
        self._tracing = True
      with jax.profiler.StepTraceAnnotation('train', step_num=step):
        result = train_step(state)
      if step == self._last and self._tracing:
        jax.block_until_ready(result)
        self.close()
        self.done = True
      return result

    return traced

  def close(self) -> None:
    """Writes what has been traced so far."""
    if self._tracing:
      self._tracing = False
      jax.profiler.stop_trace()
