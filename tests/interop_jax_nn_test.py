"""`jax_nn_attention_fn` beside `jax.nn.dot_product_attention`, keyword by keyword."""

import attn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

T = 9
LENGTHS = np.array([5, 9])


def arrays():
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=(2, T, n, 8)), jnp.float32) for n in (4, 2, 2)]


def bias():
  return np.random.default_rng(1).normal(size=(1, 4, T, T)).astype(np.float32)


def mask():
  return (np.random.default_rng(2).random((2, 1, T, T)) < .7) | np.eye(T, dtype=bool)


@pytest.mark.parametrize('keywords', [
    {},
    {'bias': bias()},
    {'mask': mask()},
    {'scale': .3},
    {'is_causal': True},
    {'query_seq_lengths': LENGTHS},
    {'key_value_seq_lengths': LENGTHS},
    {'key_value_seq_lengths': LENGTHS, 'mask': mask()},
    {'implementation': 'xla'},
], ids=lambda keywords: '-'.join(keywords) or 'plain')  # yapf: disable
def test_keywords_are_those_of_jax_nn(keywords):
  keywords = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, keywords)
  ours = attn.interop.jax_nn_attention_fn('blockwise', block_size=4)(*arrays(), **keywords)
  theirs = jax.nn.dot_product_attention(*arrays(), **keywords)
  rows = np.arange(T) < np.array(keywords.get('query_seq_lengths', [T, T]))[:, None]
  np.testing.assert_allclose(ours[rows], theirs[rows], atol=2e-6)
  assert not np.any(ours[~rows])


@pytest.mark.parametrize('size', [2, (3, 1)])
def test_local_window_size(size):
  ours = attn.interop.jax_nn_attention_fn('local')(*arrays(), local_window_size=size)
  theirs = jax.nn.dot_product_attention(*arrays(), local_window_size=size)
  np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_what_cannot_be_given_is_refused():
  attend = attn.interop.jax_nn_attention_fn('blockwise')
  with pytest.raises(ValueError, match='local_window_size'):
    attend(*arrays(), local_window_size=2)
  with pytest.raises(NotImplementedError, match='return_residual'):
    attend(*arrays(), return_residual=True)
  with pytest.raises(NotImplementedError, match='cudnn'):
    attend(*arrays(), implementation='cudnn')
  with pytest.raises(ValueError, match='name must be one of'):
    attn.interop.jax_nn_attention_fn('dense')
