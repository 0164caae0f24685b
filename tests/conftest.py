"""Sets jax up for the tests, before anything imports it.

Eight virtual CPU devices, so that sharding is tested wherever the tests run; strict promotion, so
that no test passes because jax quietly widened a dtype or a rank; no compile cache between runs.
"""

import os

DEVICES = '--xla_force_host_platform_device_count=8'

if DEVICES not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {DEVICES}'.strip()
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
os.environ.pop('JAX_ENABLE_X64', None)

import jax  # noqa: E402

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')
