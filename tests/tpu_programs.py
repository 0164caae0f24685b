"""What the TPU compiler makes of attention over a mesh, on a machine that has no TPU:
`python -m tests.tpu_programs`.

Prints a line for each variant: on eight chips of a v5e the largest part that is sent of each kind
of collective, and the memory of a chip beside its arguments. Needs libtpu, the extra `tpu-compile`.
"""

import json
import os
import sys

os.environ['JAX_PLATFORMS'] = 'cpu'  # before jax is there

from attn import orthogonal_features, sharding  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from experiments.bench_tpu import devices  # noqa: E402
from experiments.collectives import largest, sent  # noqa: E402

T, N, H, M = 8192, 8, 64, 128
CALLS = {
    'local': dict(window=128, is_causal=True),
    'blockwise': dict(is_causal=True),
    'strided': dict(stride=128, is_causal=True),
    'fixed': dict(stride=128, summary=4, is_causal=True),
    'longformer': dict(window=128, num_global=16, is_causal=True),
    'performer': dict(is_causal=True),
}


def compiled(name: str, gradient: bool):
  """The program of a chip for T tokens in all."""
  mesh = jax.sharding.Mesh(np.array(devices('v5e:2x4')), ('sequence',),
                           axis_types=(jax.sharding.AxisType.Auto,))  # yapf: disable
  runs = jax.NamedSharding(mesh, jax.P(None, 'sequence'))
  x = jax.ShapeDtypeStruct((1, T, N, H), jnp.bfloat16, sharding=runs)
  params = {}
  if name == 'performer':
    params = dict(features=orthogonal_features(jax.random.key(0), M, H).astype(jnp.bfloat16))

  def loss(query, key, value):
    output = sharding.sharded_attention(name, query, key, value, mesh=mesh, axis_name='sequence',
                                        params=params, **CALLS[name])  # yapf: disable
    return jnp.sum(output.astype(jnp.float32)) if gradient else output

  function = jax.grad(loss, argnums=(0, 1, 2)) if gradient else loss
  return jax.jit(function).lower(x, x, x).compile()


def main() -> int:
  for name in CALLS:
    for gradient in (False, True):
      program = compiled(name, gradient)
      pairs = {pair for _, _, between in sent(program) for pair in between}
      print(json.dumps(dict(name=name,
                            gradient=gradient,
                            sent=largest(program),
                            neighbours=all(abs(a - b) == 1 for a, b in pairs),
                            megabytes=program.memory_analysis().temp_size_in_bytes / 1e6)),
            flush=True)  # yapf: disable
  return 0


if __name__ == '__main__':
  sys.exit(main())
