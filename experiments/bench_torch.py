"""The peers from PyTorch, where they are installed (extra `bench`); their inputs are [B, N, T, H].

Each gets the numbers that everybody gets, laid out as it wants them before the clock starts, and
as many threads as there are cores. None of them is compiled, so their memory and their operations
are not known.
"""

from collections.abc import Callable
import contextlib
import functools
import importlib
import os
from typing import Any, NamedTuple
import warnings

import numpy as np

from experiments.bench_contenders import Contender, draw, NUM_FEATURES, Problem, Ready, settings
from experiments.bench_contenders import WINDOW

# The versions of setup.cfg's extra `bench`.
PACKAGES = {
    'torch': '2.13.0',
    'local-attention': '1.11.2',
    'linformer': '0.2.3',
    'performer-pytorch': '1.1.4',
    'x-transformers': '2.31.10',
}

Attend = Callable[[Any, Any, Any], Any]  # query, key, value [B, N, T, H] to [B, N, T, H]


def load(package: str) -> Any:
  """The module of a package; None where it cannot be imported."""
  # Torch's threads would wait for each other by spinning, which costs many times the work itself
  # wherever something else, as XLA's threads, is on their core. Read when torch is imported.
  os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
  # Importing some of them prints, and warns of what they use of others.
  with warnings.catch_warnings(), contextlib.redirect_stdout(None):
    warnings.simplefilter('ignore')
    try:
      torch = importlib.import_module('torch')
      torch.set_num_threads(os.cpu_count() or 1)
      return importlib.import_module(package.replace('-', '_'))
    except ImportError:
      return None


def missing() -> dict[str, str]:
  """The packages that cannot be imported, each with the command that installs it."""
  return {
      package: f'pip install {package}=={version}'
      for package, version in PACKAGES.items()
      if load(package) is None
  }


class Peer(NamedTuple):
  """One kind of attention of a package.

  Attributes:
    package: of PACKAGES.
    name: in tables.
    variant: the row of attn.VARIANTS that computes the same.
    make: (problem, is_causal) to an Attend.
    forms: causal or not.
    heads_first: whether its inputs lie in memory as [B, N, T, H], or as [B, T, N, H].
  """
  package: str
  name: str
  variant: str
  make: Callable[[Problem, bool], Attend]
  forms: tuple[bool, ...]
  heads_first: bool = True


def prepare(peer: Peer, is_causal: bool, problem: Problem, direction: str) -> Ready:
  """A direction of a peer's attention."""
  torch = load('torch')
  attend = peer.make(problem, is_causal)

  def tensor(array: np.ndarray) -> Any:
    x = torch.from_numpy(array.astype(np.float32)).to(getattr(torch, problem.dtype))
    x = x.transpose(1, 2)
    return x.contiguous() if peer.heads_first else x

  *inputs, cotangent = map(tensor, draw(problem))

  def forward() -> list[Any]:
    with torch.inference_mode():
      return [attend(*inputs)]

  def gradient() -> list[Any]:
    for x in inputs:
      x.grad = None
      x.requires_grad_()
    output = attend(*inputs)
    output.backward(cotangent)
    return [output.detach(), *(x.grad for x in inputs)]

  run = forward if direction == 'forward' else gradient
  return Ready(run, lambda: [np.swapaxes(x.double().numpy(), 1, 2) for x in run()])


def _sdpa(problem: Problem, is_causal: bool) -> Attend:
  attend = load('torch').nn.functional.scaled_dot_product_attention
  return functools.partial(attend, is_causal=is_causal)


def _local(problem: Problem, is_causal: bool) -> Attend:
  """Keys t - 128 ... t, which is window (128, 0): each query reads two blocks of 128 keys and
  exact_windowsize masks what is farther than window_size.
  """
  return load('local-attention').LocalAttention(window_size=min(WINDOW, problem.length),
                                                causal=is_causal,
                                                exact_windowsize=True,
                                                use_rotary_pos_emb=False)


def _linformer(problem: Problem, is_causal: bool) -> Attend:
  """LinformerSelfAttention.forward between its dense layers, line by line.

  What is timed is what it does with query, key and value: the two projections along the sequence,
  the logits, the softmax, the weighted values. Its to_q, to_k, to_v and to_out are left out, as
  ours has none, and so is the copy of the output that joins the heads. Its inputs lie in memory as
  its dense layers leave them, [B, T, N H], so that no reshape copies.
  """
  load('linformer')  # The listing is only fair where the package it copies is installed.
  torch = load('torch')
  arrays = settings('linformer', problem, is_causal)[1]
  projections = [
      torch.from_numpy(np.array(arrays[name])).to(getattr(torch, problem.dtype))
      for name in ('key_projection', 'value_projection')
  ]

  def attend(query: Any, keys: Any, values: Any) -> Any:
    b, h, n, d = query.shape
    merged = (x.transpose(1, 2).reshape(b, n, h * d) for x in (keys, values))
    slots = (torch.einsum('bnd,nk->bkd', x, p) for x, p in zip(merged, projections))
    keys, values = (x.reshape(b, -1, h, d).transpose(1, 2) for x in slots)
    dots = torch.einsum('bhnd,bhkd->bhnk', query, keys) * (d**-0.5)
    return torch.einsum('bhnk,bhkd->bhnd', dots.softmax(dim=-1), values)

  return attend


def _performer(problem: Problem, is_causal: bool) -> Attend:
  """FastAttention with our features; causal without CUDA, its fallback in plain PyTorch."""
  with contextlib.redirect_stdout(None):
    module = load('performer-pytorch').FastAttention(dim_heads=problem.head_dim,
                                                     nb_features=NUM_FEATURES,
                                                     causal=is_causal)
  features = settings('performer', problem, is_causal)[1]['features']
  module.projection_matrix.copy_(load('torch').from_numpy(np.array(features)))
  return module


def _performer_bytes(problem: Problem, direction: str) -> int:
  """The causal fallback keeps two [B, N, T, M, H]: of a 128th of T, for gradients of all of it."""
  B, T, N, H, _ = problem
  return 8 * B * N * T * NUM_FEATURES * H // (128 if direction == 'forward' else 1)


PEERS = (
    Peer('torch', 'torch SDPA', 'vanilla', _sdpa, (False, True)),
    Peer('local-attention', 'local-attention', 'local', _local, (True,)),
    Peer('linformer', 'PyPI linformer', 'linformer', _linformer, (False,), False),
    Peer('performer-pytorch', 'performer-pytorch', 'performer', _performer, (False, True)),
)


def torch_peers() -> list[Contender]:
  """Those that are installed."""
  found = []
  for peer in PEERS:
    if load(peer.package) is None:
      continue
    for is_causal in peer.forms:
      contender = Contender(peer.name, 'torch', peer.variant, is_causal,
                            functools.partial(prepare, peer, is_causal))
      if peer.package == 'performer-pytorch' and is_causal:
        contender = contender._replace(least_bytes=_performer_bytes)
      found.append(contender)
  return found
