"""The points of the attention contract that are a comparison with an oracle: a name and the call
it makes of a row.

B = 2, T = S = 11, N = 4, K = 2, H = 8, Hv = 5 unless a point says otherwise, so that nothing is
square, even or a multiple of a block by luck.
"""

from typing import Callable, NamedTuple

import jax.numpy as jnp
import numpy as np

from tests.harness import Alibi
from tests.harness import Case
from tests.harness import T5
from tests.rows import Row

T = 11


class Point(NamedTuple):
  """build makes the case; every_row: also runs on rows that differ from a primary row in causality
  alone.
  """
  build: Callable[[Row], Case]
  every_row: bool = False


POINTS: dict[str, Point] = {}


def point(name: str, every_row: bool = False):

  def register(build: Callable[[Row], Case]) -> Callable[[Row], Case]:
    POINTS[name] = Point(build, every_row)
    return build

  return register


def qkv(lead=(2,), T=T, S=None, N=4, K=2, H=8, Hv=5, dtype='float32', seed=0):
  rng, S = np.random.default_rng(seed), T if S is None else S
  shapes = {'query': (T, N, H), 'key': (S, K, H), 'value': (S, K, Hv)}
  return {
      name: rng.normal(size=lead + shape).astype(jnp.dtype(dtype)) for name, shape in shapes.items()
  }


def make(row: Row, arrays=None, needs: str = '', **changes) -> Case:
  """A case, with the needs that follow from its arguments, shapes and row added."""
  arrays = qkv() if arrays is None else arrays
  wanted = set(needs.split()) | set(arrays) & {'query_positions', 'key_positions', 'segment_ids'}
  if arrays['query'].shape[-2] != arrays['key'].shape[-2]:
    wanted.add('grouped_heads')
  if row.is_causal:
    wanted.add('causal')
  return Case(row, arrays, frozenset(wanted), **changes)


def lengths(row: Row, T: int, S: int, first: int = 0, **changes) -> Case:
  """T queries at first, first + 1, ... over S keys at 0, 1, ...: with positions where the pattern
  reads them.
  """
  arrays = qkv(T=T, S=S)
  if not (row.is_causal or row.is_pattern):
    return make(row, arrays, 'cross', **changes)
  arrays['query_positions'] = np.arange(first, first + T, dtype=np.int32)
  arrays['key_positions'] = np.arange(S, dtype=np.int32)
  return make(row, arrays, **changes)


def uniform(shape, chance: float, seed: int = 3) -> np.ndarray:
  return np.random.default_rng(seed).random(shape) < chance


def normal(*shape, seed: int = 4) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Shapes and scale.


@point('grouped heads', every_row=True)
def _(row):
  return make(row)


@point('one key head')
def _(row):
  return make(row, qkv(K=1))


@point('as many key heads, value wider than key')
def _(row):
  return make(row, qkv(K=4, Hv=13))


@point('no leading axis')
def _(row):
  return make(row, qkv(lead=(), T=7))


@point('two leading axes')
def _(row):
  return make(row, qkv(lead=(2, 3), T=5))


@point('scale')
def _(row):
  return make(row, scale=0.7)


@point('length 1')
def _(row):
  return make(row, qkv(T=1))


@point('no keys')
def _(row):
  return lengths(row, 3, 0)


@point('no queries')
def _(row):
  return lengths(row, 0, 5)


@point('nothing at all')
def _(row):
  return make(row, qkv(T=0))


@point('more keys than queries')
def _(row):
  return lengths(row, 5, 11, first=6)


@point('more queries than keys')
def _(row):
  return lengths(row, 11, 4)


# Biases.


def _bias(shape):
  return lambda row: make(row, qkv() | {'bias': normal(*shape)}, 'bias')


for _shape in ((2, 4, T, T), (1, 4, 1, T), (2, 1, T, 1)):
  point(f'bias {list(_shape)}')(_bias(_shape))


@point('ALiBi', every_row=True)
def _(row):
  slopes = np.array([.5, .25, .125, .3], np.float32)
  return make(row, qkv() | {'bias': Alibi(slopes)}, 'position_bias')


@point('T5 bias')
def _(row):
  bias = T5(normal(8, 4), not row.is_causal)
  return make(row, qkv() | {'bias': bias}, 'position_bias')


@point('T5 bias of a decode step')
def _(row):
  arrays = qkv(T=2, S=T) | {
      'bias': T5(normal(8, 4), not row.is_causal),
      'query_positions': np.array([6, 7], np.int32),
      'key_positions': np.arange(T, dtype=np.int32)
  }
  return make(row, arrays, 'position_bias')


# Masks.


def _mask(shape, needs, chance=.7):
  return lambda row: make(row, qkv() | {'mask': uniform(shape, chance)}, needs)


point('padding mask [B, 1, 1, S]', every_row=True)(_mask((2, 1, 1, T), 'key_mask'))
point('padding mask per head [1, N, 1, S]')(_mask((1, 4, 1, T), 'key_mask'))
point('dense mask [B, 1, T, S]', every_row=True)(_mask((2, 1, T, T), 'dense_mask', .4))
point('dense mask per head [B, N, T, S]')(_mask((2, 4, T, T), 'dense_mask', .2))
point('query mask [B, 1, T, 1]')(_mask((2, 1, T, 1), 'dense_mask', .5))


@point('everything masked in one row of the batch', every_row=True)
def _(row):
  mask = np.ones((2, 1, 1, T), bool)
  mask[1] = False
  return make(row, qkv() | {'mask': mask}, 'key_mask')


@point('keys masked up to a position', every_row=True)
def _(row):
  mask = np.arange(T) >= np.array([5, 8])[:, None]  # causal: the first 5 and 8 queries see nothing
  return make(row, qkv() | {'mask': mask[:, None, None, :]}, 'key_mask')


def _poison(array, hidden):
  """NaN, inf and -inf in turn at hidden [B, S]."""
  poison = np.array([np.nan, np.inf, -np.inf], array.dtype)
  fill = poison[np.arange(array.size) % 3].reshape(array.shape)
  return np.where(hidden[..., None, None], fill, array)


@point('NaN and inf in masked keys and values', every_row=True)
def _(row):
  arrays, hidden = qkv(), uniform((2, T), .4)
  arrays['key'], arrays['value'] = (_poison(arrays[name], hidden) for name in ('key', 'value'))
  return make(row, arrays | {'mask': ~hidden[:, None, None, :]}, 'key_mask')


@point('NaN and inf in keys hidden by a dense mask')
def _(row):
  arrays, hidden = qkv(), uniform((2, T), .4)
  arrays['key'], arrays['value'] = (_poison(arrays[name], hidden) for name in ('key', 'value'))
  mask = uniform((2, 1, T, T), .6, seed=5) & ~hidden[:, None, None, :]
  return make(row, arrays | {'mask': mask}, 'dense_mask')


@point('NaN in the part of a cache not yet written')
def _(row):
  arrays = qkv(T=5, S=T)
  hidden = np.broadcast_to(np.arange(T) >= 7, (2, T))
  arrays['key'], arrays['value'] = (_poison(arrays[name], hidden) for name in ('key', 'value'))
  arrays['query_positions'] = np.arange(2, 7, dtype=np.int32)
  arrays['key_positions'] = np.arange(T, dtype=np.int32)
  if not row.is_causal:
    arrays['mask'] = ~hidden[:, None, None, :]
  return make(row, arrays, '' if row.is_causal else 'key_mask')


# Positions and segments.


def _positions(make_positions, static=False):

  def build(row):
    query_positions, key_positions = make_positions()
    T, S = query_positions.shape[-1], key_positions.shape[-1]
    arrays = qkv(T=T, S=S) | {
        'query_positions': query_positions.astype(np.int32),
        'key_positions': key_positions.astype(np.int32)
    }
    return make(row, arrays, static=static)

  return build


def _decode():
  return np.arange(5, 10), np.arange(T)


def _per_row():
  return np.array([[3, 4, 5], [8, 9, 10]]), np.stack([np.arange(T), np.arange(T) + 2])


def _gaps():
  return np.array([0, 2, 3, 9, 12]), np.array([0, 1, 3, 4, 8, 9, 13, 14, 15, 17, 30])


def _shuffled():
  return np.array([5, 0, 9, 2, 2]), np.array([8, 1, 0, 3, 9, 4, 4, 6, 12, 5, 7])


point('positions as constants')(_positions(_decode, static=True))
point('positions as traced arrays', every_row=True)(_positions(_decode))
point('positions per row of the batch')(_positions(_per_row))
point('positions with gaps')(_positions(_gaps))
point('positions in no order')(_positions(_shuffled))


@point('positions of queries alone')
def _(row):
  """Keys are at 0, 1, ...: the decode step of a cache."""
  arrays = qkv(T=3, S=T) | {'query_positions': np.array([5, 6, 7], np.int32)}
  return make(row, arrays)


@point('segments')
def _(row):
  ids = np.array([[0] * 4 + [1] * 5 + [2] * 2, [3] * 7 + [1] * 4], np.int32)
  return make(row, qkv() | {'segment_ids': ids})


@point('segments of queries and of keys')
def _(row):
  ids = (np.array([[0, 0, 1, 1, 7]] * 2,
                  np.int32), np.array([[0] * 4 + [1] * 5 + [2] * 2] * 2, np.int32))
  case = lengths(row, 5, T, first=2)
  return case._replace(arrays=case.arrays | {'segment_ids': ids},
                       needs=case.needs | {'segment_ids'})


@point('packed segments with positions restarting')
def _(row):
  ids = np.array([[0] * 4 + [1] * 5 + [2] * 2, [0] * 7 + [1] * 4], np.int32)
  positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]],
                       np.int32)
  arrays = qkv() | {'segment_ids': ids, 'query_positions': positions, 'key_positions': positions}
  return make(row, arrays)


# Numbers.


@point('float64', every_row=True)
def _(row):
  return make(row, qkv(dtype='float64'), dtype='float64')


@point('bfloat16', every_row=True)
def _(row):
  return make(row, qkv(dtype='bfloat16'), dtype='bfloat16')


@point('logits of 1e4')
def _(row):
  """Whole numbers, so that logits of up to 12800 are exact in float32 and the comparison means
  something.
  """
  arrays, rng = qkv(), np.random.default_rng(6)
  for name in ('query', 'key'):
    arrays[name] = np.round(rng.uniform(-40, 40, arrays[name].shape)).astype(np.float32)
  if row.name in ('performer', 'linformer'):
    return make(row)  # their logits are not whole: see test_extreme_inputs_stay_finite
  return make(row, arrays, scale=1., factor=40.)


@point('all options together', every_row=True)
def _(row):
  """Whatever the row supports, at once."""
  arrays, supports = qkv(), row.supports
  if 'segment_ids' in supports:
    arrays['segment_ids'] = np.array([[0] * 6 + [1] * 5, [3] * 8 + [1] * 3], np.int32)
  if {'query_positions', 'key_positions'} <= supports:
    shift = np.array([[2], [5]], np.int32)
    arrays['query_positions'] = arrays['key_positions'] = np.arange(T, dtype=np.int32) + shift
  if 'position_bias' in supports:
    arrays['bias'] = T5(normal(8, 4), not row.is_causal)
  if 'dense_mask' in supports:
    arrays['mask'] = uniform((2, 4, T, T), .6)
  elif 'key_mask' in supports:
    arrays['mask'] = uniform((2, 1, 1, T), .6)
  return make(row, arrays, scale=-.4)
