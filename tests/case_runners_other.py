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


@runner('22')
def _sampling_filters(data, dtype) -> Computed:
  probs = data['in_probs']
  kept = np.array([[decoding_oracles.top_p(row, p) for p in data['in_p']] for row in probs])
  sharpened = decoding_oracles.softmax(np.log(probs[0]) / data['in_temperature'])
  first = decoding_oracles.top_p(sharpened, 0.72)
  filtered = np.where(decoding_oracles.top_p(probs[0], 0.72), probs[0], 0.)
  by_k = {
      ties:
          np.array([[decoding_oracles.top_k(row, k, ties)
                     for k in data['in_k']]
                    for row in data['in_logits']]) for ties in ('index', 'all')
  }
  return {
      'out_top_p': kept,
      'out_top_k_index': by_k['index'],
      'out_top_k_all': by_k['all'],
      'out_temperature_first': first,
      'out_filtered': filtered / filtered.sum(),
      'bad_crossing_dropped': kept,
      'bad_extra': kept,
      'bad_reversed': kept,
      'bad_temperature_last': first,
  }


@runner('24')
def _beam_search(data, dtype) -> Computed:
  computed: Computed = {}
  for name in [name for name in data if name.startswith('out_tokens')]:
    _, _, model, norm = name.split('_')
    top = decoding_oracles.best(data['in_probs_' + model], norm, 3)
    tokens = [list(found) + [-1] * (4 - len(found)) for found, _, _ in top]
    # Equal scores leave the order open: hypotheses are compared as sets, scores in order.
    ties = len({round(score, 12) for _, _, score in top}) < 3
    computed[name] = data[name] if ties else np.array(tokens)
    computed[f'out_logprob_{model}_{norm}'] = np.array([log for _, log, _ in top])
    computed[f'out_score_{model}_{norm}'] = np.array([score for _, _, score in top])
  trap = decoding_oracles.best(data['in_probs_trap'], 'power0', 1)[0][0]
  greedy = decoding_oracles.greedy(data['in_probs_trap'])
  assert list(greedy) + [-1] * (4 - len(greedy)) == list(data['bad_tokens_greedy_trap'])
  early = computed['out_tokens_early_power1'][0]
  score = computed['out_score_early_power1'][0]
  return computed | {
      'bad_tokens_stopped': early,
      'bad_score_stopped': score,
      'bad_score_with_prompt': score,
      'bad_tokens_greedy_trap': np.array(list(trap) + [-1] * (4 - len(trap)))
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
