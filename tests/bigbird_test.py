"""Random blocks: what a draw may and must contain, and that it is a pure function of its key."""

import functools

import attn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.points import qkv

FORMS = [(length, is_causal) for length in (0, 1, 3, 9, 20, 33) for is_causal in (False, True)]


def candidates(block: int, number: int, is_causal: bool) -> set[int]:
  """The blocks that neither the window nor the global blocks show to a block."""
  if is_causal:
    return set(range(1, block - 1))
  if block in (0, number - 1):
    return set()
  return set(range(1, number - 1)) - {block - 1, block, block + 1}


@pytest.mark.parametrize('length, is_causal', FORMS)
@pytest.mark.parametrize('r', [0, 1, 3])
def test_each_list_is_a_set_of_blocks_not_seen_anyway(length, is_causal, r):
  number = -(-length // 2)
  drawn = np.asarray(
      attn.bigbird_random_blocks(jax.random.key(0),
                                 length,
                                 block_size=2,
                                 num_random=r,
                                 num_heads=3,
                                 is_causal=is_causal))
  assert drawn.shape == (3, number, r) and drawn.dtype == np.int32
  for n, block in np.ndindex(3, number):
    listed = [x for x in drawn[n, block].tolist() if x >= 0]
    allowed = candidates(block, number, is_causal)
    assert set(listed) <= allowed and len(set(listed)) == len(listed) == min(r, len(allowed))


@pytest.mark.parametrize('is_causal', [False, True])
def test_every_set_of_blocks_is_equally_likely(is_causal):
  """Block 7 of 10 has 5 candidates: 10 pairs, each in a tenth of 4000 draws."""
  draw = lambda rng: attn.bigbird_random_blocks(
      rng, 10, block_size=1, num_random=2, is_causal=is_causal)
  drawn = np.asarray(jax.vmap(draw)(jax.random.split(jax.random.key(1), 4000)))[:, 7]
  pairs, counts = np.unique(np.sort(drawn, -1), axis=0, return_counts=True)
  assert len(pairs) == 10 and set(pairs.ravel()) == candidates(7, 10, is_causal)
  assert abs(counts / 4000 - .1).max() < .02  # four standard deviations


def test_the_key_alone_decides():
  draw = lambda seed, heads=None: np.asarray(
      attn.bigbird_random_blocks(
          jax.random.key(seed), 40, block_size=2, num_random=3, num_heads=heads))
  np.testing.assert_array_equal(draw(0), draw(0))
  assert (draw(0) != draw(1)).any()
  heads = draw(0, 2)
  assert (heads[0] != heads[1]).any()


def test_numbers_that_are_no_block_list_none():
  arrays = [jnp.asarray(array) for array in qkv().values()]
  call = lambda blocks: attn.bigbird_attention(*arrays, block_size=2, random_blocks=blocks)
  none = call(np.full((6, 2), -1, np.int32))
  for number in (6, 1000, -7):
    np.testing.assert_array_equal(call(np.full((6, 2), number, np.int32)), none)
  # A list of no width: as many terms, but summed in another order, which rounds.
  np.testing.assert_allclose(call(np.zeros((6, 0), np.int32)), none, atol=2e-6)
  arrays = [jnp.zeros_like(arrays[0]), arrays[1], jnp.round(arrays[2])]  # sums of whole numbers
  np.testing.assert_array_equal(call(np.zeros((6, 0), np.int32)), call(np.full((6, 2), -1,
                                                                               np.int32)))


@pytest.mark.parametrize('is_causal', [False, True])
def test_a_block_listed_twice_or_seen_anyway_counts_once(is_causal):
  """Block 4 sees 1 at random; 3, 4, 5 and the global ones it sees anyway."""
  arrays = [jnp.asarray(array) for array in qkv().values()]
  call = lambda *blocks: attn.bigbird_attention(*arrays,
                                                block_size=2,
                                                random_blocks=np.array(
                                                    [[-1] * 4] * 4 + [blocks, [-1] * 4], np.int32),
                                                is_causal=is_causal)
  once = call(1, -1, -1, -1)
  assert np.abs(np.asarray(once - call(-1, -1, -1, -1))).max() > 1e-3
  for blocks in ((1, 1, -1, 1), (0, 1, 3, 4), (5, 1, 3, 1)):
    np.testing.assert_allclose(call(*blocks), once, atol=2e-6)


def test_weights_of_heads_differ_where_their_blocks_do():
  arrays = [jnp.asarray(array) for array in qkv().values()]
  blocks = np.full((4, 6, 1), -1, np.int32)
  blocks[2, 1] = 4
  weights = np.asarray(
      attn.attention_weights('bigbird', *arrays[:2], params={'random_blocks': blocks},
                             block_size=2))
  visibility = attn.VARIANTS['bigbird'].visibility
  seen = [visibility(11, 11, block_size=2, random_blocks=one) for one in blocks]
  np.testing.assert_array_equal(weights > 0, np.broadcast_to(np.stack(seen), weights.shape))
  assert (weights[:, 2, 2:4, 8:10] > 0).all() and not weights[:, 1, 2:4, 8:10].any()
  with pytest.raises(ValueError, match=r'random_blocks\[n\]'):
    visibility(11, 11, block_size=2, random_blocks=blocks)


@pytest.mark.sampled(4)
@pytest.mark.parametrize('length, block_size', [(1, 1), (1, 3), (2, 1), (3, 5), (4, 10**6)])
@pytest.mark.parametrize('is_causal', [False, True])
def test_one_block_is_dense(length, block_size, is_causal):
  rng = np.random.default_rng(0)
  query, key, value = (
      jnp.asarray(rng.normal(size=(2, length, heads, 4)), jnp.float32) for heads in (4, 2, 2))
  blocks = -np.ones((-(-length // block_size), 2), np.int32)
  attend = functools.partial(attn.bigbird_attention,
                             block_size=block_size,
                             random_blocks=blocks,
                             is_causal=is_causal)
  dense = functools.partial(attn.vanilla_attention, is_causal=is_causal)

  def both(attend):
    return jax.value_and_grad(lambda *qkv: jnp.sum(attend(*qkv)**2), (0, 1, 2))(query, key, value)

  for found, expected in zip(*map(jax.tree.leaves, (both(attend), both(dense)))):
    np.testing.assert_allclose(found, expected, atol=1e-5)
