"""The training state and the one function that moves it on by a step."""

from typing import Any, Callable, NamedTuple

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from experiments import losses
from experiments import placement
from experiments.config import Config
from experiments.optimizer import learning_rate, make_optimizer
from experiments.tasks import Task

Batch = dict[str, Array]

# Randomness of different kinds never shares a key. Append only: a position is part of the result.
_STREAMS = ('init', 'data', 'dropout', 'eval')


class State(NamedTuple):
  """All that a run carries from step to step. step: [] int32, the updates applied so far."""
  step: Array
  params: Any
  opt_state: Any


class Sums(NamedTuple):
  """What adds up over the pieces of a batch, each [] float32: divide only at the end."""
  loss: Array
  correct: Array
  weight: Array


def stream(config: Config, name: str, index: int | Array) -> Array:
  """The key of one kind of randomness at one step: a function of (seed, name, index) alone."""
  key = jax.random.fold_in(jax.random.key(config.seed), _STREAMS.index(name))
  return jax.random.fold_in(key, index)


def init_state(config: Config, task: Task, model: nn.Module) -> State:
  """The state before the first step. Jit it, or take its shapes by jax.eval_shape."""
  rng = stream(config, 'init', 0)
  variables = model.init({'params': rng}, task.sample(rng, 1), draw=0)
  params = variables['params']
  return State(jnp.zeros((), jnp.int32), params, make_optimizer(config).init(params))


def make_train_step(
    config: Config,
    task: Task,
    model: nn.Module,
    mesh: Mesh | None = None,
    abstract: State | None = None) -> Callable[[State], tuple[State, dict[str, Array]]]:
  """Makes the jitted step(state) -> (state, metrics), which donates its argument.

  A step whose loss, gradient or new parameters are not finite returns the state as it was, its
  step count included, so the next call computes the same step again. metrics: [] arrays loss,
  accuracy, grad_norm, learning_rate and finite. With a mesh the state lives where `abstract`, of
  `placement.placed`, says.
  """
  optimizer, schedule = make_optimizer(config), learning_rate(config)

  def loss_sums(params: Any, batch: Batch, draw: Array | int, rng: Array) -> tuple[Array, Sums]:
    logits: Any = model.apply({'params': params},
                              batch,
                              deterministic=False,
                              draw=draw,
                              rngs={'dropout': rng})
    targets, weights = batch['targets'], batch['weights']
    loss, weight = losses.cross_entropy(logits, targets, weights, config.label_smoothing)
    correct = jnp.where(jnp.argmax(logits, -1) == targets, weights, 0)
    return loss, Sums(loss, jnp.sum(correct), weight)

  def step(state: State) -> tuple[State, dict[str, Array]]:
    batch = task.sample(stream(config, 'data', state.step), config.batch_size)
    batch = placement.constrain_batch(mesh, batch)
    draw = state.step // config.redraw_steps if config.redraw_steps else 0
    rng = stream(config, 'dropout', state.step)
    sums, grads = _accumulate(jax.grad(loss_sums, has_aux=True), state.params, batch, draw, rng,
                              config.micro_batches)
    total = jnp.where(sums.weight > 0, sums.weight, 1)
    grads = jax.tree.map(lambda g: g / total, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    new = State(state.step + 1, optax.apply_updates(state.params, updates), opt_state)
    squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)]
    loss, norm = sums.loss / total, jnp.sqrt(sum(squares, jnp.zeros(())))
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    for leaf in jax.tree.leaves(new.params):
      finite &= jnp.all(jnp.isfinite(leaf))
    new = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
    metrics = dict(loss=loss,
                   accuracy=sums.correct / total,
                   grad_norm=norm,
                   learning_rate=jnp.asarray(schedule(state.step)),
                   finite=finite)
    return new, metrics

  where = placement.shardings(mesh, abstract)
  if where is None:
    return jax.jit(step, donate_argnums=0)
  return jax.jit(step, donate_argnums=0, in_shardings=(where,), out_shardings=(where, None))


def _accumulate(grad_fn: Callable[..., tuple[Any, Sums]], params: Any, batch: Batch,
                draw: Array | int, rng: Array, pieces: int) -> tuple[Sums, Any]:
  """Sums and gradients of the summed loss over a batch, computed in so many pieces."""
  if pieces == 1:
    grads, sums = grad_fn(params, batch, draw, rng)
    return sums, grads

  def body(total: Any, piece: Any) -> tuple[Any, None]:
    index, part = piece
    grads, sums = grad_fn(params, part, draw, jax.random.fold_in(rng, index))
    return jax.tree.map(jnp.add, total, (sums, grads)), None

  zero = jnp.zeros((), jnp.float32)
  zeros = Sums(zero, zero, zero), jax.tree.map(jnp.zeros_like, params)
  total, _ = jax.lax.scan(body, zeros, (jnp.arange(pieces), split(batch, pieces)))
  return total


def split(batch: Batch, pieces: int) -> Batch:
  """Cuts the leading axis B of every array into [pieces, ceil(B / pieces)].

  Where B is no multiple of pieces, rows from the front fill up the last ones, with weight 0.
  """
  size = len(batch['targets'])
  rows = jnp.arange(pieces * -(-size // pieces))
  padded = {name: array[rows % size] for name, array in batch.items()}
  real = (rows < size).reshape((-1,) + (1,) * (batch['weights'].ndim - 1))
  padded['weights'] = jnp.where(real, padded['weights'], 0)
  return {name: array.reshape(pieces, -1, *array.shape[1:]) for name, array in padded.items()}
