"""A task and a model that compile in no time, for tests of what goes on around them."""

from flax import linen as nn
import jax
import jax.numpy as jnp

from experiments.config import Config
from experiments.step import init_state, stream
from experiments.tasks import Task

CLASSES = 7
CONFIG = Config(steps=6,
                batch_size=5,
                warmup_steps=2,
                learning_rate=0.1,
                dropout=0.2,
                log_every=1,
                eval_every=2,
                eval_batches=3,
                checkpoint_every=2)


class Model(nn.Module):
  """Predicts each target from its own input alone."""
  rate: float = 0.2

  @nn.compact
  def __call__(self, batch, *, deterministic=True, draw=0):
    del draw
    hidden = nn.Embed(CLASSES, 8)(batch['inputs'])
    hidden = nn.Dropout(self.rate, deterministic=deterministic)(hidden)
    return nn.Dense(CLASSES)(hidden)


def sample(rng, batch_size):
  """Successors modulo 7, with between 1 and 4 scored positions in a row."""
  tokens, lengths = jax.random.split(rng)
  inputs = jax.random.randint(tokens, (batch_size, 4), 0, CLASSES)
  scored = jnp.arange(4)[None, :] < jax.random.randint(lengths, (batch_size, 1), 1, 5)
  return dict(inputs=inputs, targets=(inputs + 1) % CLASSES, weights=scored.astype(jnp.float32))


def guesses(batch):
  return {'same again': batch['inputs'], 'zero': jnp.zeros_like(batch['targets'])}


TASK = Task(CLASSES, CLASSES, 4, 4, sample, guesses, 'learns successors')


def poisoned(config: Config, step: int) -> Task:
  """TASK, but the batch that leads from step to step + 1 makes the loss NaN."""

  def poisoned_sample(rng, batch_size):
    batch = sample(rng, batch_size)
    hit = jnp.all(jax.random.key_data(rng) == jax.random.key_data(stream(config, 'data', step)))
    return batch | dict(weights=jnp.where(hit, jnp.nan, batch['weights']))

  return TASK._replace(sample=poisoned_sample)


def new_state(config=CONFIG, task=TASK, model=Model()):
  return jax.jit(lambda: init_state(config, task, model))()
