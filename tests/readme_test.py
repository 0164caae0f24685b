"""The README's code runs as printed and does what the text says; its tables are current."""

from pathlib import Path
import re

import attn
import jax
import jax.numpy as jnp
import numpy as np

from experiments import capabilities

README = Path(__file__).parents[1].joinpath('README.md').read_text(encoding='utf-8')


def test_code_runs_and_vmap_gives_the_same():
  blocks = re.findall(r'```python\n(.*?)```', README, re.DOTALL)
  assert len(blocks) == 7
  names: dict = {}
  for block in blocks[:2]:
    exec(block, names)
  np.testing.assert_allclose(names['output'], names['same'], atol=2e-6)
  x = jax.random.normal(jax.random.key(1), (2, 5, 512))
  exec(blocks[2].partition('\n\nattend = attn.interop.nnx')[0], names)
  linen, _ = names['module'].init_with_output(jax.random.key(0), x)
  exec(blocks[2], names)
  assert linen.shape == names['module'](x).shape == x.shape
  later = x.at[:, 3:].add(1.)
  assert jnp.array_equal(names['module'](x)[:, :3], names['module'](later)[:, :3])


def test_sharded_code_gives_the_same_on_eight_devices():
  names: dict = {}
  exec(re.findall(r'```python\n(.*?)```', README, re.DOTALL)[6], names)
  assert len(names['output'].sharding.device_set) == 8
  wanted = attn.local_attention(*(np.asarray(names[name]) for name in ('query', 'key', 'value')),
                                window=128, is_causal=True)  # yapf: disable
  np.testing.assert_allclose(names['output'], wanted, atol=2e-6)


def test_decoding_code_gives_one_pass_and_writes_with_a_model_that_is_not_ours():
  blocks = re.findall(r'```python\n(.*?)```', README, re.DOTALL)
  names: dict = {}
  for block in (blocks[0], *blocks[3:6]):
    exec(block, names)
  together = jnp.concatenate([names['first'], names['rest']], 1)
  np.testing.assert_allclose(together, names['output'], atol=2e-6)
  step, cache = names['step'], names['variant'].init_cache({},
                                                           attn.Dims((1,), 1, 1, 4, 4, 8, 8),
                                                           window=16)  # the short prompt alone
  alone = attn.decoding.generate(step,
                                 cache,
                                 names['prompts'][1:, -1],
                                 temperature=0,
                                 max_length=20)
  np.testing.assert_array_equal(alone.tokens[0], names['written'].tokens[1])
  assert names['drawn'].tokens.shape == (2, 20) and names['best'].tokens.shape == (2, 4, 20)
  assert np.all(np.isfinite(names['best'].scores))


def test_variants_table_is_current():
  found = re.search(r'<!-- variants -->\n(.*?)\n<!-- /variants -->', README, re.DOTALL)
  assert found, 'README.md lost the markers of its table of variants'
  assert found[1] == capabilities.costs(), 'run python -m experiments.capabilities and paste'
