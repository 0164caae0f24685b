"""Argument checks: each error names the argument, what came, what was needed and the way out."""

import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn.axes import Array, ArrayLike, Dims

# Positions are int32, so a window or stride beyond this means the same.
MOST = 2**31 - 1


def int32(x: ArrayLike, name: str = 'positions and segment ids') -> ArrayLike:
  """Integers as int32, whose differences have a sign whatever they were; NumPy stays NumPy.

  Raises:
    ValueError: a number known before the program runs does not fit.
  """
  wider = x.dtype.itemsize > 4 or x.dtype == np.uint32
  if (wider or isinstance(x, np.ndarray)) and x.size and not isinstance(x, jax.core.Tracer):
    known = np.asarray(x)
    if known.min() < -MOST or known.max() > MOST:
      raise ValueError(f'{name} must fit int32; got {known.min()} to {known.max()}')
  return x.astype(np.int32)


def is_array(x: Any) -> bool:
  return isinstance(x, (jax.Array, np.ndarray))


def check_qkv(query: ArrayLike, key: ArrayLike, value: ArrayLike) -> Dims:
  """Returns the sizes of query [..., T, N, H], key [..., S, K, H], value [..., S, K, Hv].

  Raises:
    TypeError: an argument is no array.
    ValueError: ranks, leading axes, lengths, heads or dtypes disagree.
  """
  for name, x in (('query', query), ('key', key), ('value', value)):
    if not is_array(x):
      raise TypeError(f'{name} must be an array; got {type(x).__name__}')
    if x.ndim < 3:
      raise ValueError(
          f'{name} must have at least the axes [length, heads, head_dim]; got {x.shape}')
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f'{name} must be floating point; got {x.dtype}: cast it first')
  *leading, T, N, H = query.shape
  S, K, Hv = value.shape[-3:]
  if key.shape != (*leading, S, K, H):
    raise ValueError(
        'key must be [..., S, K, H] with the leading axes and H of query and the S, K of value, '
        f'{(*leading, S, K, H)}; got key {key.shape}, query {query.shape}, value {value.shape}')
  if value.shape[:-3] != tuple(leading):
    raise ValueError(f'value must have the leading axes of query, {tuple(leading)}; '
                     f'got value {value.shape}, query {query.shape}')
  if not N or not K or N % K:
    raise ValueError(
        'query heads must be a multiple of key/value heads; '
        f'got {N} query heads (query {query.shape}) and {K} key heads (key {key.shape})')
  if not H:
    raise ValueError(f'head_dim must be positive; got query {query.shape}')
  if not query.dtype == key.dtype == value.dtype:
    raise ValueError('query, key and value must have one dtype; '
                     f'got {query.dtype}, {key.dtype}, {value.dtype}: cast them first')
  return Dims(tuple(leading), T, S, N, K, H, Hv)


def check_dims(dims: Any) -> Dims:
  """Returns sizes that were given as they are, and not by arrays.

  Raises:
    TypeError: they are no Dims.
    ValueError: a size or axis is none, or N is no multiple of K.
  """
  if not isinstance(dims, Dims):
    raise TypeError('dims must be attn.Dims, as check_qkv(query, key, value) gives them; '
                    f'got {type(dims).__name__}')
  leading = tuple(check_int('dims.leading', x, 0) for x in dims.leading)
  T, S = (check_int(f'dims.{name}', getattr(dims, name), 0) for name in ('T', 'S'))
  N, K, H = (check_int(f'dims.{name}', getattr(dims, name), 1) for name in ('N', 'K', 'H'))
  dims = Dims(leading, T, S, N, K, H, check_int('dims.Hv', dims.Hv, 0))
  if dims.N % dims.K:
    raise ValueError(f'dims.N must be a multiple of dims.K; got {dims.N} and {dims.K}')
  return dims


def check_logits_like(name: str, x: ArrayLike, dims: Dims) -> None:
  """Checks that a bias or mask has the rank of the logits [..., N, T, S] and broadcasts to them."""
  logits = (*dims.leading, dims.N, dims.T, dims.S)
  fits = x.ndim == len(logits) and all(a in (1, b) for a, b in zip(x.shape, logits))
  if not fits:
    hint = (f'A key padding mask [B, S] is written {name}[:, None, None, :]'
            if name == 'mask' else f'Put axes of 1 in front, as in {name}[None]')
    raise ValueError(
        f'{name} must have the rank of the logits [..., N, T, S] = {logits} and broadcast to them; '
        f'got {x.shape}. {hint}')


def check_mask(mask: ArrayLike | None, dims: Dims) -> None:
  """Checks that mask is boolean and broadcasts to [..., N, T, S]."""
  if mask is None:
    return
  if not is_array(mask) or mask.dtype != jnp.bool_:
    raise ValueError('mask must be a boolean array, True where a key may be seen; got '
                     f'{mask.dtype if is_array(mask) else type(mask).__name__}: '
                     'pass jnp.asarray(mask) != 0')
  check_logits_like('mask', mask, dims)


def check_bias(bias: Any, dims: Dims) -> None:
  """Checks that bias is a float array that broadcasts to [..., N, T, S], or a position bias."""
  if bias is None:
    return
  if not is_array(bias):
    if not callable(bias):
      raise ValueError('bias must be an array or a position bias such as ALiBi or T5Bias; '
                       f'got {type(bias).__name__}')
    if not all(is_array(leaf) for leaf in jax.tree.leaves(bias)):
      raise ValueError('bias must be an array or a pytree of arrays that is called with positions; '
                       f'got {type(bias).__name__}: wrap a function in jax.tree_util.Partial')
    return
  if not jnp.issubdtype(bias.dtype, jnp.floating):
    raise ValueError(
        f'bias must be floating point; got {bias.dtype}: to hide keys pass mask, not bias')
  check_logits_like('bias', bias, dims)


def check_int(name: str, x: Any, least: int) -> int:
  """Returns x as an int, at most MOST; ValueError when it is none or less than `least`."""
  try:
    if isinstance(x, bool):
      raise TypeError
    number = operator.index(x)
  except (TypeError, jax.errors.JAXTypeError):
    raise ValueError(f'{name} must be a Python integer of at least {least}; got {x!r}') from None
  if number < least:
    raise ValueError(f'{name} must be at least {least}; got {number}')
  return min(number, MOST)


def check_flag(name: str, x: Any) -> bool:
  """Returns x, a Python bool."""
  if not isinstance(x, (bool, np.bool_)):
    raise ValueError(f'{name} must be True or False, a static Python value; got {type(x).__name__}')
  return bool(x)


def check_choice(name: str, x: Any, choices: tuple[str, ...]) -> str:
  """Returns x, one of the choices."""
  if x not in choices:
    raise ValueError(f'{name} must be one of {", ".join(choices)}; got {x!r}')
  return x


def check_window(window: int | tuple[int, int], is_causal: bool) -> tuple[int, int]:
  """Returns (left, right); an int w means (w, w); causal, right is 0 whatever was given.

  Raises:
    ValueError: a side is negative or no integer.
  """
  sides = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
  if len(sides) != 2:
    raise ValueError(f'window must be an int or a pair (left, right); got {window!r}')
  left, right = (check_int('window', side, 0) for side in sides)
  return left, 0 if check_flag('is_causal', is_causal) else right


def check_scale(scale: float | None, head_dim: int) -> float:
  """Returns scale as a float, head_dim**-0.5 when it is None."""
  if scale is None:
    return head_dim**-0.5
  if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not np.isfinite(scale):
    raise ValueError(f'scale must be a finite Python number or None; got {scale!r}. '
                     'Multiply query by a traced scale instead')
  return float(scale)


def check_key(name: str, rng: Any) -> Array:
  """Returns a key of jax.random, of the new kind or the old."""
  if not is_array(rng):
    raise ValueError(f'{name} must be a key such as jax.random.key(0); got {type(rng).__name__}')
  is_new = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
  if rng.ndim != (0 if is_new else 1) or not is_new and rng.dtype != np.uint32:
    raise ValueError(f'{name} must be one key such as jax.random.key(0); got {rng.dtype} '
                     f'{tuple(rng.shape)}')
  return rng


def check_dropout(rate: float, rng: Array | None) -> float:
  """Returns the dropout rate, in [0, 1); a positive one needs a key."""
  if isinstance(rate, bool) or not isinstance(rate, numbers.Real) or not 0 <= rate < 1:
    raise ValueError(f'dropout_rate must be a Python number in [0, 1); got {rate!r}')
  if rate and rng is not None:
    check_key('dropout_rng', rng)
  if rate and rng is None:
    raise ValueError(f'dropout_rate = {rate} needs dropout_rng; got None: pass a jax.random.key')
  return float(rate)


def check_per_token(name: str, x: ArrayLike, length: int, dims: Dims) -> ArrayLike:
  """Returns integers x, of shape [length] or [..., length], as int32 of rank [..., length]."""
  if not is_array(x) or not jnp.issubdtype(x.dtype, jnp.integer):
    raise ValueError(f'{name} must be an integer array [..., {length}]; '
                     f'got {x.dtype if is_array(x) else type(x).__name__}')
  wanted = (*dims.leading, length)
  if x.ndim in (1, len(wanted)):
    full = (1,) * (len(wanted) - x.ndim) + x.shape
    if full[-1] == length and all(a in (1, b) for a, b in zip(full, wanted)):
      return int32(x).reshape(full)
  raise ValueError(
      f'{name} must have shape [{length}] or [..., {length}] = {wanted}; got {x.shape}')


def refuse(variant: str, reason: str, **options: Any) -> None:
  """Raises NotImplementedError for an option that is asked for and that has no meaning."""
  for name, value in options.items():
    if value is not None and value is not False and not (isinstance(value, numbers.Real) and
                                                         value == 0):
      raise NotImplementedError(f'{variant}_attention has no {name}: {reason}')
