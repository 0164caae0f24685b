"""The rows of the conformance tests: every variant in every form, with parameters and the oracle
to compare with.

A row is one algorithm: a variant, causal or not, with small awkward options (a block size that
divides nothing). `conformance_test.py` checks that the rows cover attn.VARIANTS; a new variant is
one more row here.
"""

from typing import Any, Callable, NamedTuple

import attn
import numpy as np

from tests import oracles

Params = dict[str, np.ndarray]


def no_params(rng: np.random.Generator, S: int, N: int, H: int) -> Params:
  return {}


def linformer_params(rng: np.random.Generator, S: int, N: int, H: int) -> Params:
  """Projections for at least two more keys than there are, the value's one per head: R = 5."""
  size = (S + 2) if S else 3
  return {
      'key_projection': rng.normal(size=(size, 5)) / 2,
      'value_projection': rng.normal(size=(N, size, 5)) / 2
  }


def segment_params(rng: np.random.Generator, S: int, N: int, H: int) -> Params:
  """Segments of c = 4 keys in r = 3 slots, the key's one per head."""
  return {
      'key_projection': rng.normal(size=(N, 4, 3)) / 2,
      'value_projection': rng.normal(size=(4, 3)) / 2
  }


def performer_params(rng: np.random.Generator, S: int, N: int, H: int) -> Params:
  return {'features': rng.normal(size=(19, H))}


def _listed(rng: np.random.Generator, *shape: int) -> np.ndarray:
  """Random blocks: any number from -1 (none) to the last, some twice, some seen anyway."""
  return rng.integers(-1, shape[-2], shape, np.int32)


def bigbird_params(rng: np.random.Generator, S: int, N: int, H: int) -> Params:
  """Two random blocks for each block of 2 positions, the same for all heads.

  Blocks cover S, which is also T wherever the positions are the default ones.
  """
  return {'random_blocks': _listed(rng, -(-S // 2), 2)}


def bigbird_params_per_head(rng: np.random.Generator, S: int, N: int, H: int) -> Params:
  return {'random_blocks': _listed(rng, N, -(-S // 2), 2)}


class Row(NamedTuple):
  """One line of the conformance table.

  primary: runs the points that do not depend on causality; the other rows run only those that do.
  alternatives: other options to try, each a change to `options`.
  """
  id: str
  name: str
  is_causal: bool
  options: dict[str, Any]
  primary: bool = True
  alternatives: tuple[dict[str, Any], ...] = ()
  params: Callable[..., Params] = no_params

  @property
  def supports(self) -> frozenset[str]:
    return attn.VARIANTS[self.name].supports

  @property
  def is_pattern(self) -> bool:
    """Whether visibility depends on positions even when not causal."""
    return self.name in ('local', 'strided', 'fixed', 'longformer', 'bigbird')

  def oracle(self, inputs: oracles.Inputs, dout, positions, params: Params,
             options: dict[str, Any]) -> oracles.Result:
    of_cost = attn.VARIANTS[self.name].cost_options
    options = {name: value for name, value in options.items() if name not in of_cost}
    function = getattr(oracles, self.name)
    query_positions, key_positions = positions
    if self.name == 'linformer':
      return function(inputs,
                      dout,
                      is_causal=self.is_causal,
                      query_positions=query_positions,
                      **params)
    return function(inputs,
                    dout,
                    is_causal=self.is_causal,
                    query_positions=query_positions,
                    key_positions=key_positions,
                    **params,
                    **options)


BLOCKS = tuple({'block_size': size} for size in (1, 7, 64, None))
# One head of one row of the batch at a time, and one tile; then several tiles.
STEPS = tuple({'block_size': 2, 'step_size': size} for size in (1, 64))
WINDOWS = tuple({'window': window} for window in ((0, 0), (0, 3), (4, 9), 2, 100))
STRIDES = ({'stride': 1}, {'stride': 4, 'block_size': 3}, {'stride': 100})
GLOBALS = ({'num_global': 0}, {'num_global': 5, 'block_size': 3}, {'num_global': 100})
FIXED = ({
    'stride': 1,
    'summary': 1
}, {
    'stride': 4,
    'summary': 4
}, {
    'stride': 5,
    'summary': 2,
    'block_size': 3
}, {
    'stride': 100,
    'summary': 7
})

ROWS = (
    Row('vanilla', 'vanilla', False, {}),
    Row('vanilla-causal', 'vanilla', True, {}, primary=False),
    Row('blockwise', 'blockwise', False, {'block_size': 4}, alternatives=BLOCKS + STEPS),
    Row('blockwise-causal', 'blockwise', True, {'block_size': 4}, False, BLOCKS + STEPS),
    Row('local', 'local', False, {
        'window': (3, 1),
        'block_size': 4
    }, False, WINDOWS + BLOCKS + STEPS),
    Row('local-causal', 'local', True, {
        'window': 3,
        'block_size': 4
    }, True, WINDOWS + BLOCKS + STEPS),
    Row('strided', 'strided', False, {
        'stride': 3,
        'block_size': 4
    }, False, STRIDES + BLOCKS + STEPS),
    Row('strided-causal', 'strided', True, {
        'stride': 3,
        'block_size': 4
    }, True, STRIDES + BLOCKS + STEPS),
    Row('fixed', 'fixed', False, {
        'stride': 3,
        'summary': 1,
        'block_size': 4
    }, False, FIXED + BLOCKS + STEPS),
    Row('fixed-causal', 'fixed', True, {
        'stride': 3,
        'summary': 2,
        'block_size': 4
    }, True, FIXED + BLOCKS + STEPS),
    Row('longformer', 'longformer', False, {
        'window': (2, 1),
        'num_global': 2,
        'block_size': 4
    }, False, GLOBALS + BLOCKS + STEPS),
    Row('longformer-causal', 'longformer', True, {
        'window': 2,
        'num_global': 2,
        'block_size': 4
    }, True, GLOBALS + BLOCKS + STEPS),
    Row('bigbird', 'bigbird', False, {'block_size': 2}, True, params=bigbird_params),
    Row('bigbird-causal', 'bigbird', True, {'block_size': 2}, False, params=bigbird_params),
    Row('bigbird-heads', 'bigbird', False, {'block_size': 2}, False,
        params=bigbird_params_per_head),
    Row('bigbird-heads-causal',
        'bigbird',
        True, {'block_size': 2},
        True,
        params=bigbird_params_per_head),
    Row('linformer', 'linformer', False, {}, params=linformer_params),
    Row('linformer-causal', 'linformer', True, {}, params=segment_params),
    Row('performer', 'performer', False, {
        'kernel': 'softmax',
        'block_size': 4
    }, True, BLOCKS, performer_params),
    Row('performer-causal', 'performer', True, {
        'kernel': 'softmax',
        'block_size': 4
    }, True, BLOCKS, performer_params),
    Row('performer-relu', 'performer', False, {
        'kernel': 'relu',
        'block_size': 4
    }, False, BLOCKS, performer_params),
    Row('performer-relu-causal', 'performer', True, {
        'kernel': 'relu',
        'block_size': 4
    }, False, BLOCKS, performer_params),
)
PRIMARY = tuple(row for row in ROWS if row.primary)
