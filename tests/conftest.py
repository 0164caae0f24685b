"""Sets jax up for the tests, before anything imports it.

Eight virtual CPU devices, so that sharding is tested wherever the tests run; strict promotion, so
that no test passes because jax quietly widened a dtype or a rank. Most of a test is compilation of
a program that runs on a few numbers, so the compiler is told not to try hard, in the programs that
tests start too, and all of them share what they compiled: in a directory of this run alone.

Of the long crossings (pytest.mark.sampled) a run of everything takes a sample, always the same, and
the longest tests (pytest.mark.long) it leaves out; all run with --all, or when files, names or -k
choose what runs.
"""

import atexit
import gc
import importlib.metadata
import os
from pathlib import Path
import shutil
import tempfile
import zlib

FLAGS = [
    '--xla_force_host_platform_device_count=8', '--xla_backend_optimization_level=0',
    '--xla_cpu_parallel_codegen_split_count=1'
]
if importlib.metadata.version('jax').startswith('0.10.'):
  FLAGS.append('--xla_cpu_use_fusion_emitters=false')  # later versions do not have it
MAPS = Path('/proc/self/maps')
os.environ['XLA_FLAGS'] = ' '.join([os.environ.get('XLA_FLAGS', ''), *FLAGS]).strip()
os.environ['JAX_PLATFORMS'] = 'cpu'
if 'PYTEST_XDIST_WORKER' not in os.environ:
  programs = tempfile.mkdtemp()
  atexit.register(shutil.rmtree, programs)
  os.environ['JAX_COMPILATION_CACHE_DIR'] = programs
  os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'true'
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'
os.environ.pop('JAX_ENABLE_X64', None)

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')

# Tracing makes many small objects that stay: looking through them all again and again for garbage
# takes a twentieth of the time.
gc.set_threshold(100_000, 50, 100)
compiled = 0


def _count(event: str, seconds: float, **kwargs) -> None:
  global compiled
  compiled += event == '/jax/core/compile/backend_compile_duration'


jax.monitoring.register_event_duration_secs_listener(_count)


def pytest_addoption(parser) -> None:
  parser.addoption('--all',
                   action='store_true',
                   help='the long tests and every case of the sampled ones too')


def pytest_collection_modifyitems(config, items) -> None:
  """Leaves out what is not in the sample: by names, so that it is of all kinds of cases."""
  chosen = [Path(argument).name for argument in config.args] != config.getini('testpaths')
  if config.option.all or config.option.keyword or chosen:
    return
  kept, left = [], []
  seen: set[object] = set()
  for item in items:
    mark = item.get_closest_marker('sampled')
    first = mark and (item.parent, item.originalname) not in seen
    seen.add((item.parent, getattr(item, 'originalname', None)))
    some = mark is None or first or not zlib.crc32(item.name.encode()) % mark.args[0]
    some = some and not item.get_closest_marker('long')
    (kept if some else left).append(item)
  config.hook.pytest_deselected(items=left)
  items[:] = kept


@pytest.fixture(autouse=True)
def free_programs():
  """Drops compiled programs before the process runs out of memory maps.

  Linux grants 65530, a program takes about a hundred, and past the limit the next compilation
  aborts the whole run. Counting maps takes a while, so it is done after some compilations only.
  """
  global compiled
  yield
  if compiled >= 50 and MAPS.exists():
    compiled = 0
    if MAPS.read_bytes().count(b'\n') > 30_000:
      jax.clear_caches()
