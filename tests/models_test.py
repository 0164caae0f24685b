"""What every model promises, for all three families and all variants."""

import functools

import attn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.config import Config
from experiments.models import build_model, param_count
from experiments.tasks import make_task

TINY = dict(model_dim=16,
            heads=4,
            kv_heads=2,
            num_layers=1,
            window=2,
            stride=2,
            rank=3,
            segment=3,
            num_features=8)
TASKS = {
    'encoder': dict(task='masked', length=9, num_classes=2),
    'decoder': dict(task='copy', length=4, vocab_size=9),
    'seq2seq': dict(task='copy', length=6, vocab_size=9),
}
FAMILIES = tuple(TASKS)
all_models = pytest.mark.parametrize('family', FAMILIES)
all_variants = pytest.mark.parametrize('variant', list(attn.VARIANTS))


def fill(path, leaf, rng):
  """A parameter from NumPy, since compiling an init for every model takes longer than all else."""
  name, noise = path[-1].key, rng.standard_normal(leaf.shape)
  if name == 'scale':
    noise = 1 + noise / 4
  elif name == 'kernel':
    noise = noise * (leaf.shape[-1] / leaf.size if path[-2].key == 'out' else 1 /
                     leaf.shape[0])**0.5
  else:
    noise = noise / 2
  return jnp.asarray(noise, leaf.dtype)


@functools.lru_cache
def draw(task, model, length, classes, vocab_size):
  """Returns a batch of three rows."""
  config = Config(task=task, model=model, length=length, num_classes=classes, vocab_size=vocab_size)
  sample = jax.jit(make_task(config).sample, static_argnums=1)
  return {name: np.asarray(x) for name, x in sample(jax.random.key(2), 3).items()}


class Built:
  """A model with parameters and a batch; `logits` compiles once for all tests."""

  def __init__(self, family, **options):
    self.config = config = Config(**(TINY | TASKS[family] | dict(model=family) | options))
    self.task = make_task(config)
    self.model = build_model(config, self.task)
    self.batch = draw(config.task, family, config.length, config.num_classes, config.vocab_size)
    shapes = jax.eval_shape(self.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    self.params = jax.tree_util.tree_map_with_path(lambda *leaf: fill(*leaf, rng), shapes)
    self._jitted = jax.jit(self.apply)

  def init(self, rng):
    return self.model.init({'params': rng}, self.batch)['params']

  def apply(self, params, batch, draw=0, **kw):
    return self.model.apply({'params': params}, batch, draw=draw, **kw)

  def logits(self, batch=None, draw=0):
    batch = self.batch if batch is None else batch
    return np.asarray(self._jitted(self.params, batch, jnp.uint32(draw)))

  def changed(self, field, where):
    """The batch with other tokens at the places `where`."""
    tokens = self.batch[field]
    other = np.where(tokens + 1 < self.task.vocab_size, tokens + 1, 0).astype(np.int32)
    return self.batch | {field: np.where(where, other, tokens)}


@functools.lru_cache
def build(family, variant='vanilla', **options):
  return Built(family, attention=variant, **options)


def rows_that_differ(a, b):
  """Which [B, T] positions of two arrays of logits differ by more than rounding."""
  return np.abs(a - b).max(-1) > 2e-5


@all_models
@all_variants
def test_forward(family, variant):
  built = build(family, variant)
  logits = built.logits()
  assert logits.shape == (*built.batch['targets'].shape, built.task.num_classes)
  assert logits.dtype == np.float32 and np.isfinite(logits).all()


@all_models
@all_variants
def test_rows_are_independent(family, variant):
  built = build(family, variant)
  row = np.arange(3)[:, None] == 1
  batch = built.changed('inputs', row)
  if family == 'seq2seq':
    batch['source'] = built.changed('source', row)['source']
  different = rows_that_differ(built.logits(), built.logits(batch))
  assert different[1].any() and not different[[0, 2]].any()


@all_models
@all_variants
def test_padding_is_not_read(family, variant):
  built = build(family, variant)
  field, mask = {
      'encoder': ('inputs', 'input_mask'),
      'decoder': ('inputs', 'weights'),
      'seq2seq': ('source', 'source_mask'),
  }[family]
  real = built.batch[mask] > 0
  if family == 'decoder':  # Only the padding at the end: a prompt is read, though not scored.
    real = np.cumsum(real[:, ::-1], axis=1)[:, ::-1] > 0
  assert not real.all()
  logits, other = built.logits(), built.logits(built.changed(field, ~real))
  different = rows_that_differ(logits, other)
  assert not (different if family == 'seq2seq' else different & real).any()


@pytest.mark.parametrize('family', ['decoder', 'seq2seq'])
@all_variants
def test_decoders_are_causal(family, variant):
  built = build(family, variant)
  logits = built.logits()
  length = built.task.target_length
  for t in range(1, length):
    different = rows_that_differ(logits,
                                 built.logits(built.changed('inputs',
                                                            np.arange(length) >= t)))
    assert not different[:, :t].any(), t
    assert different[:, t].all(), t


@all_variants
def test_decoders_are_causal_in_the_gradient(variant):
  built = build('decoder', variant)

  def loss(params, t):
    logits = built.apply(params, built.batch)
    return jnp.sum(jnp.square(jax.lax.dynamic_index_in_dim(logits, t, axis=1)))

  gradient = jax.jit(jax.grad(loss))
  for t in (1, 4):
    table = np.asarray(gradient(built.params, t)['decoder']['positions'])
    assert np.isfinite(table).all()
    assert not table[t + 1:].any() and table[t].any() and table[t - 1].any()


@all_variants
def test_encoders_are_not_causal(variant):
  built = build('encoder', variant)
  later = np.arange(built.task.input_length) == 1
  different = rows_that_differ(built.logits(), built.logits(built.changed('inputs', later)))
  assert different[:, 0].all()


@all_variants
def test_the_source_is_read(variant):
  built = build('seq2seq', variant)
  first = np.arange(built.task.input_length) == 0
  different = rows_that_differ(built.logits(), built.logits(built.changed('source', first)))
  assert different.all()


@all_models
def test_each_place_has_its_own_variant(family):
  if family == 'seq2seq':
    options = dict(encoder_attention='linformer',
                   decoder_attention='local',
                   cross_attention='performer')
    built = build(family, **options)
    params = built.params
    assert 'projections' in params['encoder']['layer_0']['self_attention']
    assert 'projections' not in params['decoder']['layer_0']['self_attention']
    assert rows_that_differ(built.logits(draw=0), built.logits(draw=1)).all()
  else:
    built = build(family, **{f'{family}_attention': 'local'})
  assert np.isfinite(built.logits()).all()


def test_parameters_by_hand():
  built = Built('decoder', mlp_dim=24)
  vocab, dim, mlp, heads, kv_heads, head_dim, length = 9, 16, 24, 4, 2, 4, 10
  attention = dim * head_dim * (heads + 2 * kv_heads) + heads * head_dim * dim
  block = attention + (dim * mlp + mlp) + (mlp * dim + dim) + 2 * (2 * dim)
  total = vocab * dim + length * dim + block + 2 * dim + (dim * vocab + vocab)
  assert param_count(built.params) == total
  tied = Built('decoder', mlp_dim=24, tie_embeddings=True)
  assert param_count(tied.params) == total - (dim * vocab + vocab)


def test_parameters_of_variants():
  plain = param_count(build('seq2seq').params)
  assert param_count(build('seq2seq', 'performer').params) == plain
  # Two projections each: self-attention of 7 and of 3 (a segment), cross-attention of 7; rank 3.
  linformer = build('seq2seq', 'linformer').params
  assert param_count(linformer) == plain + 2 * (7 + 3 + 7) * 3


def test_initial_parameters():
  built = build('seq2seq', 'linformer', num_layers=2)
  params = jax.jit(built.init)(jax.random.key(0))
  logits = np.asarray(jax.jit(built.apply)(params, built.batch))
  assert 0.1 < logits.std() < 3  # Neither collapsed nor saturated.
  kernels = [x for path, x in jax.tree_util.tree_leaves_with_path(params) if x.ndim > 1]
  assert all(np.std(x) > 0 for x in kernels)
  assert len({np.asarray(x).tobytes() for x in kernels}) == len(kernels)  # No two layers alike.
  for stack, length in ('encoder', built.task.input_length), ('decoder', TINY['segment']):
    for i in range(2):
      projections = params[stack][f'layer_{i}']['self_attention']['projections']
      assert {x.shape for x in projections.values()} == {(length, TINY['rank'])}
