"""What the options of a model change, and what they refuse."""

import functools

import attn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models_test import all_models, build, Built, FAMILIES, rows_that_differ

POSITIONS = 'learned', 'sinusoidal', 'rope', 'alibi', 't5', 'none'


def recorder(built, monkeypatch):
  """Returns draw -> the features each performer of a model is given, in the order of the calls."""
  performer = attn.VARIANTS['performer']

  @jax.jit
  def recorded(draw):
    features = []

    @functools.wraps(performer.attention)
    def attention(*args, **options):
      features.append(options['features'])
      return performer.attention(*args, **options)

    with monkeypatch.context() as patch:
      patch.setitem(attn.VARIANTS, 'performer', performer._replace(attention=attention))
      built.apply(built.params, built.batch, draw)
    return features

  return lambda draw: [np.asarray(x) for x in recorded(jnp.uint32(draw))]


def test_features_are_a_function_of_seed_layer_and_draw(monkeypatch):
  features = recorder(build('seq2seq', 'performer', num_layers=2), monkeypatch)
  first, again, other = features(0), features(0), features(1)
  seed = recorder(build('seq2seq', 'performer', num_layers=2, seed=1), monkeypatch)(0)
  assert len(first) == 6 and {x.shape for x in first} == {(8, 4)}
  np.testing.assert_array_equal(first, again)
  assert len({x.tobytes() for x in first + other + seed}) == 18


def test_another_draw_recompiles_nothing():
  built, traces = build('decoder', 'performer'), 0

  @jax.jit
  def logits(draw):
    nonlocal traces
    traces += 1
    return built.apply(built.params, built.batch, draw)

  first, second, again = (np.asarray(logits(jnp.uint32(n))) for n in (0, 5, 0))
  assert traces == 1
  assert rows_that_differ(first, second)[:, 1:].all()
  np.testing.assert_array_equal(first, again)


def test_features_get_no_gradient_but_queries_do():
  built = build('decoder', 'performer')
  loss = lambda params: jnp.sum(jnp.square(built.apply(params, built.batch)))  # noqa: E731
  gradient = jax.jit(jax.grad(loss))(built.params)['decoder']['layer_0']['self_attention']
  assert set(gradient) == {'query', 'key', 'value', 'out'}
  assert all(np.asarray(x['kernel']).any() for x in gradient.values())


def test_remat_changes_no_gradient():
  grads = []
  for remat in False, True:
    built = Built('seq2seq', attention='linformer', remat=remat, dropout=0.3)
    rngs = {'dropout': jax.random.key(1)}

    def loss(params):
      logits = built.apply(params, built.batch, deterministic=False, rngs=rngs)
      return jnp.sum(jnp.square(logits))

    text = str(jax.make_jaxpr(jax.grad(loss))(built.params))
    assert ('remat' in text or 'checkpoint' in text) == remat
    grads.append(jax.jit(jax.grad(loss))(built.params))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), *grads)


@pytest.mark.parametrize('family, variant',
                         [(x, 'vanilla') for x in FAMILIES] + [('decoder', 'linformer'),
                                                               ('decoder', 'performer')])
def test_low_precision_computes_in_bfloat16(family, variant):
  exact, low = build(family, variant), build(family, variant, dtype='bfloat16')
  for leaf in jax.tree.leaves(low.params):
    assert leaf.dtype == jnp.float32
  logits = low.logits()
  assert logits.dtype == np.float32
  assert not np.array_equal(logits, exact.logits())
  np.testing.assert_allclose(logits, exact.logits(), atol=0.2)
  text = str(jax.make_jaxpr(low.apply)(low.params, low.batch))
  assert 'bf16' in text


def test_tied_embedding_gives_the_logits():
  tied = build('decoder', tie_embeddings=True)
  assert 'head' not in tied.params
  table = tied.params['embedding']['table']
  params = tied.params | {'embedding': {'table': table.at[8].set(0.)}}
  assert not np.asarray(tied.apply(params, tied.batch))[..., 8].any()
  assert param_names(tied) < param_names(build('decoder'))


def param_names(built):
  leaves = jax.tree_util.tree_leaves_with_path(built.params)
  return {jax.tree_util.keystr(path) for path, _ in leaves}


@all_models
def test_post_norm(family):
  pre, post = build(family), build(family, norm='post')
  last = {f"['{'encoder' if family == 'encoder' else 'decoder'}']['norm']['norm']['scale']"}
  assert last <= param_names(pre) and not last & param_names(post)
  assert rows_that_differ(pre.logits(), post.logits()).any()
  # The residual stream that the head reads is normal whatever the input's scale.
  scaled = {**post.params, 'embedding': {'table': 1e3 * post.params['embedding']['table']}}
  assert np.asarray(post.apply(scaled, post.batch)).std() < 3


@pytest.mark.parametrize('positions', POSITIONS)
def test_positions_are_told_apart(positions):
  built = build('encoder', positions=positions)
  inputs = np.tile(np.arange(10, dtype=np.int32), (3, 1))
  swapped = inputs.copy()
  swapped[:, [5, 6]] = inputs[:, [6, 5]]
  batch = built.batch | {'input_mask': np.ones(inputs.shape, bool)}
  before, after = (built.logits(batch | {'inputs': x}) for x in (inputs, swapped))
  # In one layer the ends learn of the swap through their own attention alone, on either side.
  for end in 0, 9:
    same = np.allclose(before[:, end], after[:, end], atol=1e-6)
    assert same == (positions == 'none')


@pytest.mark.parametrize('positions', POSITIONS)
def test_which_schemes_are_relative(positions):
  built = build('encoder', positions=positions)
  logits = []
  for offset in 0, 3:
    mask = np.tile((np.arange(10) >= offset) & (np.arange(10) < offset + 6), (3, 1))
    inputs = np.zeros((3, 10), np.int32)
    inputs[mask] = np.tile(np.arange(1, 7), 3)
    batch = built.batch | {'inputs': inputs, 'input_mask': mask}
    logits.append(built.logits(batch)[:, offset:offset + 6])
  same = np.allclose(*logits, atol=1e-5)
  assert same == (positions not in ('learned', 'sinusoidal'))


@pytest.mark.parametrize('positions, mirrored', [('alibi', True), ('none', True), ('t5', False),
                                                 ('rope', False)])
def test_which_encoders_know_the_direction(positions, mirrored):
  built = build('encoder', positions=positions)
  batch = built.batch | {'input_mask': np.ones(built.batch['inputs'].shape, bool)}
  back = batch | {'inputs': batch['inputs'][:, ::-1]}
  same = np.allclose(built.logits(batch), built.logits(back)[:, ::-1], atol=1e-5)
  assert same == mirrored


@pytest.mark.parametrize('family, positions',
                         [('decoder', x) for x in POSITIONS] + [('seq2seq', 'rope'),
                                                                ('seq2seq', 't5')])
def test_position_schemes_in_decoders(family, positions):
  built = build(family, 'local', positions=positions)
  names = ' '.join(param_names(built))
  assert ("['positions']" in names) == (positions == 'learned')
  assert ("['position_bias']" in names) == (positions == 't5')
  assert np.isfinite(built.logits()).all()


@pytest.mark.parametrize('option', ['dropout', 'attention_dropout'])
@all_models
def test_dropout_drops_in_training_alone(family, option):
  built = build(family, **{option: 0.5})
  exact = build(family).logits()
  np.testing.assert_allclose(built.logits(), exact, atol=1e-5)

  @jax.jit
  def train(seed):
    return built.apply(built.params,
                       built.batch,
                       deterministic=False,
                       rngs={'dropout': jax.random.key(seed)})

  first, again, other = train(0), train(0), train(1)
  np.testing.assert_array_equal(first, again)
  assert rows_that_differ(first, other).mean() > 0.5
  assert rows_that_differ(first, exact).mean() > 0.5


@pytest.mark.parametrize('activation', ['gelu', 'relu'])
def test_activation(activation):
  built = build('decoder', activation=activation)
  text = str(jax.make_jaxpr(built.apply)(built.params, built.batch))
  assert ('tanh' in text) == (activation == 'gelu')


def test_pooling():
  options = dict(task='majority', num_classes=4, length=9, positions='none')
  first = build('encoder', pooling='first', **options)
  mean = build('encoder', pooling='mean', **options)
  assert first.logits().shape == (3, 4)
  assert rows_that_differ(first.logits(), mean.logits()).all()
  tokens = np.full((3, 10), 5, np.int32)
  for built in first, mean:
    masks = [np.tile(np.arange(10) < n, (3, 1)) for n in (1, 4, 9)]
    batch = built.batch | {'inputs': tokens}
    one, some, most = (built.logits(batch | {'input_mask': mask}) for mask in masks)
    # Alike tokens, however many, have one mean; padding counts neither in it nor in its divisor.
    np.testing.assert_allclose(some, one, atol=1e-5)
    np.testing.assert_allclose(most, one, atol=1e-5)


@pytest.mark.parametrize('family, message, options', [
    ('decoder', 'linformer cannot serve positions=alibi',
     dict(attention='linformer', positions='alibi')),
    ('encoder', 'performer cannot serve positions=t5', dict(attention='performer', positions='t5')),
    ('decoder', 'performer cannot serve attention_dropout=0.1',
     dict(attention='performer', attention_dropout=0.1)),
    ('seq2seq', 'cross_attention=local cannot serve', dict(cross_attention='local')),
    ('encoder', 'tie_embeddings needs targets that are tokens',
     dict(task='majority', tie_embeddings=True)),
    ('encoder', 'task tagging has 9 classes', dict(task='tagging', tie_embeddings=True)),
    ('decoder', 'heads=3 does not divide model_dim=16', dict(heads=3, kv_heads=0)),
])
def test_clashing_options_are_refused(family, message, options):
  with pytest.raises(ValueError, match=message):
    Built(family, **options)
