"""What scripts/_bootstrap.sh promises, tried on a small project whose lock is one tiny wheel."""

import json
import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRAIN = """
import json, os, sys, tiny
print(json.dumps({'tiny': tiny.VERSION, 'cwd': os.getcwd(), 'argv': sys.argv[1:]}))
"""


def make_wheel(folder, version):
  info = f'tiny-{version}.dist-info'
  with zipfile.ZipFile(folder / f'tiny-{version}-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('tiny.py', f'VERSION = {version!r}\n')
    wheel.writestr(f'{info}/METADATA', f'Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n')
    wheel.writestr(f'{info}/WHEEL',
                   'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
    wheel.writestr(f'{info}/RECORD', '')


def write_program(path, text):
  path.write_text(f'#!/usr/bin/env bash\n{text}\n')
  path.chmod(0o755)
  return path


class Project:
  """A project with the real scripts, and a lock and a program of its own."""

  def __init__(self, folder):
    self.root = folder / 'a project'
    self.wheels = folder / 'wheels'
    self.elsewhere = folder / 'elsewhere'
    for path in (self.wheels, self.elsewhere, self.root / 'experiments',
                 self.root / 'requirements'):
      path.mkdir(parents=True)
    shutil.copytree(ROOT / 'scripts', self.root / 'scripts')
    (self.root / 'experiments' / '__init__.py').touch()
    (self.root / 'experiments' / 'train.py').write_text(TRAIN)
    make_wheel(self.wheels, '1.0')
    for line in ('3.11', '3.12'):
      (self.root / 'requirements' / f'py{line}.txt').write_text('tiny==1.0\n')
    self.env = {k: v for k, v in os.environ.items() if not k.startswith(('PIP_', 'PYTHON'))}
    self.env.update(PYTHON=sys.executable, WHEELS=str(self.wheels), HOME=str(folder))

  def start(self, *args, script=None, **env):
    return subprocess.Popen([script or self.root / 'scripts' / 'train', *args],
                            cwd=self.elsewhere,
                            env=self.env | env,
                            stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE,
                            text=True,
                            start_new_session=True)

  def train(self, *args, **kwargs):
    """Runs scripts/train from another directory; returns what the program saw, and stderr."""
    return self.finish(self.start(*args, **kwargs))

  def finish(self, process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out), err

  def refusal(self, **env):
    """Runs scripts/train, which must fail with one line; returns that."""
    process = self.start(**env)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err.count('\n')) == (1, '', 1), err
    assert err.startswith('scripts/train: ')
    return err


@pytest.fixture
def project(tmp_path):
  return Project(tmp_path)


def test_environment_is_repaired_and_kept(project):
  # Killed in the middle of a set-up.
  python = project.root / '.venv' / 'bin' / 'python'
  killed = project.start()
  while not python.exists() and killed.poll() is None:
    time.sleep(.02)
  os.killpg(killed.pid, signal.SIGKILL)
  killed.communicate()
  assert python.exists()

  # Repaired, by one of two that start at once.
  first, second = project.start('--steps=5', 'a b'), project.start()
  (seen, err), (_, other_err) = project.finish(first), project.finish(second)
  assert seen == {'tiny': '1.0', 'cwd': str(project.elsewhere), 'argv': ['--steps=5', 'a b']}
  assert sum('Setting up' in text for text in (err, other_err)) == 1
  assert not (project.root / '.venv.lock').read_bytes()

  # Kept: nothing is started but the program, also through a link, and whatever PYTHONPATH says.
  link = project.elsewhere / 'train'
  link.symlink_to(project.root / 'scripts' / 'train')
  log = project.elsewhere / 'log'
  python.rename(python.with_name('real'))
  write_program(python, f'echo "$*" >>{log}; exec "${{0%/*}}/real" "$@"')
  write_program(project.elsewhere / 'python3.13', f'echo started >>{log}; exit 1')
  (project.elsewhere / 'tiny.py').write_text('VERSION = "not the locked one"\n')
  path = f'{project.elsewhere}:{os.environ["PATH"]}'
  for env in ({'PYTHON': ''}, {'PYTHON': sys.executable}):
    seen, err = project.train(script=link, PYTHONPATH=str(project.elsewhere), PATH=path, **env)
    assert (seen['tiny'], err) == ('1.0', '')
  assert log.read_text() == '-P -m experiments.train\n' * 2


CHANGES = {
    'nothing':
        'true',
    'another lock':
        'printf "tiny==2.0\\n" >"$(lock_of "$version")"',
    'a stamp cut short':
        'write "$(head -n 1 "$stamp")" "$stamp"',
    'no stamp':
        'rm "$stamp"',
    'a Python that is gone':
        'rm "$python"',
    'a project that moved':
        'root=$root/moved; mkdir "$root"; cp -r "$venv/../requirements" "$root"',
    'another PYTHON':
        'PYTHON=$2',
    'PYTHON by another path':
        'PYTHON=$3',
    'no PYTHON':
        'PYTHON=',
}


@pytest.mark.parametrize('change', CHANGES)
def test_environment_is_redone_when_needed(project, tmp_path, change):
  other = write_program(tmp_path / 'other', 'echo 3.11.9 whole /elsewhere/python3.11')
  wrapper = write_program(tmp_path / 'wrapper', f'exec {sys.executable} "$@"')
  program = f"""
    source "$1/scripts/_bootstrap.sh"
    mkdir -p "$venv/bin"
    inspect "$PYTHON"
    ln -s "$base" "$python"
    write "$(stamp_text "$version" "$base")" "$stamp"
    {CHANGES[change]}
    if ready; then echo ready; fi
    """
  out = subprocess.check_output(
      ['bash', '-euo', 'pipefail', '-c', program, 'x', project.root, other, wrapper],
      env=project.env,
      text=True)
  kept = ('nothing', 'PYTHON by another path', 'no PYTHON')
  assert out == ('ready\n' if change in kept else '')


@pytest.mark.parametrize('answer, reason', [
    ('3.9.18 whole', 'is Python 3.9.18, too old; set PYTHON'),
    ('2.7.18 whole', 'is Python 2.7.18, too old; set PYTHON'),
    ('3.14.0 whole', 'is Python 3.14.0, for which requirements/ has no locked versions; set'),
    ('3.11.2 lean', 'is Python 3.11.2 without venv or ensurepip'),
    ('', 'does not run as Python; set PYTHON'),
])
def test_python_that_will_not_do(project, tmp_path, answer, reason):
  python = write_program(tmp_path / 'python3.9', f'echo {answer and answer + " /usr/bin/python"}')
  assert f'{python} {reason}' in project.refusal(PYTHON=str(python))
  assert not (project.root / '.venv').exists()


def test_python_is_not_found(project, tmp_path):
  assert 'PYTHON=python3.x is not a program' in project.refusal(PYTHON='python3.x')
  tools = tmp_path / 'tools'
  tools.mkdir()
  for name in ('env', 'bash', 'dirname', 'readlink', 'find'):
    (tools / name).symlink_to(shutil.which(name))
  none = project.refusal(PYTHON='', PATH=str(tools))
  assert 'no Python 3.11, 3.12 or 3.13 found; install one' in none
  write_program(tools / 'python3', 'echo 3.9.2 whole /usr/bin/python3.9')
  write_program(tools / 'python3.13', 'echo "no such version" >&2; exit 127')
  old = project.refusal(PYTHON='', PATH=str(tools))
  assert 'found (python3 is Python 3.9.2, too old); install one' in old


def test_newest_python_that_runs_is_chosen(project, tmp_path):
  for name, line in (('python3.13', 'exit 127'), ('python3.12', 'echo 3.12.4 lean /p/python3.12'),
                     ('python3.11', 'echo 3.11.9 whole /p/python3.11'), ('python3', 'exit 1')):
    write_program(tmp_path / name, line)
  program = 'source "$1"; choose_python; echo "$version $base"'
  out = subprocess.check_output(
      ['bash', '-euo', 'pipefail', '-c', program, 'x', project.root / 'scripts' / '_bootstrap.sh'],
      env=project.env | {
          'PYTHON': '',
          'PATH': f'{tmp_path}:{os.environ["PATH"]}'
      },
      text=True)
  assert out == '3.11 /p/python3.11\n'


def test_folder_without_wheels(project, tmp_path):
  (tmp_path / 'empty').mkdir()
  for name in ('empty', 'missing'):
    assert 'is not a folder with wheels in it' in project.refusal(WHEELS=str(tmp_path / name))


NOT_FOUND = 'ERROR: No matching distribution found for jax==0.10.2\n'
RETRYING = "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConn'\n"


@pytest.mark.parametrize('output, reason', [
    (RETRYING + NOT_FOUND, 'no network: the package index cannot be reached'),
    ('raise ReadTimeoutError\nReadTimeoutError: Read timed out.\n', 'the network failed'),
    (NOT_FOUND, 'the package index has no wheel of jax==0.10.2 for this machine'),
    (RETRYING + 'ERROR: [Errno 28] No space left on device\n', 'the disk is full: '),
    ("PermissionError: [Errno 13] Permission denied: '.venv'", 'no permission to write '),
    ('WARNING: one\nERROR: something new\n', 'set-up failed: ERROR: something new'),
])
def test_reason_of_a_failed_step(project, output, reason):
  program = 'source "$1"; unset WHEELS; explain "$2"'
  script = project.root / 'scripts' / '_bootstrap.sh'
  out = subprocess.check_output(['bash', '-c', program, 'x', script, output], text=True)
  assert out.startswith(reason) and '\n' not in out


def test_wheel_that_the_folder_lacks(project):
  (project.wheels / 'tiny-1.0-py3-none-any.whl').unlink()
  make_wheel(project.wheels, '2.0')
  process = project.start()
  _, err = process.communicate(timeout=120)
  line = f'{sys.version_info[0]}.{sys.version_info[1]}'
  assert process.returncode == 1
  assert err.splitlines()[-1] == (f'scripts/train: WHEELS={project.wheels} has no wheel of '
                                  f'tiny==1.0 for Python {line}')
  assert not (project.root / '.venv' / 'stamp').exists()
