"""Drop-ins for the attention call sites of others: the `attention_fn` of Flax linen and of nnx.

    attend = linen_attention_fn('local', window=128, is_causal=True)
    nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attend)

The functions of this package are themselves drop-ins for `jax.nn.dot_product_attention`. Both
frameworks pass arguments that only some functions use; each is named here, obeyed, or refused.

Where T differs from S, as in cached decoding, a pattern must know where the queries stand: at the
last key that their row of the mask shows.
"""

import contextlib
from typing import Any, Callable

import jax
import jax.numpy as jnp

from attn.axes import Array
from attn.variants import VARIANTS, Params


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

  Raises, when called:
    ValueError: dropout is to be shared by batch and heads; the module's broadcast_dropout must be
      False.
    NotImplementedError: an argument is asked for that the variant does not have.
  """
  attend = _attention(name, params, options)

  # linen passes a keyword only where the signature names it.
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
                   force_fp32_for_softmax=False,
                   qk_attn_weights_einsum=None,
                   attn_weights_value_einsum=None,
                   **unused):
    del force_fp32_for_softmax  # always so
    _refuse(name,
            module=module,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
            **unused)
    return attend(query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate,
                  deterministic, dtype, precision, False)

  return attention_fn


def nnx_attention_fn(name: str,
                     params: Params | None = None,
                     **options: Any) -> Callable[..., Array]:
  """An attention_fn for `flax.nnx.MultiHeadAttention`; the rest is as in `linen_attention_fn`."""
  attend = _attention(name, params, options)

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
                   **unused):
    _refuse(name, module=module, **unused)
    return attend(query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate,
                  deterministic, dtype, precision, is_causal)

  return attention_fn


def _refuse(name: str, **options: Any) -> None:
  for option, value in options.items():
    if value is not None and value is not False:
      raise NotImplementedError(
          f'{name}_attention cannot give what {option} = {value!r} asks for: leave it unset')


def _attention(name: str, params: Params | None, options: dict[str, Any]) -> Callable[..., Array]:
  """What both frameworks ask for, in this package's terms."""
  if name not in VARIANTS:
    raise ValueError(f'name must be one of {", ".join(VARIANTS)}; got {name!r}')

  def attend(query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate,
             deterministic, dtype, precision, is_causal):
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
    with jax.default_matmul_precision(
        precision) if precision is not None else contextlib.nullcontext():
      return variant.apply(params or {}, query, key, value, bias, mask, **given)

  return attend


def _last_shown(mask: Array, query: Array, key: Array) -> Array:
  """The position [..., T] of the last key each query's row of the mask shows."""
  shown = jnp.any(mask, axis=-3)  # [..., T, S]
  last = key.shape[-3] - 1 - jnp.argmax(shown[..., ::-1], axis=-1).astype(jnp.int32)
  return jnp.broadcast_to(last, (*query.shape[:-3], query.shape[-3]))
