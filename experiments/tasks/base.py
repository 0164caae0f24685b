"""What every task shares: reserved tokens, the Task and Batch types, sizes, next-token shift."""

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple, TYPE_CHECKING

import jax
from jax import Array
import jax.numpy as jnp

if TYPE_CHECKING:
  from experiments.config import Config

PAD, BOS, EOS, SEP, MASK = range(5)
RESERVED = 5  # the first id that is an ordinary token
NAMES = {'PAD': PAD, 'BOS': BOS, 'EOS': EOS, 'SEP': SEP, 'MASK': MASK}

Batch = dict[str, Array]


class Answer(NamedTuple):
  """How a model writes its answer to a task token by token.

  Attributes:
    frame: the symbols a person gives to (source, inputs): what the model reads, and what it goes on
      from; source is empty where there is no encoder. ValueError for what is no symbol of the task.
    eos_id: the token that ends an answer; None: its length is known.
    prompt: what a prompt is, in words.
  """
  frame: Callable[[list[int]], tuple[list[int], list[int]]]
  eos_id: int | None
  prompt: str


def as_it_stands(symbols: list[int]) -> tuple[list[int], list[int]]:
  """The frame of a task whose prompts are all that a model reads."""
  return [], symbols


class Task(NamedTuple):
  """A data distribution with its trivial answers.

  Attributes:
    vocab_size: token ids are in [0, vocab_size).
    num_classes: size of the logits' last axis.
    input_length: static length of `source` where there is one, else of `inputs`.
    target_length: static length of `inputs` next to a `source`, else the same as input_length.
    sample: (rng, batch_size) -> Batch, pure; jit it with batch_size static.
    guesses: Batch -> {name: integers shaped like targets}, what each trivial baseline answers.
    note: what is learned, and what to compare an accuracy with.
    per_position: whether targets are [B, T]; otherwise they are [B] and the model pools.
    answer: how it is answered, where the scored targets of a row are one run of tokens that end it;
      None where a model does not write what it is scored on.
    bottleneck: whether a seq2seq decoder sees the last token of the source alone.

  A batch holds int32 tokens, float32 weights and boolean masks (True = a real token):
    decoder: inputs [B, T], targets [B, T], weights [B, T].
    seq2seq: source [B, S], source_mask [B, S], inputs [B, T], targets [B, T], weights [B, T].
    encoder: inputs [B, T], input_mask [B, T], targets and weights [B, T] or [B].
  """
  vocab_size: int
  num_classes: int
  input_length: int
  target_length: int
  sample: Callable[[Array, int], Batch]
  guesses: Callable[[Batch], dict[str, Array]]
  note: str
  per_position: bool = True
  answer: Answer | None = None
  bottleneck: bool = False


class TaskFamily(NamedTuple):
  """How a task is made from a Config.

  Attributes:
    make: Config -> Task.
    models: the model families that can be trained on it.
    options: Config fields the task reads -> the default the task uses where the field is 0, which
      make its small form. With 'min_length' among them the length of a sequence is drawn.
    full: the values of the published form, which --preset=TASK_full sets; none where there is but
      one form.
  """
  make: Callable[['Config'], Task]
  models: tuple[str, ...]
  options: Mapping[str, Any]
  full: Mapping[str, Any] = {}


def size(
    config: 'Config',
    options: Mapping[str, Any],
    name: str,
    low: float,
    high: float = math.inf,
) -> Any:
  """Returns Config field `name`, for 0 the task's default; ValueError unless from low to high."""
  value = getattr(config, name) or options[name]
  if not low <= value <= high:
    bound = f'at least {low}' if high == math.inf else f'from {low} to {high}'
    raise ValueError(f'{name} must be {bound} for task {config.task}; got {value}. '
                     f'0 means this task\'s default, {options[name]}')
  return value


def lengths(config: 'Config', options: Mapping[str, Any], low: int = 1) -> tuple[int, int]:
  """Returns (min_length, length): how many items a sequence whose length is drawn has.

  At least `low`. Where length is less than the task's own min_length, that is not what binds.
  """
  length = size(config, options, 'length', low)
  least = config.min_length or min(options['min_length'], length)
  if not low <= least <= length:
    raise ValueError(f'min_length must be from {low} to length={length} for task {config.task}; '
                     f'got {least}')
  return least, length


def draw_count(rng: Array, batch_size: int, low: int, high: int) -> Array:
  """Draws how many items each row has, evenly from low to high: int32 [B, 1]."""
  return jax.random.randint(rng, (batch_size, 1), low, high + 1, jnp.int32)


def next_token(tokens: Array, scored: Array) -> Batch:
  """Shifts whole sequences [B, T+1] once: `inputs` at position t predict token t + 1 as `targets`.

  Args:
    tokens: [B, T+1].
    scored: [B, T+1], true at the tokens whose prediction counts.
  """
  return {
      'inputs': tokens[:, :-1],
      'targets': tokens[:, 1:],
      'weights': scored[:, 1:].astype(jnp.float32),
  }


def classified(tokens: Array, real: Array, classes: Array) -> Batch:
  """An encoder's batch: BOS and the real ones of tokens [B, T]; classes [B] are the targets."""
  pad = ((0, 0), (1, 0))
  return {
      'inputs': jnp.pad(jnp.where(real, tokens, PAD), pad, constant_values=BOS),
      'input_mask': jnp.pad(real, pad, constant_values=True),
      'targets': classes,
      'weights': jnp.ones(len(classes), jnp.float32),
  }


def chance(shape: tuple[int, ...], low: int, high: int) -> Array:
  """Returns int32 guesses drawn evenly from [low, high), the same at every call."""
  return jax.random.randint(jax.random.key(0), shape, low, high, jnp.int32)


def any_token(tokens: Array, low: int, high: int) -> Array:
  """Returns at all places of a row one of its tokens in [low, high), the same at every call.

  A trivial guess. It is drawn evenly from the places; a row without such a token gives its first.
  """
  score = jax.random.uniform(jax.random.key(0), tokens.shape, jnp.float32)
  score = jnp.where((low <= tokens) & (tokens < high), score, -1.)
  drawn = jnp.argmax(score, axis=1, keepdims=True)
  return jnp.broadcast_to(jnp.take_along_axis(tokens, drawn, axis=1), tokens.shape)


def draw_distinct(rng: Array, log_weights: Array, batch_size: int, count: int) -> Array:
  """Draws `count` distinct indices per row, one after the other with the given weights.

  The largest of log weight + Gumbel noise are a weighted sample without replacement.

  Args:
    rng: a key.
    log_weights: [n].
    batch_size: B.
    count: at most n.

  Returns:
    int32 [B, count].

  Source: Kool et al. 2019, section 2.3, https://arxiv.org/abs/1903.06059.
  """
  noise = jax.random.gumbel(rng, (batch_size, log_weights.shape[0]), jnp.float32)
  return jax.lax.top_k(noise + log_weights[None, :], count)[1].astype(jnp.int32)
