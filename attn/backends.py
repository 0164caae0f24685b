"""Who computes a softmax pattern: XLA, tile by tile, or a Pallas kernel where one serves the call.

The choice is made once for a call and is the same for any platform; what the program is compiled
for decides, when it is lowered, whether the kernel or XLA is in it.
"""

from collections.abc import Callable
import contextlib
import functools
import importlib.util
import logging
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from attn import checks
from attn.axes import Array
from attn.call import Call, Spec

IMPLEMENTATIONS = ('auto', 'xla', 'pallas')


def attend(implementation: str,
           call: Call,
           spec: Spec,
           xla: Callable[[Call], Array],
           *,
           block_size: int | None = None,
           step_size: int | None = None,
           dearer: str | None = None) -> Array:
  """The attention of a call, by the first kernel that serves it or by XLA.

  Args:
    implementation: 'auto', 'xla' or 'pallas'.
    call, spec: the call, as `calls.prepare` gives them.
    xla: computes it otherwise, [..., T, N, Hv].
    block_size, step_size: of the caller; None if not given.
    dearer: why kernels cost more than XLA and are not chosen unless asked for.

  Raises:
    NotImplementedError: no kernel serves the call and implementation is 'pallas'.
  """
  checks.check_choice('implementation', implementation, IMPLEMENTATIONS)
  if implementation == 'xla' or (implementation == 'auto' and not _for_tpu()):
    return xla(call)
  from attn import kernels  # pylint: disable=import-outside-toplevel  # Pallas takes 0.5 s
  reasons = {}
  for kernel in kernels.KERNELS:
    reason = kernel.refuses(call, spec, block_size)
    if step_size is not None:
      reason = reason or f'it has no steps; got step_size = {step_size}'
    if reason is None:
      break
    reasons[kernel.name] = reason
  why = '; '.join(f'{name}: {reason}' for name, reason in reasons.items())
  chosen = len(reasons) < len(kernels.KERNELS)
  if implementation == 'pallas':
    if not chosen:
      raise NotImplementedError(
          f"implementation must be 'auto' or 'xla' for this call, which no kernel serves: {why}")
  elif reason := dearer or _elsewhere():
    chosen, why = False, reason
  if not chosen:
    _say(f'XLA computes {spec.visible or "all pairs"}: {why}')
    return xla(call)
  _say(f'On TPU {kernel.name} attention computes {spec.visible or "all pairs"}')
  compute = lambda interpret, call: kernel.compute(call, spec, block_size, interpret)
  default = functools.partial(xla, call)
  if implementation == 'pallas':  # elsewhere it is interpreted, slowly
    default = functools.partial(_differentiable, functools.partial(compute, True), xla, call,
                                kernel.interpreting)
  return lax.platform_dependent(tpu=functools.partial(_differentiable,
                                                      functools.partial(compute, False), xla, call),
                                default=default)


@functools.cache
def _for_tpu() -> bool:
  """Whether programs made here may be compiled for TPU; if not, no time is spent on kernels."""
  return jax.default_backend() == 'tpu' or importlib.util.find_spec('libtpu') is not None


def _elsewhere() -> str | None:
  """Why a kernel might not compile where this call is."""
  mesh = jax.sharding.get_abstract_mesh()
  if jax.device_count() > 1 and (mesh.empty or set(mesh.manual_axes) < set(mesh.axis_names)):
    return ('a kernel is not divided over devices, of which there are '
            f"{jax.device_count()}; inside shard_map, or with implementation='pallas', it is used")
  return None


@functools.cache
def _say(text: str) -> None:
  """Says it once."""
  logging.getLogger('attn').info(text)


def _differentiable(compute: Callable[[Call], Array],
                    xla: Callable[[Call], Array],
                    call: Call,
                    context: Any = contextlib.nullcontext) -> Array:
  """compute(call) with its own first derivative, and for any after it those of xla(call).

  Kernels have no second one.
  """
  arrays = {k: x for k, x in call._asdict().items() if not (x is None or isinstance(x, np.ndarray))}
  moving = {k: x for k, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
  still = {k: x for k, x in arrays.items() if k not in moving}
  of = lambda function, still: lambda moving: function(call._replace(**moving, **still))

  tree: list[Any] = []  # of what the kernel keeps for its gradient

  @jax.custom_vjp
  def output(moving: Any, still: Any) -> Array:
    with context():
      return of(compute, still)(moving)

  @jax.custom_vjp
  def both(moving: Any, still: Any) -> Any:
    with context():
      out, pull = jax.vjp(of(compute, still), moving)
      kept, tree[:] = jax.tree.flatten(pull)[0], [jax.tree.structure(pull)]
      return out, kept

  @jax.custom_vjp
  def gradient(kept: Any, moving: Any, still: Any, dout: Array) -> Any:
    del moving, still
    with context():
      return jax.tree.unflatten(tree[0], kept)(dout)[0]

  def slow(moving: Any, still: Any, dout: Array) -> Any:
    return jax.vjp(of(xla, still), moving)[1](dout)[0]

  def forward(moving: Any, still: Any) -> Any:
    out, kept = both(moving, still)
    return out, (kept, moving, still)

  def again(kept: Any, grads: Any) -> Any:
    moving, still, dout = kept
    d_moving, d_dout = jax.vjp(lambda moving, dout: slow(moving, still, dout), moving,
                               dout)[1](grads)
    return None, d_moving, None, d_dout

  output.defvjp(forward, lambda kept, dout: (gradient(*kept, dout), None))
  both.defvjp(lambda *args: (both(*args), args), lambda args, grads:
              (slow(args[0], args[1], grads[0]), None))
  gradient.defvjp(lambda *args: (gradient(*args), args[1:]), again)
  return output(moving, still)
