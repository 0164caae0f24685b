"""The layout visits every pair that a pattern lets see, once, and no other."""

import attn
from attn import call as calls
from attn import layout
from attn import masks
from attn.variants import bigbird
from attn.variants import longformer
import jax
import jax.numpy as jnp
import numpy as np
import pytest

PATTERNS = {
    'window': lambda rng: masks.window(*rng.integers(0, 9, 2)),
    'causal window': lambda rng: masks.causal() & masks.window(int(rng.integers(0, 9)), 0),
    'causal': lambda rng: masks.causal(),
    'strided': lambda rng: masks.strided(int(rng.integers(1, 9))),
    'global tokens': lambda rng: masks.window(2, 1) | masks.global_tokens(int(rng.integers(0, 9))),
    'apart': lambda rng: masks.apart(int(rng.integers(0, 9))),
    'all': lambda rng: None,
}


def prepared(length, visible, positions=None, heads=2):
  """A call of `length` queries and keys, and its static values."""
  x = np.zeros((1, length, heads, 1), np.float32)
  _, call, spec = calls.prepare(x,
                                x,
                                x,
                                None,
                                None,
                                is_causal=False,
                                scale=None,
                                query_positions=positions,
                                key_positions=positions,
                                segment_ids=None,
                                dropout_rate=0.,
                                dropout_rng=None,
                                pattern=visible)
  shapes = {  # nothing here reads more of them
      name: jax.ShapeDtypeStruct(getattr(call, name).shape, np.float32)
      for name in ('query', 'key', 'value')
  }
  return call._replace(**shapes), spec


def arranged(call, spec, parts, step_size):
  """What layout.arrange returns, as NumPy, compiled as one program where tiles are listed."""
  if all(part.listed is None for part in parts):
    return layout.arrange(call, spec, parts, step_size)
  kept = []

  def trace(lists):
    some = [part._replace(listed=listed) for part, listed in zip(parts, lists)]
    *static, steps = layout.arrange(call, spec, some, step_size)
    kept.append(static)
    return steps

  steps = jax.jit(trace)([part.listed for part in parts])
  return *kept[0], steps


def visits(call, spec, parts, step_size, head=0):
  """How often each pair is counted for a head, [T, S]; checks what a Plan promises."""
  call, loops, steps = arranged(call, spec, parts, step_size)
  T, S = (x.shape[-1] for x in (call.query_index, call.key_index))
  counts, visited = np.zeros((T, S), int), np.zeros(T, int)
  for (rule, plan), lanes in zip(loops, steps):
    for step in np.asarray(lanes):
      rows: list[int] = []
      for lane in step:
        if lane[0] >= T or (plan.heads and tuple(lane[-2:]) != (head, 0)):
          continue  # beyond the last tile, or another head's
        q = np.arange(lane[0], lane[0] + plan.C)
        r = plan.listed
        for n in range(max(r, 1)):
          k = np.arange(lane[1 + n], lane[1 + n] + plan.D)
          if r and not lane[1 + r + n]:
            continue
          seen = np.ones((len(q), len(k)), bool)
          if rule.visible is not None:
            seen = np.array(
                rule.visible(call.query_positions[0, q][:, None], call.key_positions[0, k]))
          if rule.padded:
            seen &= call.key_index[0, k] >= 0
          counts[np.ix_(q, k)] += seen
        rows += list(q)
      assert len(set(rows)) == len(rows), 'a step visits a query twice'
      assert not (plan.once and visited[rows].any()), 'nothing to merge, and yet visited before'
      visited[rows] += 1
  return counts


def expected(length, visible, positions=None):
  p = np.arange(length) if positions is None else positions
  return np.ones(
      (length, length), int) if visible is None else np.array(visible(p[:, None], p)).astype(int)


@pytest.mark.parametrize('name', PATTERNS)
def test_every_pair_of_a_pattern_once(name):
  rng = np.random.default_rng(0)
  for _ in range(60):
    length, block, step = (int(n) for n in rng.integers((1, 1, 1), (41, 12, 400)))
    visible = PATTERNS[name](rng)
    positions = None if rng.random() < .5 else np.sort(rng.integers(0, 50, length)).astype(np.int32)
    if rng.random() < .2 and positions is not None:
      rng.shuffle(positions)
    call, spec = prepared(length, visible, positions)
    counts = visits(call, spec, layout.whole(call, spec, block), step)[:length, :length]
    np.testing.assert_array_equal(counts, expected(length, visible, positions))


def test_a_band_is_read_at_once():
  """No query is visited twice, and few keys are read for nothing."""
  call, spec = prepared(64, masks.window(8, 0))
  _, ((_, plan),), (steps,) = layout.arrange(call, spec, layout.whole(call, spec, 8), 1)
  assert plan.once and (plan.C, plan.D) == (8, 16) and len(steps) == 8
  assert (visits(call, spec, layout.whole(call, spec, 8), 1) == expected(64, spec.visible)).all()


@pytest.mark.parametrize('is_causal', [False, True])
@pytest.mark.parametrize('number', [1, 5, 16, 100])
def test_global_keys_once(number, is_causal):
  for block, length in ((3, 30), (8, 31), (16, 16), (64, 7)):
    near = masks.window(3, 0 if is_causal else 2)
    call, spec = prepared(length, near)
    parts = longformer.global_parts(length, near, min(number, length), is_causal, block)
    whole = near | masks.global_tokens(number)
    counts = visits(call, spec, parts, 50)[:length, :length]
    np.testing.assert_array_equal(counts,
                                  expected(length,
                                           masks.causal() & whole if is_causal else whole))


@pytest.mark.parametrize('is_causal', [False, True])
def test_blocks_once(is_causal):
  """BigBird's: near, global and random ones, also where they are the same."""
  rng = np.random.default_rng(2)
  for size, length in ((1, 9), (3, 20), (4, 16), (5, 5), (8, 9)):
    number = -(-length // size)
    blocks = rng.integers(-1, number + 1, (number, 3)).astype(np.int32)
    call, spec = prepared(length, None)
    chosen = bigbird.choose(jnp.asarray(blocks), is_causal)[None]
    counts = visits(call, spec, bigbird.parts(length, size, chosen, is_causal), 50)
    wanted = attn.VARIANTS['bigbird'].visibility(length,
                                                 length,
                                                 is_causal=is_causal,
                                                 block_size=size,
                                                 random_blocks=blocks)
    np.testing.assert_array_equal(counts[:length, :length], np.asarray(wanted).astype(int))


@pytest.mark.parametrize('heads', [1, 3])
def test_listed_tiles_once(heads):
  rng = np.random.default_rng(1)
  for size, length, step in ((1, 9, 1), (3, 20, 40), (4, 16, 4000)):
    number = -(-length // size)
    listed = np.stack([
        rng.permuted(np.tile(np.arange(-2, number), (number, 1)), axis=-1)[:, :3]
        for _ in range(heads)
    ])
    listed = np.maximum(listed, -1)[:, None]
    call, spec = prepared(length, None, heads=3)
    blocks = layout.cut(0, number * size, size)
    part = layout.Part(None, blocks, blocks, jnp.asarray(listed))
    for head in range(heads):
      counts = visits(call, spec, (part,), step, head)[:length, :length]
      block = np.arange(length) // size
      wanted = (listed[head, 0][block][:, None, :] == block[None, :, None]).sum(-1)
      np.testing.assert_array_equal(counts, wanted)


def test_an_exact_cut_ends_where_the_interval_does():
  for length in range(1, 30):
    for block in range(1, 12):
      tiles = layout.cut(2, 2 + length, block, exact=True)
      assert tiles.size <= block
      covered = (tiles.starts[:, None] + np.arange(tiles.size)).ravel()
      np.testing.assert_array_equal(covered, np.arange(2, 2 + length))
