"""What a decode step costs: each variant's cache alone, and a model's beside x-transformers.

A step of attention is timed inside a loop of STEPS of them, as decoding runs it; a step of a model
and a generation are single calls. All in float32, batch 1.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import attn
from attn import decoding
import jax
import jax.numpy as jnp
import numpy as np

from experiments import bench_measure
from experiments import bench_torch
from experiments import decode
from experiments.bench_contenders import Problem, settings
from experiments.bench_progress import Progress
from experiments.bench_steps import HEADS, LAYERS, VOCAB, WIDTH
from experiments.config import Config
from experiments.models import build_model
from experiments.step import init_state
from experiments.tasks import next_token, Task

STEPS = 32
POSITIONS = (512, 2048, 8192)
PROMPT, NEW = 512, 256  # tokens of a generation


def _cache(variant: str, length: int) -> tuple[Any, Any, tuple[Any, ...]]:
  """A variant's arrays, its empty cache for 8 heads of 64, and random tokens [1, length, 8, 64]."""
  problem = Problem(1, length, HEADS, 64, 'float32')
  options, arrays = settings(variant, problem, True)
  params = {name: jnp.asarray(x) for name, x in arrays.items()}
  row = attn.VARIANTS[variant]
  options = {name: x for name, x in options.items() if name not in row.cost_options}
  rng = np.random.default_rng(0)
  tokens = tuple(
      jnp.asarray(rng.normal(size=(1, length, HEADS, 64)), jnp.float32) for _ in range(3))
  dims = attn.check_qkv(*tokens)
  return params, row.init_cache(params, dims, max_length=length, **options), tokens


def attention_steps(variant: str, position: int, length: int) -> Callable[[], None]:
  """A call of STEPS steps that end at a position of a sequence of `length` at most."""
  params, cache, tokens = _cache(variant, length)
  extend, start = attn.VARIANTS[variant].extend, position - STEPS
  fill = jax.jit(lambda cache, *qkv: extend(params, cache, *qkv)[1], donate_argnums=0)
  cache = fill(cache, *(x[:, :start] for x in tokens))

  def steps(cache: Any, *token: Any) -> tuple[Any, Any]:

    def body(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
      output, cache = extend(params, carry[1], token[0] + carry[0], *token[1:])
      return output * 1e-3, cache

    output, cache = jax.lax.fori_loop(0, STEPS, body, (jnp.zeros_like(token[2]), cache))
    return cache, output

  last = tuple(x[:, -1:] for x in tokens)
  compiled = jax.jit(steps, donate_argnums=0).lower(cache, *last).compile()

  def run() -> None:
    nonlocal cache
    cache = dataclasses.replace(cache, length=jnp.full(1, start, jnp.int32))
    cache, _ = jax.block_until_ready(compiled(cache, *last))

  return run


def run(rounds: int,
        variants: Sequence[str] = tuple(attn.VARIANTS),
        positions: Sequence[int] = POSITIONS) -> list[dict[str, Any]]:
  """For each variant the time of a step at each position, in turns, and the bytes of its cache."""
  length = max(positions)
  progress = Progress(len(variants), len(variants) * (rounds + 1))
  results = []
  for variant in variants:
    progress.cell(f'decode: {variant}, positions {", ".join(map(str, positions))}', 1)
    calls = [attention_steps(variant, position, length) for position in positions]
    turn = lambda number, index: progress.turn(f'{variant}, round {number + 1}/{rounds}', 1 / len(
        calls))
    timings = [
        bench_measure.timing([x / STEPS
                              for x in seconds])
        for seconds in bench_measure.alternate(calls, rounds, before=turn)
    ]
    results.append(
        dict(label=variant,
             length=length,
             state_bytes=attn.cache.size(_cache(variant, length)[1]),
             steps=[
                 dict(position=position, median=t.median, spread=t.spread)
                 for position, t in zip(positions, timings)
             ]))
    jax.clear_caches()
  progress.end()
  return results


def _model(length: int) -> tuple[Any, Any]:
  """A decoder of 4 layers, width 256, and its parameters."""

  def sample(rng: Any, batch_size: int) -> Any:
    tokens = jax.random.randint(rng, (batch_size, length + 1), 0, VOCAB)
    return next_token(tokens, tokens >= 0)

  task = Task(VOCAB, VOCAB, length, length, sample, lambda batch: {}, 'random tokens')
  config = Config(attention='vanilla', num_layers=LAYERS, model_dim=WIDTH, heads=HEADS)
  model = build_model(config, task)
  return model, jax.jit(lambda: init_state(config, task, model).params)()


def _batch(tokens: int) -> dict[str, Any]:
  inputs = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (1, tokens)), jnp.int32)
  return {'inputs': inputs, 'input_mask': jnp.ones((1, tokens), bool)}


def flax_step(length: int) -> Callable[[], None]:
  """A call that decodes one token of our model at the end of a sequence of `length`."""
  model, params = _model(length)
  begin = lambda params: decode.begin(model, params, _batch(length - 1))[1:]
  cache, last = jax.jit(begin)(params)
  # What begin returns first is a function of the model's own, so it is made anew inside the jit.
  batch = {'inputs': last[:, None], 'input_mask': jnp.ones((1, 1), bool)}

  def one(cache: Any, params: Any) -> tuple[Any, Any]:
    logits, new = model.apply({
        'params': params,
        'cache': cache
    },
                              batch,
                              decode=True,
                              mutable=('cache',))
    return new['cache'], jnp.argmax(logits[:, 0], -1)

  compiled = jax.jit(one, donate_argnums=0).lower(cache, params).compile()
  lengths = lambda cache: jax.tree.map(
      lambda x: jnp.full_like(x, length - 1)
      if x.shape == (1,) and x.dtype == jnp.int32 else x, cache)

  def run() -> None:
    nonlocal cache
    cache, _ = jax.block_until_ready(compiled(lengths(cache), params))

  return run


def flax_generate(length: int) -> Callable[[], None]:
  """A call that reads a prompt and writes greedily until `length`, for our model."""
  model, params = _model(length)

  @jax.jit
  def generate(params: Any, batch: Any) -> Any:
    step, cache, last = decode.begin(model, params, batch)
    return decoding.generate(step, cache, last, max_length=length - PROMPT, temperature=0.).tokens

  batch = _batch(PROMPT)
  return lambda: jax.block_until_ready(generate(params, batch))


def _torch_model(length: int) -> tuple[Any, Any]:
  transformers, torch = bench_torch.load('x-transformers'), bench_torch.load('torch')
  layers = transformers.Decoder(dim=WIDTH,
                                depth=LAYERS,
                                heads=HEADS,
                                attn_dim_head=WIDTH // HEADS,
                                attn_flash=True)
  model = transformers.TransformerWrapper(num_tokens=VOCAB, max_seq_len=length, attn_layers=layers)
  return model.eval(), torch


def torch_step(length: int) -> Callable[[], None]:
  """As flax_step, for x-transformers with its cache."""
  model, torch = _torch_model(length)
  tokens = torch.from_numpy(np.array(_batch(length)['inputs'])).long()
  with torch.inference_mode():
    _, cache = model(tokens[:, :-1], return_intermediates=True)

  def run() -> None:
    with torch.inference_mode():
      model(tokens, return_intermediates=True, cache=cache)[0][:, -1].argmax(-1)

  return run


def torch_generate(length: int) -> Callable[[], None]:
  """As flax_generate, for x-transformers with its cache."""
  model, torch = _torch_model(length)
  wrapper = bench_torch.load('x-transformers').AutoregressiveWrapper(model)
  prompt = torch.from_numpy(np.array(_batch(PROMPT)['inputs'])).long()

  def run() -> None:
    with torch.inference_mode():
      wrapper.generate(prompt, length - PROMPT, temperature=0., cache_kv=True)

  return run
