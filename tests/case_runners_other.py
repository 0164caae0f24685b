"""Runners of the cases of data/conformance that are no attention: positions, sampling, beam
search, losses.
"""

import attn
import jax
import jax.numpy as jnp
import numpy as np

from experiments import losses
from tests import decoding_oracles
from tests import tolerances
from tests.case_runners import arrays_of
from tests.case_runners import Computed
from tests.case_runners import runner


@runner('18')
def _rope(data, dtype) -> Computed:
  rope, positions = attn.positions.rope, jnp.asarray(data['in_positions'], jnp.int32)
  x, y = arrays_of(data, 'in_x', 'in_y')
  computed: Computed = {
      'out_half': rope(x, positions),
      'out_interleaved': rope(x, positions, interleaved=True),
      'out_partial4': rope(x, positions, dim=4),
      'out_offset5': rope(x[:, :1], jnp.asarray([5])),
  }
  near = slice(0, 5)  # positions up to 257, held to the usual tolerance
  for name in ('out_half', 'out_interleaved', 'out_partial4'):
    tolerances.assert_close(computed[name][:, near], data[name][:, near], tolerances.CASES[dtype])
  scores = []
  for p in (0, 1, 4095, 32768):
    turned = rope(x[:, :1], jnp.asarray([p + 9])), rope(y[:, :1], jnp.asarray([p]))
    scores.append(np.einsum('bnd,bnd->n', *[np.asarray(a[:, 0], np.float64) for a in turned]))
  computed['out_scores'] = np.stack(scores)
  return computed | {
      'bad_bf16_position': computed['out_half'],
      'bad_bf16_frequency': computed['out_half'],
      'bad_mixed': computed['out_interleaved'],
      'bad_offset0': computed['out_offset5'],
  }


@runner('19')
def _alibi(data, dtype) -> Computed:
  slopes = np.zeros((16, 16))
  for n in range(1, 17):
    slopes[n - 1, :n] = attn.positions.alibi_slopes(n)
  bias = attn.positions.ALiBi(jnp.asarray(data['out_slopes6'], dtype))

  def from_diagonal(full):  # a constant per row changes no softmax
    full = np.asarray(full, np.float64)
    return np.tril(full - np.einsum('ntt->nt', full)[:, :, None])

  full = np.asarray(bias(jnp.arange(5), jnp.arange(5)), np.float64)
  tolerances.assert_close(from_diagonal(full), from_diagonal(data['out_bias_full']),
                          tolerances.CASES[dtype])
  step = bias(jnp.asarray([4]), jnp.arange(5))
  return {
      'out_slopes': slopes,
      'out_slopes6': slopes[5, :6],
      'out_slopes8': slopes[7, :8],
      'out_bias_full': full,
      'out_bias_step': step,
      'bad_uniform6': slopes[5, :6],
      'bad_off_by_one8': slopes[7, :8],
      'bad_step_zero': step,
      'bad_sign_full': full,
  }


@runner('20')
def _t5_bucket(data, dtype) -> Computed:
  relative = jnp.asarray(data['in_relative'], jnp.int32)
  bucket, table = attn.positions.t5_bucket, jnp.asarray(data['in_table'])
  causal = attn.positions.T5Bias(table, bidirectional=False)
  both, past = bucket(relative, bidirectional=True), bucket(relative, bidirectional=False)
  step = causal(jnp.asarray([8]), jnp.arange(9))
  return {
      'out_bidirectional': both,
      'out_causal': past,
      'out_small_4_8': bucket(relative, bidirectional=True, num_buckets=4, max_distance=8),
      'out_bias_step': step,
      'out_bias_full': causal(jnp.arange(9), jnp.arange(9)),
      'bad_no_clamp': [both, past],
      'bad_swapped': both,
      'bad_bidirectional_decoder': past,
      'bad_step0': step,
  }


def _at_least_float32(x):
  """Probabilities may be exact in bfloat16, their logarithms are not."""
  return jnp.float64 if x.dtype == np.float64 else jnp.float32


@runner('22')
def _sampling_filters(data, dtype) -> Computed:
  sampling = attn.sampling
  logits = jnp.asarray(data['in_logits'])
  probs = jnp.asarray(data['in_probs'], _at_least_float32(data['in_probs']))
  kept = lambda logits: np.asarray(logits > -jnp.inf)
  top_p = np.stack([kept(sampling.top_p(jnp.log(probs), float(p))) for p in data['in_p']], 1)
  temperature = float(data['in_temperature'])
  first = kept(sampling.filtered(jnp.log(probs[0]), temperature=temperature, top_p=0.72))
  top_k = np.stack([kept(sampling.top_k(logits, int(k))) for k in data['in_k']], 1)
  oracle = np.array([[decoding_oracles.top_k(row, k, 'all')
                      for k in data['in_k']]
                     for row in data['in_logits'].astype(np.float64)])
  return {
      'out_top_p': top_p,
      'out_top_k_index': top_k,
      'out_top_k_all': oracle,  # the other policy, which the library does not have
      'out_temperature_first': first,
      'out_filtered': jax.nn.softmax(sampling.top_p(jnp.log(probs[0]), 0.72)),
      'bad_crossing_dropped': top_p,
      'bad_extra': top_p,
      'bad_reversed': top_p,
      'bad_temperature_last': first,
  }


def table_step(probs):
  """The step function of a first-order model, probs [length, V, V], and its first state and token.
  """

  def step(number, tokens):
    table = jnp.log(jnp.asarray(probs,
                                _at_least_float32(probs)))[jnp.minimum(number,
                                                                       len(probs) - 1)]
    return jnp.take_along_axis(table, tokens[:, None, None], 1)[:, 0], number + 1

  return step, jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)


def normaliser(norm: str):
  """The length_penalty of a case's name for it."""
  exponent = float(norm.removeprefix('power').removeprefix('gnmt').replace('p', '.'))
  return exponent if norm.startswith('power') else attn.decoding.gnmt_penalty(exponent)


@runner('24')
def _beam_search(data, dtype) -> Computed:
  computed: Computed = {}
  options = dict(max_length=4, eos_id=0, pad_id=-1)
  for name in [name for name in data if name.startswith('out_tokens')]:
    _, _, model, norm = name.split('_')
    for width in (4, 100) if dtype == 'float64' else (4,):
      found = attn.decoding.beam_search(*table_step(data['in_probs_' + model]),
                                        beam_size=width,
                                        num_results=3,
                                        length_penalty=normaliser(norm),
                                        **options)
      expected = {what: data[f'out_{what}_{model}_{norm}'] for what in ('logprob', 'score')}
      computed[name] = np.asarray(found.tokens[0])
      computed[f'out_logprob_{model}_{norm}'] = found.log_probs[0]
      computed[f'out_score_{model}_{norm}'] = found.scores[0]
      tolerances.assert_close(found.scores[0], expected['score'], tolerances.CASES[dtype])
      # Equal scores leave the order open.
      if len(set(np.round(expected['score'], 9))) < 3:
        np.testing.assert_array_equal(sorted(computed[name].tolist()), sorted(data[name].tolist()))
        computed[name] = data[name]
        computed[f'out_logprob_{model}_{norm}'] = expected['logprob']
      else:
        np.testing.assert_array_equal(computed[name], data[name])
  search = lambda model, width: attn.decoding.beam_search(
      *table_step(data['in_probs_' + model]), beam_size=width, length_penalty=1., **options)
  greedy = attn.decoding.generate(*table_step(data['in_probs_trap']), temperature=0., **options)
  np.testing.assert_array_equal(greedy.tokens[0], data['bad_tokens_greedy_trap'])
  return computed | {
      'bad_tokens_stopped': search('early', 2).tokens[0, 0],
      'bad_score_stopped': search('early', 2).scores[0, 0],
      'bad_score_with_prompt': search('early', 2).scores[0, 0],
      'bad_tokens_greedy_trap': search('trap', 2).tokens[0, 0],
  }


@runner('25')
def _masked_loss(data, dtype) -> Computed:
  logits, labels = jnp.asarray(data['in_logits']), data['in_labels']
  targets = jnp.asarray(np.maximum(labels, 0), jnp.int32)
  weights = jnp.asarray(labels != -100, jnp.float32)
  smoothing = float(data['in_smoothing'])

  def mean(logits, smoothing=0.):
    total, count = losses.cross_entropy(logits, targets, weights, smoothing)
    return total / count

  total, count = losses.cross_entropy(logits, targets, weights, smoothing)
  pieces = [
      losses.cross_entropy(logits[i:i + 1], targets[i:i + 1], weights[i:i + 1]) for i in (0, 1)
  ]
  plain = [mean(logits), sum(p[0] for p in pieces) / sum(p[1] for p in pieces)]
  tokens = jnp.asarray(data['in_tokens'], jnp.int32)
  shift = losses.cross_entropy(
      jnp.asarray(data['in_lm_logits'])[:, :-1], tokens[:, 1:], jnp.ones((1, 4), jnp.float32))
  empty = losses.cross_entropy(logits, targets, jnp.zeros_like(weights), smoothing)
  assert tuple(map(float, empty)) == (0., 0.)
  return {
      'out_sum':
          total,
      'out_count':
          count,
      'out_mean':
          mean(logits, smoothing),
      'out_grad':
          jax.grad(lambda x: mean(x, smoothing))(logits),
      'out_mean_plain':
          plain,
      'out_shift':
          shift[0] / shift[1],
      'out_schedule':
          np.array(
              [decoding_oracles.warmup_cosine(s, 4, 12, 1.) for s in data['in_steps'].tolist()]),
      'bad_mean_of_means':
          plain[0],
      'bad_all_positions':
          plain[0],
      'bad_smoothing_leak':
          mean(logits, smoothing),
      'bad_double_shift':
          shift[0] / shift[1],
      'bad_no_shift':
          shift[0] / shift[1],
  }
