"""Visibility predicates against the oracles' tables, alone and combined, on any positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn import masks
from tests import oracles

PREDICATES = {
    'causal': (masks.causal(), oracles.sees_past),
    'window': (masks.window(2, 1), oracles.sees_window(2, 1)),
    'window 0': (masks.window(0, 0), oracles.sees_window(0, 0)),
    'strided': (masks.strided(3), oracles.sees_strided(3)),
    'fixed': (masks.fixed(4, 2), oracles.sees_fixed(4, 2)),
    'near blocks': (masks.near_blocks(3), lambda t, s: abs(t // 3 - s // 3) <= 1),
    'global block': (masks.global_block(3, 1), lambda t, s: t // 3 == 1 or s // 3 == 1),
    'listed blocks': (masks.listed_blocks(3, np.array([[1, -1], [0, 2],
                                                       [2,
                                                        2]])), lambda t, s: 0 <= t < 9 and s // 3 in
                      ((1,), (0, 2), (2,))[t // 3]),
    'apart': (masks.apart(2), lambda t, s: abs(t - s) >= 2),
    'keys outside': (masks.outside_blocks(2, (0, 3), key=True), lambda t, s: s // 2 not in (0, 3)),
    'queries outside': (masks.outside_blocks(2, (1,), query=True), lambda t, s: t // 2 != 1),
    'both outside': (masks.outside_blocks(3, (0, 2), query=True,
                                          key=True), lambda t, s: t // 3 not in
                     (0, 2) and s // 3 not in (0, 2)),
    'global': (masks.global_tokens(2), lambda t, s: t < 2 or s < 2),
}
POSITIONS = {
    'square': (np.arange(9), np.arange(9)),
    'decode step': (np.array([6]), np.arange(11)),
    'far away': (np.arange(1000, 1005), np.arange(990, 1010)),
    'in no order': (np.array([4, 0, 7, 7]), np.array([9, 2, 2, 5, 0, 1])),
    'per row': (np.array([[3, 4], [8, 9]]), np.stack([np.arange(10),
                                                      np.arange(10) + 3])),
    'no queries': (np.arange(0), np.arange(3)),
}


def dense(predicate, query_positions, key_positions):
  return predicate.dense(jnp.asarray(query_positions, jnp.int32),
                         jnp.asarray(key_positions, jnp.int32))


@pytest.mark.parametrize('positions', POSITIONS.values(), ids=list(POSITIONS))
@pytest.mark.parametrize('predicate, sees', PREDICATES.values(), ids=list(PREDICATES))
def test_predicates_equal_the_oracle(predicate, sees, positions):
  found = dense(predicate, *positions)
  assert found.dtype == jnp.bool_
  np.testing.assert_array_equal(found, oracles.pattern(sees, *positions))


@pytest.mark.parametrize('first', PREDICATES)
@pytest.mark.parametrize('second', PREDICATES)
def test_and_or(first, second):
  (a, sees_a), (b, sees_b) = PREDICATES[first], PREDICATES[second]
  at = POSITIONS['in no order']
  np.testing.assert_array_equal(dense(a & b, *at),
                                oracles.pattern(lambda t, s: sees_a(t, s) and sees_b(t, s), *at))
  np.testing.assert_array_equal(dense(a | b, *at),
                                oracles.pattern(lambda t, s: sees_a(t, s) or sees_b(t, s), *at))


def test_a_longer_expression():
  positions = POSITIONS['square']
  predicate = masks.causal() & (masks.window(1, 0) | masks.global_tokens(1)) & masks.strided(2)
  sees = lambda t, s: s <= t and (t - 1 <= s <= t or t < 1 or s < 1) and oracles.sees_strided(2)(t,
                                                                                                 s)
  np.testing.assert_array_equal(dense(predicate, *positions), oracles.pattern(sees, *positions))


def test_segments_index_by_position():
  ids = np.array([0, 0, 1, 1, 1, 2])
  found = dense(masks.segments(jnp.asarray(ids)), np.arange(6), np.arange(6))
  np.testing.assert_array_equal(found, ids[:, None] == ids[None, :])
  both = dense(masks.segments(jnp.asarray(ids)) & masks.causal(), np.array([3, 5]), np.arange(6))
  expected = oracles.pattern(lambda t, s: ids[t] == ids[s] and s <= t, np.array([3, 5]),
                             np.arange(6))
  np.testing.assert_array_equal(both, expected)


def test_dense_under_jit_and_vmap():
  predicate = masks.causal() & masks.window(3, 0)
  query_positions, key_positions = (jnp.asarray(a) for a in POSITIONS['per row'])
  whole = predicate.dense(query_positions, key_positions)
  np.testing.assert_array_equal(jax.jit(predicate.dense)(query_positions, key_positions), whole)
  np.testing.assert_array_equal(jax.vmap(predicate.dense)(query_positions, key_positions), whole)


@pytest.mark.parametrize('make', [
    lambda: masks.window(-1, 0), lambda: masks.window(0, -1), lambda: masks.strided(0),
    lambda: masks.strided(-2), lambda: masks.fixed(0, 1), lambda: masks.fixed(4, 5),
    lambda: masks.fixed(4, -1), lambda: masks.global_tokens(-1)
])
def test_impossible_sizes_are_refused(make):
  with pytest.raises(ValueError, match=r'-?\d'):
    make()


@pytest.mark.parametrize('name', PREDICATES)
def test_reaches_and_fills_never_promise_too_much(name):
  """For all intervals of up to 4 positions: what is not reached holds nothing, what fills, all."""
  one, sees = PREDICATES[name]
  combined = ((one, sees), (masks.causal() & one, lambda t, s: s <= t and sees(t, s)),
              (one | masks.window(1, 0), lambda t, s: sees(t, s) or t - 1 <= s <= t))
  for predicate, visible in combined:
    told = 0
    for t, s, n, m in np.ndindex(9, 9, 4, 4):
      table = [visible(i, j) for i in range(t, t + n + 1) for j in range(s, s + m + 1)]
      ends = [np.asarray(end) for end in (t, t + n, s, s + m)]
      reached, filled = predicate.reaches(*ends), predicate.fills(*ends)
      assert (reached or not any(table)) and (not filled or all(table)), (t, s, n, m)
      told += int(filled) + int(not reached)
    assert told or predicate is one and name in ('strided', 'listed blocks'), 'nothing is ever told'
