"""The directory a run lives in: whose it is, what made it, and that one process has it."""

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
import platform
import subprocess
import tempfile
from typing import Any

from experiments.config import Config, FIELDS, UserError
from experiments.writer import to_json, write_json

_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
_LOCK, _CONFIG, CHECKPOINTS = 'lock', 'config.json', 'checkpoints'


def identity(config: Config) -> dict[str, Any]:
  """The fields that a result depends on: all but those a run may be resumed without."""
  values = dataclasses.asdict(config)
  return {name: values[name] for name, field in FIELDS.items() if not field.metadata['free']}


def check_same(theirs: dict[str, Any], config: Config, where: Path) -> None:
  """Refuses to go on with what another configuration made.

  Raises:
    UserError: names every field that differs, with both values.
  """
  ours = identity(config)
  names = [name for name in FIELDS if name in ours] + sorted(set(theirs) - set(FIELDS))
  differences = [
      f'{name}={theirs.get(name, "(absent)")} there, {ours.get(name, "(absent)")} now'
      for name in names
      if name not in FIELDS or not FIELDS[name].metadata['free']
      if theirs.get(name, '(absent)') != ours.get(name, '(absent)')
  ]
  if differences:
    raise UserError(f'{where} was made with another configuration: {"; ".join(differences)}. '
                    'Give those values, or another --workdir')


def locate(config: Config) -> Path:
  """The workdir: as given, or one for each configuration, so the same command finds its run."""
  if config.workdir:
    return Path(config.workdir).expanduser().absolute()
  variants = dict.fromkeys(place.variant for place in config.places().values())
  digest = hashlib.sha256(to_json(identity(config)).encode()).hexdigest()[:8]
  return Path('runs', '-'.join((config.task, config.model, *variants, digest))).absolute()


class Borrowed:
  """The directory of a run that another process has; this one only reads.

  Attributes:
    path: the directory.
    warnings: how the versions that made it differ from today's, one line each.
  """

  def __init__(self, config: Config):
    self.path = locate(config)
    self.warnings: list[str] = []

  def read_json(self, name: str) -> dict[str, Any] | None:
    """A record of this directory, or None if it has none.

    Raises:
      UserError: it is not JSON.
    """
    path = self.path / name
    try:
      return json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
      return None
    except ValueError:
      raise _damaged(path) from None

  def close(self) -> None:
    """Has nothing to let go of."""


class Workdir(Borrowed):
  """A directory that this process alone writes to until close()."""

  def __init__(self, config: Config):
    """Makes, checks and locks the directory before anything is computed.

    Raises:
      UserError: it cannot be written to, is in use, is something else's, or another config's.
    """
    super().__init__(config)
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      self._refuse_strangers()
      self._lock = open(self.path / _LOCK, 'a+', encoding='utf-8')
      if (self.path / CHECKPOINTS).exists():
        tempfile.TemporaryFile(dir=self.path / CHECKPOINTS).close()
    except OSError as error:
      raise UserError(f'workdir {self.path} cannot be written to: {error.strerror}') from None
    try:
      self._acquire()
      self.warnings = self._adopt(config)
    except BaseException:
      self._lock.close()
      raise

  def _refuse_strangers(self) -> None:
    names = os.listdir(self.path)
    strangers = sorted(set(names) - {_LOCK, _CONFIG + '.tmp'})
    if strangers and _CONFIG not in names:
      raise UserError(f'workdir {self.path} is not empty and no run of this program '
                      f'(it holds {strangers[0]}); give another --workdir')

  def _acquire(self) -> None:
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      self._lock.seek(0)
      raise UserError(f'workdir {self.path} is in use by process {self._lock.read() or "?"}; '
                      'wait for it, or give another --workdir') from None
    self._lock.truncate(0)
    self._lock.write(str(os.getpid()))
    self._lock.flush()

  def _adopt(self, config: Config) -> list[str]:
    record = self.read_json(_CONFIG)
    versions, commit = _versions(), _commit()
    if record is None:
      write_json(self.path / _CONFIG,
                 dict(config=dataclasses.asdict(config), versions=versions, commit=commit))
      return []
    try:
      theirs, then = record['config'], record['versions'] | {'commit': record['commit']}
    except (KeyError, TypeError):
      raise _damaged(self.path / _CONFIG) from None
    check_same(theirs, config, self.path)
    now = versions | {'commit': commit}
    return [
        f'started with {name} {then.get(name)}, continued with {value}: results may differ'
        for name, value in now.items()
        if then.get(name) != value
    ]

  def close(self) -> None:
    """Lets another process in."""
    self._lock.close()


def _damaged(path: Path) -> UserError:
  return UserError(f'{path} is damaged; restore it, or give another --workdir')


def _versions() -> dict[str, str | None]:
  packages: dict[str, str | None] = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {'python': platform.python_version()} | packages


def _commit() -> str | None:
  """The commit of this code, with '+' where files differ from it; None outside a checkout."""
  root = Path(__file__).parent

  def git(*arguments: str) -> str:
    return subprocess.run(('git', '-C', str(root)) + arguments,
                          capture_output=True,
                          text=True,
                          timeout=10,
                          check=True).stdout.strip()

  try:
    return git('rev-parse', 'HEAD') + ('+' if git('status', '--porcelain', '-uno') else '')
  except (OSError, subprocess.SubprocessError):
    return None
