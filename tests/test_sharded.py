"""Decoding on several devices, of one process and of two: the same tokens as on one device."""
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from speculative import sharding
from speculative.checkpoints import huggingface
from speculative.checkpoints import streaming
from speculative.models import t5

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Every process makes the same models. 8 heads and 8 blocks of hidden units for 8 devices; the draft has 3 heads.
PROGRAM = '''
import sys
from flax import traverse_util
import numpy as np
import jax
processes, index, port = map(int, sys.argv[1:4])
if processes > 1:
  jax.distributed.initialize(f'localhost:{port}', processes, index)
import speculative
from speculative import sharding
from speculative.checkpoints import streaming
from speculative.models import t5

def build(heads, seed, mesh):
  config = t5.T5Config(vocab_size=64, d_model=32, d_ff=1024, num_heads=heads, d_kv=8, num_encoder_layers=1,
                       num_decoder_layers=2, eos_id=1)
  params = jax.device_get(jax.jit(lambda: t5.init_params(config, jax.random.key(seed)))())
  flat = traverse_util.flatten_dict(params, sep='/')
  shapes = {path: leaf.shape for path, leaf in flat.items()}
  params = streaming.place(config, shapes, lambda path, index: flat[path][index], np.dtype('float32'), mesh)
  return speculative.Model(config, params)

inputs = np.random.default_rng(0).integers(2, 64, (8, 9)).astype(np.int32)
config = speculative.DecodeConfig(gamma=3, max_decode_len=20, temperature=np.tile([0., 1.], 4), min_decode_len=12)
results = {}
for name in sys.argv[4].split():
  if name == 'one':
    meshes = None, None
  else:
    meshes = sharding.make_mesh(int(name)), sharding.make_mesh(1)
  target, draft = build(8, 0, meshes[0]), build(3, 1, meshes[1])
  result = speculative.speculative_decode(target, draft, inputs, config)
  plain = speculative.autoregressive_decode(target, inputs, config)
  results[name] = result.tokens
  results[f'{name}_plain'] = plain.tokens
  # A batch that the mesh does not divide.
  results[f'{name}_odd'] = speculative.speculative_decode(
      target, draft, inputs[:3], speculative.DecodeConfig(gamma=2, max_decode_len=9)).tokens
if index == 0:
  np.savez(sys.argv[5], **results)
'''


def run(tmp_path, meshes, processes, devices):
  """The program's arrays, {name: tokens}."""
  with socket.socket() as s:
    s.bind(('localhost', 0))
    port = s.getsockname()[1]
  path = tmp_path / 'tokens.npz'
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
                      'PYTHONPATH': ROOT}
  started = [subprocess.Popen([sys.executable, '-c', PROGRAM, str(processes), str(i), str(port), meshes, str(path)],
                              env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
             for i in range(processes)]
  outputs = [process.communicate(timeout=600)[0] for process in started]
  assert all(process.returncode == 0 for process in started), '\n'.join(outputs)[-3000:]
  return dict(np.load(path))


@pytest.mark.slow
@pytest.mark.parametrize('processes,meshes', [(1, '1 2'), (2, '8')])
def test_the_same_tokens_on_8_devices(processes, meshes, tmp_path):
  """Temperatures 0 and 1, the target split over some of them, the draft copied to each."""
  one = run(tmp_path, 'one', 1, 1)
  many = run(tmp_path, meshes, processes, 8 // processes)
  for kind in ('', '_plain', '_odd'):
    for mesh in meshes.split():
      np.testing.assert_array_equal(many[mesh + kind], one['one' + kind], err_msg=mesh + kind)
  assert len(np.unique(one['one'])) > 10


def test_devices_that_do_not_fit():
  device = jax.devices()[0]
  mesh = jax.sharding.Mesh(np.array([[device]]), ('data', 'model'))
  here = jax.device_put(np.zeros(2), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
  assert sharding.layout_of([here], [here]) is None  # one device

  class Elsewhere:
    committed = True
    class sharding:
      device_set = {'another'}
      is_fully_replicated = True
  with pytest.raises(ValueError, match="the drafter's parameters are not on the target's devices"):
    sharding.layout_of([here], [Elsewhere])


def test_a_model_that_does_not_fit(monkeypatch):
  """Before it is read, by how much, and what mesh would do."""
  config = t5.T5Config(**t5.SHAPES['xxl'])
  shapes = huggingface.shapes_of(t5.init_params, config)
  monkeypatch.setattr(sharding, 'free_memory', lambda device: 8 * 2**30)
  def read(path, index):
    raise AssertionError('read')
  with pytest.raises(ValueError, match=r'take 20\.\d+ GiB of a device, .* 8\.00 GiB are free: 12\.\d+ GiB too much; make_mesh\(4\)'):
    streaming.place(config, shapes, read, np.dtype('float16'))
  monkeypatch.setattr(sharding, 'free_memory', lambda device: 2**20)
  with pytest.raises(ValueError, match='no mesh of such devices would do'):
    sharding.check_fits(config, shapes, 4)
