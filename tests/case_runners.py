"""Runners of the attention cases of data/conformance, by case id.

A runner takes the arrays of a case, its in_* arrays in the dtype under test, and returns by name
what was computed for each out_* array (a list: each must equal it) and what is to differ from each
bad_* array.
"""

import functools
from typing import Any, Callable

import attn
import jax
import jax.numpy as jnp
import numpy as np

from tests import harness
from tests import oracles
from tests import tolerances

Computed = dict[str, Any]
Runner = Callable[[dict[str, np.ndarray], str], Computed]
RUNNERS: dict[str, Runner] = {}


def runner(case_id: str) -> Callable[[Runner], Runner]:

  def register(function: Runner) -> Runner:
    RUNNERS[case_id] = function
    return function

  return register


def arrays_of(data, *names: str) -> tuple[jax.Array, ...]:
  return tuple(jnp.asarray(data[name]) for name in names)


def _qkv(data) -> tuple[jax.Array, ...]:
  return arrays_of(data, 'in_q', 'in_k', 'in_v')


def _run(function, *arrays, **options) -> jax.Array:
  """function(query, key, value, bias, mask, **options), compiled as one program."""
  return harness.jit(functools.partial(function, **options))(*arrays)


DENSE = (attn.vanilla_attention, attn.blockwise_attention)


@runner('01')
def _fully_masked_row(data, dtype) -> Computed:
  mask, dout = jnp.asarray(data['in_visible']), jnp.asarray(data['in_dout'])

  def gradients(function):

    def run(*arrays):
      out, pull = jax.vjp(lambda q, k, v: function(q, k, v, mask=mask), *arrays)
      return out, *pull(dout)

    return harness.jit(run)(*_qkv(data))

  found = [gradients(function) for function in DENSE]
  names = ('out_out', 'out_dq', 'out_dk', 'out_dv')
  return {
      name: [arrays[i] for arrays in found] for i, name in enumerate(names)
  } | {
      'bad_mean_out': found[0][0],
      'bad_mean_dv': found[0][3]
  }


@runner('05')
def _low_precision(data, dtype) -> Computed:
  computed: Computed = {}
  for part in 'ab':
    arrays = arrays_of(data, f'in_q_{part}', f'in_k_{part}', f'in_v_{part}')
    out = [
        _run(attn.vanilla_attention, *arrays),
        _run(attn.blockwise_attention, *arrays, block_size=16)
    ]
    computed |= {f'out_{part}': out, f'bad_{part}': out[0]}
  return computed


@runner('07')
def _scale_then_bias(data, dtype) -> Computed:
  out = [
      _run(function, *_qkv(data), *arrays_of(data, 'in_bias', 'in_visible')) for function in DENSE
  ]
  wrong = dict.fromkeys(('bad_scaled_bias', 'bad_model_scale', 'bad_no_scale'), out[0])
  return {'out_out': out} | wrong


@runner('08')
def _grouped_heads(data, dtype) -> Computed:
  out = [_run(function, *_qkv(data), None, jnp.asarray(data['in_visible'])) for function in DENSE]
  return {'out_out': out, 'bad_tiled': out[0]}


@runner('09')
def _causal_alignment(data, dtype) -> Computed:
  """Queries are the last positions: T of them over S keys are at S - T, ..., S - 1."""
  q, k, v = _qkv(data)
  computed: Computed = {}
  for name, queries, S in (('5x5', slice(0, 5), 5), ('2x5', slice(3, 5), 5),
                           ('1x5', slice(4, 5), 5), ('5x2', slice(0, 5), 2)):
    T = queries.stop - queries.start
    positions = {'query_positions': np.arange(S - T, S), 'key_positions': np.arange(S)}
    computed['out_' + name] = [
        _run(function, q[:, queries], k[:, :S], v[:, :S], is_causal=True, **positions)
        for function in DENSE
    ]
    if 'bad_' + name in data:
      computed['bad_' + name] = computed['out_' + name][0]
    if 'out_visible_' + name in data:
      computed['out_visible_' +
               name] = attn.masks.causal().dense(*map(jnp.asarray, positions.values()))
  return computed


@runner('10')
def _local_window(data, dtype) -> Computed:
  local, arrays = attn.local_attention, _qkv(data)
  single = [array[:, :1] for array in arrays]
  causal = [
      _run(local, *arrays, window=2, is_causal=True),
      _run(local, *arrays, window=(2, 0)),
      _run(local, *arrays, window=(2, 0), block_size=2)
  ]
  # Buckets of 4 with one block back, causal, are no window: any visibility can be given to vanilla
  # as a mask.
  positions = np.arange(7)
  bucketed = oracles.pattern(lambda t, s: s <= t and t // 4 - s // 4 <= 1, positions, positions)
  return {
      'out_causal3':
          causal,
      'out_symmetric1':
          _run(local, *arrays, window=1),
      'out_wide':
          _run(local, *arrays, window=100, is_causal=True),
      'out_single':
          _run(local, *single, window=2, is_causal=True),
      'out_bucketed4':
          _run(attn.vanilla_attention, *arrays, None, jnp.asarray(bucketed[None, None])),
      'out_visible_causal3': [
          attn.masks.window(2, 0).dense(*[jnp.arange(7)] * 2),
          attn.VARIANTS['local'].visibility(7, 7, window=2, is_causal=True)
      ],
      'out_visible_bucketed4':
          bucketed,
      'bad_one_too_many':
          causal[0],
      'bad_future':
          causal[0],
      'bad_ignored':
          causal[0],
  }


@runner('12')
def _strided(data, dtype) -> Computed:
  out = [
      _run(attn.strided_attention, *_qkv(data), stride=3, is_causal=True, block_size=size)
      for size in (None, 2)
  ]
  positions = np.arange(7)
  return {
      'out_out':
          out,
      'out_visible': [
          attn.VARIANTS['strided'].visibility(7, 7, stride=3, is_causal=True),
          (attn.masks.strided(3) & attn.masks.causal()).dense(*[jnp.arange(7)] * 2)
      ],
      # The strided half alone is not what the library offers; the oracle's predicate is checked
      # instead.
      'out_visible_stride_only':
          oracles.pattern(lambda t, s: s <= t and (t - s) % 3 == 0, positions, positions),
      'bad_fixed':
          out[0],
      'bad_column':
          out[0],
  }


@runner('14')
def _linformer(data, dtype) -> Computed:
  mask = jnp.asarray(data['in_valid'])[:, None, None, :]
  E, F = arrays_of(data, 'in_proj_k', 'in_proj_v')

  def call(*names):
    return _run(attn.linformer_attention,
                *arrays_of(data, *names),
                None,
                mask,
                key_projection=E,
                value_projection=F)

  out = [call('in_q', 'in_k', 'in_v'), call('in_q', 'in_k_alt', 'in_v_alt')]
  leak = call('in_q', 'in_k_moved', 'in_v_moved') - out[0]
  return {'out_out': out, 'out_leak': leak, 'bad_padding_projected': out[0]}


@runner('16')
def _performer_causal(data, dtype) -> Computed:
  features = jnp.asarray(data['in_projection'])

  def call(key, block_size):
    return _run(attn.performer_attention,
                *arrays_of(data, 'in_q', key, 'in_v'),
                features=features,
                is_causal=True,
                block_size=block_size)

  out = [call('in_k', size) for size in (None, 1, 2)]
  far = [call('in_k_far', size) for size in (None, 1, 2)]
  for found, moved in zip(out, far):
    tolerances.assert_close(found[:, 0], data['in_v'][:, 0], tolerances.CASES[dtype])
    tolerances.assert_close(found[:, :4], moved[:, :4], tolerances.CASES[dtype])
  return {
      'out_out': out,
      'out_far': far,
      'bad_far_eps': far[0],
      'bad_elementwise': out[0],
      'bad_all_keys': out[0]
  }
