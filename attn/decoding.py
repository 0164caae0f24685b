"""Generation from a step function: sampling, and beam search.

Both know of a model only

    step(state, tokens) -> (logits, state)      tokens int32 [B], logits [B, V]

which feeds one token of every row and tells what may follow. The state is a pytree of arrays that
lead with the batch axis: the caches of `attn.cache`, or whatever another model keeps. The caller
has fed the prompt but for its last token, so neither function knows of prompts: ragged ones are a
matter of the caller's cache. Both are one loop inside, to be compiled once by a jit around them.
"""

import numbers
from typing import Any, Callable, NamedTuple

import jax
from jax import lax
from jax.experimental import io_callback
import jax.numpy as jnp
import numpy as np

from attn import axes, checks, sampling, softmax
from attn.axes import Array, ArrayLike
from attn.sampling import Setting

Step = Callable[[Any, Array], tuple[Array, Any]]


class Generated(NamedTuple):
  """What `generate` returns.

  Attributes:
    tokens: int32 [B, max_length], pad_id behind each row's end.
    lengths: int32 [B], the tokens of each row, its eos_id included.
    log_probs: [B, max_length], the model's own log-probability of each token, before any filter; 0
      behind the end; nan where the logits allow no token.
    state: the step's state after as many steps as the longest row took. A row that ended earlier
      was fed its last token again in every further one: only the longest rows can go on from here,
      and a cache needs room for as many steps in every row.
  """
  tokens: Array
  lengths: Array
  log_probs: Array
  state: Any


class Beams(NamedTuple):
  """What `beam_search` returns, best first.

  Attributes:
    tokens: int32 [B, n, max_length], pad_id behind each end.
    lengths: int32 [B, n], eos_id included; 0 where there is no such hypothesis.
    log_probs: [B, n], the sum over the tokens.
    scores: [B, n], log_probs over the normaliser of the length; -inf where there is no hypothesis.
  """
  tokens: Array
  lengths: Array
  log_probs: Array
  scores: Array


def generate(step: Step,
             state: Any,
             tokens: ArrayLike,
             rng: Array | None = None,
             *,
             max_length: int,
             limits: ArrayLike | None = None,
             eos_id: int | None = None,
             pad_id: int = 0,
             temperature: Setting = 1.,
             top_k: Setting | None = None,
             top_p: Setting | None = None,
             min_p: Setting | None = None,
             repetition_penalty: Setting | None = None,
             seen: ArrayLike | None = None,
             callback: Callable[[Any, Any, Any], None] | None = None) -> Generated:
  """Draws tokens one after the other until every row has ended.

  The draws of a row depend on rng, its place in the batch and its own logits, so its neighbours
  change nothing.

  Args:
    step: see the module's text.
    state: of the step, after the prompt but for its last token.
    tokens: integers [B], the last token of every prompt.
    rng: a key; may be None where temperature is 0.
    max_length: the most new tokens, static.
    limits: integers [B], the most new tokens of each row; None: max_length.
    eos_id: ends a row; None: nothing does.
    pad_id: any number, what stands behind an end.
    temperature, top_k, top_p, min_p: see `sampling.filtered`; one, or [B]. Temperature 0 is greedy.
    repetition_penalty: see `sampling.repetition_penalty`; it comes before the temperature.
    seen: boolean [B, V], the tokens it counts as seen beside the new ones; `tokens` alone if None.
    callback: called with (number of the token, tokens [B], log_probs [B]) as they come, in order.

  Returns:
    tokens, lengths, log-probabilities and the state.

  Raises:
    ValueError: an argument is out of range, or step does not keep the form of its state.
  """
  tokens, V = _check(step, state, tokens)
  length = checks.check_int('max_length', max_length, 1)
  _check_ids(eos_id, pad_id, V)
  if callback is not None and not callable(callback):
    raise ValueError(f'callback must be a function or None; got {type(callback).__name__}')
  if rng is None and not _is_zero(temperature):
    raise ValueError(f'rng must be a key unless temperature is 0; got None and {temperature}')
  rng = jax.random.key(0) if rng is None else checks.check_key('rng', rng)
  if seen is not None and repetition_penalty is None:
    raise ValueError('seen is read with a repetition_penalty only; got none')
  B, rows = len(tokens), jnp.arange(len(tokens), dtype=jnp.int32)
  limits = _check_limits(limits, B, length)

  class Carry(NamedTuple):
    number: Array
    state: Any
    last: Array
    ended: Array
    lengths: Array
    seen: Array | None
    tokens: Array
    log_probs: Array

  def body(carry: Carry) -> Carry:
    logits, state = step(carry.state, carry.last)
    logits = logits.astype(axes.wide(logits.dtype))
    log_probs, i = jax.nn.log_softmax(logits, -1), carry.number
    if repetition_penalty is not None:
      assert carry.seen is not None
      logits = sampling.repetition_penalty(logits, carry.seen, repetition_penalty)
    logits = sampling.filtered(logits,
                               temperature=temperature,
                               top_k=top_k,
                               top_p=top_p,
                               min_p=min_p)
    new = sampling.sample(jax.random.fold_in(rng, i), logits)
    log_prob = jnp.where(carry.ended, 0., log_probs[rows, new]).astype(carry.log_probs.dtype)
    shown = jnp.where(carry.ended, jnp.int32(pad_id), new)
    if callback is not None:
      io_callback(callback, None, i, shown, log_prob, ordered=True)
    ended = carry.ended | (i + 1 >= limits)
    ended = ended if eos_id is None else ended | (new == eos_id)
    return Carry(i + 1, state, jnp.where(carry.ended, carry.last, new), ended,
                 carry.lengths + (~carry.ended).astype(jnp.int32),
                 None if carry.seen is None else carry.seen.at[rows, new].set(True),
                 carry.tokens.at[:, i].set(shown), carry.log_probs.at[:, i].set(log_prob))

  dtype = axes.wide(jax.eval_shape(step, state, tokens)[0].dtype)
  start = Carry(jnp.int32(0), jax.tree.map(jnp.asarray, state), tokens, limits <= 0,
                jnp.zeros_like(limits),
                _first_seen(seen, tokens, V) if repetition_penalty is not None else None,
                jnp.full((B, length), pad_id, jnp.int32), jnp.zeros((B, length), dtype))
  more = lambda carry: (carry.number < length) & ~jnp.all(carry.ended)
  end = lax.while_loop(more, body, start)
  return Generated(end.tokens, end.lengths, end.log_probs, end.state)


def beam_search(step: Step,
                state: Any,
                tokens: ArrayLike,
                *,
                beam_size: int,
                max_length: int,
                eos_id: int | None,
                pad_id: int = 0,
                limits: ArrayLike | None = None,
                length_penalty: float | Callable[[np.ndarray], np.ndarray] = 1.,
                num_results: int | None = None) -> Beams:
  """Finds the sequences with the best log-probability over a normaliser of their length.

  A hypothesis ends with eos_id or, cut, with as many tokens as a row may have. One that ends leaves
  its place to another that goes on. A row's search is over when no running hypothesis, whatever
  follows, can come before the results. The prompt counts neither in the length nor in the score.

  Args:
    step: see the module's text; it is called with B * beam_size rows.
    state: of the step, after the prompt but for its last token; its rows are copied, and reordered
      with the hypotheses.
    tokens: integers [B], the last token of every prompt.
    beam_size: running hypotheses of a row, and the most ended ones remembered.
    max_length: the most new tokens, static.
    eos_id: ends a hypothesis; None: nothing does.
    pad_id: any number, what stands behind an end.
    limits: integers [B], the most new tokens of each row; None: max_length.
    length_penalty: a, where the normaliser is length**a; or a function of lengths [L] to positive
      normalisers [L], such as `gnmt_penalty(a)`. The end token counts.
    num_results: n, at most beam_size; beam_size if None.

  Returns:
    the n best of each row.

  Raises:
    ValueError: an argument is out of range, or step does not keep the form of its state.

  Source: Sutskever et al. 2014, section 3.2, https://arxiv.org/abs/1409.3215; when to stop: Huang
  et al. 2017, https://arxiv.org/abs/1809.00069.
  """
  k = checks.check_int('beam_size', beam_size, 1)
  tokens, V = _check(step, state, tokens, k)
  n = k if num_results is None else checks.check_int('num_results', num_results, 1)
  if n > k:
    raise ValueError(f'num_results must be at most beam_size; got {n} and {k}')
  length = checks.check_int('max_length', max_length, 1)
  _check_ids(eos_id, pad_id, V)
  B = len(tokens)
  limits = _check_limits(limits, B, length)
  rows, beams = jnp.arange(B, dtype=jnp.int32)[:, None], jnp.arange(k, dtype=jnp.int32)[None]
  take = lambda x, which: jnp.take_along_axis(x, which.reshape(*which.shape, *[1] *
                                                               (x.ndim - 2)), 1)
  state = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), k, 0), state)
  dtype = axes.wide(jax.eval_shape(step, state, jnp.repeat(tokens, k))[0].dtype)
  hidden = jnp.asarray(softmax.HIDDEN, dtype)
  norms, furthest = _normalisers(length_penalty, length, dtype)

  class Ended(NamedTuple):
    scores: Array  # [B, k], best first
    log_probs: Array
    lengths: Array
    tokens: Array  # [B, k, max_length]

  class Carry(NamedTuple):
    number: Array
    state: Any  # of B * k rows
    last: Array  # [B, k]
    log_probs: Array  # [B, k], best first; HIDDEN where there is none
    tokens: Array  # [B, k, max_length]
    ended: Ended

  def best(a: Ended, b: Ended, count: int) -> Ended:
    both = Ended(*(jnp.concatenate(pair, 1) for pair in zip(a, b)))
    _, which = lax.top_k(both.scores, count)
    return Ended(*(take(x, which) for x in both))

  def lost(carry: Carry, number: Array) -> Array:
    """Whether no running hypothesis of so many tokens can beat a row's [B] n-th ended one."""
    hope = carry.log_probs[:, 0] / furthest[jnp.minimum(number, length - 1)]
    return carry.ended.scores[:, n - 1] >= hope

  over = lambda carry: lost(carry, carry.number) | (carry.number >= limits)

  def body(carry: Carry) -> Carry:
    i, done = carry.number, over(carry)
    hold = lambda old, new: jnp.where(done.reshape(B, *[1] * (old.ndim - 1)), old, new)
    logits, state = step(carry.state, carry.last.reshape(-1))
    logits = logits.astype(dtype).reshape(B, k, V)
    log_probs = jax.nn.log_softmax(logits, -1) + carry.log_probs[..., None]
    # What there is not has no children, and what allows no token none either: their sums are nan.
    dead = (jnp.max(logits, -1) == hidden) | (carry.log_probs == hidden)
    log_probs = jnp.where(dead[..., None], hidden, log_probs)
    ended = carry.ended
    if eos_id is not None:
      finish = log_probs[..., eos_id]
      lengths = jnp.full((B, k), i + 1, jnp.int32)
      new = Ended(finish / norms[i], finish, lengths, carry.tokens.at[..., i].set(eos_id))
      ended = jax.tree.map(hold, ended, best(ended, new, k))
      log_probs = log_probs.at[..., eos_id].set(hidden)
    log_probs, which = lax.top_k(log_probs.reshape(B, k * V), k)
    parent, token = which // V, which % V
    order = (rows * k + parent).reshape(-1)
    tokens = take(carry.tokens, parent).at[..., i].set(token)
    return Carry(i + 1, jax.tree.map(lambda x: x[order], state), token,
                 hold(carry.log_probs, log_probs), hold(carry.tokens, tokens), ended)

  nothing = Ended(jnp.full((B, k), hidden), jnp.full((B, k), hidden), jnp.zeros((B, k), jnp.int32),
                  jnp.full((B, k, length), pad_id, jnp.int32))
  start = Carry(jnp.int32(0), state, jnp.repeat(tokens[:, None], k, 1),
                jnp.where((rows >= 0) & (beams == 0), jnp.zeros((), dtype), hidden), nothing.tokens,
                nothing)
  end = lax.while_loop(lambda carry: (carry.number < length) & ~jnp.all(over(carry)), body, start)
  # Those that still run are cut; where none could win they were left at another length.
  out = lost(end, limits - 1) | (limits < 1)
  running, cut_at = jnp.where(out[:, None], hidden, end.log_probs), limits[:, None]
  cut = Ended(running / norms[jnp.maximum(cut_at - 1, 0)], running,
              jnp.broadcast_to(cut_at, (B, k)), end.tokens)
  result = best(end.ended, cut, n)
  real = result.scores > hidden
  return Beams(jnp.where(real[..., None], result.tokens, jnp.int32(pad_id)),
               jnp.where(real, result.lengths, 0), result.log_probs, result.scores)


def gnmt_penalty(alpha: float) -> Callable[[np.ndarray], np.ndarray]:
  """The normaliser ((5 + length) / 6)**alpha (Wu et al. 2016, equation 14, arxiv 1609.08144)."""
  return lambda length: ((5. + length) / 6.)**alpha


def _normalisers(length_penalty: Any, length: int, dtype: Any) -> tuple[Array, Array]:
  """Of the lengths 1 ... length; and the largest of those that a running hypothesis may reach.

  A log-probability is at most 0 and only falls, so divided by that it is the best score to come.
  """
  lengths = np.arange(1., length + 1)
  if callable(length_penalty):
    try:
      norms = np.asarray(length_penalty(lengths), np.float64)
    except (TypeError, ValueError) as error:
      raise ValueError(f'length_penalty must give numbers; got an error: {error}') from None
  elif isinstance(length_penalty, numbers.Real) and not isinstance(length_penalty, bool):
    norms = lengths**float(length_penalty)
  else:
    raise ValueError('length_penalty must be a number or a function of lengths; '
                     f'got {length_penalty!r}')
  range_ = jnp.finfo(dtype)
  if norms.shape != (length,) or not np.all((norms >= range_.tiny) & (norms <= range_.max)):
    raise ValueError('length_penalty must give positive normalisers, one for each of '
                     f'{length} lengths, within the range of {jnp.dtype(dtype)}; got {norms}')
  furthest = np.maximum.accumulate(norms[::-1])[::-1]
  return jnp.asarray(norms, dtype), jnp.asarray(furthest, dtype)


def _check(step: Step, state: Any, tokens: ArrayLike, copies: int = 1) -> tuple[Array, int]:
  """Returns tokens as int32 [B], and V; a step of so many copies of every row keeps its state."""
  if not checks.is_array(tokens) or not jnp.issubdtype(tokens.dtype,
                                                       jnp.integer) or tokens.ndim != 1:
    got = f'{tokens.dtype} {tokens.shape}' if checks.is_array(tokens) else type(tokens).__name__
    raise ValueError(f'tokens must be integers [B], the last token of every prompt; got {got}')
  tokens = jnp.asarray(checks.int32(tokens, 'tokens'))
  named, structure = jax.tree_util.tree_leaves_with_path(state), jax.tree.structure(state)
  for path, leaf in named:
    if jnp.shape(leaf)[:1] != tokens.shape:
      raise ValueError(f'state{jax.tree_util.keystr(path)} must lead with the batch axis B = '
                       f'{len(tokens)} of tokens; got {jnp.shape(leaf)}')
  fed = jax.eval_shape(lambda x: jax.tree.map(lambda x: jnp.repeat(x, copies, 0), x),
                       (state, tokens))
  result, rows = jax.eval_shape(step, *fed), len(tokens) * copies
  if not isinstance(result, tuple) or len(result) != 2:
    raise ValueError('step must return a pair (logits, state); got '
                     f'{jax.tree.map(lambda x: (str(x.dtype), x.shape), result)}')
  logits, after = result
  if not isinstance(logits, jax.ShapeDtypeStruct) or logits.shape[:1] != (rows,) or len(
      logits.shape) != 2 or not logits.shape[1] or not jnp.issubdtype(logits.dtype, jnp.floating):
    got = jax.tree.map(lambda x: (str(x.dtype), x.shape), logits)
    raise ValueError(f'step must return floating-point logits [rows, V] first, with {rows} rows '
                     f'and V > 0; got {got}')
  found: Any = jax.tree.structure(after)
  if found != structure:
    raise ValueError('step must return a state of the structure it was given, '
                     f'{structure}; got {found}')
  for (path, _), old, new in zip(named, jax.tree.leaves(fed[0]), jax.tree.leaves(after)):
    if (old.shape, old.dtype) != (new.shape, new.dtype):
      raise ValueError(f'step must keep shape and dtype of state{jax.tree_util.keystr(path)}, '
                       f'{old.dtype} {old.shape}; got {new.dtype} {new.shape}')
  return tokens, logits.shape[-1]


def _check_ids(eos_id: int | None, pad_id: int, V: int) -> None:
  if eos_id is not None and not 0 <= checks.check_int('eos_id', eos_id, 0) < V:
    raise ValueError(f'eos_id must be one of the V = {V} tokens or None; got {eos_id}')
  if isinstance(pad_id, bool) or not isinstance(pad_id,
                                                (int, np.integer)) or abs(pad_id) > checks.MOST:
    raise ValueError(f'pad_id must be an integer that fits int32; got {pad_id!r}')


def _check_limits(limits: ArrayLike | None, B: int, length: int) -> Array:
  """The most tokens of each row, int32 [B]."""
  if limits is None:
    return jnp.full(B, length, jnp.int32)
  if not checks.is_array(limits) or limits.shape != (B,) or not jnp.issubdtype(
      limits.dtype, jnp.integer):
    got = f'{limits.dtype} {limits.shape}' if checks.is_array(limits) else type(limits).__name__
    raise ValueError(f'limits must be integers [B] = ({B},); got {got}')
  if limits.dtype.itemsize < 4:  # whose range may not hold `length`
    limits = limits.astype(np.int32)
  clip = np.clip if isinstance(limits, np.ndarray) else jnp.clip
  return jnp.asarray(clip(limits, 0, length), jnp.int32)


def _first_seen(seen: ArrayLike | None, tokens: Array, V: int) -> Array:
  """The tokens seen before the first new one, bool [B, V]."""
  if seen is None:
    return jnp.arange(V, dtype=jnp.int32)[None] == tokens[:, None]
  if not checks.is_array(seen) or seen.dtype != jnp.bool_ or seen.shape != (len(tokens), V):
    got = f'{seen.dtype} {seen.shape}' if checks.is_array(seen) else type(seen).__name__
    raise ValueError(f'seen must be boolean [B, V] = ({len(tokens)}, {V}); got {got}')
  return jnp.asarray(seen)


def _is_zero(x: Any) -> bool:
  """Whether a setting is known to be 0 everywhere."""
  return x is not None and not isinstance(x, jax.core.Tracer) and not np.any(np.asarray(x))
