"""The legend of axis letters, and the sizes of one attention call.

    B  batch (any leading axes)     T  query length        S  key length
    N  query heads                  K  key/value heads     G  query heads that share one, N = K * G
    H  head dim                     Hv value head dim      M  random features
    R  projected slots              C  block size

Arrays arrive as [..., T, N, H] and are worked on with heads first, [..., K, G, T, H], so that every
product is one batched matrix product and no key is copied for the query heads that share it.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
ArrayLike = jax.Array | np.ndarray


class Dims(NamedTuple):
  """Sizes of a call: query [*leading, T, N, H], key [..., S, K, H], value [..., S, K, Hv]."""

  leading: tuple[int, ...]
  T: int
  S: int
  N: int
  K: int
  H: int
  Hv: int

  @property
  def G(self) -> int:
    """Query heads that share one key/value head."""
    return self.N // self.K


def wide(dtype: Any) -> Any:
  """The dtype that logits, softmax and sums use for inputs of `dtype`: float32 at least."""
  return jnp.float64 if dtype == jnp.float64 else jnp.float32


def ranked(x: Any, rank: int) -> Any:
  """x with axes of 1 in front, up to rank."""
  return x.reshape((1,) * (rank - x.ndim) + x.shape)


def varying(x: Any) -> frozenset[str]:
  """The mesh axes over which x varies inside shard_map."""
  return jax.typeof(x).manual_axis_type.varying


def vary_alike(tree: Any) -> Any:
  """Inside shard_map, arrays that all vary over the mesh axes any of them does; elsewhere tree.

  A loop's carry must begin as it goes on, and the gradient of what is shared must be summed.
  """
  names = frozenset().union(*(varying(x) for x in jax.tree.leaves(tree)))

  def one(x):
    missing = tuple(sorted(names - varying(x)))
    return lax.pcast(jnp.asarray(x), missing, to='varying') if missing else x

  return jax.tree.map(one, tree) if names else tree
