"""Loading what a run has left, while it may still be training."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from experiments.checkpoint import Checkpoints
from experiments.config import Config, UserError, validate
from experiments.report import warn
from experiments.train import build, Experiment
from experiments.workdir import CHECKPOINTS


def read_config(workdir: str) -> Config:
  """The Config a run was made with.

  Raises:
    UserError: there is no run, or its record is not one.
  """
  path = Path(workdir).expanduser().absolute()
  if not (path / 'config.json').exists():
    raise UserError(f'{path} is no run: it has no config.json; train one with '
                    f'--workdir={workdir}')
  try:
    values = json.loads((path / 'config.json').read_text(encoding='utf-8'))['config']
    config = dataclasses.replace(Config(**values), workdir=str(path), mesh='')
    validate(config)
  except (ValueError, KeyError, TypeError) as error:
    raise UserError(f'{path / "config.json"} is damaged or of another version: '
                    f'{" ".join(str(error).split())}') from None
  return config


def restore(config: Config) -> tuple[Experiment, Any, int]:
  """The experiment of a run, the parameters of its newest checkpoint, and their step.

  Raises:
    UserError: there is no checkpoint.
  """
  path, state, experiment = Path(config.workdir), None, build(config)
  if (path / CHECKPOINTS).is_dir():
    with Checkpoints(path / CHECKPOINTS, config, warn, read_only=True) as checkpoints:
      state = checkpoints.restore(experiment.abstract)
  if state is None:
    raise UserError(f'{path} has no checkpoint yet; let it train to its first')
  return experiment, state.params, int(state.step)
