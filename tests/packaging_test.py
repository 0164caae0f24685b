"""What `pip install .` brings, what importing attn does, and the rules on imports and locks."""

import configparser
import importlib.metadata
import importlib.util
from pathlib import Path
import re
import shutil
import subprocess
import sys
import zipfile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
import pytest

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ('py3.11.txt', 'py3.12.txt')

# Imports every module of attn where only jax and numpy can be had and no device can be taken.
IMPORT_ALL = """
import os, sys
os.environ['JAX_PLATFORMS'] = 'no_such_platform'
class Refuse:
  def find_spec(self, name, path=None, target=None):
    if name.partition('.')[0] in ('flax', 'optax', 'absl', 'orbax', 'chex', 'rich', 'experiments'):
      raise ImportError(f'{name} is not for attn')
sys.meta_path.insert(0, Refuse())
import attn, jax, pkgutil
for module in pkgutil.walk_packages(attn.__path__, 'attn.'):
  __import__(module.name)
assert not jax._src.xla_bridge.backends_are_initialized(), 'a device was taken'
assert jax.config.jax_enable_x64 is False, 'the configuration was changed'
"""


def load_checker():
  spec = importlib.util.spec_from_file_location('check_structure',
                                                ROOT / 'scripts' / 'check_structure.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def read_lock(name):
  lines = (ROOT / 'requirements' / name).read_text().splitlines()
  pins = (line.split('==') for line in lines)
  return {canonicalize_name(package): version for package, version in pins}


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """The wheel that `pip install .` makes, built from a copy of the project."""
  installed = {d.name: Version(d.version) for d in importlib.metadata.distributions()}
  if installed.get('setuptools', Version('0')) < Version('77'):
    pytest.skip('this environment is not the locked one: setuptools is missing or old')
  folder = tmp_path_factory.mktemp('project')
  for name in ('pyproject.toml', 'setup.cfg', 'LICENSE', 'README.md'):
    shutil.copy(ROOT / name, folder)
  for name in ('attn', 'experiments', 'tests', 'scripts', 'requirements'):
    shutil.copytree(ROOT / name, folder / name)
  program = 'from setuptools import build_meta; build_meta.build_wheel("dist")'
  subprocess.run([sys.executable, '-c', program], cwd=folder, check=True, capture_output=True)
  with zipfile.ZipFile(next((folder / 'dist').glob('*.whl'))) as archive:
    yield archive


def test_wheel_holds_attn_and_nothing_else(wheel):
  ours = {name for name in wheel.namelist() if not name.startswith('attn-0.1.0.dist-info/')}
  modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / 'attn').rglob('*.py')}
  assert ours == modules | {'attn/py.typed'}
  assert 'attn-0.1.0.dist-info/licenses/LICENSE' in wheel.namelist()


def test_wheel_needs_jax_and_numpy(wheel):
  metadata = wheel.read('attn-0.1.0.dist-info/METADATA').decode()
  requires = [Requirement(line) for line in re.findall(r'^Requires-Dist: (.*)', metadata, re.M)]
  always = {str(requirement) for requirement in requires if not requirement.marker}
  assert always == {'jax>=0.10', 'numpy>=2.0'}
  assert set(re.findall(r'^Provides-Extra: (.*)', metadata,
                        re.M)) == {'experiments', 'test', 'dev', 'bench', 'tpu-compile'}
  assert 'Requires-Python: >=3.11\n' in metadata


def test_import_needs_only_jax_and_has_no_effects():
  done = subprocess.run([sys.executable, '-W', 'error', '-c', IMPORT_ALL],
                        cwd=ROOT,
                        capture_output=True,
                        text=True)
  assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


def test_project_keeps_its_rules():
  assert load_checker().check(ROOT) == []


@pytest.mark.parametrize('name, text, fault', [
    ('attn/a.py', 'import os\nimport flax.linen', 'attn/a.py:2: imports flax;'),
    ('attn/a.py', 'def f():\n  from experiments import loop', 'attn/a.py:2: imports experiments;'),
    ('attn/b/c.py', 'try:\n  import optax\nexcept ImportError: pass', 'attn/b/c.py:2: imports op'),
    ('attn/interop.py', 'import flax', 'attn/interop.py:1: imports flax;'),
    ('experiments/a.py', 'import pandas', 'experiments/a.py:1: imports pandas;'),
    ('tests/a.py', '\n' * 401, 'tests/a.py: 401 lines, more than 400;'),
    ('attn/a.py', 'def f(:', 'attn/a.py:1: invalid syntax'),
])
def test_checker_finds_fault(tmp_path, name, text, fault):
  shutil.copy(ROOT / 'setup.cfg', tmp_path)
  path = tmp_path / name
  path.parent.mkdir(parents=True)
  path.write_text(text)
  found, = load_checker().check(tmp_path)
  assert found.startswith(fault)


def test_checker_lets_pass_what_the_rules_allow(tmp_path):
  (tmp_path / 'attn').mkdir()
  (tmp_path / 'attn' / 'interop.py').write_text('def f():\n  import flax\nfrom . import masks\n')
  (tmp_path / 'attn' / 'long.py').write_text('\n' * 401)
  setup = (ROOT / 'setup.cfg').read_text()
  heading = '[structure:long_files]\n'
  (tmp_path / 'setup.cfg').write_text(setup.replace(heading, f'{heading}attn/long.py = a table\n'))
  assert load_checker().check(tmp_path) == []
  (tmp_path / 'attn' / 'long.py').write_text('\n' * 400)
  assert 'no longer a long file' in load_checker().check(tmp_path)[0]


UNLOCKED = ('bench', 'tpu-compile')


def direct_requirements():
  """What setup.cfg asks for, extras included but for those that no lock holds."""
  setup = configparser.ConfigParser(interpolation=None)
  setup.read(ROOT / 'setup.cfg')
  extras = {k: v for k, v in setup['options.extras_require'].items() if k not in UNLOCKED}
  lines = [setup['options']['install_requires'], *extras.values()]
  requirements = map(Requirement, '\n'.join(lines).split())
  return [requirement for requirement in requirements if requirement.name != 'attn']


@pytest.mark.parametrize('name', LOCKS)
def test_lock_is_exact_and_covers_setup_cfg(name):
  for line in (ROOT / 'requirements' / name).read_text().splitlines():
    assert re.fullmatch(r'[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*', line)
  locked = read_lock(name)
  for requirement in direct_requirements():
    assert locked[canonicalize_name(requirement.name)] in requirement.specifier


def test_locks_name_the_same_packages():
  first, second = map(read_lock, LOCKS)
  assert first.keys() == second.keys()


def test_lock_is_closed():
  """The lock of this Python holds all that is needed, and nothing else."""
  locked = read_lock(LOCKS[0] if sys.version_info[:2] == (3, 11) else LOCKS[1])
  installed = {canonicalize_name(d.name): d for d in importlib.metadata.distributions()}
  if any(name not in installed or installed[name].version != locked[name] for name in locked):
    pytest.skip('this environment is not the locked one')
  pending, seen = direct_requirements(), set()
  while pending:
    requirement = pending.pop()
    name = canonicalize_name(requirement.name)
    assert locked[name] in requirement.specifier
    for extra in {'', *requirement.extras} - {e for n, e in seen if n == name}:
      seen.add((name, extra))
      needs = map(Requirement, installed[name].requires or ())
      pending += [r for r in needs if r.marker is None or r.marker.evaluate({'extra': extra})]
  assert {name for name, _ in seen} == locked.keys()


def test_readme_gives_the_commands_that_ci_runs():
  readme = (ROOT / 'README.md').read_text(encoding='utf-8')
  ci = (ROOT / '.ci' / 'run').read_text(encoding='utf-8')
  assert 'scripts/test' in readme and 'scripts/train' in readme
  assert re.findall(r'^scripts/\w+$', ci, re.M) == ['scripts/check', 'scripts/test']
