"""listops: what a nested expression of digits comes to (encoder classifies, decoder writes it).

    expression = OPERATOR argument argument .. ]     argument = digit | expression
    OPERATOR   = [MIN | [MAX | [MED | [SM

MED is the median, rounded down, and SM the sum modulo 10.

Encoder: BOS expression, one of ten classes. Decoder: BOS expression SEP digit, scored at the digit.
What remains is PAD. The number of tokens of an expression is from min_length to length.

Trees are drawn by NumPy, whole levels of many trees at a time, in a callback that reads the key
alone: how many nodes a level has is known only when it is drawn. A tree has `depth` levels at
most, the root's included, so that expressions stand in each other depth - 1 deep.
"""

import functools
from typing import NamedTuple, TYPE_CHECKING

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from experiments.tasks import answers
from experiments.tasks import base
from experiments.tasks.base import BOS, PAD, RESERVED, SEP

if TYPE_CHECKING:
  from experiments.config import Config

OPTIONS = {
    'length': 64,
    'min_length': 10,
    'depth': 10,
    'max_args': 5,
    'pooling': 'mean',
    'free_running': True
}
FULL = {'length': 1999, 'min_length': 501, 'max_args': 10}
# The id of a token is RESERVED + its place here.
TOKENS = ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9', '[MIN', '[MAX', '[MED', '[SM', ']')
MIN, MAX, MED, SM, CLOSE = range(10, 15)
BEST = (0, 9, 4, 0)  # the likeliest value of MIN, MAX, MED, SM
OPERATOR_RATE = 0.25  # how often an argument is an expression
BLOCK = 256  # trees drawn at a time
MOST_BLOCKS = 64  # in which one tree at least must have a length that is asked for


class Level(NamedTuple):
  """The nodes [n] of many trees that are equally deep, those of one tree side by side.

  The arguments of a level's operators, in order, are the level below.

  Attributes:
    tree: the tree a node belongs to, counted from 0.
    args: how many arguments it has, 0 for a digit.
    symbol: the digit, or the operator, as a place in TOKENS.
  """
  tree: np.ndarray
  args: np.ndarray
  symbol: np.ndarray


def _grow(rng: np.random.Generator, *, lengths: tuple[int, int], depth: int,
          max_args: int) -> list[Level]:
  """Draws a block of trees; returns those whose length is between the bounds, roots first."""
  tree, total, levels = np.arange(BLOCK), np.zeros(BLOCK, np.int64), []
  for rate in [1.] + [OPERATOR_RATE] * (depth - 2) + [0.]:
    nodes = len(tree)
    is_operator = rng.random(nodes) < rate
    args = np.where(is_operator, rng.integers(2, max_args + 1, nodes), 0)
    symbol = np.where(is_operator, rng.integers(MIN, CLOSE, nodes), rng.integers(0, MIN, nodes))
    levels.append(Level(tree, args, symbol))
    total += np.bincount(tree, minlength=BLOCK) + np.bincount(tree[is_operator], minlength=BLOCK)
    tree = np.repeat(tree, args)
    tree = tree[total[tree] <= lengths[1]]  # What is too long already grows no further.
  fits = (lengths[0] <= total) & (total <= lengths[1])
  number = np.cumsum(fits) - 1
  kept = [Level(*(field[fits[level.tree]] for field in level)) for level in levels]
  return [level._replace(tree=number[level.tree]) for level in kept]


def _apply(operator: np.ndarray, count: np.ndarray, arguments: np.ndarray) -> np.ndarray:
  """What each operator [n] comes to; arguments are those of all, in order, count [n] of each."""
  first = np.cumsum(count) - count
  ranked = arguments[np.lexsort((arguments, np.repeat(first, count)))]  # within an operator
  median = (ranked[first + (count - 1) // 2] + ranked[first + count // 2]) // 2
  return np.select([operator == MIN, operator == MAX, operator == MED],
                   [ranked[first], ranked[first + count - 1], median],
                   np.add.reduceat(arguments, first) % 10)


def _write(levels: list[Level], length: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the tokens [n, length] of trees, and what they come to [n]."""
  size = value = np.zeros(0, np.int64)
  sizes = [size]
  for level in reversed(levels):
    is_operator = level.args > 0
    count, arguments = level.args[is_operator], value
    size, value = 1 + is_operator, level.symbol.copy()
    size[is_operator] += np.add.reduceat(sizes[-1], np.cumsum(count) - count)
    value[is_operator] = _apply(level.symbol[is_operator], count, arguments)
    sizes.append(size)
  tokens = np.full((len(value), length), PAD, np.int32)
  place = np.zeros(len(value), np.int64)
  for level in levels:
    size, below, is_operator = sizes.pop(), sizes[-1], level.args > 0
    tokens[level.tree, place] = RESERVED + level.symbol
    tokens[level.tree[is_operator], (place + size - 1)[is_operator]] = RESERVED + CLOSE
    # An argument begins behind its operator and the arguments before it.
    before = np.cumsum(below) - below
    count = level.args[is_operator]
    shift = place[is_operator] + 1 - before[np.cumsum(count) - count]
    place = before + np.repeat(shift, count)
  return tokens, value.astype(np.int32)


def _draw(key_data: Array, *, batch_size: int, lengths: tuple[int, int], depth: int,
          max_args: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens [B, length] and values [B], a function of the key's data alone."""
  rng, blocks, count = np.random.default_rng(np.asarray(key_data)), [], 0
  while count < batch_size:
    trees = _grow(rng, lengths=lengths, depth=depth, max_args=max_args)
    blocks.append(_write(trees, lengths[1]))
    count += len(blocks[-1][1])
  tokens, values = (np.concatenate(parts)[:batch_size] for parts in zip(*blocks))
  return tokens, values


def _sample(rng: Array, batch_size: int, *, is_decoder: bool, lengths: tuple[int, int], depth: int,
            max_args: int) -> base.Batch:
  draw = functools.partial(_draw,
                           batch_size=batch_size,
                           lengths=lengths,
                           depth=depth,
                           max_args=max_args)
  shapes = [
      jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch_size, lengths[1]), (batch_size,))
  ]
  tokens, value = jax.pure_callback(draw,
                                    tuple(shapes),
                                    jax.random.key_data(rng),
                                    vmap_method='sequential')
  if is_decoder:
    end = 1 + jnp.sum(tokens != PAD, axis=1, keepdims=True, dtype=jnp.int32)
    place = jnp.arange(lengths[1] + 3, dtype=jnp.int32)[None, :]
    tokens = jnp.pad(tokens, ((0, 0), (1, 2))).at[:, 0].set(BOS)
    tokens = jnp.where(place == end, SEP, tokens)
    tokens = jnp.where(place == end + 1, RESERVED + value[:, None], tokens)
    return base.next_token(tokens, place == end + 1)
  tokens = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=BOS)
  return {
      'inputs': tokens,
      'input_mask': tokens != PAD,
      'targets': value,
      'weights': jnp.ones(batch_size, jnp.float32),
  }


def _own_digits(operator: Array, own: Array, symbols: Array) -> Array:
  """What an operator [B] makes of its own digits, which are the symbols [B, T] marked as own."""
  count = jnp.sum(own, axis=1, dtype=jnp.int32)[:, None]
  ranked = jnp.sort(jnp.where(own, symbols, MIN), axis=1)
  at = lambda place: jnp.take_along_axis(ranked, jnp.maximum(place, 0), axis=1)[:, 0]
  total = jnp.sum(jnp.where(own, symbols, 0), axis=1, dtype=jnp.int32) % 10
  return jnp.select(
      [operator == MIN, operator == MAX, operator == MED],
      [ranked[:, 0], at(count - 1), (at((count - 1) // 2) + at(count // 2)) // 2], total)


def _guesses(batch: base.Batch) -> dict[str, Array]:
  symbols, targets = batch['inputs'] - RESERVED, batch['targets']
  operator = symbols[:, 1]
  first = jnp.asarray(BEST, jnp.int32)[operator - MIN]
  opens = (MIN <= symbols) & (symbols < CLOSE)
  depth = jnp.cumsum(opens, axis=1, dtype=jnp.int32) - jnp.cumsum(
      symbols == CLOSE, axis=1, dtype=jnp.int32)
  own = (depth == 1) & (0 <= symbols) & (symbols < MIN)
  guesses = {
      'majority class':
          jnp.zeros_like(operator),
      'first token':
          first,
      'first token and own digits':
          jnp.where(jnp.any(own, axis=1), _own_digits(operator, own, symbols), first),
      'chance':
          base.chance(operator.shape, 0, 10),
  }
  if targets.ndim == 1:
    return guesses
  return {
      name: jnp.broadcast_to(RESERVED + guess[:, None], targets.shape)
      for name, guess in guesses.items()
  }


def _make(config: 'Config') -> base.Task:
  """Expressions as the published generator draws them, in the token form of Long Range Arena.

  Sources: Nangia & Bowman 2018, ListOps, https://arxiv.org/abs/1804.06028; Tay et al. 2020,
  section 2.2.1, https://arxiv.org/abs/2011.04006.
  """
  lengths = base.lengths(config, OPTIONS, 4)
  sizes = {
      'depth': base.size(config, OPTIONS, 'depth', 2),
      'max_args': base.size(config, OPTIONS, 'max_args', 2)
  }
  rng = np.random.default_rng(0)
  if not any(len(_grow(rng, lengths=lengths, **sizes)[0].tree) for _ in range(MOST_BLOCKS)):
    raise ValueError(f'of {MOST_BLOCKS * BLOCK} expressions with depth {sizes["depth"]} and '
                     f'max_args {sizes["max_args"]} none has from {lengths[0]} to {lengths[1]} '
                     'tokens; widen min_length to length')
  is_decoder = config.model == 'decoder'
  vocab_size = RESERVED + len(TOKENS)
  time = lengths[1] + (2 if is_decoder else 1)
  return base.Task(
      vocab_size=vocab_size,
      num_classes=vocab_size if is_decoder else 10,
      input_length=time,
      target_length=time,
      sample=functools.partial(_sample, is_decoder=is_decoder, lengths=lengths, **sizes),
      guesses=_guesses,
      note='evaluate a nested expression; exactly solvable, 1.00; in the full form the first token '
      'alone gives 0.36, as does the Transformer of Long Range Arena',
      per_position=is_decoder,
      answer=answers.answer(lengths[1], None) if is_decoder else None,
  )


TASKS = {'listops': base.TaskFamily(_make, ('encoder', 'decoder'), OPTIONS, FULL)}
