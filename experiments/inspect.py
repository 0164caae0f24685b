"""Shows what the heads of a model look at: `python -m experiments.inspect --workdir=RUN`."""

from collections.abc import Sequence
import functools
import math
import os
from pathlib import Path
import sys
import textwrap
from typing import Any, NamedTuple

from absl import flags
import jax
from jax import Array
import jax.numpy as jnp
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
import numpy as np

from experiments import runs
from experiments.checkpoint import silence_orbax
from experiments.config import UserError
from experiments.flags import read
from experiments.generate import tokens_of
from experiments.heads import Head, judge
from experiments.step import stream
from experiments.tasks.base import NAMES
from experiments.train import Experiment
from experiments.writer import write_json

PROGRAM = 'python -m experiments.inspect'
_HELP = f"""\
usage: {PROGRAM} --workdir=RUN [--option=value ...]

Scores every head of a run's newest checkpoint on held-out sequences and draws its weights on one of
them: attention.png, heads.md and heads.json, in RUN/inspect if no other place is named. Shares:
previous, first, duplicate (other keys with the query's token), induction (keys behind one with the
query's token); a role is the largest share from 0.4 on.
"""
_COLUMNS = ('entropy', 'uniform', 'distance', 'previous', 'first', 'duplicate', 'induction')
_MOST_LABELS = 48


class Place(NamedTuple):
  """Where attention stands in a model, and what it gave.

  Attributes:
    name: as decoder layer 0, or cross layer 1.
    weights: [B, N, T, S].
    queries, keys: tokens [B, T] and [B, S].
    heads: one each.
  """
  name: str
  weights: np.ndarray
  queries: np.ndarray
  keys: np.ndarray
  heads: list[Head]


def look(experiment: Experiment, params: Any, batch: dict[str, Array]) -> list[Place]:
  """The weights of all attention layers on a batch, in the model's order, judged."""
  apply = functools.partial(experiment.model.apply, draw=0, mutable=('attention',))
  _, found = jax.jit(lambda params, batch: apply({'params': params}, batch))(params, batch)
  leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(found['attention']))
  tokens: dict[str, np.ndarray] = {
      name: np.asarray(batch[name]) for name in ('inputs', 'source') if name in batch
  }
  real = {name: np.asarray(x) for name, x in (
      ('inputs', batch.get('input_mask', _until_scored(batch))),
      ('source', batch.get('source_mask', True)))}  # yapf: disable
  places = []
  for path, weights in leaves:
    stack, layer, kind = (key.key for key in path[:3])
    is_cross = kind == 'cross_attention'
    reads = 'source' if 'source' in tokens and stack == 'encoder' else 'inputs'
    sees = 'source' if is_cross else reads
    heads = judge(weights, tokens[reads], tokens[sees], real[reads], real[sees],
                  'cross' if is_cross else 'causal' if stack == 'decoder' else 'full')
    name = f'{"cross" if is_cross else stack} layer {layer.removeprefix("layer_")}'
    places.append(Place(name, weights, tokens[reads], tokens[sees], heads))
  return sorted(places, key=lambda place: (place.name.split()[0] != 'encoder', place.name))


def _until_scored(batch: dict[str, Array]) -> Array:
  """Which inputs of a decoder come before, or at, the last scored one: padding is behind."""
  place = jnp.arange(batch['inputs'].shape[1], dtype=jnp.int32)[None]
  return place <= jnp.max(jnp.where(batch['weights'] > 0, place, 0), 1, keepdims=True)


def table(places: Sequence[Place]) -> str:
  """A Markdown table with a line for each head."""
  lines = ['| head | ' + ' | '.join(_COLUMNS) + ' | role |', '| --- |' + ' --: |' * 7 + ' --- |']
  for place in places:
    for number, head in enumerate(place.heads):
      cells = ['' if math.isnan(x) else f'{x:.2f}' for x in head]
      lines.append(f'| {place.name} head {number} | {" | ".join(cells)} | {head.role} |')
  return '\n'.join(lines)


def draw(places: Sequence[Place], row: int, vocab: dict[int, str], path: Path) -> None:
  """A picture of the weights on one row: a line for each layer, a column for each head."""
  heads = max(len(place.heads) for place in places)
  side = max(2.2, min(6., 0.16 * max(place.weights.shape[-1] for place in places)))
  figure = Figure(figsize=(side * heads, (side + 0.5) * len(places)), layout='constrained')
  FigureCanvasAgg(figure)
  panels = figure.subplots(len(places), heads, squeeze=False)
  for place, line in zip(places, panels):
    for number, panel in enumerate(line):
      if number >= len(place.heads):
        panel.set_axis_off()
        continue
      weights = np.abs(place.weights[row, number])
      panel.imshow(weights, cmap='Greys', vmin=0., vmax=max(float(weights.max()), 1e-9))
      panel.set_title(f'{place.name} head {number} {place.heads[number].role}', fontsize=7)
      for axis, tokens, turn in ((panel.xaxis, place.keys, 90), (panel.yaxis, place.queries, 0)):
        if len(tokens[row]) <= _MOST_LABELS:
          names = [vocab.get(int(x), str(x)) for x in tokens[row]]
          axis.set_ticks(range(len(names)), names, fontsize=5, rotation=turn)
      if not number:
        panel.set_ylabel('query', fontsize=7)
      panel.set_xlabel('key', fontsize=7)
  figure.savefig(path, dpi=120)


def _batch(experiment: Experiment, prompt: str | None, rows: int) -> dict[str, Array]:
  """Held-out rows, or the one sequence of a prompt.

  Raises:
    UserError: the prompt is none, or too long.
  """
  config, task = experiment.config, experiment.task
  if prompt is None:
    sample = jax.jit(task.sample, static_argnums=1)
    return sample(stream(config, 'eval', 0), rows)
  if config.model == 'seq2seq':
    raise UserError(
        '--prompt is for encoders and decoders; leave it out to see a held-out sequence')
  tokens = tokens_of(prompt, task.vocab_size)
  if not 0 < len(tokens) <= task.target_length:
    raise UserError(f'--prompt must have from 1 to {task.target_length} tokens; got {len(tokens)}')
  inputs = jnp.asarray(tokens, jnp.int32)[None]
  return {'inputs': inputs, 'input_mask': jnp.ones(inputs.shape, bool),
          'weights': jnp.ones(inputs.shape)}  # yapf: disable


def _define() -> flags.FlagValues:
  values = flags.FlagValues()
  flags.DEFINE_boolean('help', False, 'show this help', short_name='h', flag_values=values)
  flags.DEFINE_string('workdir', '', 'the run', flag_values=values)
  flags.DEFINE_string('prompt', None, 'tokens as they stand, instead of held-out sequences; BOS, '
                      'SEP and the like are words', flag_values=values)  # yapf: disable
  flags.DEFINE_integer('rows', 64, 'held-out sequences to score', 1, flag_values=values)
  flags.DEFINE_integer('row', 0, 'which of them to draw', 0, flag_values=values)
  flags.DEFINE_string('out', '', 'where to write; RUN/inspect if not given', flag_values=values)
  return values


def help_text() -> str:
  """What --help prints."""
  values, lines = _define(), [_HELP]
  for name in ('workdir', 'prompt', 'rows', 'row', 'out'):
    flag: Any = values[name]
    shown = f'--{name}={"" if flag.default is None else flag.default}'
    first, *rest = textwrap.wrap(flag.help, 72)
    lines += [f'  {shown:16} {first}', *(' ' * 19 + line for line in rest)]
  return '\n'.join(lines)


def run(argv: Sequence[str]) -> None:
  """Inspects a run.

  Raises:
    UserError: the request is none, or there is no such run.
  """
  values = _define()
  rest = read(values, argv)
  if values['help'].value:
    print(help_text())
    return
  given: dict[str, Any] = {name: values[name].value for name in values}
  if len(rest) > 1:
    raise UserError(f'unexpected argument {rest[1]!r}; options are --name=value')
  if not given['workdir']:
    raise UserError('--workdir must name the run to load, as --workdir=runs/mine')
  rows = 1 if given['prompt'] is not None else given['rows']
  if given['row'] >= rows:
    raise UserError(f'--row={given["row"]} is none of the {rows} sequences, from 0')
  config = runs.read_config(given['workdir'])
  experiment, params, step = runs.restore(config)
  places = look(experiment, params, _batch(experiment, given['prompt'], rows))
  out = Path(given['out'] or os.path.join(config.workdir, 'inspect')).expanduser()
  out.mkdir(parents=True, exist_ok=True)
  is_named = experiment.task.answer is not None
  names = {token: name for name, token in NAMES.items()} if is_named else {}
  draw(places, given['row'], names, out / 'attention.png')
  heading = f'{config.task}, {config.model}, step {step}: {rows} held-out sequences'
  (out / 'heads.md').write_text(f'{heading}\n\n{table(places)}\n', encoding='utf-8')
  write_json(out / 'heads.json', {
      place.name: [head._asdict() | {
          'role': head.role
      } for head in place.heads] for place in places
  })
  print(
      f'{heading}\n\n{table(places)}\n\neverything is in {out}: attention.png, heads.md, heads.json'
  )


def main(argv: Sequence[str]) -> int:
  """Returns the exit status: 0, 1 for what failed, 2 for what was asked and cannot be done."""
  silence_orbax()
  try:
    run(argv)
    return 0
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return error.exit_status
  except OSError as error:
    print(f'error: {error}', file=sys.stderr)
    return 1


if __name__ == '__main__':
  sys.exit(main(sys.argv))
