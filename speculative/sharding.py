"""How parameters, caches and the loop's variables are split over the devices of a mesh.

A mesh has the axes `data` (rows of a batch) and `model` (heads, hidden units, rows of the embedding). Columns of every
matrix are ordered so that a split keeps together what belongs together: a head's q, k and v, a unit's two gates.
"""
import functools
import math
from typing import NamedTuple

import jax
from jax.experimental import layout as layouts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from speculative.models import kv_cache

DATA, MODEL = 'data', 'model'
# By the parameter's name, or its parent's where that is a dense layer's weight and bias.
_COLUMNS = 'qkv', 'q', 'kv', 'wi', 'head'
_ROWS = 'out', 'wo'


def make_mesh(model=None, devices=None):
  """A mesh [data, model].

  Args:
    model: devices that share one copy of the parameters. None: all.
    devices: list of `jax.Device`. None: all there are.

  Raises:
    ValueError: `model` does not divide the number of devices; this process has none of them.
  """
  devices = jax.devices() if devices is None else devices
  model = model or len(devices)
  if len(devices) % model:
    raise ValueError(f'model = {model} does not divide the {len(devices)} devices')
  processes = {device.process_index for device in devices}
  if jax.process_count() > 1 and jax.process_index() not in processes:
    raise ValueError(f'process {jax.process_index()} has none of the {len(devices)} devices: start no more processes than '
                     'there are devices, or leave this one out')
  return jax.sharding.Mesh(np.reshape(devices, (-1, model)), (DATA, MODEL))


def param_shardings(config, shapes, mesh):
  """Where each parameter of a model goes.

  Args:
    config: `T5Config` or `GPTConfig`.
    shapes: {path: shape} of its parameters.
    mesh: with an axis `model`; over all others parameters are replicated.

  Returns:
    {path: NamedSharding}.

  Raises:
    ValueError: no mesh, none with such an axis, or one that would part a head or a block of hidden units.
  """
  if not isinstance(mesh, jax.sharding.Mesh):
    raise ValueError(f'mesh = {mesh!r}: must be a jax.sharding.Mesh (speculative.sharding.make_mesh)')
  if MODEL not in mesh.axis_names:
    raise ValueError(f'the mesh has the axes {", ".join(map(str, mesh.axis_names))}; parameters are split over one '
                     f'named {MODEL!r} (speculative.sharding.make_mesh)')
  n = mesh.shape[MODEL]
  for count, name in _units(config):
    if count % n:
      raise ValueError(f'a mesh with {n} devices along {MODEL!r} does not divide the {count} {name}')
  mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names)  # XLA's choice of the rest, whatever the caller's mesh says
  return {path: NamedSharding(mesh, PartitionSpec(*_axes(path, shape, n))) for path, shape in shapes.items()}


def check_fits(config, shapes, itemsize, mesh=None):
  """Raises ValueError, by how much and what mesh would do, if parameters do not fit into the devices' free memory.

  Args:
    config, shapes, mesh: as for `param_shardings`; None: one device.
    itemsize: bytes of an element.
  """
  free = free_memory((jax.local_devices() if mesh is None else mesh.local_devices)[0])
  if free is None:
    return
  whole = itemsize * sum(math.prod(shape) for shape in shapes.values())
  need = whole
  if mesh is not None:
    where = param_shardings(config, shapes, mesh)
    need = itemsize * sum(math.prod(where[path].shard_shape(shape)) for path, shape in shapes.items())
  if need > free:
    enough = [n for n in range(1, config.num_heads + 1)
              if all(count % n == 0 for count, _ in _units(config)) and whole / n < free]
    advice = f'make_mesh({enough[0]}) of speculative.sharding would do' if enough else 'no mesh of such devices would do'
    raise ValueError(f'the parameters take {need / 2**30:.2f} GiB of a device, of which {free / 2**30:.2f} GiB are free: '
                     f'{(need - free) / 2**30:.2f} GiB too much; {advice}')


def free_memory(device):
  """Bytes; None where the device does not tell, as CPUs."""
  stats = device.memory_stats() or {}
  return stats['bytes_limit'] - stats.get('bytes_in_use', 0) if 'bytes_limit' in stats else None


def _units(config):
  """What a split must keep whole: ((how many, what), …)."""
  # Gate and linear columns of a gated model alternate in blocks.
  block = config.gate_block if getattr(config, 'gated', False) else 1
  return (config.num_heads, 'attention heads'), (config.d_ff // block, f'blocks of {block} hidden units')


def _axes(path, shape, n):
  """The mesh axis of every axis of a parameter."""
  names = path.split('/')
  if names[-1] == 'weight':
    names = names[:-1]
  if names[-1] == 'bias' and names[-2] in _COLUMNS:
    return (MODEL,)
  if names[-1] in _COLUMNS:
    axis = 1
  elif names[-1] in _ROWS or names[-1] == 'embedding':
    axis = 0
  else:
    return ()
  if names[-1] in ('head', 'embedding') and shape[axis] % n:
    axis = 1 - axis  # 32,100 rows over 8 devices
    if shape[axis] % n:
      return ()
  return (MODEL,) if axis == 0 else (None, MODEL)


class Layout(NamedTuple):
  """Where a decoding run's arrays are: static, a part of a compiled program's key.

  Attributes:
    mesh: `jax.sharding.Mesh` with the axes `data` and `model`.
    split: whether the target's parameters are split over `model`, and the drafter's.
  """
  mesh: jax.sharding.Mesh
  split: tuple[bool, bool]

  def shardings(self, tree, split=False):
    """Where arrays with the batch axis first go: rows over `data`; and, if `split`, heads of keys and values over `model`.
    A batch that `data` does not divide is replicated."""
    def at(array, *more):
      rows = DATA if array.shape[0] % self.mesh.shape[DATA] == 0 else None
      return NamedSharding(self.mesh, PartitionSpec(rows, *more))

    def one(node):
      if not isinstance(node, kv_cache.KVCache):
        return at(node)
      heads = (MODEL,) if split else ()
      return kv_cache.KVCache(*jax.tree.map(lambda a: at(a, *heads), (node.self_kv, node.cross_kv)),
                              jax.tree.map(at, node.encoder_mask))
    return jax.tree.map(one, tree, is_leaf=lambda node: isinstance(node, kv_cache.KVCache))

  def constrain(self, tree, split=False):
    """Says so inside a jitted function."""
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, self.shardings(tree, split))

  def replicated(self, tree):
    """The arrays on every device, whichever hosts these belong to; what comes from a host must be the same on all."""
    return _replicate(self.mesh)(tree)


@functools.lru_cache(maxsize=None)
def _replicate(mesh):
  """One jitted function a mesh, or every call would compile anew. device_put refuses random keys where devices belong to
  other hosts."""
  return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))


def best_layouts(params):
  """`in_shardings` that leave the layout in memory of arrays, or of shapes with shardings, to the compiler."""
  return jax.tree.map(lambda a: layouts.Format(layouts.Layout.AUTO, a.sharding), params)


def layout_of(target_params, draft_params=()):
  """The `Layout` that parameters imply; None on a single device.

  Raises:
    ValueError: the drafter's parameters are on other devices than the target's.
  """
  def shardings(params):
    return [leaf.sharding for leaf in jax.tree.leaves(params)
            if getattr(leaf, 'committed', True) and getattr(leaf, 'sharding', None) is not None]
  target, draft = shardings(target_params), shardings(draft_params)
  mesh = next((s.mesh for s in target if isinstance(s, NamedSharding) and MODEL in s.mesh.axis_names), None)
  devices = set() if mesh is None else set(mesh.devices.flat)
  for sharding in draft:
    if (target and mesh is None and sharding.device_set != target[0].device_set) or (
        mesh is not None and sharding.device_set != devices):
      raise ValueError("the drafter's parameters are not on the target's devices: load it with a mesh of the same ones "
                       '(speculative.sharding.make_mesh(1) copies a small draft to each)')
  if mesh is None or mesh.size == 1:
    return None
  if DATA not in mesh.axis_names:
    raise ValueError(f'the mesh has the axes {", ".join(map(str, mesh.axis_names))}; a batch is split over one named {DATA!r} '
                     '(speculative.sharding.make_mesh)')
  mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
  return Layout(mesh, tuple(not all(s.is_fully_replicated for s in found) for found in (target, draft)))
