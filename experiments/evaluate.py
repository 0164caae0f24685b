"""Scores on held-out batches, of a model and of the task's trivial baselines alike."""

from typing import Any, Callable, NamedTuple

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments import decode
from experiments import losses
from experiments import placement
from experiments.config import Config
from experiments.step import stream
from experiments.tasks import Task

MODEL = 'model'


class Score(NamedTuple):
  """How good something is on the held-out batches; loss is None for what has no probabilities.

  accuracy counts positions by weight; exact_match counts the rows that are right wherever they
  are scored, by teacher forcing; free_running those whose answer is right when the model writes it
  itself, None for what writes nothing.
  """
  loss: float | None
  accuracy: float
  exact_match: float
  free_running: float | None = None


def make_evaluate(config: Config,
                  task: Task,
                  model: nn.Module,
                  mesh: Mesh | None = None) -> Callable[[Any], dict[str, Score]]:
  """Makes evaluate(params) -> {'model': Score, and each baseline's name: Score}.

  The batches are a function of (seed, index) on a stream of their own, and the Performer draw is
  always the first, so equal parameters score equally at any step. Numerators and denominators add
  up over the batches and are divided once. Answers are greedy.
  """
  writes = task.answer if config.free_running else None

  @jax.jit
  def batch_sums(params: Any, index: Array) -> tuple[Array, dict[str, Any], Array | None]:
    batch = task.sample(stream(config, 'eval', index), config.batch_size)
    batch = placement.constrain_batch(mesh, batch)
    logits: Any = model.apply({'params': params}, batch, deterministic=True, draw=0)
    loss, _ = losses.cross_entropy(logits, batch['targets'], batch['weights'])
    answers = {MODEL: jnp.argmax(logits, -1)} | task.guesses(batch)
    counts = {name: count_correct(answer, batch) for name, answer in answers.items()}
    if writes is None:
      return loss, counts, None
    written = decode.answer(model, params, batch, writes.eos_id).tokens
    return loss, counts, jnp.sum(decode.is_right(written, batch))

  def evaluate(params: Any) -> dict[str, Score]:
    sums = [batch_sums(params, index) for index in range(config.eval_batches)]
    losses_, counts, right = jax.tree.map(lambda *xs: sum(map(float, xs)), *jax.device_get(sums))
    scores = {}
    for name in sorted(counts, key=lambda name: (name != MODEL, name)):
      correct, count, exact, rows = counts[name]
      accuracy, exact_match = correct / max(count, 1), exact / max(rows, 1)
      if name == MODEL:
        written = None if right is None else right / max(rows, 1)
        scores[name] = Score(losses_ / max(count, 1), accuracy, exact_match, written)
      else:
        scores[name] = Score(None, accuracy, exact_match)
    return scores

  return evaluate


def count_correct(answer: Array, batch: dict[str, Array]) -> tuple[Array, Array, Array, Array]:
  """Counts what is right in a batch.

  Args:
    answer: integers like batch['targets'], [B, T] or [B].
    batch: targets and weights.

  Returns:
    (weight of right positions, weight of all, rows right throughout, rows that are scored at all).
  """
  weights = batch['weights'].reshape(len(answer), -1)
  right = (answer == batch['targets']).reshape(len(answer), -1)
  scored = jnp.any(weights > 0, axis=1)
  exact = jnp.all(right | (weights == 0), axis=1) & scored
  return jnp.sum(jnp.where(right, weights, 0)), jnp.sum(weights), jnp.sum(exact), jnp.sum(scored)
