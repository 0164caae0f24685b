"""One sequence as a batch of shorter ones, whose queries and keys meet group by group.

Blocks are runs of neighbouring positions; residues, every size-th position. Queries and keys are
those of the same sequence. All of it is reshaping, whose gradient is as cheap.
"""

import math
from typing import Any

from jax import lax
import jax.numpy as jnp
import numpy as np

from attn import call as calls
from attn import checks
from attn.axes import Array
from attn.call import Call, Spec
from attn.softmax import State


def fold(call: Call, spec: Spec, size: int, residues: bool = False) -> tuple[Call, Spec]:
  """T positions as ceil(T / size) blocks of `size`, or as `size` residues of ceil(T / size).

  The groups become the innermost leading axis; what fills the last ones has index -1.
  """
  length, lead = call.lengths[0], call.query_index.ndim - 1
  whole = -(-length // size) * size

  def split(name: str, x: Any, axis: int) -> Any:
    """An axis as two, groups and places; where they are shared, both are 1."""
    x = calls.fill(name, x, axis, whole)
    shape = (whole // size, size) if x.shape[axis] == whole else (1, 1)
    x = x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1:])
    return x.swapaxes(axis, axis + 1) if residues else x

  def one(name: str, x: Any, axis: int) -> Any:
    """Splits an axis where callers have it, so that a loop's transposition cancels."""
    library = np if isinstance(x, np.ndarray) else jnp
    last, first = axis - x.ndim, -len(calls.LETTERS[name])
    x = library.moveaxis(x, last, first)
    x = split(name, x, x.ndim + first)
    return library.moveaxis(library.moveaxis(x, first, last), first - 1, lead)

  def both(name: str, x: Any) -> Any:
    """[..., T, S] with each group of queries beside the same group of keys."""
    x = split(name, split(name, x, x.ndim - 1), x.ndim - 2)  # [..., groups, T', groups, S']
    if x.shape[-4] == 1:
      return jnp.moveaxis(x[..., 0, :, :, :], -2, lead)
    if x.shape[-2] == 1:
      return jnp.moveaxis(x[..., 0, :], -3, lead)
    return jnp.moveaxis(jnp.diagonal(x, axis1=-4, axis2=-2), -1, lead)

  bias, mask = (both(name, x) if checks.is_array(x) else x
                for name, x in (('bias', call.bias), ('mask', call.mask)))
  draw = call.draw and call.draw._replace(heads=np.expand_dims(call.draw.heads, lead))
  call = call._replace(bias=None, mask=None)
  call = calls.along(calls.along(call, 'T', one), 'S', one)._replace(draw=draw,
                                                                     bias=bias,
                                                                     mask=mask)
  return call, spec._replace(padded=spec.padded or whole > length, interleaved=residues)


def unfold(state: State, length: int, residues: bool = False) -> State:
  """Undoes `fold` for a state [..., E, K, G, T']: [..., K, G, length]."""
  lead = state.max.ndim - 4

  def one(x: Any) -> Any:
    x = jnp.moveaxis(x, lead, lead + 2)  # [..., K, G, E, T', ...]
    x = x.swapaxes(lead + 2, lead + 3) if residues else x
    x = x.reshape(*x.shape[:lead + 2], math.prod(x.shape[lead + 2:lead + 4]), *x.shape[lead + 4:])
    return lax.slice_in_dim(x, 0, length, axis=lead + 2)

  return State(*(one(x) for x in state))


def last_keys(call: Call, spec: Spec, size: int, number: int) -> tuple[Call, Spec]:
  """The call with the last `number` keys of every block of `size` alone."""
  length = call.lengths[1]
  whole = -(-length // size) * size

  def one(name: str, x: Any, axis: int) -> Any:
    x = calls.fill(name, x, axis, whole)
    if x.shape[axis] != whole:
      return x
    x = x.reshape(*x.shape[:axis], whole // size, size, *x.shape[axis + 1:])
    x = x[(slice(None),) * (axis + 1) + (slice(size - number, None),)]
    return x.reshape(*x.shape[:axis], whole // size * number, *x.shape[axis + 2:])

  return calls.along(call, 'S', one), spec._replace(padded=spec.padded or whole > length)


def runs(x: Any, axis: int, size: int, end: Any) -> Any:
  """An axis cut into runs of `size`, whose number comes first; filled up with end, None: its last.

  [..., T, ...] becomes [number, ..., size, ...].
  """
  library, number = np if isinstance(x, np.ndarray) else jnp, -(-x.shape[axis] // size)
  widths = [(0, number * size - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
  x = library.pad(x, widths, mode='edge') if end is None else library.pad(
      x, widths, constant_values=end)
  x = x.reshape(*x.shape[:axis], number, size, *x.shape[axis + 1:])
  return library.moveaxis(x, axis, 0)


def joined(x: Array, axis: int, length: int) -> Array:
  """Undoes `runs`: [number, ..., size, ...] becomes [..., length, ...]."""
  x = jnp.moveaxis(x, 0, axis)
  number, size = x.shape[axis:axis + 2]
  x = x.reshape(*x.shape[:axis], number * size, *x.shape[axis + 2:])
  return lax.slice_in_dim(x, 0, length, axis=axis)
