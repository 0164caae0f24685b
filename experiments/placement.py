"""Which device holds what: a mesh of data, model and sequence axes, and the rules for it.

    data      rows of a batch; and the parameters, of which every device keeps a part (FSDP)
    model     heads of attention and the hidden width of the MLP
    sequence  runs of every sequence; attention passes between them what it must

Nothing here changes a result but for rounding: what is computed is that of one device, and XLA
moves what is needed to where it is needed.
"""

import math
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.config import Config, MESH_AXES

# Axes of a parameter, by the last two names of its path: D model_dim, F mlp_dim, N heads.
_RULES: dict[tuple[str, str], tuple[str | None, ...]] = {
    ('query', 'kernel'): ('data', 'model', None),  # D N H
    ('key', 'kernel'): ('data', 'model', None),
    ('value', 'kernel'): ('data', 'model', None),
    ('out', 'kernel'): ('model', None, 'data'),  # N H D
    ('mlp_in', 'kernel'): ('data', 'model'),  # D F
    ('mlp_in', 'bias'): ('model',),
    ('mlp_out', 'kernel'): ('model', 'data'),  # F D
    ('embedding', 'table'): ('model', 'data'),  # V D
    ('dense', 'kernel'): ('data', 'model'),  # D V
}


def make_mesh(config: Config) -> Mesh | None:
  """The mesh of config.mesh over the first devices. Where it names none: of several processes all
  devices along data, of one process None.

  Raises:
    ValueError: there are too few devices; or several processes have devices that it leaves out, or
      that cannot share a batch.
  """
  sizes, devices, several = config.mesh_axes, jax.devices(), jax.process_count() > 1
  if not sizes and not several:
    return None
  if not sizes and config.batch_size % len(devices):
    raise ValueError(f'mesh must say how {jax.process_count()} processes share a run, as data:2: '
                     f'batch_size={config.batch_size} is no multiple of their {len(devices)} '
                     'devices')
  sizes = sizes or {'data': len(devices)}
  number = math.prod(sizes.values())
  if several and number < len(devices):
    raise ValueError(
        f'mesh={config.mesh} uses {number} devices; the {jax.process_count()} processes '
        f'have {len(devices)}, and all must be used')
  if number > len(devices):
    raise ValueError(f'mesh={config.mesh} needs {number} devices; there are {len(devices)}. On CPU '
                     f'XLA_FLAGS=--xla_force_host_platform_device_count={number} makes as many')
  shape = tuple(sizes.get(name, 1) for name in MESH_AXES)
  return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES),
                       devices=devices[:number])  # yapf: disable


def _fitting(mesh: Mesh, shape: tuple[int, ...], names: tuple[str | None, ...]) -> PartitionSpec:
  """names where they divide an axis; the last axes are not cut where there are fewer names."""
  names += (None,) * (len(shape) - len(names))
  return PartitionSpec(
      *(name if name and n % mesh.shape[name] == 0 else None for name, n in zip(names, shape)))


def constrain(mesh: Mesh | None, x: Array, *names: str | None) -> Array:
  """x with its axes cut along those of the mesh, where they divide it."""
  if mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, _fitting(mesh, x.shape, names)))


def constrain_batch(mesh: Mesh | None, batch: dict[str, Array]) -> dict[str, Array]:
  """A batch [B, ...] or [B, T] with its rows and tokens cut."""
  return {name: constrain(mesh, x, *('data', 'sequence')[:x.ndim]) for name, x in batch.items()}


def placed(mesh: Mesh | None, abstract: Any) -> Any:
  """The shapes of a state, with where each leaf lives; as they are without a mesh.

  A leaf of the optimiser lives where its parameter does, whose path its own ends with.
  """
  if mesh is None:
    return abstract

  def place(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    names = tuple(str(getattr(key, 'key', '')) for key in path[-2:])
    spec = _fitting(mesh, leaf.shape, _RULES.get(names, ()))  # type: ignore[arg-type]
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

  return jax.tree_util.tree_map_with_path(place, abstract)


def shardings(mesh: Mesh | None, abstract: Any) -> Any:
  """Where each leaf of `placed` lives, as jit takes it; None without a mesh."""
  return None if mesh is None else jax.tree.map(lambda leaf: leaf.sharding, abstract)
