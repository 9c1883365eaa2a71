"""Parameters that go onto devices part by part: same values as a whole, on any mesh; what does not fit is refused first."""
import dataclasses
import functools
import os
import subprocess
import sys

from flax import traverse_util
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import speculative
from speculative import sharding
from speculative.checkpoints import huggingface
from speculative.checkpoints import streaming
from speculative.checkpoints import t5x
from speculative.models import decoder_only
from speculative.models import t5
from tests import test_t5x

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DATA = os.path.join(ROOT, 'tests', 'data')
# Four blocks of hidden units; 100 rows, which four devices divide and eight do not.
T5 = t5.T5Config(vocab_size=100, d_model=48, d_ff=512, num_heads=8, d_kv=8, num_encoder_layers=1, num_decoder_layers=2,
                 eos_id=-1)
GPT = decoder_only.GPTConfig(vocab_size=100, d_model=64, d_ff=96, num_heads=8, num_layers=2, max_positions=40, eos_id=-1)


@functools.lru_cache
def model_of(config):
  init = t5.init_params if isinstance(config, t5.T5Config) else decoder_only.init_params
  return speculative.Model(config, init(config, jax.random.key(0)))


def same(params, others):
  jax.tree.map(np.testing.assert_array_equal, params, others)


@pytest.mark.parametrize('chunk', [1, 700])
@pytest.mark.parametrize('config', [T5, dataclasses.replace(T5, gated=False, tied=True), GPT])
def test_parts_make_the_whole(config, chunk, tmp_path, monkeypatch):
  """However few rows are read at a time."""
  model = model_of(config)
  speculative.save_model(model, tmp_path / 'model')
  monkeypatch.setattr(streaming, '_CHUNK', chunk)
  same(speculative.load_model(tmp_path / 'model', 'float32').params, model.params)
  same(speculative.load_model(tmp_path / 'model', 'bfloat16').params,
       jax.tree.map(lambda a: a.astype('bfloat16'), model.params))


def test_several_files(tmp_path, monkeypatch):
  """Weights are written in files of bounded size, as Transformers shards them."""
  monkeypatch.setattr(huggingface, '_SHARD', 100_000)
  model = model_of(T5)
  speculative.save_model(model, tmp_path / 'model')
  names = sorted(os.listdir(tmp_path / 'model'))
  n = sum(name.endswith('.safetensors') for name in names)
  assert n > 3 and f'model-00001-of-{n:05d}.safetensors' in names and 'model.safetensors.index.json' in names
  assert not any('tmp' in name for name in names)
  for name in names:
    if name.endswith('.safetensors'):
      tensors = load_file(tmp_path / 'model' / name)
      assert len(tensors) == 1 or sum(a.nbytes for a in tensors.values()) <= 100_000
  same(speculative.load_model(tmp_path / 'model', 'float32').params, model.params)


def test_a_mesh_that_does_not_fit():
  devices = np.array(jax.devices() * 24)

  def check(config, n, **kwargs):
    mesh = jax.sharding.Mesh(devices[:n], kwargs.get('axes', ('model',)))
    sharding.param_shardings(config, huggingface.shapes_of(t5.init_params, config), mesh)

  with pytest.raises(ValueError, match="3 devices along 'model' does not divide the 8 attention heads"):
    check(T5, 3)
  with pytest.raises(ValueError, match="8 devices along 'model' does not divide the 4 blocks of 128 hidden units"):
    check(T5, 8)
  with pytest.raises(ValueError, match="axes batch; parameters are split over one named 'model'"):
    check(T5, 4, axes=('batch',))
  with pytest.raises(ValueError, match='model = 3 does not divide the 4 devices'):
    sharding.make_mesh(3, list(devices[:4]))


_ON_8_DEVICES = """
import sys, jax, numpy as np, speculative
from speculative import sharding
from speculative.checkpoints import huggingface, streaming
from tests import test_streaming as test
assert jax.device_count() == 8
jax.config.update('jax_disable_most_optimizations', True)
where = sys.argv[1]
read = []
original = streaming.rows_at_a_time
def counting(*args):
  for at, rows in original(*args):
    read.append(rows.nbytes)
    yield at, rows
streaming.rows_at_a_time = counting
mesh = sharding.make_mesh(4)
model = speculative.load_model(where, 'float32', mesh)
whole = speculative.load_model(where, 'float32')
test.same(model.params, whole.params)
total = sum(a.nbytes for a in jax.tree.leaves(whole.params))
if sys.argv[2] == 't5':
  assert sum(read) == 2 * total, (sum(read), total)  # each file once a load, though there are two replicas
for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
  part = leaf.addressable_shards[0].data.size
  whole_leaf = leaf.size
  name = path[-1].key
  split = (name in ('qkv', 'q', 'kv', 'wi', 'out', 'wo', 'head', 'embedding', 'weight')
           or name == 'bias' and path[-2].key in ('qkv', 'wi'))
  assert part * (mesh.shape['model'] if split else 1) == whole_leaf, (path, part, whole_leaf)
rng = np.random.default_rng(0)
inputs = rng.integers(3, 60, (4, 9)).astype(np.int32)
config = speculative.DecodeConfig(gamma=3, max_decode_len=20)
alone = speculative.autoregressive_decode(whole, inputs, config)
result = speculative.speculative_decode(model, model, inputs, config)
np.testing.assert_array_equal(result.tokens, alone.tokens)
np.testing.assert_array_equal(speculative.autoregressive_decode(model, inputs, config).tokens, alone.tokens)
"""


@pytest.mark.parametrize('kind', ['t5', *(pytest.param(kind, marks=pytest.mark.slow) for kind in ('gpt', 't5x'))])
def test_a_mesh_of_8_devices(kind, tmp_path):
  """Each device has its part, from Hugging Face's and T5X's files; tokens are those of one device."""
  path = tmp_path / 'model'
  model = model_of(GPT if kind == 'gpt' else T5)
  if kind == 't5x':
    path.mkdir()
    tree = traverse_util.flatten_dict(t5x.to_params(model), sep='.')
    test_t5x.write(path, {name: np.ascontiguousarray(array) for name, array in tree.items()})
  else:
    speculative.save_model(model, path)
  result = subprocess.run(
      [sys.executable, '-c', _ON_8_DEVICES, path, kind], cwd=ROOT, capture_output=True, text=True, check=False,
      env=os.environ | {'XLA_FLAGS': '--xla_force_host_platform_device_count=8', 'JAX_PLATFORMS': 'cpu'})
  assert result.returncode == 0, result.stderr


def test_what_is_ignored_is_listed(tmp_path):
  folder = os.path.join(DATA, 'huggingface', 't5_tied_unscaled')
  assert speculative.load_model(folder).ignored == tuple(sorted(
      name for name in load_file(os.path.join(folder, 'model.safetensors'))
      if name != 'shared.weight' and '.block.' not in name and 'final_layer_norm' not in name))
  ignored = speculative.load_model(os.path.join(DATA, 't5x', 't5_v1_1')).ignored
  assert 'state.step' in ignored and all(name.startswith('state.') for name in ignored) and len(ignored) > 20
