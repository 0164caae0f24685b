"""Wrong arguments end in a ValueError that names the argument and both sides, or in
NotImplementedError.
"""

import functools
import inspect

import attn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.harness import jit
from tests.points import qkv
from tests.points import T

PUBLIC = {name: getattr(attn, f'{name}_attention') for name in attn.VARIANTS}
OWN = {
    'vanilla': {},
    'blockwise': {},
    'local': {
        'window': 2
    },
    'strided': {
        'stride': 3
    },
    'fixed': {
        'stride': 3
    },
    'longformer': {
        'window': 2,
        'num_global': 1
    },
    'bigbird': {
        'block_size': 2,
        'random_blocks': np.zeros(((T + 1) // 2, 1), np.int32)
    },
    'linformer': {
        'key_projection': np.ones((T, 5), np.float32),
        'value_projection': np.ones((T, 5), np.float32)
    },
    'performer': {
        'features': np.ones((6, 8), np.float32)
    },
}
by_name = pytest.mark.parametrize('name', PUBLIC)


def call(name, arrays=None, **options):
  return PUBLIC[name](**jax.tree.map(jnp.asarray,
                                     qkv() if arrays is None else arrays), **OWN[name] | options)


def test_check_qkv_reads_the_sizes():
  dims = attn.check_qkv(*qkv(lead=(2, 3)).values())
  assert (dims.T, dims.S, dims.N, dims.K, dims.H, dims.Hv) == (T, T, 4, 2, 8, 5)
  assert tuple(dims.leading) == (2, 3)
  assert attn.check_qkv(*qkv(lead=(), T=0, S=3).values()).leading == ()


@by_name
def test_signature_is_a_drop_in(name):
  """The first five parameters are those of jax.nn.dot_product_attention; all others are keyword-
  only.
  """
  theirs = list(inspect.signature(jax.nn.dot_product_attention).parameters)[:5]
  ours = inspect.signature(PUBLIC[name]).parameters
  assert list(ours)[:5] == theirs == ['query', 'key', 'value', 'bias', 'mask']
  kinds = [parameter.kind for parameter in ours.values()]
  assert all(kind == inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds[:5])
  assert all(kind == inspect.Parameter.KEYWORD_ONLY for kind in kinds[5:])
  common = {
      'is_causal', 'scale', 'query_positions', 'key_positions', 'segment_ids', 'dropout_rate',
      'dropout_rng'
  }
  assert common <= set(ours)
  assert set(ours) - set(theirs) - common == set(attn.VARIANTS[name].options) | set(OWN[name])


@by_name
def test_positional_arguments_and_the_table_give_the_same(name):
  arrays = [jnp.asarray(array) for array in qkv().values()]
  mask = jnp.asarray(np.arange(T)[None, None, None] < 8)
  direct = jit(functools.partial(PUBLIC[name], **OWN[name]))(*arrays, None, mask)
  params = {k: v for k, v in OWN[name].items() if isinstance(v, np.ndarray)}
  options = {k: v for k, v in OWN[name].items() if k not in params}
  apply = functools.partial(attn.VARIANTS[name].apply, params, **options)
  row = jit(apply)(*arrays, None, mask)
  np.testing.assert_array_equal(direct, row)


@by_name
@pytest.mark.parametrize('wrong, words', [
    ({
        'key': (2, T, 3, 8)
    }, ['key', '4', '3']),
    ({
        'key': (2, T, 2, 7)
    }, ['key', '8', '7']),
    ({
        'value': (2, T - 1, 2, 5)
    }, ['value', str(T), str(T - 1)]),
    ({
        'value': (2, T, 4, 5)
    }, ['value', '2', '4']),
    ({
        'query': (3, T, 4, 8)
    }, ['query', '3', '2']),
    ({
        'query': (T, 8)
    }, ['query', str((T, 8))]),
])
def test_shapes_that_disagree(name, wrong, words):
  arrays = qkv() | {argument: np.ones(shape, np.float32) for argument, shape in wrong.items()}
  with pytest.raises(ValueError) as error:
    call(name, arrays)
  assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize('name',
                         [name for name in PUBLIC if 'bias' in attn.VARIANTS[name].supports])
def test_bias_shape_and_dtype(name):
  for shape in ((3, 4, T, T), (4, T, T), (2, 4, T, T - 1), (T, T)):
    with pytest.raises(ValueError, match='bias') as error:
      call(name, bias=jnp.ones(shape))
    assert str(shape) in str(error.value) and str(T) in str(error.value)
  with pytest.raises(ValueError, match='bias.*int32'):
    call(name, bias=jnp.ones((1, 1, T, T), jnp.int32))
  with pytest.raises((ValueError, TypeError), match='bias'):
    call(name, bias=1.5)


@by_name
def test_positions_and_segments_shapes_and_dtypes(name):
  supports = attn.VARIANTS[name].supports
  for argument in sorted({'query_positions', 'key_positions'} & supports):
    for wrong in (np.arange(T - 1), np.ones((3, T), np.int32), np.ones((2, 2, T), np.int32)):
      with pytest.raises(ValueError, match=argument):
        call(name, **{argument: wrong})
    with pytest.raises(ValueError, match=f'{argument}.*float32'):
      call(name, **{argument: np.arange(T, dtype=np.float32)})
  if 'segment_ids' in supports:
    for wrong in (np.arange(T - 1), np.ones((3, T), np.int32), (np.arange(T), np.arange(T - 1))):
      with pytest.raises(ValueError, match='segment_ids'):
        call(name, segment_ids=wrong)
    with pytest.raises(ValueError, match='segment_ids.*float32'):
      call(name, segment_ids=np.ones(T, np.float32))
    with pytest.raises(ValueError, match='segment_ids'):  # one array cannot serve T != S
      call(name,
           qkv(T=5, S=T),
           segment_ids=np.ones(5, np.int32),
           query_positions=np.arange(5),
           key_positions=np.arange(T))


@pytest.mark.parametrize('name, options', [('local', {
    'window': -1
}), ('local', {
    'window': (1, -1)
}), ('local', {
    'window': (1, 2, 3)
}), ('local', {
    'window': 1.5
}), ('strided', {
    'stride': 0
}), ('strided', {
    'stride': -3
}), ('strided', {
    'stride': 2.
}), ('fixed', {
    'stride': 0
}), ('fixed', {
    'summary': 4
}), ('fixed', {
    'summary': -1
}), ('blockwise', {
    'block_size': 0
}), ('local', {
    'block_size': -1
}), ('strided', {
    'block_size': 0
}), ('fixed', {
    'block_size': 0
}), ('performer', {
    'block_size': 0
}), ('performer', {
    'kernel': 'cosine'
}), ('longformer', {
    'window': -1
}), ('longformer', {
    'num_global': -1
}), ('longformer', {
    'num_global': 1.5
}), ('bigbird', {
    'block_size': 0
}), ('bigbird', {
    'block_size': 3
})])
def test_options_out_of_range(name, options):
  with pytest.raises(ValueError) as error:
    call(name, **options)
  (option, value), = options.items()
  assert option in str(
      error.value) and str(min(value) if isinstance(value, tuple) else value) in str(error.value)


@pytest.mark.parametrize(
    'name, options',
    [
        ('linformer', {
            'key_projection': np.ones((T - 1, 5), np.float32)
        }),  # S > S_max
        ('linformer', {
            'value_projection': np.ones((T - 1, 5), np.float32)
        }),
        ('linformer', {
            'value_projection': np.ones((T, 6), np.float32)
        }),
        ('linformer', {
            'key_projection': np.ones((3, T, 5), np.float32)
        }),
        ('linformer', {
            'key_projection': np.ones((T,), np.float32)
        }),
        ('performer', {
            'features': np.ones((6, 7), np.float32)
        }),
        ('performer', {
            'features': np.ones((8,), np.float32)
        }),
        ('performer', {
            'features': np.ones((0, 8), np.float32)
        }),
        ('bigbird', {
            'random_blocks': np.zeros((4, 2), np.int32)
        }),
        ('bigbird', {
            'random_blocks': np.zeros((3, 6, 2), np.int32)
        }),
        ('bigbird', {
            'random_blocks': np.zeros(6, np.int32)
        }),
    ])
def test_parameters_of_another_shape(name, options):
  with pytest.raises(ValueError) as error:
    call(name, **options)
  (option, array), = options.items()
  assert option in str(error.value) and str(array.shape) in str(error.value), str(error.value)


@by_name
def test_unknown_options_and_names(name):
  with pytest.raises(TypeError, match='widnow'):
    call(name, widnow=3)
  with pytest.raises((KeyError, ValueError), match='loacl'):
    attn.attention_weights('loacl', *[jnp.asarray(a) for a in list(qkv().values())[:2]])


@pytest.mark.sampled(3)
@by_name
def test_init_gives_what_apply_takes(name):
  """Shapes, float32, the same for the same key, another for another."""
  variant, dims = attn.VARIANTS[name], attn.check_qkv(*qkv().values())
  sizes = {
      'linformer': {
          'rank': 5
      },
      'performer': {
          'num_features': 20
      },
      'bigbird': {
          'block_size': 2,
          'num_random': 1
      }
  }.get(name, {})
  first, again, other = (variant.init(jax.random.key(seed), dims, **sizes) for seed in (0, 0, 1))
  expected = {
      'linformer': {
          'key_projection': (T, 5),
          'value_projection': (T, 5)
      },
      'performer': {
          'features': (20, 8)
      },
      'bigbird': {
          'random_blocks': (4, (T + 1) // 2, 1)
      }
  }.get(name, {})
  assert {k: v.shape for k, v in first.items()} == expected
  for k, array in first.items():
    assert array.dtype == (jnp.int32 if k == 'random_blocks' else jnp.float32)
    np.testing.assert_array_equal(array, again[k])
    assert not np.array_equal(array, other[k])
  if name == 'linformer':
    assert not np.array_equal(first['key_projection'], first['value_projection'])
  own = {k: v for k, v in OWN[name].items() if k not in expected}
  out = variant.apply(first, *[jnp.asarray(array) for array in qkv().values()], **own)
  assert out.shape == (2, T, 4, 5) and np.isfinite(out).all()


@pytest.mark.parametrize('rng, got', [(0, 'int'), ('key', 'str'), (None, 'None')])
def test_dropout_needs_a_key(rng, got):
  query = jnp.ones((1, 3, 2, 4))
  with pytest.raises(ValueError, match=f'dropout_rng.*got {got}'):
    attn.vanilla_attention(query, query, query, dropout_rate=0.1, dropout_rng=rng)
