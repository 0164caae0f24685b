"""Shows that a run killed with -9 ends as one that was not: `python -m tests.kill_resume`.

It trains once without a stop, then again under `kill -9` at random moments, and compares the
digests of the final parameters and of metrics.jsonl.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path
import random
import subprocess
import sys
import tempfile
import time

OPTIONS = ('--steps=120', '--batch_size=16', '--dropout=0.1', '--log_every=1', '--eval_every=20',
           '--eval_batches=2', '--checkpoint_every=7')


def start(workdir: Path, options: list[str]) -> subprocess.Popen:
  """Starts a training process that says nothing."""
  command = [sys.executable, '-m', 'experiments.train', f'--workdir={workdir}', *options]
  path = filter(None, (str(Path(__file__).parents[1]), os.environ.get('PYTHONPATH')))
  environment = os.environ | {'PYTHONPATH': os.pathsep.join(path)}
  return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)


def last_step(workdir: Path) -> int:
  """The step of the newest row, 0 if there is none."""
  path = workdir / 'metrics.jsonl'
  rows = path.read_text().splitlines(True) if path.exists() else []
  whole = [row for row in rows if row.endswith('\n')]
  return json.loads(whole[-1])['step'] if whole else 0


def digests(workdir: Path) -> tuple[str, str]:
  """The digests of the final parameters and of metrics.jsonl."""
  summary = json.loads((workdir / 'summary.json').read_text())
  metrics = hashlib.sha256((workdir / 'metrics.jsonl').read_bytes()).hexdigest()
  return summary['params_digest'], metrics


def run_killed(workdir: Path, options: list[str], kills: int, steps: int, seed: int) -> None:
  """Starts a run, kills it soon after so many random steps, then lets it end."""
  rng = random.Random(seed)
  for target in sorted(rng.randint(0, steps - 1) for _ in range(kills)):
    process, delay = start(workdir, options), rng.uniform(0, 0.1)
    while process.poll() is None and last_step(workdir) < target:
      time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    process.wait()
    print(f'killed at step {target} + {delay * 1000:.0f} ms, last row of step {last_step(workdir)}',
          flush=True)
  if start(workdir, options).wait():
    raise SystemExit('the last rerun failed')


def main() -> int:
  parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
  parser.add_argument('--kills', type=int, default=5)
  parser.add_argument('--moments', type=int, default=0, help='seed of the moments to kill at')
  arguments, options = parser.parse_known_args()
  options = [*OPTIONS, *options]
  with tempfile.TemporaryDirectory() as directory:
    whole, killed = Path(directory, 'whole'), Path(directory, 'killed')
    if start(whole, options).wait():
      raise SystemExit('the uninterrupted run failed')
    run_killed(killed, options, arguments.kills, last_step(whole), arguments.moments)
    pairs = list(zip(('final parameters', 'metrics.jsonl'), digests(whole), digests(killed)))
  for name, before, after in pairs:
    print(f'{name}: uninterrupted {before[:16]}, killed {after[:16]}: '
          f'{"equal" if before == after else "DIFFERENT"}')
  return any(before != after for _, before, after in pairs)


if __name__ == '__main__':
  sys.exit(main())
