"""The model for T5X: its tokens are those of T5X's own decoding.

Skipped where T5X is not installed. T5X is not on PyPI: clone google-research/t5x and follow its README, or put the
folders of t5x, google-research/jestimator and google/airio on PYTHONPATH, with seqio, clu, orbax-checkpoint and tensorflow
installed. Then: JAX_PLATFORMS=cpu python -m pytest tests/test_t5x_plugin.py (two minutes; with -m slow `t5x.eval` and two
devices, two minutes more).
"""
import dataclasses
import functools
import json
import os
import subprocess
import sys

from flax import traverse_util
import jax
import numpy as np
import pytest

pytest.importorskip('t5x', reason='needs T5X')
import seqio
from t5x import decoding
from t5x import models
from t5x import partitioning
from t5x.examples.scalable_t5 import network as scalable_network
from t5x.examples.t5 import network

import speculative
from speculative import t5x_plugin
from speculative.checkpoints import t5x
from speculative.data import vocabulary as vocabularies
from speculative.drafters.copying import CopyingDrafter
from speculative.models.model import Model
from tests.test_t5x import fixture
from tests.test_t5x import stored

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LENGTH = 24
BATCH = {'encoder_input_tokens': np.array([[5, 17, 33, 2, 90, 41], [61, 7, 7, 9, 0, 0], [88, 0, 0, 0, 0, 0]], np.int32),
         'decoder_input_tokens': np.zeros((3, LENGTH), np.int32)}


def module_of(net, config, **changes):
  """T5X's network of a `T5Config`."""
  c = config
  settings = dict(vocab_size=c.vocab_size, dtype='float32', emb_dim=c.d_model, num_heads=c.num_heads, head_dim=c.d_kv,
                  num_encoder_layers=c.num_encoder_layers, num_decoder_layers=c.num_decoder_layers, mlp_dim=c.d_ff,
                  mlp_activations=('gelu', 'linear') if c.gated else ('relu',), logits_via_embedding=c.tied)
  return net.Transformer(net.T5Config(**settings | changes))


def noisy(model, std=.1):
  """A draft that is often of the model's opinion."""
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda a: a * (1 + std * rng.standard_normal(a.shape).astype(np.float32)), model.params)
  return dataclasses.replace(model, params=params)


@pytest.fixture(scope='module')
def tree():
  return traverse_util.unflatten_dict(stored('t5_v1_1'), sep='.')


@pytest.fixture(scope='module')
def make(tree):
  """make(size of the vocabulary, draft, T5X's arguments, **DecodeConfig) → the model of `tree`."""
  model = t5x.from_params(tree)

  def make(size=128, draft=None, more={}, **config):
    vocabulary = seqio.PassThroughVocabulary(size, eos_id=1)
    return t5x_plugin.SpeculativeEncoderDecoderModel(
        module_of(network, model.config), vocabulary, vocabulary, None, draft=noisy(model) if draft is None else draft,
        decode_config=speculative.DecodeConfig(**{'gamma': 3} | config), **more)
  return make


def predict(model, params, batch=BATCH, rng=None, **arguments):
  """`predict_batch_with_aux` under jit, as NumPy arrays."""
  return jax.device_get(jax.jit(functools.partial(model.predict_batch_with_aux, **arguments))(params, batch, rng))


@pytest.mark.parametrize('name,net,scanned', [
    ('t5_v1_0', network, False), ('scanned_v1_1', scalable_network, True)])
def test_greedy_tokens_and_scores_are_t5x_own(name, net, scanned):
  tree = traverse_util.unflatten_dict(stored(name), sep='.')
  target = t5x.from_params(tree)
  module = module_of(net, target.config)
  assert getattr(module, 'scan_layers', False) == scanned
  vocabulary = seqio.PassThroughVocabulary(128, eos_id=1)
  greedy = functools.partial(decoding.temperature_sample, topk=1, rescale_log_probs=False)
  theirs = models.EncoderDecoderModel(module, vocabulary, vocabulary, None, decode_fn=greedy)
  ours = t5x_plugin.SpeculativeEncoderDecoderModel(module, vocabulary, vocabulary, None, draft=noisy(target),
                                                   decode_config=speculative.DecodeConfig(gamma=3))
  expected, aux = predict(theirs, tree)
  tokens, found = predict(ours, tree)
  np.testing.assert_array_equal(tokens, expected)
  assert tokens.shape == (3, LENGTH)
  np.testing.assert_allclose(found['scores'], aux['scores'], rtol=1e-5)


def test_samples_are_those_of_speculative_decode(tree, make):
  """Seed 0, without a key."""
  target = t5x.from_params(tree)
  config = speculative.DecodeConfig(gamma=3, max_decode_len=LENGTH, temperature=1.0, top_k=20)
  expected = speculative.speculative_decode(target, noisy(target), BATCH['encoder_input_tokens'], config)
  assert 0 < expected.accepted.sum() < expected.drafted.sum()
  tokens, aux = predict(make(temperature=1.0, top_k=20), tree)
  np.testing.assert_array_equal(tokens, expected.tokens)
  np.testing.assert_allclose(aux['scores'], expected.log_probs.sum(1), rtol=1e-5)


@pytest.fixture(scope='module')
def greedy(tree, make):
  return predict(make(), tree)[0]


def test_any_drafter(tree, make, greedy):
  for draft in (fixture('v1_1_bfloat16'), CopyingDrafter(t5x.from_params(tree))):
    np.testing.assert_array_equal(predict(make(draft=draft), tree)[0], greedy)


def test_padding_of_the_vocabulary_is_never_emitted(tree, make, greedy):
  assert greedy.max() >= 100
  assert predict(make(size=100), tree)[0].max() < 100


def test_lengths(tree, make, greedy):
  """As long as the batch's targets, whatever limits the tokens."""
  tokens = greedy
  short = predict(make(max_decode_len=5), tree)[0]
  assert short.shape == tokens.shape and not short[:, 5:].any()
  np.testing.assert_array_equal(short[:, :5], tokens[:, :5])
  with pytest.raises(ValueError, match='min_decode_len'):
    predict(make(min_decode_len=LENGTH + 1), tree)


def test_random_keys(tree, make):
  """The same key, of whatever kind, gives the same tokens."""
  model = make(temperature=1.0)
  decode = jax.jit(model.predict_batch)
  keys = [jax.random.PRNGKey(7), jax.random.PRNGKey(8)]
  first, other = (decode(tree, BATCH, key) for key in keys)
  np.testing.assert_array_equal(decode(tree, BATCH, jax.random.key(7)), first)
  assert (first != other).any()
  by_parameter = jax.jit(lambda key: model.predict_batch_with_aux(tree, BATCH, decoder_params={'decode_rng': key})[0])
  np.testing.assert_array_equal(by_parameter(keys[0]), first)


def test_num_decodes(tree, make):
  """Independent samples, the most probable last."""
  same = BATCH | {'encoder_input_tokens': np.repeat(BATCH['encoder_input_tokens'][:1], 3, axis=0)}
  model = make(temperature=1.0, more={'default_decoder_params': models.DecoderParams(True, 4)})
  tokens, aux = predict(model, tree, same)
  assert tokens.shape == (3, 4, LENGTH) and aux['scores'].shape == (3, 4)
  assert len(set(map(tuple, tokens.reshape(-1, LENGTH)))) == 12
  assert (np.diff(aux['scores']) >= 0).all()
  best, best_aux = predict(model, tree, same, return_all_decodes=False)
  np.testing.assert_array_equal(best, tokens[:, -1])
  np.testing.assert_array_equal(best_aux['scores'], aux['scores'][:, -1])
  one = jax.eval_shape(functools.partial(model.predict_batch_with_aux, num_decodes=1), tree, same)[0]
  assert one.shape == (3, 1, LENGTH)


def test_end_of_sequence(tree, make, greedy):
  """`eos_id` as T5X has it: the vocabulary's, or that of decoder_params."""
  tokens = greedy
  eos = int(tokens[0, 3])
  ended = predict(make(), tree, decoder_params={'eos_id': eos})[0]
  first = list(tokens[0]).index(eos)
  np.testing.assert_array_equal(ended[0, :first + 1], tokens[0, :first + 1])
  assert not ended[0, first + 1:].any()


def test_logits_that_are_not_finite(tree, make):
  broken = jax.tree.map(lambda a: a * np.nan, tree)
  tokens, aux = predict(make(), broken)
  assert not tokens.any() and (aux['scores'] == -np.inf).all()


def test_arguments_of_a_prediction(tree, make):
  model = make()
  for arguments, message in (
      ({'prompt_with_targets': True}, 'prompt_with_targets is not supported'),
      ({'decoder_params': {'alpha': 0.6}}, r"decoder_params \['alpha'\] are not supported"),
      ({'decoder_params': {'decode_rng': 1}, 'rng': 2}, 'both rng and')):
    with pytest.raises(ValueError, match=message):
      model.predict_batch_with_aux(tree, BATCH, **arguments)
  with pytest.raises(ValueError, match='decoder.layers_1.mlp.wo.kernel is missing'):
    damaged = traverse_util.flatten_dict(tree)
    del damaged['decoder', 'layers_1', 'mlp', 'wo', 'kernel']
    model.predict_batch_with_aux(traverse_util.unflatten_dict(damaged), BATCH)


@pytest.mark.parametrize('net,changes,message', [
    (network, {'mlp_activations': ('silu', 'linear')}, r"mlp_activations = \('silu', 'linear'\): only"),
    (scalable_network, {'param_scan_axis': 0}, 'param_scan_axis = 0: only 1')])
def test_modules_that_are_no_t5(net, changes, message, tree):
  target, vocabulary = t5x.from_params(tree), seqio.PassThroughVocabulary(128, eos_id=1)
  module = module_of(net, target.config, **changes)
  with pytest.raises(ValueError, match=message):
    t5x_plugin.SpeculativeEncoderDecoderModel(module, vocabulary, vocabulary, None, target)


def test_arguments_of_a_model(tree, make):
  target, vocabulary = t5x.from_params(tree), seqio.PassThroughVocabulary(128, eos_id=1)
  with pytest.raises(ValueError, match='object has no config.mlp_activations'):
    t5x_plugin.SpeculativeEncoderDecoderModel(object(), vocabulary, vocabulary, None, target)
  with pytest.raises(ValueError, match='decode_fn is not used'):
    make(more={'decode_fn': decoding.beam_search})
  with pytest.raises(TypeError, match='int is no drafter'):
    make(draft=7)
  with pytest.raises(FileNotFoundError, match='nowhere'):
    make(draft='/nowhere')
  with pytest.raises(ValueError, match='gamma'):
    make(gamma=0)
  relu = module_of(network, target.config, mlp_activations=('relu',))
  model = t5x_plugin.SpeculativeEncoderDecoderModel(relu, vocabulary, vocabulary, None, target)
  with pytest.raises(ValueError, match='mlp_activations .* do not fit'):
    model.predict_batch(tree, BATCH)


def test_the_draft_s_vocabulary(tree, make):
  """Sizes and EOS of any, the pieces of SentencePiece."""
  model = t5x.from_params(tree)
  with pytest.raises(ValueError, match='PassThroughVocabulary and drafter .* do not fit: vocab_size 100 and 128'):
    make(size=100, draft=CopyingDrafter(model))
  zoo = speculative.load_pretrained()
  target = zoo.target
  module = module_of(network, target.config)
  vocabulary = seqio.SentencePieceVocabulary(os.path.join(ROOT, 'speculative', 'pretrained', 'spiece.model'))
  spec = functools.partial(t5x_plugin.SpeculativeEncoderDecoderModel, module, vocabulary, vocabulary, None)
  assert spec(zoo.drafts['small']).drafter.vocab_size == 4000  # of 4096 rows
  other = vocabularies.ByteVocabulary(4000 - 259)
  with pytest.raises(ValueError, match='other pieces in the vocabulary'):
    spec(Model(target.config, target.params, other))


def test_texts():
  """The packaged target in T5X, in float32: its own tokens on real texts."""
  zoo = speculative.load_pretrained()
  target = dataclasses.replace(zoo.target, params=jax.tree.map(lambda a: a.astype('float32'), zoo.target.params))
  vocabulary = seqio.SentencePieceVocabulary(os.path.join(ROOT, 'speculative', 'pretrained', 'spiece.model'))
  model = t5x_plugin.SpeculativeEncoderDecoderModel(
      module_of(network, target.config), vocabulary, vocabulary, None, zoo.drafts['base'],
      speculative.DecodeConfig(gamma=5, max_decode_len=32))
  inputs = np.zeros((3, 128), np.int32)
  for row, (text, _) in zip(inputs, zoo.texts['ende']):
    ids = [*vocabulary.encode(text), 1]
    row[:len(ids)] = ids
  config = speculative.DecodeConfig(max_decode_len=32)
  expected = speculative.autoregressive_decode(target, inputs, config).tokens
  batch = {'encoder_input_tokens': inputs, 'decoder_input_tokens': np.zeros((3, 32), np.int32)}
  np.testing.assert_array_equal(predict(model, t5x.to_params(target), batch)[0], expected)


TASK = '''
import numpy as np
import seqio
import tensorflow as tf

def dataset(split, shuffle_files, seed=None):
  rows = np.random.default_rng(0).integers(2, 100, (6, 8)).astype(np.int32)
  return tf.data.Dataset.from_tensor_slices({'inputs': rows, 'targets': rows})

vocabulary = seqio.PassThroughVocabulary(128, eos_id=1)
seqio.TaskRegistry.add(
    'tiny', source=seqio.FunctionDataSource(dataset, splits=['test'], num_input_examples={'test': 6}),
    preprocessors=[seqio.preprocessors.append_eos],
    output_features={name: seqio.Feature(vocabulary, dtype=tf.int32) for name in ('inputs', 'targets')},
    metric_fns=[lambda targets, predictions: {'length': float(np.mean([len(p) for p in predictions]))}])
'''

MODEL = '''
from __gin__ import dynamic_registration
import seqio
from t5x import adafactor
from t5x import decoding
from t5x import models
from t5x.examples.{network} import network
import tiny_task

VOCABULARY = @seqio.PassThroughVocabulary()
seqio.PassThroughVocabulary:
  size = 128
  eos_id = 1
OPTIMIZER = @adafactor.Adafactor()
MODEL = @models.EncoderDecoderModel()
models.EncoderDecoderModel:
  module = @network.Transformer()
  input_vocabulary = %VOCABULARY
  output_vocabulary = %VOCABULARY
  optimizer_def = %OPTIMIZER
  decode_fn = @decoding.temperature_sample
decoding.temperature_sample.topk = 1
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 128
  dtype = 'float32'
  emb_dim = 32
  num_heads = 2
  num_encoder_layers = 2
  num_decoder_layers = 2
  head_dim = 8
  mlp_dim = 40
  mlp_activations = ('gelu', 'linear')
  dropout_rate = 0.1
  logits_via_embedding = False
'''


def run_t5x(folder, script, speculatively, checkpoint='v1_1_ocdbt', net='t5', environment={}):
  """Runs `t5x.infer` or `t5x.eval` as a user does → what it writes, parsed."""
  out = folder / f'{script}_{net}_{speculatively}'
  (folder / 'tiny_task.py').write_text(TASK)
  (folder / 'model.gin').write_text(MODEL.format(network=net))
  t5x_root = os.path.dirname(os.path.dirname(partitioning.__file__))
  bindings = {'CHECKPOINT_PATH': os.path.join(fixture(checkpoint), 'checkpoint_1000'), 'MIXTURE_OR_TASK_NAME': 'tiny',
              'TASK_FEATURE_LENGTHS': {'inputs': 9, 'targets': LENGTH}, 'utils.DatasetConfig.batch_size': 4,
              'utils.RestoreCheckpointConfig.dtype': None, f'{script.upper()}_OUTPUT_DIR': str(out)}
  if script == 'infer':
    bindings['infer.checkpoint_ds_iter'] = False  # a FunctionDataSource cannot be saved
  files = ['model.gin']
  if speculatively:
    files.append('configs/t5x/infer_speculative.gin')
    bindings |= {'DRAFT': fixture('v1_1_bfloat16'), 'GAMMA': 3, 'MAX_DECODE_LEN': LENGTH}
  files.append(f't5x/configs/runs/{script}.gin')
  command = [sys.executable, '-m', f't5x.{script}', f'--gin_search_paths={folder},{ROOT},{t5x_root}',
             *(f'--gin_file={file}' for file in files),
             *(f'--gin.{name}={value!r}' for name, value in bindings.items()),
             *(['--gin.MODULE=@network.Transformer()'] if speculatively else [])]
  path = os.pathsep.join([str(folder), os.environ.get('PYTHONPATH', '')])
  done = subprocess.run(command, cwd=ROOT, env=os.environ | {'PYTHONPATH': path} | environment, capture_output=True,
                        text=True)
  assert done.returncode == 0, done.stderr[-3000:]
  written = out / ('tiny-predict.jsonl-00000-of-00001' if script == 'infer' else 'inference_eval/tiny-001000.jsonl')
  return [json.loads(line) for line in written.read_text().splitlines()]


def test_infer(tmp_path):
  """The gin file; T5X's newest checkpoints; the same predictions as T5X's."""
  predictions = [run_t5x(tmp_path, 'infer', speculatively) for speculatively in (False, True)]
  assert len(predictions[0]) == 6
  assert predictions[0] == predictions[1]


@pytest.mark.slow
def test_eval(tmp_path):
  predictions = [run_t5x(tmp_path, 'eval', speculatively) for speculatively in (False, True)]
  assert len(predictions[0]) == 6
  assert predictions[0] == predictions[1]


@pytest.mark.slow
def test_infer_of_scanned_layers_on_a_mesh(tmp_path):
  """Two devices, which T5X takes for model parallelism; with the draft's parameters as arguments of the program."""
  scanned = 'scanned_v1_1_ocdbt', 'scalable_t5'
  expected = run_t5x(tmp_path, 'infer', False, *scanned)
  environment = {'XLA_FLAGS': '--xla_force_host_platform_device_count=2', 'JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS': '1'}
  assert run_t5x(tmp_path, 'infer', True, *scanned, environment) == expected
