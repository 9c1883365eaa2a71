"""T5X checkpoints: T5X's own logits; latest steps, scanned layers, bfloat16, damage.

tests/data/t5x: written by T5X itself (random weights), with the float32 logits of its network. t5_v1_0, t5_v1_1,
v1_1_bfloat16 (`save_dtype`) and scanned_v1_1 (`scalable_t5`) by its `Checkpointer`; v1_1_orbax, v1_1_ocdbt and
scanned_v1_1_ocdbt by the Orbax manager that its `train` makes: the first with `use_ocdbt=False`, T5X's default from
February to July of 2024, the others with today's default. The arrays of the optimizer state are left out where each is a
folder (the index still lists them), and so are `_sharding`, `array_metadatas` and `commit_success.txt`.
"""
import http.server
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from urllib import parse

from flax import serialization
from flax import traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
import tensorstore as ts

import speculative
from speculative.checkpoints import streaming
from speculative.checkpoints import t5x
from speculative.models import t5

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data')
NAMES = 't5_v1_0', 't5_v1_1'


def fixture(name):
  return os.path.join(DATA, 't5x', name)


def check_logits(model, folder):
  with np.load(os.path.join(folder, 'expected.npz')) as f:
    e = dict(f)
  logits = jax.jit(t5.T5(model.config).apply)({'params': model.params}, e['encoder_input_tokens'],
                                              e['decoder_input_tokens'])
  np.testing.assert_allclose(logits[:, e['logit_positions']], e['logits'], atol=1e-4 * np.ptp(e['logits']))


@pytest.mark.parametrize('name', [*NAMES, 'v1_1_bfloat16', 'scanned_v1_1', 'v1_1_orbax', 'v1_1_ocdbt', 'scanned_v1_1_ocdbt'])
def test_logits_are_those_of_t5x(name):
  check_logits(speculative.load_model(fixture(name), 'float32'), fixture(name))


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
  assert a.config == b.config


def test_saved_as_hugging_face_has_it(tmp_path):
  for name in NAMES:
    model = speculative.load_model(fixture(name), 'float32')
    speculative.save_model(model, tmp_path / name)
    same(speculative.load_model(tmp_path / name, 'float32'), model)


@pytest.fixture
def folder(tmp_path):
  """A copy whose path has a space."""
  shutil.copytree(fixture('t5_v1_1'), tmp_path / 'my model')
  return tmp_path / 'my model'


@pytest.fixture(scope='module')
def model():
  return speculative.load_model(fixture('t5_v1_1'), 'float32')


def test_the_latest_step(folder, model, monkeypatch):
  """By number; unfinished folders, which Orbax and T5X mark behind the number, are not looked at."""
  step = folder / 'checkpoint_1000'
  for other in ('checkpoint_999', 'checkpoint_2000.orbax-checkpoint-tmp-17', 'checkpoint_3000.tmp-1'):
    shutil.copytree(step, folder / other)
    shutil.rmtree(folder / other / 'target.token_embedder.embedding')
  monkeypatch.chdir(folder.parent)
  monkeypatch.setenv('HOME', str(folder.parent))
  for path in (folder, step, f'{folder}/', 'my model', 'my model/checkpoint_1000/', '~/my model'):
    same(speculative.load_model(path, 'float32'), model)
  (folder / 'checkpoint_1000').rename(folder / 'checkpoint_10000')
  same(speculative.load_model(folder, 'float32'), model)


def test_a_state_folder(folder, model):
  """Newer versions put the arrays one level down, and name them in the index without an `optimizer`."""
  step = folder / 'checkpoint_1000'
  tree = serialization.msgpack_restore((step / 'checkpoint').read_bytes())
  names = os.listdir(step)
  (step / 'state').mkdir()
  for name in names:
    (step / name).rename(step / 'state' / name)
  (step / 'state' / 'checkpoint').write_bytes(serialization.msgpack_serialize(
      {'target': tree['optimizer']['target'], 'state': {'step': np.int32(1000)}}))
  for path in (folder, step, step / 'state'):
    same(speculative.load_model(path, 'float32'), model)


def edit_index(folder, change):
  """Rewrites the index, `change`d: it is given the target's tree and changes it."""
  file = folder / 'checkpoint_1000' / 'checkpoint'
  tree = serialization.msgpack_restore(file.read_bytes())
  change(tree['optimizer']['target'])
  file.write_bytes(serialization.msgpack_serialize(tree))


def test_an_index_that_names_another_place(folder, model):
  """The arrays are where the index is, whatever it says of the place where it was written; small ones may be in it."""
  def change(target):
    kernel = target['decoder']['layers_0']['mlp']['wo']['kernel']
    kernel['kvstore'] = {'driver': 'gfile', 'path': 'gs://bucket/model/checkpoint_1000/target.decoder.layers_0.mlp.wo.kernel'}
    target['encoder']['encoder_norm']['scale'] = np.asarray(model.params['encoder']['final_norm']['scale'])
  edit_index(folder, change)
  shutil.rmtree(folder / 'checkpoint_1000' / 'target.encoder.encoder_norm.scale')
  same(speculative.load_model(folder, 'float32'), model)


def stored(name):
  """{name: NumPy array} of a fixture, read by themselves."""
  step = os.path.join(fixture(name), 'checkpoint_1000')
  return {folder.removeprefix('target.'): ts.open({'driver': 'zarr', 'kvstore': {
      'driver': 'file', 'path': os.path.join(step, folder)}}).result().read().result()
          for folder in os.listdir(step) if folder.startswith('target.')}


def write(folder, arrays):
  """A T5X folder of {name: NumPy array}, in T5X's layout."""
  tree = {}
  for name, array in arrays.items():
    spec = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{folder}/target.{name}'}}
    dtype = array.dtype.name
    ts.open(spec | {'metadata': {'shape': array.shape, 'dtype': {'float32': '<f4'}.get(dtype, dtype)}},
            create=True).result().write(array).result()
    node = tree
    *path, last = name.split('.')
    for part in path:
      node = node.setdefault(part, {})
    node[last] = spec
  (folder / 'checkpoint').write_bytes(serialization.msgpack_serialize({'version': 3, 'optimizer': {
      'target': tree, 'state': {'step': np.int32(7)}}}))


def as_t5x(name, array):
  """A parameter of Hugging Face's umT5 under T5X's name, as `t5x/examples/scalable_t5/network.py` has it."""
  if name in ('shared.weight', 'lm_head.weight'):
    return {'shared.weight': ('token_embedder.embedding', array),
            'lm_head.weight': ('decoder.logits_dense.kernel', array.T)}[name]
  for pattern, theirs in {
      r'(\w+)\.final_layer_norm': r'\1.\1_norm.scale',
      r'(\w+)\.block\.(\d+)\.layer\.0\.SelfAttention\.relative_attention_bias': r'\1.layers_\2.relpos_bias.rel_embedding',
      r'(encoder)\.block\.(\d+)\.layer\.0\.SelfAttention\.(.)': r'\1.layers_\2.attention.<\3>.kernel',
      r'(decoder)\.block\.(\d+)\.layer\.0\.SelfAttention\.(.)': r'\1.layers_\2.self_attention.<\3>.kernel',
      r'(decoder)\.block\.(\d+)\.layer\.1\.EncDecAttention\.(.)': r'\1.layers_\2.encoder_decoder_attention.<\3>.kernel',
      r'(\w+)\.block\.(\d+)\.layer\.\d\.DenseReluDense\.(w\w+)': r'\1.layers_\2.mlp.\3.kernel',
      r'(encoder)\.block\.(\d+)\.layer\.0\.layer_norm': r'\1.layers_\2.pre_attention_layer_norm.scale',
      r'(encoder)\.block\.(\d+)\.layer\.1\.layer_norm': r'\1.layers_\2.pre_mlp_layer_norm.scale',
      r'(decoder)\.block\.(\d+)\.layer\.0\.layer_norm': r'\1.layers_\2.pre_self_attention_layer_norm.scale',
      r'(decoder)\.block\.(\d+)\.layer\.1\.layer_norm': r'\1.layers_\2.pre_cross_attention_layer_norm.scale',
      r'(decoder)\.block\.(\d+)\.layer\.2\.layer_norm': r'\1.layers_\2.pre_mlp_layer_norm.scale'}.items():
    match = re.fullmatch(pattern + r'\.weight', name)
    if match:
      theirs = match.expand(theirs)
      for letter, word in dict(q='query', k='key', v='value', o='out').items():
        theirs = theirs.replace(f'<{letter}>', word)
      return theirs, array.T if array.ndim == 2 else array
  raise AssertionError(name)


@pytest.mark.parametrize('scanned', [False, True])
def test_scalable_t5(scanned, tmp_path):
  """The umT5 that Transformers wrote, laid out as T5X's `scalable_t5` has it: its logits are Transformers'."""
  umt5 = os.path.join(DATA, 'huggingface', 'umt5')
  arrays = dict(as_t5x(*item) for item in load_file(os.path.join(umt5, 'model.safetensors')).items()
                if 'embed_tokens' not in item[0])
  model = speculative.load_model(umt5, 'float32')
  for name, array in arrays.items():  # in three dimensions
    if 'attention.' in name:
      heads = model.config.num_heads, model.config.d_kv
      arrays[name] = array.reshape(*heads, -1) if name.endswith('out.kernel') else array.reshape(-1, *heads)
  theirs = traverse_util.flatten_dict(t5x.to_params(model), sep='.')
  assert theirs.keys() == arrays.keys()
  for name, array in theirs.items():
    np.testing.assert_array_equal(array, arrays[name], err_msg=name)
  if scanned:  # along axis 1, `param_scan_axis`
    unrolled = [name for name in arrays if '.layers_' in name]
    for name in [name for name in unrolled if '.layers_0.' in name]:
      stack, rest = name.split('.layers_0.')
      arrays[f'{stack}.{stack}.{rest}'] = np.stack([arrays[f'{stack}.layers_{i}.{rest}'] for i in range(2)], axis=1)
    arrays = {name: array for name, array in arrays.items() if name not in unrolled}
  write(tmp_path, arrays)
  loaded = speculative.load_model(tmp_path, 'float32')
  same(loaded, model)
  check_logits(loaded, umt5)


def test_bfloat16(model, tmp_path):
  """Arrays in bfloat16, and arrays that are to be bfloat16."""
  arrays = stored('t5_v1_1')
  write(tmp_path, {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()})
  loaded = speculative.load_model(tmp_path)
  rounded = speculative.load_model(fixture('t5_v1_1'), 'bfloat16')
  same(speculative.load_model(tmp_path, 'bfloat16'), rounded)
  np.testing.assert_array_equal(rounded.params['embedding'],
                                arrays['token_embedder.embedding'].astype(ml_dtypes.bfloat16))
  assert loaded.config == model.config


@pytest.mark.parametrize('name', NAMES)
def test_parameters_of_t5x_and_back(name):
  """The tree that T5X's network takes is what its checkpoint holds."""
  arrays = stored(name)
  model = speculative.load_model(fixture(name), 'float32')
  theirs = t5x.to_params(model)
  found = {'.'.join(path): array for path, array in traverse_util.flatten_dict(theirs).items()}
  assert found.keys() == arrays.keys()
  for key, array in arrays.items():
    np.testing.assert_array_equal(found[key], array, err_msg=key)
  same(t5x.from_params(jax.tree.map(jnp.asarray, theirs)), model)
  del theirs['decoder']['layers_1']['mlp']['wo']
  with pytest.raises(ValueError, match='T5X parameters: parameter decoder.layers_1.mlp.wo.kernel is missing'):
    t5x.from_params(theirs)


@pytest.mark.parametrize('name', ['t5_v1_1', 'scanned_v1_1'])
def test_traced_parameters(name):
  """`from_params` may be inside of a jit."""
  tree = traverse_util.unflatten_dict(stored(name), sep='.')
  params = jax.jit(lambda tree: t5x.from_params(tree).params)(tree)
  jax.tree.map(np.testing.assert_array_equal, params, speculative.load_model(fixture(name), 'float32').params)


@pytest.mark.parametrize('name', ['t5_v1_1', 'scanned_v1_1', 'scanned_v1_1_ocdbt'])
def test_read_in_parts(name, monkeypatch):
  """Few rows at a time, which may begin within a head."""
  whole = speculative.load_model(fixture(name), 'float32')
  monkeypatch.setattr(streaming, '_CHUNK', 300)
  same(speculative.load_model(fixture(name), 'float32'), whole)


@pytest.mark.parametrize('change,message', [
    (lambda t: t['decoder']['layers_1']['mlp'].pop('wo'), 'decoder.layers_1.mlp.wo.kernel is missing'),
    (lambda t: t['decoder'].pop('layers_0'), 'decoder.layers_0.pre_self_attention_layer_norm.scale is missing'),
    (lambda t: t['decoder']['layers_1'].update(extra={'kernel': np.ones((2, 2), np.float32)}),
     'decoder.layers_1.extra.kernel is unknown'),
    (lambda t: t['encoder']['encoder_norm'].update(scale=np.ones(5, np.float32)), r'encoder_norm.scale has shape \(5,\)'),
    (lambda t: t['encoder']['encoder_norm'].update(scale=np.ones(32, np.int32)), 'encoder_norm.scale is int32'),
    (lambda t: t.pop('token_embedder'), 'token_embedder.embedding is missing')])
def test_damage(folder, change, message):
  edit_index(folder, change)
  with pytest.raises(ValueError, match=f'checkpoint_1000: .*{message}'):
    speculative.load_model(folder)


def test_missing_and_broken_files(folder):
  step = folder / 'checkpoint_1000'
  array = step / 'target.encoder.layers_0.mlp.wo.kernel'
  chunk = array / '0.0'
  chunk.write_bytes(b'no gzip')
  with pytest.raises(ValueError, match='encoder.layers_0.mlp.wo.kernel cannot be read'):
    speculative.load_model(folder)
  (array / '.zarray').write_text('{')
  with pytest.raises(ValueError, match='encoder.layers_0.mlp.wo.kernel cannot be opened'):
    speculative.load_model(folder)
  shutil.rmtree(array)
  with pytest.raises(ValueError, match='encoder.layers_0.mlp.wo.kernel is missing: the index lists it'):
    speculative.load_model(folder)
  (step / 'checkpoint').write_bytes(b'\x93nothing')
  with pytest.raises(ValueError, match='not the index of a T5X checkpoint'):
    speculative.load_model(folder)


@pytest.mark.parametrize('name', ['v1_1_orbax', 'v1_1_ocdbt'])
def test_damaged_orbax(name, tmp_path):
  state = shutil.copytree(fixture(name), tmp_path / name) / 'checkpoint_1000' / 'state'
  if name == 'v1_1_ocdbt':
    (state / 'manifest.ocdbt').write_bytes(b'nothing')
    with pytest.raises(ValueError, match='checkpoint_1000/state: parameter .* cannot be opened'):
      speculative.load_model(tmp_path / name)
  else:
    shutil.rmtree(state / 'target.decoder.layers_0.mlp.wo.kernel')
    with pytest.raises(ValueError, match='parameter decoder.layers_0.mlp.wo.kernel is missing'):
      speculative.load_model(tmp_path / name)
  (state / '_METADATA').write_text('{}')
  with pytest.raises(ValueError, match='state/_METADATA: not the index of a T5X checkpoint'):
    speculative.load_model(tmp_path / name)


class _Bucket(http.server.BaseHTTPRequestHandler):
  """What TensorStore asks of Google Cloud Storage, answered from a folder (the bucket's name is not looked at)."""

  def do_GET(self):
    path, _, query = self.path.partition('?')
    query = parse.parse_qs(query)
    root = self.server.folder
    _, marker, name = path.partition('/o/')
    if not marker:
      found = [os.path.relpath(os.path.join(folder, file), root) for folder, _, files in os.walk(root) for file in files]
      names = sorted(key for key in found if key.startswith(query.get('prefix', [''])[0])
                     and query.get('startOffset', [''])[0] <= key < query.get('endOffset', ['~'])[0])
      return self._answer(json.dumps({'items': [{'name': key} for key in names]}).encode())
    file = os.path.join(root, parse.unquote(name))
    if not os.path.isfile(file):
      return self._answer(b'{}', 404)
    with open(file, 'rb') as f:
      content = f.read()
    if 'Range' in self.headers:
      first, last = self.headers['Range'].removeprefix('bytes=').split('-')
      part = content[int(first):int(last) + 1 if last else None]
      return self._answer(part, 206, f'bytes {first}-{int(first) + len(part) - 1}/{len(content)}')
    return self._answer(content)

  def _answer(self, content, status=200, content_range=None):
    self.send_response(status)
    self.send_header('x-goog-generation', '1')
    self.send_header('Content-Length', str(len(content)))
    if content_range:
      self.send_header('Content-Range', content_range)
    self.end_headers()
    self.wfile.write(content)

  def log_message(self, *args):
    pass


def test_a_bucket(tmp_path, model):
  """gs://: the latest complete step, by TensorStore, from a server that answers as the real one does."""
  root = tmp_path / 'bucket'
  shutil.copytree(fixture('t5_v1_1'), root / 'runs' / 'a')
  shutil.copytree(os.path.join(fixture('v1_1_ocdbt'), 'checkpoint_1000'), root / 'runs' / 'a' / 'checkpoint_2000')  # not finished
  shutil.copytree(os.path.join(fixture('v1_1_ocdbt'), 'checkpoint_1000'), root / 'runs' / 'c' / 'checkpoint_2000')
  (root / 'runs' / 'c' / 'checkpoint_2000' / 'commit_success.txt').write_text('done')
  server = http.server.ThreadingHTTPServer(('localhost', 0), _Bucket)
  server.folder = root
  threading.Thread(target=server.serve_forever, daemon=True).start()
  code = """
import sys, jax, numpy as np, speculative
model = speculative.load_model(sys.argv[1], 'float32')
for url in ('gs://bucket/runs/a', 'gs://bucket/runs/a/', 'gs://bucket/runs/a/checkpoint_1000'):
  found = speculative.load_model(url, 'float32')
  jax.tree.map(np.testing.assert_array_equal, found.params, model.params)
  print(found.name)
model = speculative.load_model(sys.argv[2], 'float32')
found = speculative.load_model('gs://bucket/runs/c', 'float32')
jax.tree.map(np.testing.assert_array_equal, found.params, model.params)
for url in ('gs://bucket/runs/b', 'nowhere://x'):
  try:
    speculative.load_model(url)
  except (FileNotFoundError, ValueError) as e:
    print(e)
"""
  environment = os.environ | {'TENSORSTORE_GCS_HTTP_URL': f'http://localhost:{server.server_port}', 'JAX_PLATFORMS': 'cpu',
                              'GCE_METADATA_ROOT': f'localhost:{server.server_port}'}
  result = subprocess.run([sys.executable, '-c', code, fixture('t5_v1_1'), fixture('v1_1_ocdbt')], env=environment,
                          text=True, check=False, capture_output=True)
  server.shutdown()
  assert result.returncode == 0, result.stderr
  names, errors = result.stdout.splitlines()[:3], result.stdout.splitlines()[3:]
  assert names == ['a', 'a', 'checkpoint_1000']
  assert errors[0].startswith('gs://bucket/runs/b: no T5X checkpoint') and 'nowhere://x: cannot be opened' in errors[1]


def test_the_plugin_without_t5x(monkeypatch):
  monkeypatch.setitem(sys.modules, 't5x', None)
  monkeypatch.delitem(sys.modules, 'speculative.t5x_plugin', raising=False)
  with pytest.raises(ImportError, match='needs T5X .*clone github.com/google-research/t5x'):
    importlib.import_module('speculative.t5x_plugin')
