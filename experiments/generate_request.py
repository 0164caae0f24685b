"""What a command line of `experiments.generate` asks for."""

from collections.abc import Sequence
import functools
import re
import textwrap
from typing import Any, NamedTuple

from absl import flags

from experiments.config import UserError
from experiments.flags import read

PROGRAM = 'python -m experiments.generate'
_HELP = f"""\
usage: {PROGRAM} --workdir=RUN [--prompt="7 9 8" ...] [--option=value ...]

Loads the newest checkpoint of a run, which may be training meanwhile, and continues prompts, one
answer a line. A prompt is the numbers of its symbols, framed as the run's task has them: for copy,
7 9 8 is read as BOS 7 9 8 SEP, and by a seq2seq model as the source 7 9 8 EOS. Prompts come from
--prompt, which may be repeated, from the lines of --file, or from standard input. One that cannot
be answered is told on standard error; the others are answered, and the exit status is 2.
"""
# What sampling reads and beam search does not, and the other way round.
_SAMPLING = ('temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty', 'seed')
_BEAMS = ('length_penalty', 'num_results')


class Request(NamedTuple):
  """What a command line asks for; settings: what `decoding` is told."""
  workdir: str
  prompts: list[str]
  file: str
  raw: bool
  max_length: int
  log_probs: bool
  beam_size: int
  seed: int
  settings: dict[str, Any]


def _define() -> flags.FlagValues:
  values = flags.FlagValues()
  number = functools.partial(flags.DEFINE_float, flag_values=values)
  count = functools.partial(flags.DEFINE_integer, flag_values=values)
  switch = functools.partial(flags.DEFINE_boolean, flag_values=values)
  switch('help', False, 'show this help', short_name='h')
  flags.DEFINE_string('workdir', '', 'the run', flag_values=values)
  flags.DEFINE_multi_string('prompt', [], 'a prompt; may be repeated', flag_values=values)
  flags.DEFINE_string('file', '', 'a file with a prompt in each line', flag_values=values)
  switch(
      'raw', False,
      'take prompts as they are, the words BOS, EOS, SEP, MASK and PAD among them; a seq2seq '
      'model reads one as its source')
  count('max_length', 0, 'the most new tokens; 0: all that the model has room for', lower_bound=0)
  switch('log_probs', False,
         "show each token's log-probability, the model's own, before temperature and filters")
  number('temperature', 0., 'divides the logits; 0: the best token always', lower_bound=0.)
  count('top_k', None, 'draw from so many of the best tokens', lower_bound=1)
  number('top_p', None, 'draw from the best tokens with this probability in all', 0., 1.)
  number('min_p', None, "draw from tokens with this share of the best one's probability", 0., 1.)
  number('repetition_penalty', None, 'makes tokens that were there less likely; 1: as likely')
  count('seed', 0, 'of the draws', lower_bound=0)
  count('beam_size',
        0,
        'search for the best answers with so many hypotheses; 0: draw one',
        lower_bound=0)
  number('length_penalty', 1., 'scores are log-probability / length**length_penalty')
  count('num_results', 0, 'answers to show of a search; 0: all', lower_bound=0)
  return values


def help_text() -> str:
  """What --help prints."""
  values, lines = _define(), [_HELP]
  for name in ('workdir', 'prompt', 'file', 'raw', 'max_length', 'log_probs', *_SAMPLING,
               'beam_size', *_BEAMS):
    flag: Any = values[name]
    default = '' if flag.default in (None, []) else flag.default
    shown = f'--[no]{name}' if isinstance(flag.default, bool) else f'--{name}={default}'
    first, *rest = textwrap.wrap(re.split(r';\s*repeat', flag.help)[0], 68)
    lines += [f'  {shown:27} {first}', *(' ' * 30 + line for line in rest)]
  return '\n'.join(lines)


def parse(argv: Sequence[str]) -> Request | None:
  """What a command line, whose first word is the program's name, asks for; None for --help.

  Raises:
    UserError: a flag that does not exist, has a wrong value, or is not read beside the others.
  """
  values = _define()
  rest = read(values, argv)
  if values['help'].value:
    return None
  if len(rest) > 1:
    raise UserError(f'unexpected argument {rest[1]!r}; a prompt of several words is written '
                    '--prompt="7 9 8", and --help lists the options')
  given: dict[str, Any] = {name: values[name].value for name in values}
  if not given['workdir']:
    raise UserError('--workdir must name the run to load, as --workdir=runs/mine')
  if given['prompt'] and given['file']:
    raise UserError('--prompt and --file are both given; give one of them')
  searching = given['beam_size'] > 0
  for name in _SAMPLING if searching else _BEAMS:
    if values[name].present:
      raise UserError(f'--{name} is not read ' +
                      ('by a beam search; leave out --beam_size, or this'
                       if searching else 'without --beam_size; give that too'))
  if given['temperature'] == 0:
    for name in ('top_k', 'top_p', 'min_p', 'seed'):
      if values[name].present:
        raise UserError(f'--{name} is not read at temperature 0, which always takes the best '
                        'token; give --temperature=1')
  if given['num_results'] > given['beam_size']:
    raise UserError(f'--num_results={given["num_results"]} exceeds --beam_size='
                    f'{given["beam_size"]}')
  penalty = given['repetition_penalty']
  if penalty is not None and not 0 < penalty < float('inf'):
    raise UserError(f'--repetition_penalty must be greater than 0; got {penalty}')
  names = _BEAMS if searching else _SAMPLING[:-1]
  settings = {name: given[name] for name in names}
  if searching:
    settings['num_results'] = given['num_results'] or given['beam_size']
  return Request(given['workdir'], given['prompt'], given['file'], given['raw'],
                 given['max_length'], given['log_probs'], given['beam_size'], given['seed'],
                 settings)
