"""parity, even_pairs, cycle_navigation, modular_arithmetic, dyck: properties of formal languages.

All but dyck put a string into a class. Encoder: inputs BOS x_1 .. x_n, one target a row. Decoder:
BOS x_1 .. x_n SEP y, scored at SEP, where y is RESERVED + class. Symbols are from RESERVED on.
"""

from collections.abc import Callable
import functools
from typing import Any, Mapping, TYPE_CHECKING

import jax
from jax import Array
import jax.numpy as jnp

from experiments.tasks import answers
from experiments.tasks import base
from experiments.tasks.base import BOS, EOS, PAD, RESERVED, SEP

if TYPE_CHECKING:
  from experiments.config import Config

# Symbols [B, n] from 0 on and how many are used, [B, 1] -> classes [B].
Rule = Callable[[Array, Array], Array]

BINARY_OPTIONS = {'length': 40, 'min_length': 1, 'pooling': 'mean', 'free_running': True}
MODULAR_OPTIONS = BINARY_OPTIONS | {'num_classes': 5}
DYCK_OPTIONS = {'length': 40, 'min_length': 2, 'num_classes': 8, 'depth': 4}
DYCK_FULL = {'length': 180, 'num_classes': 128, 'depth': 5}
MOST_CLASSES = 46340  # whose square is an int32
MINUS, TIMES = 1, 2  # operators; 0 is PLUS


def _counts(config: 'Config', options: Mapping[str, Any], first: int, step: int) -> tuple[int, int]:
  """Returns the least and most i for which first + i * step is a length to draw."""
  least, length = base.lengths(config, options, first)
  low, high = -((first - least) // step), (length - first) // step
  if low > high:
    raise ValueError(f'task {config.task} has the lengths {first}, {first + step} and so on; none '
                     f'is from min_length={least} to length={length}')
  return low, high


def _sample(rng: Array, batch_size: int, *, counts: tuple[int, int],
            alphabets: tuple[tuple[int, int], ...], rule: Rule, is_decoder: bool) -> base.Batch:
  """Draws strings whose symbols are from the alphabets in turn, and classifies them."""
  symbol_rng, count_rng = jax.random.split(rng)
  step = len(alphabets)
  count = 1 + step * base.draw_count(count_rng, batch_size, *counts)
  place = jnp.arange(1 + step * counts[1], dtype=jnp.int32)[None, :]
  low, high = (jnp.array(bounds, jnp.int32)[place % step] for bounds in zip(*alphabets))
  symbols = jax.random.randint(symbol_rng, (batch_size, place.shape[1]), low, high, jnp.int32)
  real = place < count
  symbols = jnp.where(real, symbols, low)
  classes = rule(symbols, count)
  if is_decoder:
    answer = RESERVED + classes[:, None]
    return answers.one_sequence(
        answers.Drawn(RESERVED + symbols, count, answer, jnp.ones_like(answer)))
  return base.classified(RESERVED + symbols, real, classes)


def _guesses(batch: base.Batch, *, num_classes: int, rule: Rule,
             is_decoder: bool) -> dict[str, Array]:
  inputs, targets = batch['inputs'], batch['targets']
  if is_decoder:
    last = jnp.argmax(inputs == SEP, axis=1).astype(jnp.int32) - 1
  else:
    last = jnp.sum(batch['input_mask'], axis=1, dtype=jnp.int32) - 1
  one = jnp.ones((len(inputs), 1), jnp.int32)
  ends = {'first': one, 'last': last[:, None]}
  guesses = {
      f'{name} symbol alone': rule(jnp.take_along_axis(inputs, place, axis=1) - RESERVED, one)
      for name, place in ends.items()
  } | {
      'majority class': jnp.zeros_like(last),
      'chance': base.chance(last.shape, 0, num_classes),
  }
  if is_decoder:
    return {
        name: jnp.broadcast_to(RESERVED + guess[:, None], targets.shape)
        for name, guess in guesses.items()
    }
  return guesses


def _classify(config: 'Config', options: Mapping[str, Any], *, num_classes: int,
              alphabets: tuple[tuple[int, int], ...], rule: Rule, note: str) -> base.Task:
  """Makes a task of a rule; alphabets [low, high) are those of x_1, x_2 .. in turn."""
  is_decoder = config.model == 'decoder'
  counts = _counts(config, options, 1, len(alphabets))
  time = 2 + len(alphabets) * counts[1] + is_decoder
  vocab_size = RESERVED + max(num_classes, *(high for _, high in alphabets))
  return base.Task(
      vocab_size=vocab_size,
      num_classes=vocab_size if is_decoder else num_classes,
      input_length=time,
      target_length=time,
      sample=functools.partial(_sample,
                               counts=counts,
                               alphabets=alphabets,
                               rule=rule,
                               is_decoder=is_decoder),
      guesses=functools.partial(_guesses, num_classes=num_classes, rule=rule,
                                is_decoder=is_decoder),
      note=note,
      per_position=is_decoder,
      answer=answers.answer(time - 2, None) if is_decoder else None,
  )


def _parity(symbols: Array, count: Array) -> Array:
  del count  # What is not used is 0.
  return jnp.sum(symbols, axis=1, dtype=jnp.int32) % 2


def _make_parity(config: 'Config') -> base.Task:
  """Parity: whether the number of b's among a's and b's is odd.

  Source: Deletang et al. 2022, appendix A, https://arxiv.org/abs/2207.02098.
  """
  return _classify(config,
                   BINARY_OPTIONS,
                   num_classes=2,
                   alphabets=((0, 2),),
                   rule=_parity,
                   note='tell whether the second symbol is there an odd number of times; exactly '
                   'solvable, 1.00, but hard for attention')


def _even_pairs(symbols: Array, count: Array) -> Array:
  last = jnp.take_along_axis(symbols, count - 1, axis=1)
  return (symbols[:, 0] != last[:, 0]).astype(jnp.int32)


def _make_even_pairs(config: 'Config') -> base.Task:
  """Even pairs: class 0 where ab and ba are there an even number of times, so first equals last.

  Source: Deletang et al. 2022, appendix A, https://arxiv.org/abs/2207.02098.
  """
  return _classify(config,
                   BINARY_OPTIONS,
                   num_classes=2,
                   alphabets=((0, 2),),
                   rule=_even_pairs,
                   note='tell whether the symbol changes an odd number of times, so that the last '
                   'is not the first; exactly solvable, 1.00')


def _end_of_walk(symbols: Array, count: Array, *, num_classes: int) -> Array:
  del count  # What is not used is 0, no move.
  moves = jnp.where(symbols == 2, -1, symbols)
  return jnp.sum(moves, axis=1, dtype=jnp.int32) % num_classes


def _make_cycle_navigation(config: 'Config') -> base.Task:
  """Cycle navigation: where a walk from 0 ends; the symbols are the moves 0, +1 and -1.

  Source: Deletang et al. 2022, appendix A, https://arxiv.org/abs/2207.02098.
  """
  num_classes = base.size(config, MODULAR_OPTIONS, 'num_classes', 2)
  return _classify(config,
                   MODULAR_OPTIONS,
                   num_classes=num_classes,
                   alphabets=((0, 3),),
                   rule=functools.partial(_end_of_walk, num_classes=num_classes),
                   note='tell where steps on a cycle end; exactly solvable, 1.00, but hard for '
                   'attention')


def _value(symbols: Array, count: Array, *, num_classes: int) -> Array:
  del count  # What is not used is + 0.

  def step(carry: tuple[Array, Array], item: tuple[Array, Array]) -> tuple[Any, None]:
    total, term = carry
    operator, number = item
    multiplies = operator == TIMES
    total = jnp.where(multiplies, total, total + term)
    term = jnp.where(multiplies, term * number, jnp.where(operator == MINUS, -number, number))
    return (total % num_classes, term % num_classes), None

  first = symbols[:, 0]
  items = symbols[:, 1::2].T - num_classes, symbols[:, 2::2].T
  (total, term), _ = jax.lax.scan(step, (jnp.zeros_like(first), first), items)
  return (total + term) % num_classes


def _make_modular_arithmetic(config: 'Config') -> base.Task:
  """Modular arithmetic: the value of number op number .., modulo C, without brackets.

  Symbols are the numbers from 0 to C - 1, then + - *, of which * comes first.

  Source: Deletang et al. 2022, appendix A, https://arxiv.org/abs/2207.02098.
  """
  num_classes = base.size(config, MODULAR_OPTIONS, 'num_classes', 2, MOST_CLASSES)
  return _classify(config,
                   MODULAR_OPTIONS,
                   num_classes=num_classes,
                   alphabets=((0, num_classes), (num_classes, num_classes + 3)),
                   rule=functools.partial(_value, num_classes=num_classes),
                   note='tell what an expression with + - * comes to; exactly solvable, 1.00, but '
                   'hard for attention')


def _sample_dyck(rng: Array, batch_size: int, *, counts: tuple[int, int], num_classes: int,
                 depth: int) -> base.Batch:
  """Draws BOS, a balanced string and EOS; a bracket opens or closes by a fair coin if it can."""
  count_rng, kind_rng, coin_rng = jax.random.split(rng, 3)
  count = 2 + 2 * base.draw_count(count_rng, batch_size, *counts)
  shape = 2 + 2 * counts[1], batch_size
  kinds = jax.random.randint(kind_rng, shape, 0, num_classes, jnp.int32)
  coins = jax.random.bernoulli(coin_rng, 0.5, shape)
  left = count.T - jnp.arange(shape[0], dtype=jnp.int32)[:, None]
  levels = jnp.arange(depth, dtype=jnp.int32)[None, :]

  def step(carry: tuple[Array, Array], item: tuple[Array, Array, Array]) -> tuple[Any, Array]:
    stack, height = carry
    kind, coin, left = item
    opens = (height == 0) | (coin & (height < depth) & (height < left))
    top = jnp.take_along_axis(stack, jnp.maximum(height - 1, 0)[:, None], axis=1)[:, 0]
    stack = jnp.where(opens[:, None] & (levels == height[:, None]), kind[:, None], stack)
    return (stack, height + jnp.where(opens, 1, -1)), jnp.where(opens, kind, num_classes + top)

  empty = jnp.zeros((batch_size, depth), jnp.int32), jnp.zeros(batch_size, jnp.int32)
  symbols = jax.lax.scan(step, empty, (kinds, coins, left))[1].T
  place = jnp.arange(shape[0] + 2, dtype=jnp.int32)[None, :]
  tokens = jnp.pad(RESERVED + symbols, ((0, 0), (1, 1)), constant_values=BOS)
  tokens = jnp.where(place <= count, tokens, jnp.where(place == count + 1, EOS, PAD))
  return base.next_token(tokens.astype(jnp.int32), tokens >= RESERVED + num_classes)


def _guess_dyck(batch: base.Batch, *, num_classes: int) -> dict[str, Array]:
  inputs = batch['inputs']
  place = jnp.arange(inputs.shape[1], dtype=jnp.int32)[None, :]
  is_opening = (inputs >= RESERVED) & (inputs < RESERVED + num_classes)
  opened = jax.lax.cummax(jnp.where(is_opening, place, 0), axis=1)
  closing = RESERVED + num_classes
  return {
      'bracket opened last':
          jnp.maximum(jnp.take_along_axis(inputs, opened, axis=1) + num_classes, closing),
      'majority class':
          jnp.full_like(inputs, closing),
      'chance':
          base.chance(inputs.shape, closing, closing + num_classes),
  }


def _make_dyck(config: 'Config') -> base.Task:
  """Dyck-(k, m): balanced brackets of k kinds, at most m of them open; which one closes now?

  The k opening brackets are the ids from RESERVED on, then come those that close them. Lengths are
  even and drawn evenly, where the published ones follow from a chance to end.

  Source: Hewitt et al. 2020, https://arxiv.org/abs/2010.07515.
  """
  counts = _counts(config, DYCK_OPTIONS, 2, 2)
  num_classes = base.size(config, DYCK_OPTIONS, 'num_classes', 2)
  depth = base.size(config, DYCK_OPTIONS, 'depth', 1)
  vocab_size, time = RESERVED + 2 * num_classes, 3 + 2 * counts[1]
  return base.Task(
      vocab_size=vocab_size,
      num_classes=vocab_size,
      input_length=time,
      target_length=time,
      sample=functools.partial(_sample_dyck, counts=counts, num_classes=num_classes, depth=depth),
      guesses=functools.partial(_guess_dyck, num_classes=num_classes),
      note='tell which bracket closes, where one does; exactly solvable, 1.00',
  )


CLASSIFIERS = ('encoder', 'decoder')
TASKS = {
    'parity': base.TaskFamily(_make_parity, CLASSIFIERS, BINARY_OPTIONS),
    'even_pairs': base.TaskFamily(_make_even_pairs, CLASSIFIERS, BINARY_OPTIONS),
    'cycle_navigation': base.TaskFamily(_make_cycle_navigation, CLASSIFIERS, MODULAR_OPTIONS),
    'modular_arithmetic': base.TaskFamily(_make_modular_arithmetic, CLASSIFIERS, MODULAR_OPTIONS),
    'dyck': base.TaskFamily(_make_dyck, ('decoder',), DYCK_OPTIONS, DYCK_FULL),
}
