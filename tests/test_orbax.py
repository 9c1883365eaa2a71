"""Checkpoints of our own training: written on any number of devices, read on any other."""
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import speculative
from speculative.checkpoints import orbax
from speculative.data.vocabulary import Vocabulary
from speculative.models import t5

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VOCABULARY = os.path.join(ROOT, 'tests', 'data', 'vocabulary', 'spiece.model')
CONFIG = t5.T5Config(vocab_size=128, d_model=32, d_ff=256, num_heads=4, d_kv=8, num_encoder_layers=1, num_decoder_layers=1)


@functools.lru_cache
def params_of(step):
  return t5.init_params(CONFIG, jax.random.key(step))


def save(folder, step, params):
  with ocp.CheckpointManager(folder) as manager:
    manager.save(step, args=ocp.args.StandardSave({'params': params, 'state': {'count': np.int32(step)}}))


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """Steps 5 and 12, as `training.train` writes them."""
  folder = tmp_path_factory.mktemp('run') / 'checkpoints'
  orbax.write_config(folder, CONFIG, Vocabulary(VOCABULARY))
  for step in (5, 12):
    save(folder, step, params_of(step))
  return folder


@pytest.fixture
def folder(written, tmp_path):
  return shutil.copytree(written, tmp_path / 'my run')


def test_a_step_or_the_latest(folder, monkeypatch):
  shutil.copytree(folder / '5', folder / '13.orbax-checkpoint-tmp')  # being written
  monkeypatch.chdir(folder.parent)
  for path, step in ((folder, 12), ('my run/', 12), (folder / '5', 5)):
    model = speculative.load_model(path, 'float32')
    assert model.config == CONFIG and model.vocabulary.fingerprint == Vocabulary(VOCABULARY).fingerprint
    jax.tree.map(np.testing.assert_array_equal, model.params, params_of(step))
  model = speculative.load_model(folder, 'bfloat16')
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype('bfloat16')), model.params, params_of(12))


_SAVE = """
import sys, jax, numpy as np
from tests import test_orbax
from speculative.checkpoints import orbax
assert jax.device_count() == 8
sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ('data',)), jax.sharding.PartitionSpec('data'))
put = lambda a: jax.device_put(a, sharding if a.shape[0] % 8 == 0 else sharding.update(spec=()))
orbax.write_config(sys.argv[1], test_orbax.CONFIG)
test_orbax.save(sys.argv[1], 7, jax.tree.map(put, test_orbax.params_of(7)))
"""
_LOAD = """
import sys, jax, numpy as np, speculative
from speculative import sharding
from tests import test_orbax
assert jax.device_count() == 4
params = speculative.load_model(sys.argv[1], 'float32').params
jax.tree.map(np.testing.assert_array_equal, params, test_orbax.params_of(7))
params = speculative.load_model(sys.argv[1], 'float32', mesh=sharding.make_mesh(2)).params
jax.tree.map(np.testing.assert_array_equal, params, test_orbax.params_of(7))
wi = params['decoder']['layer_0']['mlp']['wi']
assert wi.addressable_shards[0].data.shape == (32, 256), wi.sharding
"""


def test_written_on_8_devices_read_on_1_and_on_4(tmp_path):
  def run(code, devices):
    flags = f'--xla_force_host_platform_device_count={devices}'
    result = subprocess.run([sys.executable, '-c', code, tmp_path / 'run'], cwd=ROOT, capture_output=True, text=True,
                            env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'})
    assert result.returncode == 0, result.stderr
  run(_SAVE, 8)
  jax.tree.map(np.testing.assert_array_equal, speculative.load_model(tmp_path / 'run', 'float32').params, params_of(7))
  run(_LOAD, 4)


def test_damage(folder):
  file = folder / orbax.CONFIG
  config = json.loads(file.read_text())

  def fails(message, kind=ValueError):
    with pytest.raises(kind, match=message):
      speculative.load_model(folder)
  file.write_text(json.dumps(config | {'d_ff': 128}))
  fails('parameter decoder/layer_0/mlp/wi: the checkpoint holds')
  file.write_text(json.dumps(config | {'num_decoder_layers': 2}))
  fails('parameter decoder/layer_1/.* the checkpoint holds nothing')
  file.write_text(json.dumps(config | {'tied': True}))
  fails('parameter head: .* asks for nothing')
  file.write_text(json.dumps(config | {'layers': 3}))
  fails('not the configuration of a model')
  file.write_text(json.dumps(config | {'architecture': 'rnn'}))
  fails('architecture must be one of t5, gpt')
  file.unlink()
  fails('model_config.json: no such file', FileNotFoundError)
  file.write_text(json.dumps(config))
  for path in (folder / '12' / 'default').iterdir():
    shutil.rmtree(path) if path.is_dir() else path.write_bytes(b'')
  fails('12/default: ')


def test_what_training_writes_is_a_model(tmp_path):
  """`train` itself: after its last step, the checkpoint is the model that it returns."""
  from speculative.training import train as training
  rng = np.random.default_rng(0)
  examples = [training.Example(rng.integers(3, 100, 6).tolist(), rng.integers(3, 100, 4).tolist()) for _ in range(8)]
  config = dataclasses.replace(CONFIG, num_encoder_layers=1)
  params = training.train(config, params_of(0), [('task', examples, 1)], [('task', examples, 1)], output_dir=tmp_path,
                          steps=2, learning_rate=1e-3, warmup=1, decay=1, tokens_per_batch=256, buckets=(24,),
                          log=lambda entry: None, vocabulary=Vocabulary(VOCABULARY))
  model = speculative.load_model(tmp_path / 'checkpoints', 'float32')
  jax.tree.map(np.testing.assert_array_equal, model.params, params)
  assert model.vocabulary is not None
