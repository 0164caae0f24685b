"""One call of the library, the same call of an oracle, and their comparison, forward and gradient.
"""

import functools
import re
from typing import Any, NamedTuple

import attn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests import position_oracles
from tests import tolerances
from tests.rows import Row


class Alibi(NamedTuple):
  slopes: np.ndarray


class T5(NamedTuple):
  table: np.ndarray
  bidirectional: bool


class Case(NamedTuple):
  """One call: NumPy arrays by argument name, options, and the capabilities without which it must
  be refused.

  arrays: query, key, value, and any of bias (array, Alibi or T5), mask, query_positions,
    key_positions, segment_ids.
  static: whether positions reach the library as NumPy constants rather than as traced arrays.
  factor: what the gradient's tolerance is multiplied by: the size of queries and keys where it is
  not about 1.
  """
  row: Row
  arrays: dict[str, Any]
  needs: frozenset[str] = frozenset()
  options: dict[str, Any] = {}
  scale: float | None = None
  dtype: str = 'float32'
  static: bool = False
  factor: float = 1.
  params: dict[str, np.ndarray] | None = None

  @property
  def sizes(self) -> tuple[tuple[int, ...], int, int, int]:
    """Leading axes, T, S, N."""
    query, key = self.arrays['query'], self.arrays['key']
    return query.shape[:-3], query.shape[-3], key.shape[-3], query.shape[-2]

  def get_params(self) -> dict[str, np.ndarray]:
    if self.params is not None:
      return self.params
    _, _, S, N = self.sizes
    made = self.row.params(np.random.default_rng(7), S, N, self.arrays['query'].shape[-1])
    return {
        name: array if np.issubdtype(array.dtype, np.integer) else _round(array, self.dtype)
        for name, array in made.items()
    }

  def get_options(self) -> dict[str, Any]:
    options = {**self.row.options, **self.options, 'is_causal': self.row.is_causal}
    return options if self.scale is None else options | {'scale': self.scale}


# The programs here are compiled often and run on a few numbers: most of a test is compilation.
COMPILER_OPTIONS: dict[str, int | bool] = {'xla_backend_optimization_level': 0}
if jax.__version_info__ < (0, 11):  # 5 times faster to compile; later versions have no choice
  COMPILER_OPTIONS['xla_cpu_use_fusion_emitters'] = False


def jit(function):
  """jax.jit, for programs that are compiled often and run on little."""
  return jax.jit(function, compiler_options=COMPILER_OPTIONS)


REFUSALS = {  # the word by which an error names what it refuses
    'bias': 'bias', 'position_bias': 'bias', 'key_mask': 'mask', 'dense_mask': 'mask',
    'segment_ids': 'segment_ids', 'query_positions': 'positions', 'key_positions': 'positions',
    'causal': 'causal',
    'dropout': 'dropout', 'grouped_heads': 'head',
}


def _round(array: np.ndarray, dtype: str) -> np.ndarray:
  return np.asarray(array, np.float64).astype(jnp.dtype(dtype))


# The library's side.


def to_library(case: Case) -> dict[str, Any]:
  """The traced arguments; params are one of them, under 'params'."""
  arrays = dict(case.arrays, params=case.get_params())
  if case.static:
    arrays = {name: value for name, value in arrays.items() if not name.endswith('_positions')}
  bias = arrays.pop('bias', None)
  traced = jax.tree.map(jnp.asarray, arrays)
  if isinstance(bias, Alibi):
    traced['bias'] = attn.positions.ALiBi(jnp.asarray(bias.slopes))
  elif isinstance(bias, T5):
    traced['bias'] = attn.positions.T5Bias(jnp.asarray(bias.table),
                                           bidirectional=bias.bidirectional)
  elif bias is not None:
    traced['bias'] = jnp.asarray(bias)
  return traced


def call(name: str, options: dict[str, Any], arguments: dict[str, Any]) -> jax.Array:
  arguments = dict(arguments)
  params = arguments.pop('params')
  return attn.VARIANTS[name].apply(params, **arguments, **options)


@functools.cache
def _forward(name: str, options: tuple[tuple[str, Any], ...]):
  return jit(functools.partial(call, name, dict(options)))


@functools.cache
def _backward(name: str, options: tuple[tuple[str, Any], ...]):

  def run(moving, still, dout):
    out, pull = jax.vjp(lambda moving: call(name, dict(options), {**still, **moving}), moving)
    return out, pull(dout)[0]

  return jit(run)


def _compiled(kind, case: Case, fresh: bool):
  """The jitted function of a case's options; fresh, or with positions as constants, a new one."""
  options = case.get_options()
  if case.static:
    options |= {name: array for name, array in case.arrays.items() if name.endswith('_positions')}
  kind = kind.__wrapped__ if case.static or fresh else kind
  return kind(case.row.name, tuple(options.items()))


def forward(case: Case, fresh: bool = False) -> jax.Array:
  return _compiled(_forward, case, fresh)(to_library(case))


MOVING = ('query', 'key', 'value', 'bias', 'params')


def backward(case: Case, dout: np.ndarray, fresh: bool = False) -> tuple[jax.Array, dict[str, Any]]:
  """The output, and by name the gradients of sum(out * dout) in everything that has one."""
  arguments = to_library(case)
  moving = {name: arguments.pop(name) for name in MOVING if name in arguments}
  return _compiled(_backward, case, fresh)(moving, arguments, jnp.asarray(dout))


# The oracle's side.


def _positions(case: Case):
  _, T, S, _ = case.sizes
  return (case.arrays.get('query_positions',
                          np.arange(T)), case.arrays.get('key_positions', np.arange(S)))


def _segments_visible(ids) -> np.ndarray:
  queries, keys = ids if isinstance(ids, tuple) else (ids, ids)
  return (queries[..., :, None] == keys[..., None, :])[..., None, :, :]


def expected(case: Case, dout: np.ndarray | None = None, keep=None) -> oracles.Result:
  """The oracle's result, with gradients shaped like the library's."""
  lead, T, S, N = case.sizes
  shape, arrays = lead + (N, T, S), case.arrays
  visible = np.broadcast_to(arrays.get('mask', np.ones((), bool)), shape)
  if 'segment_ids' in arrays:
    visible = visible & _segments_visible(arrays['segment_ids'])
  bias, positions = arrays.get('bias'), _positions(case)
  if isinstance(bias, Alibi):
    table = position_oracles.alibi(bias.slopes, *positions)
  elif isinstance(bias, T5):
    table = position_oracles.t5_bias(bias.table, *positions, bias.bidirectional)
  else:
    table = bias
  inputs = oracles.Inputs(
      *[np.asarray(arrays[name], np.float64) for name in ('query', 'key', 'value')],
      visible,
      bias=None if table is None else np.broadcast_to(table, shape),
      scale=case.scale,
      keep=keep)
  dout = np.zeros(lead + (T, N, arrays['value'].shape[-1])) if dout is None else np.asarray(
      dout, np.float64)
  params = {name: np.asarray(array, np.float64) for name, array in case.get_params().items()}
  options = {**case.row.options, **case.options}
  result = case.row.oracle(inputs, dout, positions, params, options)
  if bias is not None:
    result.grads['bias'] = _bias_grad(result.grads['bias'], bias, positions)
  return result


def _bias_grad(dbias: np.ndarray, bias, positions) -> np.ndarray:
  """From d [..., N, T, S] to the derivative of the array, the slopes or the table that was
  broadcast.
  """
  if isinstance(bias, Alibi):
    unit = position_oracles.alibi(np.ones(len(bias.slopes)), *positions)
    return (dbias * unit).sum(axis=tuple(i for i in range(dbias.ndim) if i != dbias.ndim - 3))
  if isinstance(bias, T5):
    buckets = position_oracles.t5_buckets(*positions, bias.bidirectional, bias.table.shape[0])
    dtable = np.zeros(bias.table.shape)
    for *b, n, t, s in np.ndindex(*dbias.shape):
      at = (*b, t, s) if buckets.ndim > 2 else (t, s)
      dtable[buckets[at], n] += dbias[(*b, n, t, s)]
    return dtable
  extra = dbias.ndim - bias.ndim
  summed = dbias.sum(axis=tuple(range(extra))) if extra else dbias
  axes = tuple(i for i in range(bias.ndim) if bias.shape[i] == 1)
  return summed.sum(axis=axes, keepdims=True)


# Comparison.


def tolerance(case: Case, direction: str) -> float:
  table = tolerances.FORWARD if direction == 'forward' else tolerances.GRADIENT
  looser = case.row.name == 'performer' and case.dtype != 'bfloat16'
  return table[case.dtype] * (tolerances.PERFORMER_FACTOR if looser else 1.)


def random_dout(case: Case) -> np.ndarray:
  lead, T, _, N = case.sizes
  shape = lead + (T, N, case.arrays['value'].shape[-1])
  return _round(np.random.default_rng(11).normal(size=shape), case.dtype)


def missing(case: Case) -> set[str]:
  return set(case.needs - case.row.supports)


def assert_refused(case: Case) -> None:
  """NotImplementedError that names the variant and (one of) what it cannot do."""
  words = '|'.join(sorted({REFUSALS[need] for need in missing(case)}))
  with pytest.raises(NotImplementedError) as error:
    forward(case)
  assert case.row.name in str(error.value) and re.search(words, str(error.value)), str(error.value)


def check(case: Case) -> str:
  """Compares output and gradients with the oracle's, or asserts the refusal.

  Returns:
    which of the two: 'compared' or 'refused'.
  """
  if missing(case):
    assert_refused(case)
    return 'refused'
  dout = random_dout(case)
  out, grads = backward(case, dout)
  result = expected(case, dout)
  limit = case.factor * tolerance(case, 'gradient')
  tolerances.assert_close(out, result.out, tolerance(case, 'forward'), 'output')
  for name, grad in grads.items():
    if name == 'params':
      for part, array in grad.items():
        if part in result.grads:
          tolerances.assert_close(array, result.grads[part], limit, f'gradient of {part}')
    else:
      (leaf,) = jax.tree.leaves(grad)
      tolerances.assert_close(leaf, result.grads[name], limit, f'gradient of {name}')
  assert out.dtype == jnp.dtype(case.dtype)
  return 'compared'
