"""Sets jax up for the tests, before anything imports it.

Eight virtual CPU devices, so that sharding is tested wherever the tests run; strict promotion, so
that no test passes because jax quietly widened a dtype or a rank; no compile cache between runs.
Most of a test is compilation of a program that runs on a few numbers, so the compiler is told not
to try hard, in the programs that tests start too.
"""

import importlib.metadata
import os
from pathlib import Path

FLAGS = ['--xla_force_host_platform_device_count=8', '--xla_backend_optimization_level=0']
if importlib.metadata.version('jax').startswith('0.10.'):
  FLAGS.append('--xla_cpu_use_fusion_emitters=false')  # later versions do not have it
MAPS = Path('/proc/self/maps')
os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *FLAGS]).strip()
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
os.environ.pop('JAX_ENABLE_X64', None)

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.fixture(autouse=True)
def free_programs():
  """Drops compiled programs before the process runs out of memory maps.

  Linux grants 65530, a program takes about a hundred, and past the limit the next compilation
  aborts the whole run.
  """
  yield
  if MAPS.exists() and MAPS.read_bytes().count(b'\n') > 20_000:
    jax.clear_caches()
