"""Calls of every variant over a mesh axis, and the same calls without a mesh."""

from typing import Any, NamedTuple

import attn
from attn import sharding
import jax
from jax.sharding import AxisType
import jax.numpy as jnp
import numpy as np

from tests import harness

B, T, N, K, H, M = 2, 32, 4, 2, 8, 16
SIZES = (2, 4, 8)


class Case(NamedTuple):
  """One call on whole arrays.

  Attributes:
    name: of the variant.
    kind: what is asked of it.
    arrays: query, key, value, and any of bias, mask and those that say where tokens stand.
    params: the variant's arrays.
    options: its static options.
  """
  name: str
  kind: str
  arrays: dict[str, Any]
  params: dict[str, Any]
  options: dict[str, Any]

  @property
  def id(self) -> str:
    causal = '-causal' if self.options['is_causal'] else ''
    return f'{self.name}{causal}-{self.kind}'


OPTIONS: dict[str, dict[str, Any]] = {
    'vanilla': {},
    'blockwise': dict(block_size=4),
    'local': dict(window=(5, 2)),
    'strided': dict(stride=4),
    'fixed': dict(stride=4, summary=2),
    'longformer': dict(window=2, num_global=3),
    'bigbird': dict(block_size=4),
    'linformer': {},
    'performer': {},
}
KINDS = ('plain', 'packed', 'dense', 'placed', 'cross')
SUMMED = ('linformer', 'performer')


def _params(name: str, is_causal: bool, dtype: str) -> dict[str, Any]:
  rng = np.random.default_rng(5)
  array = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
  if name == 'bigbird':
    rng_key = jax.random.key(1)
    return dict(random_blocks=attn.bigbird_random_blocks(
        rng_key, T, block_size=4, num_random=2, num_heads=N, is_causal=is_causal))
  if name == 'linformer':
    shape = (4, 3) if is_causal else (N, T, 6)
    return dict(key_projection=array(*shape), value_projection=array(*shape))
  return dict(features=array(M, H)) if name == 'performer' else {}


def _asks(name: str, kind: str, is_causal: bool, rng: np.random.Generator) -> dict[str, Any] | None:
  """The arrays and options of a kind; None where the variant has no such call."""
  floats, integers = lambda *shape: rng.standard_normal(shape), rng.integers
  if kind == 'plain':
    return {}
  if kind == 'packed':
    mask = rng.random((B, 1, 1, T)) > 0.3
    mask[0, ..., T // 2:], mask[1] = False, mask[1] & (np.arange(T) < 3)
    if name in SUMMED:
      return dict(mask=mask)
    return dict(mask=mask, segment_ids=np.sort(integers(0, 3, (B, T)), -1).astype(np.int32),
                bias=attn.positions.ALiBi(attn.positions.alibi_slopes(N)),
                dropout_rate=0.3, dropout_rng=jax.random.key(3))  # yapf: disable
  if name in SUMMED:
    return None
  if kind == 'dense':
    return dict(mask=rng.random((B, N, T, T)) > 0.3, bias=floats(1, N, T, T))
  if kind == 'placed':
    return dict(query_positions=integers(0, T, (B, T), np.int32),
                key_positions=integers(0, T, (B, T), np.int32), bias=floats(B, 1, 1, T),
                mask=rng.random((1, N, 1, T)) > 0.3)  # yapf: disable
  return None if name != 'vanilla' or is_causal else dict(S=2 * T)


def case(name: str, kind: str, is_causal: bool, dtype: str, seed: int = 0) -> Case | None:
  """A case, or None where there is none."""
  rng = np.random.default_rng(seed)
  asked = _asks(name, kind, is_causal, rng)
  if asked is None:
    return None
  S = asked.pop('S', T)
  arrays = dict(query=rng.standard_normal((B, T, N, H)), key=rng.standard_normal((B, S, K, H)),
                value=rng.standard_normal((B, S, K, H)))  # yapf: disable
  options = OPTIONS[name] | dict(is_causal=is_causal)
  for what, x in asked.items():
    (options if what == 'dropout_rate' else arrays)[what] = x
  wide = lambda x: jnp.asarray(x, dtype) if np.issubdtype(x.dtype, np.floating) else jnp.asarray(x)
  arrays = {what: x if what == 'dropout_rng' else jax.tree.map(wide, x)
            for what, x in arrays.items()}  # yapf: disable
  if kind == 'packed':  # what nobody may see can hold anything
    hidden = ~arrays['mask'][:, 0, 0, :, None, None]
    for what in ('key', 'value'):
      arrays[what] = jnp.where(hidden, jnp.nan, arrays[what])
  return Case(name, kind, arrays, _params(name, is_causal, dtype), options)


def cases(dtype: str, kinds=KINDS) -> list[Case]:
  """Every case of some kinds."""
  made = (case(name, kind, is_causal, dtype)
          for kind in kinds
          for name in OPTIONS
          for is_causal in (False, True))
  return [one for one in made if one is not None]


def mesh(size: int):
  """So many of the devices in a row."""
  return jax.make_mesh((size,), ('sequence',),
                       axis_types=(AxisType.Auto,),
                       devices=jax.devices()[:size])


def both(given: Case, size: int | None) -> tuple[jax.Array, dict[str, Any]]:
  """The output, over `size` devices or without a mesh, and the gradients of what is continuous."""
  floats = {
      what: x for what, x in (given.arrays | given.params).items() if all(
          jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(x))
  }
  query = given.arrays['query']
  weights = jnp.asarray(np.random.default_rng(9).standard_normal(query.shape), query.dtype)

  def loss(floats):
    arrays = given.arrays | {what: x for what, x in floats.items() if what in given.arrays}
    params = given.params | {what: x for what, x in floats.items() if what in given.params}
    if size is None:
      output = attn.VARIANTS[given.name].apply(params, **arrays, **given.options)
    else:
      output = sharding.sharded_attention(given.name,
                                          **arrays,
                                          params=params,
                                          mesh=mesh(size),
                                          axis_name='sequence',
                                          **given.options)
    return jnp.sum(output * weights), output

  grads, output = harness.jit(jax.grad(loss, has_aux=True))(floats)
  return output, grads
