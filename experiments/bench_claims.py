"""Pairs of ours and a peer that do the same work, and the ratio of their times that we aim at.

Each pair takes turns on its own, so its ratio holds whatever else the machine does. A target is
printed beside the ratio and never asserted: a time is no test.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attn
import jax

from experiments import bench_decode
from experiments import bench_measure
from experiments import bench_steps
from experiments import bench_torch
from experiments.bench_contenders import Contender, jax_peers, ours, Problem
from experiments.bench_progress import Progress

BATCH, HEADS, HEAD_DIM = 1, 8, 64
STEP, GENERATE = 'training step', 'generate'
# Of a model, and of a variant's cache alone.
DECODE, DECODES = 'decode step', f'{bench_decode.STEPS} decode steps'


class Claim(NamedTuple):
  """mine, peer: labels of contenders, or for a step or a generation names of models or variants."""
  mine: str
  peer: str
  length: int
  direction: str
  target: float


CLAIMS = (
    Claim('blockwise', 'jax.nn', 4096, 'forward', 0.30),
    Claim('blockwise causal', 'jax.nn causal', 4096, 'forward', 0.25),
    Claim('blockwise', 'jax.nn', 4096, 'gradient', 0.50),
    Claim('blockwise causal', 'jax.nn causal', 4096, 'gradient', 0.35),
    Claim('blockwise', 'torch SDPA', 4096, 'forward', 1.4),
    Claim('blockwise causal', 'torch SDPA causal', 4096, 'forward', 1.4),
    Claim('blockwise', 'torch SDPA', 4096, 'gradient', 1.4),
    Claim('blockwise causal', 'torch SDPA causal', 4096, 'gradient', 1.4),
    Claim('local causal', 'local-attention causal', 8192, 'forward', 0.4),
    Claim('local causal', 'blockwise causal', 8192, 'forward', 0.12),
    Claim('strided causal', 'blockwise causal', 4096, 'forward', 0.25),
    Claim('longformer', 'blockwise', 8192, 'forward', 0.15),
    Claim('bigbird', 'blockwise', 8192, 'forward', 0.15),
    Claim('linformer', 'PyPI linformer', 8192, 'forward', 0.9),
    Claim('performer', 'performer-pytorch', 8192, 'forward', 0.7),
    Claim('performer causal', 'performer-pytorch causal', 8192, 'forward', 0.04),
    Claim('decoder, blockwise', 'decoder, jax.nn', bench_steps.LENGTH, STEP, 0.6),
    Claim('decoder, blockwise', 'x-transformers', bench_steps.LENGTH, STEP, 1.0),
    Claim('local', 'vanilla', 8192, DECODES, 0.15),
    Claim('performer', 'vanilla', 8192, DECODES, 0.15),
    Claim('decoder, vanilla', 'x-transformers', 8192, DECODE, 1.0),
    Claim('decoder, vanilla', 'x-transformers', bench_decode.PROMPT + bench_decode.NEW, GENERATE,
          0.7),
)
_PACKAGES = {
    'torch SDPA': 'torch',
    'PyPI linformer': 'linformer',
}
MODELS: dict[tuple[str, str], Callable[[int], Callable[[], None]]] = {
    ('decoder, blockwise', STEP): lambda length: bench_steps.flax_step('blockwise', length),
    ('decoder, jax.nn', STEP): lambda length: bench_steps.flax_step('jax.nn', length),
    ('x-transformers', STEP): bench_steps.torch_step,
    ('decoder, vanilla', DECODE): bench_decode.flax_step,
    ('x-transformers', DECODE): bench_decode.torch_step,
    ('decoder, vanilla', GENERATE): bench_decode.flax_generate,
    ('x-transformers', GENERATE): bench_decode.torch_generate,
}


def _absent(label: str) -> str | None:
  """Why a side of a claim is not there, or None."""
  name = label.removesuffix(' causal')
  if (package := _PACKAGES.get(name, name)) in bench_torch.PACKAGES:
    absent = bench_torch.missing().get(package)
    return absent and f'not installed: {absent}'
  known = {*attn.VARIANTS, *(model for model, _ in MODELS), 'jax.nn'}
  return None if name in known else f'attn has no variant {name}'


def _call(label: str, claim: Claim, contenders: dict[str, Contender]) -> Callable[[], Any]:
  if (label, claim.direction) in MODELS:
    return MODELS[label, claim.direction](claim.length)
  if claim.direction == DECODES:
    return bench_decode.attention_steps(label, claim.length, claim.length)
  problem = Problem(BATCH, claim.length, HEADS, HEAD_DIM, 'float32')
  return contenders[label].prepare(problem, claim.direction).run


def run(rounds: int, claims: Sequence[Claim] = CLAIMS) -> list[dict[str, Any]]:
  """Measures every pair: medians and spreads in seconds, ratio mine / peer, target.

  `skipped` is the reason where a side is missing.
  """
  contenders = {c.label: c for c in (*ours(), *jax_peers(), *bench_torch.torch_peers())}
  progress = Progress(len(claims), len(claims) * (rounds + 1))
  results = []
  for claim in claims:
    title = f'{claim.mine} / {claim.peer}, T {claim.length}, {claim.direction}'
    progress.cell(title, 1)
    result = claim._asdict()
    results.append(result)
    reason = _absent(claim.mine) or _absent(claim.peer)
    if reason:
      result['skipped'] = reason
      progress.skip(rounds)
      continue
    calls = [_call(label, claim, contenders) for label in (claim.mine, claim.peer)]

    def before(number: int, index: int, title: str = title) -> None:
      progress.turn(f'{title}, round {number + 1}/{rounds}', 0.5)

    mine, peer = map(bench_measure.timing, bench_measure.alternate(calls, rounds, before=before))
    result |= dict(mine_median=mine.median,
                   mine_spread=mine.spread,
                   peer_median=peer.median,
                   peer_spread=peer.spread,
                   ratio=mine.median / peer.median)
    jax.clear_caches()
  progress.end()
  return results
