"""Position schemes: embeddings (sinusoidal, learned, rotary) and biases on the logits (ALiBi, T5).

A position bias is a pytree called with integer positions, one tile at a time, so nobody holds a
[T, S] array: `bias(query_positions [..., T], key_positions [..., S])` gives [..., N, T, S].
Gradients reach its leaves.
"""

import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from attn import axes
from attn.axes import Array, ArrayLike
from attn.checks import check_int, int32, is_array


class PositionBias(Protocol):
  """A pytree of parameters that gives the bias of any pair of positions."""

  def __call__(self, query_positions: Array, key_positions: Array) -> Array:
    ...


def _angles(positions: ArrayLike, dim: int, base: float, dtype: Any) -> Array:
  """positions [...] / base^(2i/dim) for every i < dim/2: [..., ceil(dim/2)], float32 at least."""
  if not is_array(positions) or not jnp.issubdtype(positions.dtype, jnp.integer):
    raise ValueError(
        f'positions must be an integer array; got {getattr(positions, "dtype", type(positions))}')
  wide = axes.wide(dtype)
  inverse = base**(-np.arange(0, dim, 2, dtype=np.float64) / dim)
  inverse = inverse.reshape((1,) * positions.ndim + inverse.shape)
  return jnp.asarray(positions, wide)[..., None] * jnp.asarray(inverse, wide)


def sinusoidal(positions: ArrayLike, dim: int, dtype: Any = jnp.float32) -> Array:
  """Sine and cosine of each position at geometric wavelengths, interleaved.

    PE[p, 2i] = sin(p / 10000^(2i/dim))        PE[p, 2i+1] = cos(p / 10000^(2i/dim))

  Args:
    positions: integers [...].
    dim: the embedding's size; an odd one drops the last cosine.
    dtype: of the result.

  Returns:
    [..., dim].

  Source: Vaswani et al. 2017, section 3.5, https://arxiv.org/abs/1706.03762.
  """
  angles = _angles(positions, check_int('dim', dim, 1), 10000., dtype)
  both = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
  return both.reshape(*positions.shape, 2 * angles.shape[-1])[..., :dim].astype(dtype)


def learned(table: Array, positions: ArrayLike) -> Array:
  """Rows [..., D] of a learned table [L, D] at integer positions [...]; NaN outside the table.

  Source: Gehring et al. 2017, section 3.1, https://arxiv.org/abs/1705.03122.
  """
  if isinstance(
      positions,
      np.ndarray) and positions.size and not 0 <= positions.min() <= positions.max() < len(table):
    raise ValueError(f'positions must lie in [0, {len(table)}), the rows of table {table.shape}; '
                     f'got {positions.min()} to {positions.max()}')
  positions = jnp.asarray(int32(positions))
  # A negative index would count from the end.
  outside = jnp.where(positions < 0, len(table), positions)
  return jnp.asarray(table).at[outside].get(mode='fill', fill_value=jnp.nan)


def rope(x: Array,
         positions: ArrayLike,
         base: float = 10000.,
         interleaved: bool = False,
         dim: int | None = None) -> Array:
  """Rotates pairs of components in proportion to position: products depend on distance alone.

  Pair i turns by p / base^(2i/dim). Pairs are (i, i + dim/2), or (2i, 2i + 1) when interleaved.

  Args:
    x: [..., T, N, H].
    positions: integers [T] or [..., T].
    base: of the wavelengths.
    interleaved: which components form a pair.
    dim: how many leading components turn, even; all H if None.

  Returns:
    x rotated, in its shape and dtype; angles are computed in float32 at least.

  Raises:
    ValueError: dim is odd or larger than H, or positions do not fit x.

  Source: Su et al. 2021, section 3.2, https://arxiv.org/abs/2104.09864.
  """
  H = x.shape[-1]
  dim = H if dim is None else check_int('dim', dim, 0)
  if dim % 2 or dim > H:
    raise ValueError(f'dim must be even and at most the head dim {H}; got {dim}')
  angles = _angles(positions, dim, base, x.dtype)
  wanted = x.shape[:-2]
  given = positions.shape
  if not given or len(given) > len(wanted) or any(
      a not in (1, b) for a, b in zip(given[::-1], wanted[::-1])):
    raise ValueError(
        f'positions must be [T] or [..., T] with the T of x {x.shape}; got {positions.shape}')
  angles = angles.reshape((1,) * (x.ndim - 1 - angles.ndim) + angles.shape)[..., None, :]
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  turned, rest = x[..., :dim].astype(angles.dtype), x[..., dim:]
  if interleaved:
    a, b = turned[..., 0::2], turned[..., 1::2]
  else:
    a, b = turned[..., :dim // 2], turned[..., dim // 2:]
  a, b = a * cos - b * sin, b * cos + a * sin
  turned = jnp.stack([a, b], -1).reshape(*a.shape[:-1], dim) if interleaved else jnp.concatenate(
      [a, b], -1)
  return jnp.concatenate([turned.astype(x.dtype), rest], -1)


def alibi_slopes(num_heads: int) -> np.ndarray:
  """The slope of each head, float64 [num_heads]: 2^(-8i/n), i = 1 ... n, for n a power of two.

  Other counts follow the authors' code: the slopes of the power of two below, then every other one
  of the next.

  Source: Press et al. 2021, section 3, https://arxiv.org/abs/2108.12409.
  """
  n = check_int('num_heads', num_heads, 1)
  power = 2**math.floor(math.log2(n))
  slopes = lambda m: 2.**(-8. * np.arange(1, m + 1) / m)
  return np.concatenate([slopes(power), slopes(2 * power)[0::2][:n - power]])


def _distance(query_positions: ArrayLike, key_positions: ArrayLike) -> Array:
  """key - query of positions [..., T] and [..., S]: [..., T, S]."""
  query, key = (jnp.asarray(int32(x)) for x in (query_positions, key_positions))
  rank = max(query.ndim, key.ndim)
  query, key = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (query, key))
  return key[..., None, :] - query[..., :, None]


def _check_parameter(name: str, x: Any, shape: str, rank: int) -> None:
  if not is_array(x) or x.ndim != rank or not jnp.issubdtype(x.dtype, jnp.floating):
    got = f'{x.dtype} {x.shape}' if is_array(x) else repr(x)
    raise ValueError(f'{name} must be a floating-point array {shape}; got {got}')


@jax.tree_util.register_pytree_node_class
class ALiBi:
  """The bias -slope[n] * |key - query|, the same on both sides of the query.

  Args:
    slopes: floating point [N], one per query head, as of `alibi_slopes(N)`.

  Source: Press et al. 2021, section 3, https://arxiv.org/abs/2108.12409.
  """

  def __init__(self, slopes: ArrayLike):
    _check_parameter('slopes', slopes, '[N], as of alibi_slopes(N)', 1)
    self.slopes = slopes

  def __call__(self, query_positions: ArrayLike, key_positions: ArrayLike) -> Array:
    """Integers [..., T] and [..., S] to the bias [..., N, T, S], in float32 at least."""
    # In float32 at least: narrower distances are rounded, and overflow.
    slopes = jnp.asarray(self.slopes)
    slopes = slopes.astype(axes.wide(slopes.dtype))
    distance = jnp.abs(_distance(query_positions, key_positions)).astype(slopes.dtype)
    distance = distance[..., None, :, :]
    return -slopes.reshape((1,) * (distance.ndim - 3) + (-1, 1, 1)) * distance

  def tree_flatten(self):
    return (self.slopes,), None

  @classmethod
  def tree_unflatten(cls, _, children):
    new = object.__new__(cls)  # jax puts other things than arrays into the leaves
    (new.slopes,) = children
    return new


def t5_bucket(relative_position: ArrayLike,
              *,
              bidirectional: bool,
              num_buckets: int = 32,
              max_distance: int = 128) -> Array:
  """The bucket of each distance: exact when near, logarithmic up to max_distance, then one.

  Args:
    relative_position: integers, key position - query position.
    bidirectional: half of the buckets for keys after the query; otherwise those fall into bucket 0.
    num_buckets: how many there are.
    max_distance: distances from here on share the last bucket.

  Returns:
    int32 in [0, num_buckets), in the shape of relative_position.

  Source: Raffel et al. 2019, section 2.1, https://arxiv.org/abs/1910.10683.
  """
  buckets = check_int('num_buckets', num_buckets, 4 if bidirectional else 2)
  if bidirectional and buckets % 2:
    raise ValueError(f'num_buckets must be even when bidirectional; got {num_buckets}')
  relative = jnp.asarray(int32(relative_position))
  buckets = buckets // 2 if bidirectional else buckets
  exact = buckets // 2
  if check_int('max_distance', max_distance, 1) <= exact:
    raise ValueError(
        f'max_distance must exceed the {exact} exact distances of num_buckets = {num_buckets}; '
        f'got {max_distance}')
  # Where each logarithmic bucket begins, by exact integers: a float32 logarithm rounds the edges
  # differently per machine.
  ratio = max_distance / exact
  edges = [
      math.ceil(exact * ratio**(i / (buckets - exact)) - 1e-6) for i in range(1, buckets - exact)
  ]
  distance = jnp.abs(relative) if bidirectional else jnp.maximum(-relative, 0)
  bucket = jnp.minimum(distance, exact).astype(jnp.int32)
  for edge in edges:
    bucket += (distance >= edge).astype(jnp.int32)
  return bucket + jnp.where(relative > 0, buckets, 0).astype(jnp.int32) if bidirectional else bucket


@jax.tree_util.register_pytree_node_class
class T5Bias:
  """A learned bias per head and bucket of distance; table [num_buckets, N].

  Args:
    table: floating point [num_buckets, N], learned.
    bidirectional: whether keys after the query have buckets of their own, as in an encoder.
    max_distance: distances from here on share the last bucket.

  Source: Raffel et al. 2019, section 2.1, https://arxiv.org/abs/1910.10683.
  """

  def __init__(self, table: Array, bidirectional: bool, max_distance: int = 128):
    _check_parameter('table', table, '[num_buckets, N]', 2)
    self.table, self.bidirectional, self.max_distance = table, bidirectional, max_distance

  def __call__(self, query_positions: ArrayLike, key_positions: ArrayLike) -> Array:
    """Integers [..., T] and [..., S] to the bias [..., N, T, S]."""
    bucket = t5_bucket(_distance(query_positions, key_positions),
                       bidirectional=self.bidirectional,
                       num_buckets=self.table.shape[0],
                       max_distance=self.max_distance)
    return jnp.moveaxis(jnp.asarray(self.table)[bucket], -1, -3)

  def tree_flatten(self):
    return (self.table,), (self.bidirectional, self.max_distance)

  @classmethod
  def tree_unflatten(cls, static, children):
    new = object.__new__(cls)
    (new.table,), (new.bidirectional, new.max_distance) = children, static
    return new
