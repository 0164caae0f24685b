"""One training step of one model three ways: a decoder of 4 layers, width 256, 8 heads, T = 1024.

Ours is the runner's own model and step, with blockwise attention and with jax.nn's in its place;
the other is x-transformers in PyTorch with the same sizes. Forward, backward, AdamW; no dropout and
no clipping. Ours also draws its batch, counts its accuracy and checks that all is finite.
"""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

import attn
import jax
import numpy as np

from experiments import bench_torch
from experiments.bench_contenders import jax_nn
from experiments.config import Config
from experiments.models import build_model
from experiments.step import init_state, make_train_step
from experiments.tasks import next_token, Task

LENGTH, VOCAB, BATCH, LAYERS, WIDTH, HEADS = 1024, 256, 4, 4, 256, 8
RATE = 3e-4


@contextlib.contextmanager
def replaced(name: str, attention: Callable[..., Any]) -> Iterator[None]:
  """Puts another function in a row of attn.VARIANTS while it lasts."""
  row = attn.VARIANTS[name]
  attn.VARIANTS[name] = row._replace(attention=attention)
  try:
    yield
  finally:
    attn.VARIANTS[name] = row


def _jax_nn_row(query: Any, key: Any, value: Any, bias: Any, mask: Any, *, is_causal: bool) -> Any:
  assert bias is None and mask is None, 'a decoder with learned positions has neither'
  return jax_nn(query, key, value, is_causal)


def flax_step(attention: str, length: int = LENGTH) -> Callable[[], None]:
  """A call that trains for one step; attention is a variant, or 'jax.nn'."""

  def sample(rng: Any, batch_size: int) -> Any:
    tokens = jax.random.randint(rng, (batch_size, length + 1), 0, VOCAB)
    return next_token(tokens, tokens >= 0)

  task = Task(VOCAB, VOCAB, length, length, sample, lambda batch: {}, 'random tokens')
  variant = 'vanilla' if attention == 'jax.nn' else attention
  config = Config(attention=variant,
                  num_layers=LAYERS,
                  model_dim=WIDTH,
                  heads=HEADS,
                  batch_size=BATCH,
                  learning_rate=RATE,
                  clip_norm=0.0,
                  steps=1_000_000)
  model = build_model(config, task)
  row = replaced('vanilla', _jax_nn_row) if attention == 'jax.nn' else contextlib.nullcontext()
  with row:
    state = jax.jit(lambda: init_state(config, task, model))()
    jitted: Any = make_train_step(config, task, model)
    step = jitted.lower(state).compile()

  def run() -> None:
    nonlocal state
    state, _ = jax.block_until_ready(step(state))

  return run


def torch_step(length: int = LENGTH) -> Callable[[], None]:
  """A call that trains x-transformers for one step on the same tokens every time."""
  transformers, torch = bench_torch.load('x-transformers'), bench_torch.load('torch')
  layers = transformers.Decoder(dim=WIDTH,
                                depth=LAYERS,
                                heads=HEADS,
                                attn_dim_head=WIDTH // HEADS,
                                attn_flash=True)
  model = transformers.TransformerWrapper(num_tokens=VOCAB, max_seq_len=length, attn_layers=layers)
  optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
  tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, length + 1))
  inputs, targets = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])

  def run() -> None:
    logits = model(inputs)
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

  return run
