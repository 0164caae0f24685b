"""What is timed: the library's variants and, from JAX, its peers; the same inputs for all.

A contender is prepared for a problem and a direction. 'forward' gives the output; 'gradient' gives
the output and the gradients of query, key and value for a given gradient of the output. A variant's
own arrays (projections, features, random blocks) are arguments too, but nothing is derived for
them: no peer has the same ones.
"""

from collections.abc import Callable, Sequence
import functools
import math
import time
from typing import Any, NamedTuple

import attn
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments import bench_measure

DIRECTIONS = ('forward', 'gradient')
WINDOW, NUM_GLOBAL, BLOCK, NUM_RANDOM, RANK, NUM_FEATURES, SEGMENT = 128, 16, 64, 3, 256, 256, 128

# Each variant's options at length T.
OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    'vanilla': lambda T: {},
    'blockwise': lambda T: {},
    'local': lambda T: dict(window=WINDOW),
    'strided': lambda T: dict(stride=round(math.sqrt(T))),
    'fixed': lambda T: dict(stride=round(math.sqrt(T))),
    'longformer': lambda T: dict(window=WINDOW, num_global=NUM_GLOBAL),
    'bigbird': lambda T: dict(block_size=BLOCK),
    'linformer': lambda T: {},
    'performer': lambda T: {},
}

Arrays = dict[str, np.ndarray]
Function = Callable[..., Any]  # (arrays, query, key, value) to [B, T, N, Hv]


class Problem(NamedTuple):
  """The sizes of self-attention: B, T = S, N = K, H = Hv, and the inputs' dtype."""
  batch: int
  length: int
  heads: int
  head_dim: int
  dtype: str

  @property
  def dims(self) -> attn.Dims:
    B, T, N, H, _ = self
    return attn.Dims((B,), T, T, N, N, H, H)


class Ready(NamedTuple):
  """A contender that is compiled and has its inputs.

  Attributes:
    run: computes everything and waits; returns its own arrays.
    dispatch: the same without waiting, where that is possible.
    numbers: what run returns, as float64 [B, T, N, H] each.
    compile_seconds: tracing and compiling; None where nothing is compiled.
    temp_bytes: memory the compiled program needs beside arguments and results, if known.
    flops: operations of its matrix products, if known.
  """
  run: Callable[[], Any]
  numbers: Callable[[], list[np.ndarray]]
  compile_seconds: float | None = None
  temp_bytes: int | None = None
  flops: int | None = None
  dispatch: Callable[[], Any] | None = None


class Contender(NamedTuple):
  """One way to compute one kind of attention.

  Attributes:
    name: of the variant, or of the peer.
    maker: 'attn', 'jax' or 'torch'.
    variant: the row of attn.VARIANTS that computes the same.
    is_causal: whether later keys are hidden.
    prepare: (problem, direction) to a Ready.
    least_bytes: (problem, direction) to the least memory it takes, where that is much.
  """
  name: str
  maker: str
  variant: str
  is_causal: bool
  prepare: Callable[[Problem, str], Ready]
  least_bytes: Callable[[Problem, str], int] = lambda problem, direction: 0

  @property
  def label(self) -> str:
    return f'{self.name} causal' if self.is_causal else self.name


def logits_bytes(problem: Problem, direction: str) -> int:
  """The float32 logits [B, N, T, T] of dense attention."""
  del direction
  return 4 * problem.batch * problem.heads * problem.length**2


@functools.lru_cache(maxsize=2)
def draw(problem: Problem) -> tuple[np.ndarray, ...]:
  """query, key, value and the output's gradient, standard normal in the problem's dtype."""
  shape = (4, problem.batch, problem.length, problem.heads, problem.head_dim)
  numbers = np.random.default_rng(0).standard_normal(shape, np.float32)
  return tuple(numbers.astype(jnp.dtype(problem.dtype)))


def make_arrays(name: str, problem: Problem, is_causal: bool) -> dict[str, jax.Array]:
  """The arrays a variant needs, in float32 or int32.

  Linformer: R slots; causal, segments of SEGMENT keys in as many slots each as make R in all.
  """
  T, rng = problem.length, jax.random.key(1)
  if name == 'bigbird':
    blocks = attn.bigbird_random_blocks(rng,
                                        T,
                                        block_size=BLOCK,
                                        num_random=NUM_RANDOM,
                                        num_heads=problem.heads,
                                        is_causal=is_causal)
    return {'random_blocks': blocks}
  if name == 'linformer':
    size = min(max(SEGMENT, -(-T // RANK)), T) if is_causal else T
    rank = min(max(RANK * size // T, 1), size)
    return attn.VARIANTS[name].init(rng, problem.dims._replace(S=size), rank=rank)
  sizes = {'num_features': NUM_FEATURES} if name == 'performer' else {}
  return attn.VARIANTS[name].init(rng, problem.dims, **sizes)


def settings(name: str, problem: Problem, is_causal: bool) -> tuple[dict[str, Any], Arrays]:
  """The options of a variant and the arrays it needs."""
  arrays = make_arrays(name, problem, is_causal)
  return OPTIONS[name](problem.length), {key: np.asarray(array) for key, array in arrays.items()}


def _own(name: str, is_causal: bool, **more: Any) -> Callable[[Problem], tuple[Function, Arrays]]:

  def build(problem: Problem) -> tuple[Function, Arrays]:
    options, arrays = settings(name, problem, is_causal)
    options |= more
    return functools.partial(attn.VARIANTS[name].apply, is_causal=is_causal, **options), arrays

  return build


def jax_nn(query: Any, key: Any, value: Any, is_causal: bool) -> Any:
  return jax.nn.dot_product_attention(query, key, value, is_causal=is_causal)


def _flax(query: Any, key: Any, value: Any, is_causal: bool) -> Any:
  T = query.shape[1]
  mask = jnp.tril(jnp.ones((1, 1, T, T), bool)) if is_causal else None
  return nn.dot_product_attention(query, key, value, mask=mask)


def _plain(function: Callable[..., Any],
           is_causal: bool) -> Callable[[Problem], tuple[Function, Arrays]]:
  """A function of query, key and value alone."""
  return lambda problem: (lambda arrays, *inputs: function(*inputs, is_causal=is_causal), {})


def directed(function: Function, direction: str) -> Callable[..., tuple[Any, ...]]:
  """(arrays, query, key, value, gradient of the output) to the results of a direction.

  The gradient comes from outside: of a sum it would be a constant, with which XLA does away with
  products that training has to compute.
  """

  def forward(arrays: Any, query: Any, key: Any, value: Any, cotangent: Any) -> tuple[Any, ...]:
    del cotangent
    return (function(arrays, query, key, value),)

  def gradient(arrays: Any, query: Any, key: Any, value: Any, cotangent: Any) -> tuple[Any, ...]:
    output, pull = jax.vjp(functools.partial(function, arrays), query, key, value)
    return (output, *pull(cotangent))

  return forward if direction == 'forward' else gradient


def prepare_jax(build: Callable[[Problem], tuple[Function, Arrays]], problem: Problem,
                direction: str) -> Ready:
  """Compiles a direction of what build gives for a problem."""
  function, arrays = build(problem)
  inputs = (jax.tree.map(jnp.asarray, arrays), *map(jnp.asarray, draw(problem)))
  start = time.perf_counter()
  traced = jax.jit(directed(function, direction)).trace(*inputs)
  compiled = traced.lower().compile()
  seconds = time.perf_counter() - start
  run = lambda: jax.block_until_ready(compiled(*inputs))
  return Ready(run=run,
               numbers=lambda: [np.asarray(x).astype(np.float64) for x in run()],
               compile_seconds=seconds,
               temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
               flops=bench_measure.flops(traced.jaxpr),
               dispatch=lambda: compiled(*inputs))


def reference(name: str, is_causal: bool, problem: Problem, direction: str) -> list[np.ndarray]:
  """A variant's results in float64 for the very numbers a contender gets."""
  options, arrays = settings(name, problem, is_causal)
  wide = lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
  # An accelerator may have no float64.
  with jax.enable_x64(True), jax.default_device(jax.devices('cpu')[0]):
    function = functools.partial(attn.VARIANTS[name].apply, is_causal=is_causal, **options)
    results = jax.jit(directed(function, direction))(jax.tree.map(wide, arrays),
                                                     *map(wide, draw(problem)))
    return [np.asarray(x) for x in results]


def ours(names: Sequence[str] | None = None) -> list[Contender]:
  """The rows of attn.VARIANTS that are wanted and have options above, full and causal."""
  found = []
  for name, variant in attn.VARIANTS.items():
    if name not in OPTIONS or (names is not None and name not in names):
      continue
    bytes_needed = logits_bytes if name == 'vanilla' else (lambda problem, direction: 0)
    for is_causal in (False, True):
      if not is_causal or 'causal' in variant.supports:
        prepare = functools.partial(prepare_jax, _own(name, is_causal))
        found.append(Contender(name, 'attn', name, is_causal, prepare, bytes_needed))
  return found


def own(name: str, is_causal: bool, **options: Any) -> Contender:
  """A variant with more options, which are strings."""
  build = _own(name, is_causal, **options)
  return Contender(' '.join([name, *options.values()]), 'attn', name, is_causal,
                   functools.partial(prepare_jax, build))  # yapf: disable


def many(ready: Ready, number: int) -> None:
  """Calls that the device gets at once, so that what the host does for one hardly counts."""
  assert ready.dispatch is not None
  jax.block_until_ready([ready.dispatch() for _ in range(number)])


def cudnn_peers() -> list[Contender]:
  """cuDNN's flash attention, by jax.nn."""
  function = functools.partial(jax.nn.dot_product_attention, implementation='cudnn')
  return [
      Contender('cuDNN', 'jax', 'vanilla', is_causal,
                functools.partial(prepare_jax, _plain(function, is_causal)))
      for is_causal in (False, True)
  ]


def jax_peers() -> list[Contender]:
  """The dense attention of JAX and of Flax."""
  return [
      Contender(name, 'jax', 'vanilla', is_causal,
                functools.partial(prepare_jax, _plain(function, is_causal)), logits_bytes)
      for name, function in (('jax.nn', jax_nn), ('flax', _flax))
      for is_causal in (False, True)
  ]
