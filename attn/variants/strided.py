"""The strided pattern of the Sparse Transformer."""

from collections.abc import Callable
from typing import Any

from attn import backends
from attn import call as calls
from attn import checks, groups, masks, softmax, stores, tiles
from attn.axes import Array, ArrayLike
from attn.call import Call, Spec
from attn.positions import PositionBias
from attn.softmax import State
from attn.stores import Keep


def strided_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | PositionBias | None = None,
    mask: ArrayLike | None = None,
    *,
    stride: int,
    is_causal: bool = False,
    scale: float | None = None,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    segment_ids: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    block_size: int | None = None,
    step_size: int | None = None,
    implementation: str = 'auto',
) -> Array:
  """Softmax attention to the nearest `stride` keys and, beyond those, to every stride-th.

  Query t attends to the keys s with |t - s| < stride or (t - s) % stride == 0, when causal also s
  <= t: the union of both patterns in each head. Equal to `vanilla_attention` under
  `masks.strided(stride)`. With the default positions the window and the columns, keys in the order
  of their residue, are two visits of disjoint sets, in O(T * (stride + T / stride)) time and
  memory; explicit positions cost O(T * S) time in O(T + S) memory.

  Args:
    query: [..., T, N, H].
    key: [..., S, K, H], with N a multiple of K.
    value: [..., S, K, Hv].
    stride: at least 1; about sqrt(T) costs least.
    bias, mask, is_causal, scale, query_positions, key_positions, segment_ids, dropout_rate,
      dropout_rng: as in `vanilla_attention`.
    block_size: at most so many queries and keys in a tile; only cost depends on it.
    step_size: about so many logits are computed at a time; None for what suits the platform. Only
      cost depends on it.
    implementation: as in `blockwise_attention`, but 'auto' is 'xla':
      a kernel visits every pair.

  Returns:
    [..., T, N, Hv] in query's dtype; zeros for a query that sees nothing.

  Raises:
    TypeError, ValueError: as in `vanilla_attention`, or stride is not positive.
    NotImplementedError: as in `blockwise_attention`.

  Source: Child et al. 2019, section 4.3, https://arxiv.org/abs/1904.10509.
  """
  stride = checks.check_int('stride', stride, 1)
  dims, call, spec = calls.prepare(query,
                                   key,
                                   value,
                                   bias,
                                   mask,
                                   is_causal=is_causal,
                                   scale=scale,
                                   query_positions=query_positions,
                                   key_positions=key_positions,
                                   segment_ids=segment_ids,
                                   dropout_rate=dropout_rate,
                                   dropout_rng=dropout_rng,
                                   pattern=masks.strided(stride))

  def xla(call: Call) -> Array:
    if query_positions is None and key_positions is None and dims.T:
      state = window_and_columns(call, spec, stride, is_causal, block_size, step_size)
    else:
      state = tiles.attend(call, spec, block_size, step_size)
    return calls.heads_last(softmax.finish(state, call.query.dtype), dims)

  return backends.attend(implementation,
                         call,
                         spec,
                         xla,
                         block_size=block_size,
                         step_size=step_size,
                         dearer='a kernel would visit every pair')


def window_and_columns(call: Call,
                       spec: Spec,
                       stride: int,
                       is_causal: bool,
                       block_size: int | None,
                       step_size: int | None,
                       attend: Callable[..., State] = tiles.attend,
                       devices: int = 1) -> State:
  """The keys nearer than stride, merged with those of the query's residue that are not.

  attend sees the keys of several devices, each with as many positions, a multiple of stride.
  """
  causal = (lambda p: masks.causal() & p) if is_causal else (lambda p: p)
  window = spec._replace(visible=causal(masks.window(stride - 1, stride - 1)))
  near = attend(call, window, tiles.band_block(stride, block_size), step_size)
  length = call.lengths[0]
  if stride >= length * devices:
    return near
  columns, spec = groups.fold(call, spec._replace(visible=causal(masks.apart(stride))), stride,
                              True)
  far = attend(columns, spec, block_size, step_size)
  return softmax.merge(near, groups.unfold(far, length, True))


def keeps(max_length: int, stride: int) -> tuple[Keep, ...]:
  """A ring of the last `stride` keys, and every key beside those of its residue."""
  stride = min(stride, max_length)  # what is farther apart than that is nowhere
  length = -(-max_length // stride)
  columns = Keep(slots=stride * length,
                 place=lambda p: p % stride * length + p // stride,
                 visible=masks.apart(stride),
                 reads=lambda p: p % stride * length,
                 width=length)
  return stores.ring(stride, masks.window(stride - 1, 0), max_length), columns


MEMORY = stores.pattern(keeps, grows=True)
