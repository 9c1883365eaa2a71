"""Parameters from files onto devices, one at a time: each device's part is read by itself, in the dtype that is kept."""
import functools
import sys

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from rich import console
from rich import progress

from speculative import sharding

_CHUNK = 1 << 20  # bytes read at a time; what is transposed should fit into caches
_SHOW = 1 << 30  # bytes from which on the progress is shown


def place(config, shapes, read, dtype, mesh=None):
  """The parameter tree.

  Args:
    config: the model's.
    shapes: {path: shape}, in the order in which they are read.
    read: read(path, index) → NumPy array of the dtype, the parameter's part at `index`, a tuple of slices with start and
      stop.
    dtype: NumPy dtype.
    mesh: see `sharding.param_shardings`; a host reads only what its own devices hold. None: the default device.

  Raises:
    ValueError: the mesh does not fit the model, or the model the devices' memory; nothing has been read.
  """
  shardings = sharding.param_shardings(config, shapes, mesh) if mesh is not None else {}
  sharding.check_fits(config, shapes, dtype.itemsize, mesh)
  total = sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize
  params = {}
  with progress.Progress(
      progress.TextColumn('loading'), progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn(),
      progress.TimeRemainingColumn(), console=console.Console(stderr=True), transient=True,
      disable=total < _SHOW or not sys.stderr.isatty()) as bar:
    task = bar.add_task('', total=total)
    for path, shape in shapes.items():
      @functools.lru_cache  # replicas are read once
      def part(*bounds, path=path):
        array = read(path, tuple(slice(*b) for b in bounds))
        bar.advance(task, array.nbytes)
        return array

      def callback(index, shape=shape, part=part):
        return part(*(s.indices(size)[:2] for s, size in zip(index, shape)))

      if mesh is None:
        params[path] = jnp.asarray(part(*((0, size) for size in shape)))
      else:
        params[path] = jax.make_array_from_callback(shape, shardings[path], callback)
      jax.block_until_ready(params[path])  # before the next, or many would be in memory twice
  return traverse_util.unflatten_dict(params, sep='/')


def rows_at_a_time(read, index, itemsize, multiple=1):
  """Yields (first row, rows of the array) of the part at `index`, about a MB each.

  Args:
    read: read(index) → NumPy array.
    index: a slice for each axis, with start and stop.
    itemsize: bytes of an element.
    multiple: each yields this many rows, or a multiple, which the part's rows must be.
  """
  rows, *rest = index
  width = int(np.prod([s.stop - s.start for s in rest])) * itemsize * multiple
  step = multiple * max(1, _CHUNK // max(width, 1))
  for start in range(rows.start, rows.stop, step):
    yield start - rows.start, read((slice(start, min(start + step, rows.stop)), *rest))
