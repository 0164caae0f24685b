"""Continues prompts with a trained model: `python -m experiments.generate --workdir=runs/mine`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import functools
import os
import sys
from typing import Any

from attn import decoding
import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from experiments import decode
from experiments import runs
from experiments.checkpoint import silence_orbax
from experiments.config import UserError
from experiments.generate_request import help_text, parse, Request
from experiments.tasks import base
from experiments.tasks.base import NAMES
from experiments.train import Experiment


def load(workdir: str) -> tuple[Experiment, Any, int]:
  """The experiment of a run, the parameters of its newest checkpoint, and their step.

  The run may be training meanwhile.

  Raises:
    UserError: there is no run, no checkpoint, or its model writes no tokens.
  """
  config = runs.read_config(workdir)
  if config.model == 'encoder':
    raise UserError(f'{config.workdir} is a run of model=encoder, which writes no tokens; train a '
                    'decoder or seq2seq')
  return runs.restore(config)


def tokens_of(text: str, vocab_size: int) -> list[int]:
  """The token ids that a prompt names.

  Raises:
    UserError: a word is neither a token's number nor BOS, EOS, SEP, MASK or PAD.
  """
  found = []
  for word in text.replace(',', ' ').split():
    if word.upper() not in NAMES and not word.isdecimal():
      raise UserError(f'prompt {text!r}: {word!r} is no token; tokens are numbers below '
                      f'{vocab_size}, and {", ".join(NAMES)}')
    token = NAMES[word.upper()] if word.upper() in NAMES else int(word)
    if token >= vocab_size:
      raise UserError(f'prompt {text!r}: the vocabulary is 0 to {vocab_size - 1}; got {token}')
    found.append(token)
  return found


class Writer:
  """Answers prompts with one compiled program for all of them."""

  def __init__(self, experiment: Experiment, params: Any, request: Request):
    self._task, self._request, self._params = experiment.task, request, params
    self._is_seq2seq = experiment.config.model == 'seq2seq'
    answer = self._task.answer
    self.eos_id = None if answer is None else answer.eos_id
    self._answer = answer
    self._show: Callable[..., None] = lambda *_: None

    def run(params: Any, batch: decode.Batch, limit: Array, rng: Array) -> Any:
      step, cache, last = decode.begin(experiment.model, params, batch)
      length, settings = self._task.target_length, request.settings
      if request.beam_size:
        return decoding.beam_search(step,
                                    cache,
                                    last,
                                    beam_size=request.beam_size,
                                    max_length=length,
                                    limits=limit[None],
                                    eos_id=self.eos_id,
                                    **settings)
      seen = None
      if settings['repetition_penalty'] is not None:
        places = jnp.where(batch['input_mask'], batch['inputs'], self._task.num_classes)
        seen = jnp.zeros((1, self._task.num_classes), bool).at[0, places[0]].set(True, mode='drop')
      return decoding.generate(step,
                               cache,
                               last,
                               rng,
                               max_length=length,
                               limits=limit[None],
                               eos_id=self.eos_id,
                               seen=seen,
                               callback=lambda *step: self._show(*step),
                               **settings)

    self._run = jax.jit(run)

  def batch(self, text: str) -> tuple[decode.Batch, int]:
    """What a model reads for a prompt, and how many tokens it has room to write.

    Raises:
      UserError: the prompt is empty, too long, or asks for more room than there is.
    """
    task, symbols = self._task, tokens_of(text, self._task.vocab_size)
    if not symbols:
      raise UserError('a prompt has at least one token; got an empty one')
    source, inputs = self._frame(text, symbols)
    batch: decode.Batch = {}
    for name, mask, row, length in (('inputs', 'input_mask', inputs, task.target_length),
                                    ('source', 'source_mask', source, task.input_length)):
      if len(row) > length:
        framed = f', framed as {_words(row)}' if row != symbols else ''
        raise UserError(f'prompt {text!r} is {len(row)} tokens long{framed}; the model reads at '
                        f'most {length}')
      if name == 'inputs' or self._is_seq2seq:
        padded = np.zeros((1, length), np.int32)
        padded[0, :len(row)] = row
        batch |= {name: jnp.asarray(padded), mask: jnp.arange(length)[None] < len(row)}
    room = task.target_length - len(inputs) + 1
    wanted = self._request.max_length or room
    if wanted > room:
      raise UserError(f'--max_length={wanted} is more than prompt {text!r} leaves room for, '
                      f'{room} of the {task.target_length} tokens the model was made for')
    return batch, wanted

  def _frame(self, text: str, symbols: list[int]) -> tuple[list[int], list[int]]:
    """What the encoder reads, if there is one, and what the decoder goes on from."""
    if self._request.raw or self._answer is None:
      return (symbols, [base.BOS]) if self._is_seq2seq else ([], symbols)
    try:
      return self._answer.frame(symbols)
    except ValueError as error:
      raise UserError(f'prompt {text!r} is none of the task: {error}. --raw takes it as it '
                      'stands') from None

  def __call__(self, batch: decode.Batch, room: int, index: int, show: Callable[..., None]) -> Any:
    """The answer to a prompt; show is told (number, tokens, log_probs) as they come."""
    self._show = show
    rng = jax.random.fold_in(jax.random.key(self._request.seed), index)
    result = jax.block_until_ready(self._run(self._params, batch, jnp.int32(room), rng))
    jax.effects_barrier()
    return result


def prompts(request: Request) -> Iterator[tuple[str, str]]:
  """Where a prompt stands, '' for the command line, and the prompt, one after the other.

  Raises:
    UserError: the file cannot be read.
  """
  if request.prompts:
    yield from (('', prompt) for prompt in request.prompts)
    return
  try:
    with (open(request.file, encoding='utf-8-sig')
          if request.file else contextlib.nullcontext(sys.stdin)) as lines:
      for number, line in enumerate(lines, 1):
        if line.strip():
          yield f'{request.file or "standard input"}, line {number}: ', line.strip()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'prompts cannot be read from {request.file or "standard input"}: '
                    f'{error}') from None


def _say(text: str, end: str = '\n') -> None:
  print(text, end=end, flush=True)


def _words(tokens: Iterable[int], eos_id: int | None = base.EOS) -> str:
  """Tokens as a person reads them; where EOS is reserved, the other reserved ones are too."""
  names = {} if eos_id is None else {token: name for name, token in NAMES.items()}
  return ' '.join(names.get(int(token), str(token)) for token in tokens)


def write(request: Request) -> int:
  """Prints the answer to every prompt, and what is wrong with those that have none.

  Returns:
    the exit status: 2 if there was such a prompt, unless a person typed it and was told.

  Raises:
    UserError: there is no such run.
  """
  experiment, params, step = load(request.workdir)
  writer = Writer(experiment, params, request)
  config = experiment.config
  print(
      f'{config.task}, {config.model}, step {step} of {config.steps}; vocabulary 0 to '
      f'{experiment.task.vocab_size - 1}',
      file=sys.stderr,
      flush=True)
  if writer.eos_id is None and not request.max_length:
    print(
        f'{config.task} has no token that ends an answer: what follows fills the '
        f'{experiment.task.target_length} positions the model has; --max_length bounds it',
        file=sys.stderr,
        flush=True)
  if experiment.task.answer is not None and not request.raw:
    print(f'a prompt: {experiment.task.answer.prompt}', file=sys.stderr, flush=True)
  asked = not request.prompts and not request.file and sys.stdin.isatty()
  if asked:
    print('a prompt a line; Ctrl-D ends', file=sys.stderr, flush=True)
  status, index = 0, -1
  for index, (where, text) in enumerate(prompts(request)):
    try:
      batch, room = writer.batch(text)
    except UserError as error:
      print(f'error: {"" if asked else where}{error}', file=sys.stderr, flush=True)
      status = 0 if asked else error.exit_status
      continue
    show = functools.partial(_show, writer.eos_id, request.log_probs)
    if request.beam_size:
      _say_beams(text, writer(batch, room, index, show), writer.eos_id, request.log_probs)
    else:
      _say(f'{text} -> ', end='')
      found = writer(batch, room, index, show)
      last = found.tokens[0, found.lengths[0] - 1]
      _say('' if writer.eos_id is None or last == writer.eos_id else ' ... (no room for more)')
  if index < 0 and not asked:
    raise UserError(f'there is no prompt in {request.file or "standard input"}')
  return status


def _show(eos_id: int | None, log_probs: bool, number: Any, tokens: Any, values: Any) -> None:
  word = _words(tokens[:1], eos_id) + (f' ({float(values[0]):.3f})' if log_probs else '')
  _say(f' {word}' if number else word, end='')


def _say_beams(text: str, found: decoding.Beams, eos_id: int | None, log_probs: bool) -> None:
  for tokens, length, log_prob, score in zip(*(np.asarray(x[0]) for x in found)):
    if length:
      words = _words(tokens[:length], eos_id)
      total = f' log-probability {log_prob:.4f}' if log_probs else ''
      _say(f'{text} -> {words}  [score {score:.4f}{total}]')


def main(argv: Sequence[str]) -> int:
  """Returns the exit status: 0, 1 for what failed, 2 for what was asked and cannot be met."""
  silence_orbax()
  try:
    request = parse(argv)
    if request is None:
      print(help_text())
      return 0
    return write(request)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return error.exit_status
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except KeyboardInterrupt:
    return 130
  except OSError as error:
    print(f'error: {error}', file=sys.stderr)
    return 1


if __name__ == '__main__':
  sys.exit(main(sys.argv))
