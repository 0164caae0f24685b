"""The training loop."""

from typing import Any, Callable

import jax

from experiments.checkpoint import Checkpoints
from experiments.config import Config, UserError
from experiments.evaluate import MODEL, Score
from experiments.step import State
from experiments.writer import MetricsFile, NoFile

Scores = dict[str, Score]


class NonFinite(UserError):
  """A step's loss, gradient or parameters were not finite; nothing of it was applied."""
  exit_status = 1


def is_due(step: int, every: int, last: int) -> bool:
  """Whether something is done after a step: every so many (0: never), and after the last."""
  return step == last or every > 0 and step % every == 0


def score_row(scores: Scores) -> dict[str, Any]:
  """Scores as the fields of a row."""
  model = scores[MODEL]._asdict()
  baselines = {name: score.accuracy for name, score in scores.items() if name != MODEL}
  row = {f'eval_{name}': value for name, value in model.items() if value is not None}
  return row | {'baselines': baselines}


def run(
    config: Config,
    state: State,
    train_step: Callable[[State], tuple[State, dict[str, Any]]],
    evaluate: Callable[[Any], Scores],
    metrics_file: MetricsFile | NoFile,
    checkpoints: Checkpoints,
    *,
    should_stop: Callable[[], bool],
    report: Callable[[dict[str, Any]], None],
) -> tuple[State, Scores | None]:
  """Trains from state.step to config.steps, or until told to stop.

  The numbers of a step are read when the next one has been dispatched, so the device never waits
  for Python. Rows are written before the checkpoint that follows them.

  Args:
    config: how long, and how often each thing happens.
    state: where to begin; it is donated.
    train_step: see step.make_train_step.
    evaluate: see evaluate.make_evaluate.
    metrics_file: gets the rows.
    checkpoints: get the states.
    should_stop: asked after every step.
    report: told every step's row.

  Returns:
    The last state, which checkpoints also has, and its scores: None if stopped before the end.

  Raises:
    NonFinite: after the row of the step that failed; checkpoints has good states only.
  """
  scores, start, pending = None, int(state.step), None

  def settle(step: int, metrics: dict[str, Any], params: Any = None) -> None:
    nonlocal scores
    row = {'step': step} | {name: float(value) for name, value in jax.device_get(metrics).items()}
    finite = row.pop('finite')
    if finite and params is not None:
      scores = evaluate(params)
      row |= score_row(scores)
    if not finite or params is not None or step % config.log_every == 0:
      metrics_file.write(row)
    if not finite:
      last = checkpoints.latest_step()
      raise NonFinite(f'step {step} is not finite (loss {row["loss"]}, gradient norm '
                      f'{row["grad_norm"]}); nothing of it was applied. Last good checkpoint: '
                      f'{"none" if last is None else f"step {last}"}. Try a smaller '
                      '--learning_rate or --clip_norm')
    report(row)

  for step in range(start + 1, config.steps + 1):
    state, metrics = train_step(state)
    if pending:
      settle(*pending)
    pending = step, metrics
    evaluating = is_due(step, config.eval_every, config.steps)
    saving = is_due(step, config.checkpoint_every, config.steps)
    stopping = should_stop()
    if evaluating or saving or stopping:
      settle(step, metrics, state.params if evaluating else None)
      pending = None
    if saving or stopping:
      metrics_file.sync()
      checkpoints.save(state)
    if stopping and step < config.steps:
      return state, None
  return state, evaluate(state.params) if scores is None else scores
