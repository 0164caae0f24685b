"""Drop-ins for the attention calls of others: `jax.nn`, and `attention_fn` of Flax linen and nnx.

    attend = linen_attention_fn('local', window=128, is_causal=True)
    nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attend)

The functions of this package take the arguments of `jax.nn.dot_product_attention` by position;
`jax_nn_attention_fn` takes its other keywords too. Frameworks pass arguments that only some
functions use; each is named here, obeyed, or refused.

Where T differs from S, as in cached decoding, a pattern must know where the queries stand: at the
last key that their row of the mask shows.
"""

import inspect
from typing import Any, Callable

import jax.numpy as jnp

from attn.axes import Array, Dims
from attn.checks import check_mask, check_qkv
from attn.variants import VARIANTS, Params


def jax_nn_attention_fn(name: str,
                        params: Params | None = None,
                        **options: Any) -> Callable[..., Array]:
  """A function with the signature of `jax.nn.dot_product_attention`.

  It keeps this package's contract where jax.nn differs: is_causal with T != S asks for
  query_positions, a query that sees nothing gets zeros, float64 is computed in float64.

  Args:
    name: a row of VARIANTS.
    params: the variant's arrays, as its `init` gives them.
    **options: of the variant's function.

  Returns:
    a function of query, key, value, bias, mask and the keywords of jax.nn.

  Raises:
    ValueError, TypeError: name is no variant, or it has no such option.

  Raises, when called:
    ValueError: local_window_size is given to another variant than local.
    NotImplementedError: return_residual or another implementation than 'xla' is asked for, or what
      the variant does not have.
  """
  _check(name, params, options, needed=False)

  def attention(query,
                key,
                value,
                bias=None,
                mask=None,
                *,
                scale=None,
                is_causal=False,
                query_seq_lengths=None,
                key_value_seq_lengths=None,
                local_window_size=None,
                implementation=None,
                return_residual=False):
    # There is one implementation, in XLA.
    _refuse(name,
            return_residual=return_residual,
            implementation=None if implementation == 'xla' else implementation)
    given = options | {'is_causal': is_causal or options.get('is_causal', False)}
    if scale is not None:
      given['scale'] = scale
    dims = check_qkv(query, key, value)
    check_mask(mask, dims)
    if local_window_size is not None:
      if name != 'local':
        raise ValueError('local_window_size needs the variant local; '
                         f'got {local_window_size!r} for {name}')
      given['window'] = local_window_size
    if key_value_seq_lengths is not None:
      shown = _shorter('key_value_seq_lengths', key_value_seq_lengths, dims.S, dims)[..., None,
                                                                                     None, :]
      mask = shown if mask is None else mask & shown
    output = VARIANTS[name].apply(params or {}, query, key, value, bias, mask, **given)
    if query_seq_lengths is None:
      return output
    rows = _shorter('query_seq_lengths', query_seq_lengths, dims.T, dims)[..., None, None]
    return jnp.where(rows, output, jnp.zeros_like(output))

  return attention


def _shorter(name: str, lengths: Array, size: int, dims: Dims) -> Array:
  """Which of `size` places lie within each length [...]: bool [..., size]."""
  lengths = jnp.asarray(lengths)
  if lengths.shape != dims.leading:
    raise ValueError(f'{name} must have the leading axes of query, {dims.leading}; '
                     f'got {lengths.shape}')
  places = jnp.arange(size, dtype=lengths.dtype).reshape((1,) * lengths.ndim + (size,))
  return places < lengths[..., None]


def _check(name: str, params: Params | None, options: dict[str, Any], needed: bool) -> None:
  """Checks the names of a variant, its arrays and its options; where needed, that none is missing.
  """
  if name not in VARIANTS:
    raise ValueError(f'name must be one of {", ".join(VARIANTS)}; got {name!r}')
  known = inspect.signature(VARIANTS[name].attention).parameters
  options = options | (params or {})
  for option in options:
    if option not in known:
      raise TypeError(f'{name}_attention has no {option}; its own are: '
                      f'{", ".join(VARIANTS[name].options) or "none"}')
  for option in VARIANTS[name].options:
    if needed and option not in options and known[option].default is inspect.Parameter.empty:
      raise TypeError(f'{name}_attention needs {option}, among the options or in params')


def linen_attention_fn(name: str,
                       params: Params | None = None,
                       **options: Any) -> Callable[..., Array]:
  """An attention_fn for `flax.linen.MultiHeadDotProductAttention`.

  Args:
    name: a row of VARIANTS.
    params: the variant's arrays, as its `init` gives them.
    **options: of the variant's function, such as window or is_causal.

  Returns:
    a function of query, key, value [..., length, heads, head_dim] and of what linen passes by name.

  Raises:
    ValueError, TypeError: name is no variant, or an option is not the variant's, or missing.

  Raises, when called:
    ValueError: dropout is to be shared by batch and heads; the module's broadcast_dropout must be
      False.
    NotImplementedError: an argument is asked for that the variant does not have.
  """
  return _attention_fn(name, params, options)


def nnx_attention_fn(name: str,
                     params: Params | None = None,
                     **options: Any) -> Callable[..., Array]:
  """An attention_fn for `flax.nnx.MultiHeadAttention`; the rest is as in `linen_attention_fn`."""
  return _attention_fn(name, params, options)


# The backward pass is traced when the function has returned: precision is set around both.
_INSTEAD = {'precision': ', and set jax.default_matmul_precision around the step'}


def _refuse(name: str, **options: Any) -> None:
  for option, value in options.items():
    if value is not None and value is not False:
      raise NotImplementedError(
          f'{name}_attention cannot give what {option} = {value!r} asks for: leave it unset'
          f'{_INSTEAD.get(option, "")}')


def _attention_fn(name: str, params: Params | None, options: dict[str,
                                                                  Any]) -> Callable[..., Array]:
  """What both frameworks ask for, in this package's terms."""
  _check(name, params, options, needed=True)

  # linen passes a keyword only where the signature names it; nnx passes all it has.
  def attention_fn(query,
                   key,
                   value,
                   bias=None,
                   mask=None,
                   broadcast_dropout=True,
                   dropout_rng=None,
                   dropout_rate=0.,
                   deterministic=False,
                   dtype=None,
                   precision=None,
                   module=None,
                   is_causal=False,
                   force_fp32_for_softmax=False,
                   qk_attn_weights_einsum=None,
                   attn_weights_value_einsum=None,
                   **unused):
    del force_fp32_for_softmax  # always so
    _refuse(name,
            precision=precision,
            module=module,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
            **unused)
    if dtype is not None:
      query, key, value = (x.astype(dtype) for x in (query, key, value))
    given = dict(options)
    given['is_causal'] = given.get('is_causal', False) or is_causal
    if mask is not None and mask.dtype != jnp.bool_:
      mask = mask != 0  # linen's own masks are floating point
    if dropout_rate and not deterministic:
      if broadcast_dropout:
        raise ValueError(
            'broadcast_dropout must be False: weights are dropped for each row and head by itself; '
            'got True, the default of the module')
      given.update(dropout_rate=dropout_rate, dropout_rng=dropout_rng)
    variant = VARIANTS[name]
    if 'query_positions' not in given and query.shape[-3] != key.shape[-3] and mask is not None:
      given['query_positions'] = _last_shown(mask, query, key)
    return variant.apply(params or {}, query, key, value, bias, mask, **given)

  return attention_fn


def _last_shown(mask: Array, query: Array, key: Array) -> Array:
  """The position [..., T] of the last key each query's row of the mask shows."""
  shown = jnp.any(mask, axis=-3)  # [..., T, S]
  last = key.shape[-3] - 1 - jnp.argmax(shown[..., ::-1], axis=-1).astype(jnp.int32)
  return jnp.broadcast_to(last, (*query.shape[:-3], query.shape[-3]))
