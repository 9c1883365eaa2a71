"""How long loading a large checkpoint takes, and how much memory: random weights in a T5's shape, written and loaded.

  python -m experiments.loading [--gin.loading.shape="'xl'"] [--gin.loading.dtype="'float32'"]

The file is float32 in Hugging Face's layout (XL: 11 GB in the output folder, removed at the end) and is dropped from the
page cache before it is read.
"""
import os
import shutil
import threading
import time

from flax import traverse_util
import gin
import jax
import numpy as np

from experiments import command
import speculative
from speculative.checkpoints import huggingface
from speculative.models import t5
from speculative.report import results


@gin.configurable
def loading(output_dir, dry_run=False, *, shape='xl', dtype=None, keep=False):
  """Writes, loads, prints and adds a line to results.jsonl.

  Args:
    shape: a key of `t5.SHAPES`.
    dtype: to load in, 'float32' or 'bfloat16'; None: as `load_model`.
    keep: leave the checkpoint in the output folder.
  """
  if shape not in t5.SHAPES:
    raise command.UsageError(f'loading.shape = {shape!r}: there are {", ".join(t5.SHAPES)}')
  config = t5.T5Config(**t5.SHAPES[shape])
  shapes = huggingface.shapes_of(t5.init_params, config)
  elements = sum(int(np.prod(s)) for s in shapes.values())
  largest = 4 * max(int(np.prod(s)) for s in huggingface.shapes_by_name(config).values())
  dtype = huggingface.resolve_dtype(dtype)
  os.makedirs(output_dir, exist_ok=True)
  free = shutil.disk_usage(output_dir).free
  if free < 4.1 * elements:
    raise command.UsageError(f'{output_dir}: the checkpoint takes {4 * elements / 1e9:.1f} GB, there are {free / 1e9:.1f}')
  if dry_run:
    return
  folder = os.path.join(output_dir, f'random_{shape}')
  try:
    start = time.perf_counter()
    params = traverse_util.unflatten_dict({path: _Random(s) for path, s in shapes.items()}, sep='/')
    speculative.save_model(speculative.Model(config, params), folder, overwrite=True)
    written = time.perf_counter() - start
    _forget(folder)
    with _Memory() as memory:
      start = time.perf_counter()
      model = jax.block_until_ready(speculative.load_model(folder, dtype).params)
      seconds = time.perf_counter() - start
  finally:
    if not keep:
      shutil.rmtree(folder, ignore_errors=True)
  row = {'experiment': 'loading', 'label': 'measured', 'weights': 'random', 'shape': shape, 'parameters': elements,
         'file_bytes': 4 * elements, 'written_seconds': round(written, 1), 'load_seconds': round(seconds, 1),
         'largest_tensor_bytes': largest, 'extra_anonymous_bytes': memory.extra, 'peak_anonymous_bytes': memory.peak,
         'dtype': str(dtype), 'device': jax.devices()[0].device_kind}
  del model
  results.append_jsonl(os.path.join(output_dir, 'results.jsonl'), row)
  print(f'{shape}, {elements / 1e9:.2f} B random parameters, {4 * elements / 1e9:.1f} GB of float32 to {dtype}: '
        f'written in {written:.0f} s, loaded in {seconds:.0f} s ({4e-6 * elements / seconds:.0f} MB/s); anonymous memory '
        f'at most {memory.peak / 1e9:.2f} GB, {memory.extra / 1e9:.2f} GB above the parameters loaded so far '
        f'(largest tensor {largest / 1e9:.2f} GB)')


class _Random:
  """A parameter that is made when it is asked for."""
  dtype = np.dtype('float32')

  def __init__(self, shape):
    self.shape = shape

  def __array__(self, dtype=None, copy=None):
    del dtype, copy
    return np.random.default_rng(0).standard_normal(self.shape, np.float32)


class _Memory:
  """Watches this process' anonymous memory (Linux).

  Attributes:
    peak: the most, in bytes, above what was there before.
    extra: the most above the JAX arrays of the moment, which on a CPU are anonymous memory too.
  """

  def __enter__(self):
    self.peak = self.extra = 0
    self._stop = threading.Event()
    self._before = self._anonymous(), self._arrays()
    self._thread = threading.Thread(target=self._watch)
    self._thread.start()
    return self

  def __exit__(self, *error):
    self._stop.set()
    self._thread.join()

  def _watch(self):
    while not self._stop.wait(0.01):
      anonymous = self._anonymous() - self._before[0]
      self.peak = max(self.peak, anonymous)
      self.extra = max(self.extra, anonymous - (self._arrays() - self._before[1]))

  @staticmethod
  def _anonymous():
    with open('/proc/self/status', encoding='ascii') as f:
      return next(1024 * int(line.split()[1]) for line in f if line.startswith('RssAnon'))

  @staticmethod
  def _arrays():
    on_host = jax.default_backend() == 'cpu'
    return sum(a.nbytes for a in jax.live_arrays()) if on_host else 0


def _forget(folder):
  """Drops a folder's files from the page cache."""
  for name in os.listdir(folder):
    with open(os.path.join(folder, name), 'rb') as f:
      os.fsync(f.fileno())
      os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == '__main__':
  command.main(loading)
