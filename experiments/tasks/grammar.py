"""masked and tagging: tell hidden words, or each word's role, in a small grammar (encoder-only).

    text   = BOS clause+                      clause = NP(a) verb(a) NP(b) SEP
    NP(c)  = det(c) [adj(c)] noun(c)          a, b, c: agreement classes

The verb agrees with its subject, determiner and adjective with their noun. There is one word per
category and class. Never two neighbours are hidden, so each phrase shows its class, and the order
of the rest shows the category: every hidden word can be told exactly. Roles need the context:
subject and object phrases are made of the same words.
"""

import functools
from typing import TYPE_CHECKING

import jax
from jax import Array
import jax.numpy as jnp

from experiments.tasks import base
from experiments.tasks.base import BOS, MASK, PAD, RESERVED, SEP

if TYPE_CHECKING:
  from experiments.config import Config

TAGGING_OPTIONS = {'length': 32, 'num_classes': 4}
MASKED_OPTIONS = TAGGING_OPTIONS | {'mask_rate': 0.15}
SHORTEST, LONGEST = 6, 8  # tokens of a clause
DET, ADJ, NOUN, VERB, STOP = range(5)
NUM_TAGS = 9  # 0 BOS and padding; 1-4 DET ADJ NOUN VERB; 5-8 DET ADJ NOUN of the object, STOP


def _words(category: Array, agreement: Array, num_classes: int) -> Array:
  """Returns the id of a word: RESERVED + category * C + class, but SEP for STOP."""
  return jnp.where(category == STOP, SEP, RESERVED + category * num_classes + agreement)


def draw_text(rng: Array, batch_size: int, length: int,
              num_classes: int) -> tuple[Array, Array, Array]:
  """Draws texts of whole clauses.

  A clause is two pieces: a phrase and what closes it (verb or SEP). Where a place lies in its
  piece, counted from both ends, gives its category.

  Returns:
    tokens [B, length + 1] behind a BOS and padded with PAD; tags [B, length + 1], 0 at BOS and
    padding; real [B, length + 1], true at BOS and words.
  """
  adjective_rng, class_rng, clause_rng = jax.random.split(rng, 3)
  num_pieces = 2 * (length // SHORTEST)
  shape = (batch_size, num_pieces)
  sizes = 3 + jax.random.bernoulli(adjective_rng, 0.5, shape).astype(jnp.int32)
  agreement = jax.random.randint(class_rng, shape, 0, num_classes, jnp.int32)
  ends = jnp.cumsum(sizes, axis=1, dtype=jnp.int32)
  fitting = jnp.sum(ends[:, 1::2] <= length, axis=1, dtype=jnp.int32)
  clauses = jax.random.randint(clause_rng, (batch_size,), 1, fitting + 1, jnp.int32)
  place = jnp.arange(length, dtype=jnp.int32)[None, :]
  piece = jnp.sum(ends[:, None, :] <= place[..., None], axis=-1, dtype=jnp.int32)
  real = piece < 2 * clauses[:, None]
  piece = jnp.minimum(piece, num_pieces - 1)
  left = jnp.take_along_axis(ends, piece, axis=1) - 1 - place
  right = jnp.take_along_axis(sizes, piece, axis=1) - 1 - left
  closing = jnp.where(piece % 2 == 0, VERB, STOP)
  category = jnp.where(left == 0, closing,
                       jnp.where(left == 1, NOUN, jnp.where(right == 0, DET, ADJ)))
  words = _words(category, jnp.take_along_axis(agreement, piece, axis=1), num_classes)
  tags = 1 + category + 4 * (piece % 2) - (category == STOP).astype(jnp.int32)
  pad = ((0, 0), (1, 0))
  tokens = jnp.pad(jnp.where(real, words, PAD), pad, constant_values=BOS).astype(jnp.int32)
  return tokens, jnp.pad(jnp.where(real, tags, 0), pad), jnp.pad(real, pad, constant_values=True)


def _hide(rng: Array, real: Array, mask_rate: float) -> Array:
  """Returns where to hide words [B, T]: at least one, never BOS, padding or two neighbours."""
  rate_rng, one_rng = jax.random.split(rng)
  words = real.at[:, 0].set(False)
  wanted = jax.random.bernoulli(rate_rng, mask_rate, real.shape) & words
  # Of a run of neighbours the first stays.
  hidden = wanted & ~jnp.pad(wanted, ((0, 0), (1, 0)))[:, :-1]
  score = jnp.where(words, jax.random.uniform(one_rng, real.shape, jnp.float32), -1.)
  one = jax.nn.one_hot(jnp.argmax(score, axis=1), real.shape[1], dtype=jnp.bool)
  return jnp.where(jnp.any(hidden, axis=1, keepdims=True), hidden, one)


def _sample_masked(rng: Array, batch_size: int, *, length: int, num_classes: int,
                   mask_rate: float) -> base.Batch:
  text_rng, hide_rng = jax.random.split(rng)
  tokens, _, real = draw_text(text_rng, batch_size, length, num_classes)
  hidden = _hide(hide_rng, real, mask_rate)
  return {
      'inputs': jnp.where(hidden, MASK, tokens),
      'input_mask': real,
      'targets': tokens,
      'weights': hidden.astype(jnp.float32),
  }


def _after(previous: Array, num_classes: int) -> Array:
  """Returns the likeliest word behind `previous`, from that word alone."""
  category, agreement = jnp.divmod(previous - RESERVED, num_classes)
  following = jnp.where(category == NOUN, STOP, jnp.where(category == VERB, DET, NOUN))
  word = _words(following, jnp.where(category == VERB, 0, agreement), num_classes)
  return jnp.where(previous < RESERVED, RESERVED + DET * num_classes, word)


def _guess_masked(batch: base.Batch, *, num_classes: int) -> dict[str, Array]:
  inputs, targets = batch['inputs'], batch['targets']
  previous = jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
  return {
      'majority class': jnp.full_like(targets, SEP),
      'likeliest after the last token': _after(previous, num_classes),
      'copy the last token': previous,
      'chance': base.chance(targets.shape, RESERVED, RESERVED + 4 * num_classes),
  }


def _make_masked(config: 'Config') -> base.Task:
  length = base.size(config, MASKED_OPTIONS, 'length', LONGEST)
  num_classes = base.size(config, MASKED_OPTIONS, 'num_classes', 1)
  mask_rate = base.size(config, MASKED_OPTIONS, 'mask_rate', 0., 1.)
  sizes = {'length': length, 'num_classes': num_classes, 'mask_rate': mask_rate}
  return base.Task(
      vocab_size=RESERVED + 4 * num_classes,
      num_classes=RESERVED + 4 * num_classes,
      input_length=length + 1,
      target_length=length + 1,
      sample=functools.partial(_sample_masked, **sizes),
      guesses=functools.partial(_guess_masked, num_classes=num_classes),
      note='fill in hidden words by category and agreement; exactly solvable, 1.00',
  )


def _sample_tagging(rng: Array, batch_size: int, *, length: int, num_classes: int) -> base.Batch:
  tokens, tags, real = draw_text(rng, batch_size, length, num_classes)
  return {
      'inputs': tokens,
      'input_mask': real,
      'targets': tags,
      'weights': real.at[:, 0].set(False).astype(jnp.float32),
  }


def _guess_tagging(batch: base.Batch, *, num_classes: int) -> dict[str, Array]:
  inputs, targets = batch['inputs'], batch['targets']
  word_tag = jnp.where(inputs < RESERVED, 0, 1 + (inputs - RESERVED) // num_classes)
  return {
      'majority class': jnp.ones_like(targets),
      'the word alone': jnp.where(inputs == SEP, NUM_TAGS - 1, word_tag),
      'chance': base.chance(targets.shape, 1, NUM_TAGS),
  }


def _make_tagging(config: 'Config') -> base.Task:
  length = base.size(config, TAGGING_OPTIONS, 'length', LONGEST)
  num_classes = base.size(config, TAGGING_OPTIONS, 'num_classes', 1)
  return base.Task(
      vocab_size=RESERVED + 4 * num_classes,
      num_classes=NUM_TAGS,
      input_length=length + 1,
      target_length=length + 1,
      sample=functools.partial(_sample_tagging, length=length, num_classes=num_classes),
      guesses=functools.partial(_guess_tagging, num_classes=num_classes),
      note='name each word\'s role, subject or object side included; exactly solvable, 1.00',
  )


TASKS = {
    'masked': base.TaskFamily(_make_masked, ('encoder',), MASKED_OPTIONS),
    'tagging': base.TaskFamily(_make_tagging, ('encoder',), TAGGING_OPTIONS),
}
