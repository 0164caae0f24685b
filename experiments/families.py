"""The same small runs for every variant and every model family, as a Markdown table:
`python -m experiments.families`.

Each run is stopped by SIGTERM halfway and resumed, so the table also shows that resuming works.
Runs that have ended are not run again. Flags of experiments.train apply to every run.
"""

import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

VARIANTS = {
    'vanilla': (),
    'blockwise': (),
    'local': ('--window=16',),
    'strided': ('--stride=4',),
    'fixed': ('--stride=4',),
    'longformer': ('--window=8', '--num_global=4'),
    'bigbird': ('--block_size=4', '--num_random=2'),
    'linformer': ('--rank=8',),
    'performer': ('--num_features=64',),
}
FAMILIES = {
    'encoder': ('--task=tagging',),
    'decoder': ('--task=copy',),
    'seq2seq': ('--task=copy',),
}


def run(workdir: Path, options: list[str]) -> dict:
  """Trains with a stop halfway, or finds that it has been done; returns the summary.

  Raises:
    subprocess.CalledProcessError: the run failed; it has said why.
  """
  summary = workdir / 'summary.json'
  command = [sys.executable, '-m', 'experiments.train', f'--workdir={workdir}', *options]
  if not summary.exists():
    print(' '.join(command[1:]), file=sys.stderr, flush=True)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
      while process.poll() is None and not _halfway(workdir):
        time.sleep(0.1)
      process.send_signal(signal.SIGTERM)
  subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
  return json.loads(summary.read_text(encoding='utf-8'))


def _halfway(workdir: Path) -> bool:
  try:
    steps = json.loads((workdir / 'config.json').read_text(encoding='utf-8'))['config']['steps']
    rows = (workdir / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()
    return json.loads(rows[-1])['step'] >= steps // 2
  except (OSError, IndexError):
    return False


def cell(summary: dict) -> str:
  """Accuracy and the best baseline's; whole answers right, and those that it writes itself."""
  scores = dict(summary['scores'])
  model = scores.pop('model')
  best = max(scores, key=lambda name: scores[name]['accuracy'])
  text = f'{model["accuracy"]:.3f} ({best} {scores[best]["accuracy"]:.3f})'
  if model.get('free_running') is None:
    return text
  return f'{text}; {model["exact_match"]:.3f}, {model["free_running"]:.3f}'


def main(options: list[str]) -> int:
  root = Path('runs', 'families')
  os.environ['PYTHONPATH'] = os.pathsep.join(
      filter(None, (str(Path(__file__).parents[1]), os.environ.get('PYTHONPATH'))))
  lines = [['accuracy (best baseline)', *FAMILIES], ['---'] * (len(FAMILIES) + 1)]
  for variant, its_options in VARIANTS.items():
    line = [variant]
    for family, task in FAMILIES.items():
      flags = [f'--model={family}', f'--attention={variant}', *task, *its_options, *options]
      try:
        line.append(cell(run(root / f'{family}-{variant}', flags)))
      except subprocess.CalledProcessError as error:
        return error.returncode
    lines.append(line)
  print('\n'.join(f'| {" | ".join(line)} |' for line in lines))
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
