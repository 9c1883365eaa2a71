"""Tests of speculative.checkpoints against Transformers: its folders, its logits, its greedy output.

tests/data/huggingface holds tiny random checkpoints that Transformers 4.57.1 wrote (t5_tied_unscaled: 5.24.0).
expected.npz is what Transformers computes from them: logits at some positions, greedy tokens (0 after EOS).
"""
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file
from safetensors.numpy import save_file

from speculative.checkpoints import check_pair
from speculative.checkpoints import huggingface
from speculative.checkpoints import load_model
from speculative.data.vocabulary import Vocabulary
from speculative.models import precision
from speculative.models import t5

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data')
SPIECE, OTHER = (os.path.join(DATA, 'vocabulary', name) for name in ('spiece.model', 'other.model'))
FOLDERS = 't5_v1_0', 't5_v1_1', 't5_v1_1_sharded', 't5_tied_unscaled', 'byt5', 'umt5'
QKV = 'decoder.block.1.layer.0.SelfAttention.v.weight'


def fixture(name):
  return os.path.join(DATA, 'huggingface', name)


def expected(name):
  return dict(np.load(os.path.join(fixture(name), 'expected.npz')))


@functools.partial(jax.jit, static_argnums=0)
def forward(config, params, inputs, tokens):
  return t5.T5(config).apply({'params': params}, inputs, tokens)


def same(a, b):
  """Bit for bit, dtypes too."""
  return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and bool((x == y).all()), a, b))


class TestCase(parameterized.TestCase):

  def folder(self, *files):
    """A temporary folder with some empty files."""
    folder = self.enter_context(tempfile.TemporaryDirectory())
    for file in files:
      os.makedirs(os.path.join(folder, os.path.dirname(file)), exist_ok=True)
      open(os.path.join(folder, file), 'wb').close()
    return folder


class NumericsTest(TestCase):

  def check_logits(self, name, logits):
    e = expected(name)
    spread = e['logits'].max() - e['logits'].min()
    np.testing.assert_allclose(logits[:, e['logit_positions']], e['logits'], rtol=0, atol=1e-4 * spread)

  @parameterized.parameters(*FOLDERS)
  def test_full_forward(self, name):
    model, e = load_model(fixture(name), 'float32'), expected(name)
    self.check_logits(name, forward(model.config, model.params, e['encoder_input_tokens'], e['decoder_input_tokens']))

  @parameterized.parameters(*FOLDERS)
  def test_blocks_and_greedy(self, name):
    model, e = load_model(fixture(name), 'float32'), expected(name)
    inputs, tokens = e['encoder_input_tokens'], e['decoder_input_tokens']
    rows, length = tokens.shape
    prefill, extend = jax.jit(model.prefill, static_argnums=2), jax.jit(model.extend)
    start = prefill(model.params, inputs, length)

    cache, logits = start, []
    for i in [0, *range(1, length, 20)]:
      block, cache = extend(model.params, cache, tokens[:, i:i + (20 if i else 1)], np.full(rows, i, np.int32))
      logits.append(block)
    self.check_logits(name, np.concatenate(logits, axis=1))

    cache, tokens = start, np.full((rows, 1), model.start_id, np.int32)
    for i in range(e['greedy'].shape[1] - 1):
      logits, cache = extend(model.params, cache, tokens[:, -1:], np.full(rows, i, np.int32))
      tokens = np.append(tokens, np.argmax(logits, axis=-1), axis=1)
    ended = np.cumsum(tokens == model.eos_id, axis=1) - (tokens == model.eos_id) > 0
    np.testing.assert_array_equal(np.where(ended, 0, tokens), e['greedy'])


  def test_gates_of_several_blocks(self):
    """The fixtures have one block of hidden units, real models several."""
    config = dataclasses.replace(load_model(fixture('t5_v1_1')).config, d_ff=192)
    self.assertEqual(config.gate_block, 64)
    rng = np.random.default_rng(0)
    gate, linear, wo = (rng.normal(size=shape).astype('float32') for shape in [(192, 32), (192, 32), (32, 192)])
    wi = huggingface._pack([gate, linear], config.gate_block)
    x = rng.normal(size=(1, 3, 32)).astype('float32')
    y = t5.FeedForward(config, None).apply({'params': {'wi': wi, 'wo': wo.T}}, x, lambda h: h)
    np.testing.assert_allclose(y, (jax.nn.gelu(x @ gate.T) * (x @ linear.T)) @ wo.T, rtol=1e-4, atol=1e-3)
    for part, whole in zip(huggingface._unpack(wi, 2, config.gate_block), (gate, linear)):
      np.testing.assert_array_equal(part, whole)


class FolderTest(TestCase):
  """With a writable copy of a fixture in self.path."""

  def setUp(self):
    super().setUp()
    self.path = self.copy('t5_v1_1')
    self.weights = os.path.join(self.path, 'model.safetensors')

  def copy(self, name):
    return shutil.copytree(fixture(name), os.path.join(self.folder(), name))

  def configure(self, path=None, **settings):
    """Edits config.json; None removes a key."""
    file = os.path.join(path or self.path, 'config.json')
    with open(file, encoding='utf-8') as f:
      content = json.load(f) | settings
    with open(file, 'w', encoding='utf-8') as f:
      json.dump({k: v for k, v in content.items() if v is not None}, f)

  def edit(self, path=None, remove=(), **arrays):
    """Edits model.safetensors: removes names that start so, adds or replaces arrays."""
    file = os.path.join(path or self.path, 'model.safetensors')
    tensors = {k: v for k, v in load_file(file).items() if not k.startswith(tuple(remove))}
    save_file(tensors | arrays, file, metadata={'format': 'pt'})

  def fails(self, *parts, error=ValueError, path=None, **kwargs):
    with self.assertRaises(error) as caught:
      load_model(path or self.path, **kwargs)
    for part in (path or self.path, *parts):
      self.assertIn(part, str(caught.exception))


class VariantsTest(FolderTest):

  def test_configuration(self):
    self.assertEqual(load_model(fixture('t5_v1_1')).config, t5.T5Config(
        128, 32, 64, 4, 8, 2, 2, gated=True, tied=False))
    self.assertEqual(load_model(fixture('t5_v1_0')).config, t5.T5Config(
        128, 32, 64, 4, 8, 2, 2, gated=False, tied=True))
    self.assertEqual(load_model(fixture('t5_tied_unscaled')).config, t5.T5Config(
        128, 32, 64, 4, 8, 2, 2, gated=True, tied=True, scale_tied_output=False))
    self.configure(num_decoder_layers=None, decoder_start_token_id=5, layer_norm_epsilon=1e-5, dropout_rate=0.2,
                   eos_token_id=7, relative_attention_max_distance=99)
    self.assertEqual(load_model(self.path).config, t5.T5Config(
        128, 32, 64, 4, 8, 2, 2, norm_eps=1e-5, dropout=0.2, eos_id=7, start_id=5, max_distance=99))

  def test_start_id_of_generation_config(self):
    self.configure(decoder_start_token_id=None)
    with open(os.path.join(self.path, 'generation_config.json'), 'w', encoding='utf-8') as f:
      json.dump({'decoder_start_token_id': 9}, f)
    self.assertEqual(load_model(self.path).start_id, 9)
    os.remove(os.path.join(self.path, 'generation_config.json'))
    self.assertEqual(load_model(self.path).start_id, 0)

  def test_transformers_5_head(self):
    """Version 5 says that every head is tied; the file decides."""
    self.configure(tie_word_embeddings=True, scale_decoder_outputs=False)
    model = load_model(self.path)
    self.assertFalse(model.config.tied)
    self.assertTrue(same(model.params, load_model(fixture('t5_v1_1')).params))

  def test_head_repeats_the_embedding(self):
    path = self.copy('t5_v1_0')
    embedding = load_file(os.path.join(path, 'model.safetensors'))['shared.weight']
    self.edit(path, **{'lm_head.weight': embedding})
    self.assertEqual(load_model(path).config, load_model(fixture('t5_v1_0')).config)
    self.edit(path, **{'lm_head.weight': 2 * embedding})
    self.fails('lm_head.weight', 'differs', path=path)

  def test_embedding_aliases(self):
    embedding = load_file(self.weights)['shared.weight']
    params = load_model(self.path).params
    # The first released T5s also hold a bias that nothing uses.
    self.edit(**{'encoder.embed_tokens.weight': embedding, 'decoder.embed_tokens.weight': embedding,
                 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight': np.ones((32, 4), 'float32')})
    self.assertTrue(same(load_model(self.path).params, params))
    self.edit(remove=['shared', 'encoder.embed'])
    self.assertTrue(same(load_model(self.path).params, params))
    self.edit(**{'encoder.embed_tokens.weight': 2 * embedding})
    self.fails('decoder.embed_tokens.weight', 'differs from encoder.embed_tokens.weight')
    self.edit(remove=['encoder.embed', 'decoder.embed'])
    self.fails('shared.weight is missing')

  def test_dtype(self):
    def dtypes(**kwargs):
      return {leaf.dtype.name for leaf in jax.tree.leaves(load_model(self.path, **kwargs).params)}

    for fast in False, True:
      with mock.patch.object(precision, 'cpu_is_fast_in_bfloat16', lambda fast=fast: fast):
        self.assertEqual(dtypes(), {'bfloat16' if fast or jax.default_backend() != 'cpu' else 'float32'})
    self.assertEqual(dtypes(dtype=jnp.bfloat16), {'bfloat16'})
    self.assertEqual(dtypes(dtype=np.dtype('float32')), {'float32'})
    with self.assertRaisesRegex(ValueError, 'overflow in it; use bfloat16'):
      load_model(self.path, 'float16')
    for dtype in 'int8', 'float64', 'nonsense':
      with self.assertRaisesRegex(ValueError, dtype):
        load_model(self.path, dtype)

  def test_paths(self):
    home = os.path.dirname(self.path)
    os.rename(self.path, os.path.join(home, 'a model'))
    with mock.patch.dict(os.environ, HOME=home):
      self.assertEqual(load_model('~/a model/').name, 'a model')
    with contextlib.chdir(home):
      self.assertEqual(load_model('a model').name, 'a model')
    with contextlib.chdir(os.path.join(home, 'a model')):
      self.assertEqual(load_model('.').name, 'a model')

  def test_vocabulary(self):
    self.assertIsNone(load_model(self.path).vocabulary)
    shutil.copy(SPIECE, self.path)
    model = load_model(self.path)  # no rows for sentinels
    self.assertEqual((model.vocabulary.extra_ids, model.vocab_size), (0, 120))
    tokenizer = os.path.join(self.path, 'tokenizer_config.json')
    with open(tokenizer, 'w', encoding='utf-8') as f:
      json.dump({'extra_ids': 4}, f)
    self.assertEqual(load_model(self.path).vocab_size, 124)
    os.remove(tokenizer)
    wide = self.copy('t5_v1_1')
    arrays = {name: np.zeros((256, 32), 'float32') for name in ('shared.weight', 'lm_head.weight')}
    self.edit(wide, **arrays)
    self.configure(wide, vocab_size=256)
    shutil.copy(SPIECE, wide)
    self.assertEqual(load_model(wide).vocab_size, 220)

  def test_vocabulary_does_not_fit(self):
    shutil.copy(SPIECE, self.path)
    self.configure(pad_token_id=3)
    self.fails('padding is 0 in the vocabulary, 3 in config.json')
    self.configure(pad_token_id=0, vocab_size=100)
    self.edit(**{name: np.zeros((100, 32), 'float32') for name in ('shared.weight', 'lm_head.weight')})
    self.fails('120 pieces', '100 rows')


class HubTest(FolderTest):

  def test_the_cache_comes_first_and_then_the_network(self):
    asked = []

    def download(name, allow_patterns, local_files_only):
      asked.append((name, local_files_only))
      if local_files_only and name == 'org/new':
        raise FileNotFoundError('not in the cache')
      return self.path
    with mock.patch('huggingface_hub.snapshot_download', download):
      model = load_model('org/cached')
      self.assertEqual((model.name, model.config), ('cached', load_model(self.path).config))
      load_model('org/new')
    self.assertEqual(asked, [('org/cached', True), ('org/new', True), ('org/new', False)])

  def test_offline(self):
    """In one line, with the name."""
    with mock.patch('huggingface_hub.snapshot_download', side_effect=OSError('no network\nand more')):
      self.fails('org/model: no such folder here, and not to be had from the Hugging Face Hub', 'no network',
                 error=FileNotFoundError, path='org/model')


class BadInputTest(FolderTest):

  def test_not_a_checkpoint(self):
    self.fails('no such folder', error=FileNotFoundError, path='/nowhere/model')
    self.fails('takes the folder', path=self.weights)
    self.fails('not a checkpoint of a known format', 'nothing', path=self.folder())
    self.fails('not a checkpoint of a known format', 'weights.h5', path=self.folder('weights.h5'))
    self.fails('not the index of a T5X checkpoint', path=self.folder('checkpoint_1000/checkpoint'))
    self.fails('model_config.json: no such file', error=FileNotFoundError, path=self.folder('1000/default/_METADATA'))
    with self.assertRaisesRegex(ValueError, 'must be a jax.sharding.Mesh'):
      load_model(self.path, mesh=object())

  @parameterized.parameters('', '{"model_type": ', '[]', b'\xff\xfe')
  def test_damaged_configuration(self, content):
    with open(os.path.join(self.path, 'config.json'), 'wb') as f:
      f.write(content if isinstance(content, bytes) else content.encode())
    self.fails('config.json: not')

  @parameterized.parameters(
      ({'model_type': 'bart'}, "model_type 'bart' is not supported"),
      ({'feed_forward_proj': 'gated-silu'}, "feed_forward_proj 'gated-silu' is not supported"),
      ({'d_model': None}, 'd_model must be an integer'),
      ({'num_layers': '2'}, 'num_layers must be an integer'),
      ({'vocab_size': 0}, 'vocab_size must be an integer ≥ 1'),
      ({'eos_token_id': [1, 2]}, 'eos_token_id must be an integer'),
      ({'layer_norm_epsilon': 'x'}, 'layer_norm_epsilon must be a number'),
  )
  def test_bad_configuration(self, settings, message):
    self.configure(**settings)
    self.fails('config.json', message)

  @parameterized.parameters(0, 4, 1000, -1)
  def test_truncated_weights(self, size):
    with open(self.weights, 'rb') as f:
      content = f.read()
    with open(self.weights, 'wb') as f:
      f.write(content[:size])
    self.fails('model.safetensors: not a safetensors file, or a truncated')

  def test_missing_weights(self):
    os.remove(self.weights)
    self.fails('neither model.safetensors nor', error=FileNotFoundError)
    open(os.path.join(self.path, 'pytorch_model.bin'), 'wb').close()
    self.fails('only PyTorch weights', 'safe_serialization', error=FileNotFoundError)

  def test_missing_parameter(self):
    self.edit(remove=[QKV])
    self.fails(f'parameter {QKV} is missing')

  def test_missing_head(self):
    self.edit(remove=['lm_head'])
    self.fails('parameter lm_head.weight is missing', 'tie_word_embeddings')

  def test_missing_layer(self):
    self.configure(num_decoder_layers=3)
    self.fails('layer decoder.block.2 is missing', 'decoder.block.2.layer.0.layer_norm.weight', '3 decoder layers')

  def test_extra_layer(self):
    self.configure(num_layers=1)
    self.fails('layer encoder.block.1 is too many', 'encoder.block.1.layer.0', '1 encoder')

  def test_extra_parameter(self):
    self.edit(**{'encoder.block.0.layer.0.SelfAttention.q.bias': np.zeros(32, 'float32')})
    self.fails('parameter encoder.block.0.layer.0.SelfAttention.q.bias is unknown')

  def test_other_feed_forward(self):
    self.configure(feed_forward_proj='relu')
    self.fails('parameter encoder.block.0.layer.1.DenseReluDense.wi.weight is missing')

  def test_wrong_shape(self):
    self.edit(**{QKV: np.zeros((32, 16), 'float32')})
    self.fails(f'parameter {QKV} has shape (32, 16), config.json asks for (32, 32)')
    self.edit(**{QKV: np.zeros((1, 32, 32), 'float32')})
    self.fails(f'parameter {QKV} has shape (1, 32, 32)')
    self.configure(vocab_size=100)
    self.fails('parameter shared.weight has shape (128, 32), config.json asks for (100, 32)')

  def test_quantised(self):
    self.edit(**{QKV: np.zeros((32, 32), 'int8')})
    self.fails(QKV, 'I8')

  def test_shards(self):
    path = self.copy('t5_v1_1_sharded')
    shard = os.path.join(path, 'model-00003-of-00007.safetensors')
    shutil.copy(shard, os.path.join(path, 'kept'))
    tensors = load_file(shard)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, shard)
    self.fails('is missing', path=path)
    with open(shard, 'wb') as f:
      f.write(b'version https://git-lfs.github.com/spec/v1')
    self.fails(shard, 'not a safetensors file', path=path)
    os.remove(shard)
    self.fails(shard, 'no such file', error=FileNotFoundError, path=path)
    os.rename(os.path.join(path, 'kept'), shard)
    shutil.copy(shard, os.path.join(path, 'model-00004-of-00007.safetensors'))
    self.fails('in two files', path=path)
    with open(os.path.join(path, 'model.safetensors.index.json'), 'w', encoding='utf-8') as f:
      f.write('{}')
    self.fails('no weight_map', path=path)


class SaveTest(TestCase):

  def setUp(self):
    super().setUp()
    self.path = os.path.join(self.folder(), 'saved')

  @parameterized.product(name=FOLDERS, dtype=('float32', 'bfloat16'))
  def test_round_trip(self, name, dtype):
    model = load_model(fixture(name), dtype)
    model.vocabulary = Vocabulary(SPIECE, extra_ids=3)
    huggingface.save(model, self.path)
    again = load_model(self.path, dtype)
    self.assertEqual(again.config, model.config)
    self.assertTrue(same(again.params, model.params))
    self.assertEqual(again.vocabulary.fingerprint, model.vocabulary.fingerprint)
    self.assertEqual(again.name, 'saved')
    self.assertEqual(os.listdir(os.path.dirname(self.path)), ['saved'])

  @parameterized.parameters('t5_v1_0', 't5_v1_1', 't5_tied_unscaled', 'byt5', 'umt5')
  def test_same_file_as_transformers(self, name):
    huggingface.save(load_model(fixture(name), 'float32'), self.path)
    ours, theirs = (load_file(os.path.join(path, 'model.safetensors')) for path in (self.path, fixture(name)))
    self.assertEqual(ours.keys(), theirs.keys())
    self.assertTrue(same(ours, theirs))
    self.assertCountEqual(os.listdir(self.path), ['config.json', 'generation_config.json', 'model.safetensors'])

  def test_no_eos_other_start(self):
    model = load_model(fixture('t5_v1_0'))
    model.config = dataclasses.replace(model.config, eos_id=-1, start_id=2)
    huggingface.save(model, self.path)
    self.assertEqual(load_model(self.path).config, model.config)

  def test_dtype(self):
    model = load_model(fixture('t5_v1_1'), 'float32')
    huggingface.save(model, self.path, dtype='bfloat16')
    again = load_model(self.path, 'bfloat16')
    self.assertTrue(same(again.params, jax.tree.map(lambda x: x.astype('bfloat16'), model.params)))
    with self.assertRaisesRegex(ValueError, 'float16'):
      huggingface.save(model, self.path, dtype='float16', overwrite=True)
    self.assertTrue(os.path.exists(self.path))

  def test_overwrite(self):
    model, other = load_model(fixture('t5_v1_0')), load_model(fixture('t5_v1_1'))
    huggingface.save(model, self.path)
    with self.assertRaisesRegex(FileExistsError, 'overwrite=True'):
      huggingface.save(other, self.path)
    self.assertEqual(load_model(self.path).config, model.config)
    huggingface.save(other, self.path, overwrite=True)
    self.assertEqual(load_model(self.path).config, other.config)
    folder = self.folder('precious')
    with self.assertRaisesRegex(FileExistsError, 'not a Hugging Face model'):
      huggingface.save(model, folder, overwrite=True)
    self.assertEqual(os.listdir(folder), ['precious'])

  def test_parameters_of_another_configuration(self):
    model = load_model(fixture('t5_v1_0'))
    model.config = dataclasses.replace(model.config, num_decoder_layers=1)
    with self.assertRaisesRegex(ValueError, 'decoder/layer_1/'):
      huggingface.save(model, self.path)
    self.assertEqual(os.listdir(os.path.dirname(self.path)), [])

  @parameterized.product(name=('t5_v1_0', 't5_v1_1', 't5_tied_unscaled', 'byt5', 'umt5'))
  def test_transformers_reads_it(self, name):
    try:
      import torch  # pylint: disable=g-import-not-at-top
      import transformers  # pylint: disable=g-import-not-at-top
    except ImportError:
      self.skipTest('needs torch and transformers')
    ours, e = load_model(fixture(name), 'float32'), expected(name)
    ours.vocabulary = Vocabulary(SPIECE, extra_ids=3)
    huggingface.save(ours, self.path)
    theirs, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(self.path, output_loading_info=True)
    self.assertFalse(any(report.values()), report)
    inputs, targets = (torch.tensor(e[f'{side}_input_tokens']).long() for side in ('encoder', 'decoder'))
    with torch.no_grad():
      logits = theirs(input_ids=inputs, attention_mask=inputs != 0, decoder_input_ids=targets).logits.numpy()
    spread = e['logits'].max() - e['logits'].min()
    np.testing.assert_allclose(logits[:, e['logit_positions']], e['logits'], rtol=0, atol=1e-4 * spread)
    # For umt5, Transformers 5's AutoTokenizer takes nothing but a tokenizer.json.
    tokenizer = (transformers.T5Tokenizer if name == 'umt5' else transformers.AutoTokenizer).from_pretrained(self.path)
    text = 'the package <extra_id_0> for the <extra_id_2>'
    self.assertEqual(tokenizer(text).input_ids, ours.vocabulary.encode(text) + [1])


class PairTest(TestCase):

  def model(self, spiece=SPIECE, extra_ids=0, **config):
    model = load_model(fixture('t5_v1_0'))
    model.config = dataclasses.replace(model.config, **config)
    model.vocabulary = spiece and Vocabulary(spiece, extra_ids)
    return model

  def test_fits(self):
    check_pair(self.model(), self.model())
    check_pair(self.model(None), self.model(None))
    check_pair(self.model(vocab_size=128), self.model(vocab_size=120))  # rows of one vocabulary
    check_pair(self.model(), object())  # a drafter that has none of the attributes

  @parameterized.parameters(
      ({'extra_ids': 5}, 'vocab_size 120 and 125'),
      ({'spiece': OTHER}, 'other pieces'),
      ({'eos_id': 2}, 'eos_id 1 and 2'),
      ({'pad_id': 3}, 'pad_id 0 and 3'),
      ({'start_id': 4}, 'start_id 0 and 4'),
  )
  def test_does_not_fit(self, other, message):
    with self.assertRaisesRegex(ValueError, f'target t5_v1_0 .* do not fit.*{message}'):
      check_pair(self.model(), self.model(**other))

  def test_names_every_difference(self):
    with self.assertRaisesRegex(ValueError, 'pad_id 0 and 3; eos_id 1 and 2; start_id 0 and 4$'):
      check_pair(self.model(), self.model(pad_id=3, eos_id=2, start_id=4))


if __name__ == '__main__':
  absltest.main()
