"""What each attention computes, in NumPy float64 and plain loops, from the papers' equations.

Nothing here comes from attn/: when a test disagrees, one of the two is wrong. Every variant is
reduced to one function, `attend` (softmax over the visible keys of each query, and its derivative
written out by hand), or to `kernel_attend` for the Performer. Keys that a query may not see are
never read, so they may hold NaN.

Letters: T queries, S keys, N query heads, K key heads, H and Hv head dims, M features, R slots.
"""

import math
from typing import Callable, NamedTuple

import numpy as np


class Inputs(NamedTuple):
  """One call. visible and bias are full [..., N, T, S]; keep is 0 (dropped) or 1 / (1 - rate)."""
  query: np.ndarray  # [..., T, N, H]
  key: np.ndarray  # [..., S, K, H]
  value: np.ndarray  # [..., S, K, Hv]
  visible: np.ndarray  # bool [..., N, T, S]
  bias: np.ndarray | None = None
  scale: float | None = None
  keep: np.ndarray | None = None


class Result(NamedTuple):
  """The output, the effective weights of every key [..., N, T, S], and derivatives for a given
  dout.
  """
  out: np.ndarray
  weights: np.ndarray
  grads: dict[str, np.ndarray]


# Visibility: which key positions s a query position t sees, one Boolean per pair.


def sees_all(t: int, s: int) -> bool:
  return True


def sees_past(t: int, s: int) -> bool:
  return s <= t


def sees_window(left: int, right: int) -> Callable[[int, int], bool]:
  """Longformer (Beltagy et al. 2020), section 3.1: a band of neighbours around the query."""
  return lambda t, s: t - left <= s <= t + right


def sees_strided(stride: int) -> Callable[[int, int], bool]:
  """Sparse Transformer (Child et al. 2019), section 4.2: A1 (the last l) and A2 ((i - j) mod l =
  0), united.
  """
  return lambda t, s: abs(t - s) < stride or (t - s) % stride == 0


def sees_fixed(stride: int, summary: int) -> Callable[[int, int], bool]:
  """Sparse Transformer, section 4.2: floor(j / l) = floor(i / l), or j mod l in {l - c, ..., l -
  1}.
  """
  return lambda t, s: t // stride == s // stride or s % stride in range(stride - summary, stride)


def sees_longformer(left: int, right: int, num_global: int) -> Callable[[int, int], bool]:
  """Longformer, section 3.1: the window, and tokens that attend to all and to which all attend."""
  window = sees_window(left, right)
  return lambda t, s: window(t, s) or t < num_global or s < num_global


def sees_bigbird(size: int, blocks: np.ndarray, is_causal: bool) -> Callable[[int, int], bool]:
  """BigBird (Zaheer et al. 2020), section 2, by blocks: w = 3, first and last global, r at random.

  Causal, nothing later is seen, so the last block is not global, and of listed blocks only earlier
  ones count.
  """
  last = len(blocks) - 1

  def sees(t: int, s: int) -> bool:
    i, j = t // size, s // size
    listed = 0 <= i <= last and j >= 0 and j in blocks[i].tolist() and (not is_causal or j < i)
    first_or_last = (0,) if is_causal else (0, last)
    return abs(i - j) <= 1 or i in first_or_last or j in first_or_last or listed

  return sees


def pattern(sees, query_positions, key_positions) -> np.ndarray:
  """Tabulates a predicate: [..., T] and [..., S] positions give bool [..., T, S]."""
  query_positions, key_positions = np.asarray(query_positions), np.asarray(key_positions)
  lead = np.broadcast_shapes(query_positions.shape[:-1], key_positions.shape[:-1])
  T, S = query_positions.shape[-1], key_positions.shape[-1]
  query_positions = np.broadcast_to(query_positions, lead + (T,))
  key_positions = np.broadcast_to(key_positions, lead + (S,))
  table = np.zeros(lead + (T, S), bool)
  for index in np.ndindex(*table.shape):
    *b, t, s = index
    table[index] = sees(int(query_positions[(*b, t)]), int(key_positions[(*b, s)]))
  return table


# Softmax attention and its derivative.


def attend(inputs: Inputs, dout: np.ndarray) -> Result:
  """Vaswani et al. 2017, equation 1, over visible keys: w = softmax(scale q.k + bias), out = sum
  keep w v.

  Derivatives: dw_s = keep_s dout.v_s, dl_s = w_s (dw_s - sum_j w_j dw_j), dbias = dl, and the
  derivative in q is scale times the sum of dl_s k_s.
  """
  query, key, value, visible, bias, scale, keep = inputs
  lead, (T, N, H) = query.shape[:-3], query.shape[-3:]
  S, K, Hv = value.shape[-3:]
  scale = H**-0.5 if scale is None else scale
  out, weights = np.zeros(lead + (T, N, Hv)), np.zeros(lead + (N, T, S))
  dq, dk, dv = np.zeros(query.shape), np.zeros(key.shape), np.zeros(value.shape)
  dbias = np.zeros(lead + (N, T, S))
  for *b, n, t in np.ndindex(*lead, N, T):
    row, at, kv = (*b, n, t), (*b, t, n), n // (N // K)
    seen = [s for s in range(S) if visible[(*row, s)]]
    if not seen:
      continue
    logits = np.array([scale * np.dot(query[at], key[(*b, s, kv)]) for s in seen])
    if bias is not None:
      logits = logits + np.array([bias[(*row, s)] for s in seen])
    w = np.exp(logits - logits.max())
    w = w / w.sum()
    kept = np.array([1. if keep is None else keep[(*row, s)] for s in seen])
    for i, s in enumerate(seen):
      weights[(*row, s)] = kept[i] * w[i]
      out[at] += kept[i] * w[i] * value[(*b, s, kv)]
      dv[(*b, s, kv)] += kept[i] * w[i] * dout[at]
    dw = np.array([kept[i] * np.dot(dout[at], value[(*b, s, kv)]) for i, s in enumerate(seen)])
    dlogits = w * (dw - np.dot(w, dw))
    for i, s in enumerate(seen):
      dbias[(*row, s)] = dlogits[i]
      dq[at] += scale * dlogits[i] * key[(*b, s, kv)]
      dk[(*b, s, kv)] += scale * dlogits[i] * query[at]
  return Result(out, weights, {'query': dq, 'key': dk, 'value': dv, 'bias': dbias})


def masked_softmax(logits: np.ndarray, visible: np.ndarray) -> np.ndarray:
  """Softmax along the last axis over visible entries; zeros where there are none."""
  weights = np.zeros(logits.shape)
  for row in np.ndindex(*logits.shape[:-1]):
    seen = [s for s in range(logits.shape[-1]) if visible[(*row, s)]]
    if seen:
      top = max(logits[(*row, s)] for s in seen)
      total = sum(math.exp(logits[(*row, s)] - top) for s in seen)
      for s in seen:
        weights[(*row, s)] = math.exp(logits[(*row, s)] - top) / total
  return weights


def _seen(inputs: Inputs, is_causal: bool, query_positions, key_positions, sees) -> Inputs:
  """The same call with a pattern, and causality, added to what it may see."""
  table = pattern(sees, query_positions, key_positions)
  if is_causal:
    table = table & pattern(sees_past, query_positions, key_positions)
  table = np.broadcast_to(table[..., None, :, :], inputs.visible.shape)
  return inputs._replace(visible=inputs.visible & table)


def vanilla(inputs, dout, *, is_causal, query_positions, key_positions) -> Result:
  return attend(_seen(inputs, is_causal, query_positions, key_positions, sees_all), dout)


def blockwise(inputs, dout, *, is_causal, query_positions, key_positions) -> Result:
  """FlashAttention (Dao et al. 2022) computes the same function as dense attention."""
  return vanilla(inputs,
                 dout,
                 is_causal=is_causal,
                 query_positions=query_positions,
                 key_positions=key_positions)


def local(inputs, dout, *, is_causal, query_positions, key_positions, window) -> Result:
  left, right = (window, window) if isinstance(window, int) else window
  sees = sees_window(left, right)
  return attend(_seen(inputs, is_causal, query_positions, key_positions, sees), dout)


def strided(inputs, dout, *, is_causal, query_positions, key_positions, stride) -> Result:
  sees = sees_strided(stride)
  return attend(_seen(inputs, is_causal, query_positions, key_positions, sees), dout)


def fixed(inputs, dout, *, is_causal, query_positions, key_positions, stride, summary=1) -> Result:
  sees = sees_fixed(stride, summary)
  return attend(_seen(inputs, is_causal, query_positions, key_positions, sees), dout)


def longformer(inputs, dout, *, is_causal, query_positions, key_positions, window,
               num_global) -> Result:
  left, right = (window, window) if isinstance(window, int) else window
  sees = sees_longformer(left, right, num_global)
  return attend(_seen(inputs, is_causal, query_positions, key_positions, sees), dout)


def bigbird(inputs, dout, *, is_causal, query_positions, key_positions, block_size,
            random_blocks) -> Result:
  """random_blocks [blocks, r], or [N, blocks, r] for each head its own."""
  blocks = np.asarray(random_blocks, int)
  if blocks.ndim == 2:
    sees = sees_bigbird(block_size, blocks, is_causal)
    return attend(_seen(inputs, is_causal, query_positions, key_positions, sees), dout)
  visible = np.array(inputs.visible)
  for n in range(len(blocks)):
    sees = sees_bigbird(block_size, blocks[n], is_causal)
    one = inputs._replace(visible=inputs.visible[..., n:n + 1, :, :])
    visible[..., n:n + 1, :, :] = _seen(one, is_causal, query_positions, key_positions,
                                        sees).visible
  return attend(inputs._replace(visible=visible), dout)


# Linformer.


def _project(array, projection, valid, segment: int | None) -> np.ndarray:
  """Slots of each query head: sum over valid keys of projection[s, r] * array[s], as [..., slots,
  N, H].

  Without segments, slot r sums over all keys (Linformer, Wang et al. 2020, equation 7). With
  segments of c keys (Long-Short Transformer, Zhu et al. 2021, section 3.2), slot (g, r) sums over
  the complete segment g alone.
  """
  lead, (S, K, H) = array.shape[:-3], array.shape[-3:]
  N, R = valid.shape[-2], projection.shape[-1]
  projection = np.broadcast_to(projection, (N,) + projection.shape[-2:])
  count = 1 if segment is None else S // segment
  slots = np.zeros(lead + (count, R, N, H))
  for *b, n, s in np.ndindex(*lead, N, S):
    group, row = (0, s) if segment is None else divmod(s, segment)
    if valid[(*b, n, s)] and group < count:
      for r in range(R):
        slots[(*b, group, r, n)] += projection[n, row, r] * array[(*b, s, n // (N // K))]
  return slots.reshape(lead + (count * R, N, H))


def _unproject(dslots, array, projection, valid, segment: int | None):
  """The derivative of `_project`: (darray, dprojection)."""
  lead, (S, K, H) = array.shape[:-3], array.shape[-3:]
  N, R = valid.shape[-2], projection.shape[-1]
  heads = np.broadcast_to(projection, (N,) + projection.shape[-2:])
  dslots = dslots.reshape(lead + (-1 if dslots.size else 0, R, N, H))
  darray, dheads = np.zeros(array.shape), np.zeros(heads.shape)
  for *b, n, s in np.ndindex(*lead, N, S):
    group, row = (0, s) if segment is None else divmod(s, segment)
    if valid[(*b, n, s)] and group < dslots.shape[-4]:
      for r in range(R):
        darray[(*b, s, n // (N // K))] += heads[n, row, r] * dslots[(*b, group, r, n)]
        dheads[n, row, r] += np.dot(dslots[(*b, group, r, n)], array[(*b, s, n // (N // K))])
  return darray, dheads if projection.ndim == 3 else dheads.sum(0)


def _per_head(array: np.ndarray, N: int) -> np.ndarray:
  return np.repeat(array, N // array.shape[-2], axis=-2)


def _slots_visible(valid: np.ndarray, query_positions, S: int, R: int,
                   segment: int | None) -> np.ndarray:
  """[..., N, T, S + slots]: own unfinished segment exactly, slots of completed segments; or all
  slots.
  """
  T, count = query_positions.shape[-1], 1 if segment is None else S // segment
  query_positions = np.broadcast_to(query_positions, valid.shape[:-2] + (T,))
  visible = np.zeros(valid.shape[:-1] + (T, S + count * R), bool)
  for *b, t in np.ndindex(*valid.shape[:-1], T):
    if segment is None:
      visible[(*b, t)] = [False] * S + [valid[tuple(b)].any()] * R
      continue
    at = int(query_positions[(*b[:-1], t)])
    for s in range(at // segment * segment, min(at + 1, S)):
      visible[(*b, t, s)] = valid[(*b, s)]
    for g in range(min(at // segment, count)):
      some = valid[tuple(b)][g * segment:(g + 1) * segment].any()
      visible[(*b, t)][S + g * R:S + (g + 1) * R] = some
  return visible


def linformer(inputs: Inputs, dout, *, is_causal, query_positions, key_projection,
              value_projection) -> Result:
  """Softmax over exact keys (none, unless causal) and projected slots; a masked key enters neither.

  Keys are at 0, 1, ...; inputs.visible must not differ between queries. keep, if given, covers the
  S exact keys and then the slots.
  """
  lead, (T, N, _) = inputs.query.shape[:-3], inputs.query.shape[-3:]
  S, K, Hv = inputs.value.shape[-3:]
  valid = inputs.visible.any(-2)
  R, segment = key_projection.shape[-1], key_projection.shape[-2] if is_causal else None
  clean = np.broadcast_to(np.moveaxis(valid, -1, -2)[..., None], lead + (S, N, 1))
  key = np.where(clean, _per_head(inputs.key, N), 0.)
  value = np.where(clean, _per_head(inputs.value, N), 0.)
  every = Inputs(inputs.query,
                 np.concatenate([key, _project(key, key_projection, valid, segment)], -3),
                 np.concatenate([value, _project(value, value_projection, valid, segment)], -3),
                 _slots_visible(valid, np.asarray(query_positions), S, R, segment),
                 scale=inputs.scale,
                 keep=inputs.keep)
  result = attend(every, dout)
  weights = result.weights[..., :S].copy()
  for *b, n, t, s in np.ndindex(*lead, N, T, S):
    group, row = (0, s) if segment is None else divmod(s, segment)
    if valid[(*b, n, s)] and (segment is None or group < S // segment):
      slots = result.weights[(*b, n, t)][S + group * R:S + (group + 1) * R]
      projection = value_projection if value_projection.ndim == 2 else value_projection[n]
      weights[(*b, n, t, s)] += np.dot(slots, projection[row])
  grads = {'query': result.grads['query']}
  for name, array, projection in (('key', key, key_projection), ('value', value, value_projection)):
    total = result.grads[name]
    darray, dprojection = _unproject(total[..., S:, :, :], array, projection, valid, segment)
    darray = darray + total[..., :S, :, :]
    grads[name] = darray.reshape(lead +
                                 (S, K, N // K, -1 if darray.size else array.shape[-1])).sum(-2)
    grads[name + '_projection'] = dprojection
  return Result(result.out, weights, grads)


# Performer.


def _log_features(x: np.ndarray, features: np.ndarray) -> np.ndarray:
  """FAVOR+ (Choromanski et al. 2021), equation 5: log phi_m(x) = w_m.x - |x|^2 / 2, less a
  constant.
  """
  return np.array([np.dot(w, x) for w in features]) - np.dot(x, x) / 2


def _softmax_kernel(x, y, features):
  """log sum_m phi_m(x) phi_m(y) and its derivatives in x and y, in log space: no feature
  overflows.
  """
  logs = _log_features(x, features) + _log_features(y, features)
  top = logs.max()
  share = np.exp(logs - top)
  mean = (share / share.sum()) @ features
  return top + math.log(share.sum()), mean - x, mean - y


def _relu_kernel(x, y, features):
  """log sum_m relu(w_m.x) relu(w_m.y); -inf where no feature is shared, and then no derivative."""
  fx, fy = np.maximum(features @ x, 0.), np.maximum(features @ y, 0.)
  total = np.dot(fx, fy)
  if total == 0.:
    return -math.inf, np.zeros(x.shape), np.zeros(y.shape)
  return (math.log(total), features.T @ (fy * (features @ x > 0)) / total,
          features.T @ (fx * (features @ y > 0)) / total)


def performer(inputs: Inputs, dout, *, is_causal, query_positions, key_positions, features,
              kernel) -> Result:
  """out_t = sum_s A_ts v_s / sum_s A_ts over visible s, A_ts = sum_m phi_m(q_t) phi_m(k_s);
  equation 4.

  phi reads x * sqrt(scale), so that the softmax kernel estimates exp(scale q.k); a negative scale
  turns the keys round. Written as softmax of log A.
  """
  inputs = _seen(inputs, is_causal, query_positions, key_positions, sees_all)
  query, key, value, visible = inputs[:4]
  lead, (T, N, H) = query.shape[:-3], query.shape[-3:]
  S, K, Hv = value.shape[-3:]
  scale = H**-0.5 if inputs.scale is None else inputs.scale
  root, turned = abs(scale)**0.5, math.copysign(abs(scale)**0.5, scale)
  similarity = {'softmax': _softmax_kernel, 'relu': _relu_kernel}[kernel]
  out, weights = np.zeros(lead + (T, N, Hv)), np.zeros(lead + (N, T, S))
  dq, dk, dv = np.zeros(query.shape), np.zeros(key.shape), np.zeros(value.shape)
  for *b, n, t in np.ndindex(*lead, N, T):
    at, kv = (*b, t, n), n // (N // K)
    seen = [s for s in range(S) if visible[(*b, n, t, s)]]
    pairs = [similarity(root * query[at], turned * key[(*b, s, kv)], features) for s in seen]
    top = max([pair[0] for pair in pairs], default=-math.inf)
    if top == -math.inf:
      continue
    w = np.exp(np.array([pair[0] for pair in pairs]) - top)
    w = w / w.sum()
    out[at] = sum(w[i] * value[(*b, s, kv)] for i, s in enumerate(seen))
    for i, s in enumerate(seen):
      weights[(*b, n, t, s)] = w[i]
      dv[(*b, s, kv)] += w[i] * dout[at]
      dlog = w[i] * np.dot(dout[at], value[(*b, s, kv)] - out[at])
      dq[at] += root * dlog * pairs[i][1]
      dk[(*b, s, kv)] += turned * dlog * pairs[i][2]
  return Result(out, weights, {'query': dq, 'key': dk, 'value': dv})
