"""Decoder-only targets: GPT-2's logits and tokens as Transformers 5.24 gives them, and the same loop over prompts.

tests/data/gpt2: a GPT2LMHeadModel with random weights of std 0.2–0.5, its logits, and `generate`'s greedy tokens for each
prompt by itself.
"""
import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import speculative
from speculative.data.vocabulary import Vocabulary
from speculative.drafters.chain import ChainDrafter
from speculative.drafters.copying import CopyingDrafter
from speculative.models import decoder_only
from tests import toys

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data', 'gpt2')
VOCABULARY = os.path.join(os.path.dirname(DATA), 'vocabulary', 'spiece.model')


@pytest.fixture(scope='module')
def expected():
  with np.load(os.path.join(DATA, 'expected.npz')) as f:
    return dict(f)


@pytest.fixture(scope='module')
def model():
  return speculative.load_model(DATA, 'float32')


@pytest.fixture(scope='module')
def draft(model):
  """The model with noise on its weights."""
  rng = np.random.default_rng(0)
  noisy = jax.tree.map(lambda a: a + .1 * jnp.std(a) * rng.normal(size=a.shape).astype(np.float32), model.params)
  return dataclasses.replace(model, params=noisy)


def test_logits_are_those_of_transformers(model, expected):
  full = jax.jit(decoder_only.DecoderOnly(model.config).apply)({'params': model.params}, expected['tokens'])
  np.testing.assert_allclose(full, expected['logits'], atol=1e-4 * np.ptp(expected['logits']))


def test_greedy_tokens_are_those_of_transformers(model, draft, expected):
  """Prompts of other lengths in one batch, padded at the end; plain and with every kind of draft."""
  config = speculative.DecodeConfig(gamma=3, max_decode_len=20)
  plain = speculative.autoregressive_decode(model, expected['prompts'], config)
  np.testing.assert_array_equal(plain.tokens, expected['greedy'])
  for drafter in (draft, model, ChainDrafter(draft, model, 2), CopyingDrafter(model)):
    result = speculative.speculative_decode(model, drafter, expected['prompts'], config)
    np.testing.assert_array_equal(result.tokens, expected['greedy'])
    if drafter is model:
      assert (result.accepted == result.tested).all() and (result.rounds == 5).all()


def test_blocks_equal_the_full_pass(model, expected):
  """From a prompt of ragged lengths on: γ + 1 and random sizes, each row at its own position."""
  tokens, extend = expected['tokens'], jax.jit(model.extend)
  full = expected['logits']
  prompts = np.array([5, 9])
  inputs = np.where(np.arange(12) < prompts[:, None], tokens[:, :12], model.pad_id)
  first, at = model.first(jnp.asarray(inputs))
  np.testing.assert_array_equal(first, [tokens[0, 4], tokens[1, 8]])
  cache = jax.jit(model.prefill, static_argnums=2)(model.params, inputs, 14)
  at = np.array(at)
  for size in (1, 4, 4, 1, 3):
    block = np.stack([row[i:i + size] for row, i in zip(tokens, at)])
    logits, cache = extend(model.params, cache, block, at)
    for b in range(2):
      np.testing.assert_allclose(logits[b], full[b, at[b]:at[b] + size], atol=1e-5 * np.ptp(full))
    at += size


def test_a_row_is_as_it_is_alone(model, draft, expected):
  """Also with a longer row beside it, whose prompt makes the batch wider."""
  config = speculative.DecodeConfig(gamma=2, max_decode_len=12, temperature=1.0)
  together = speculative.speculative_decode(model, draft, expected['prompts'], config, 3)
  for b, length in ((0, 5), (2, 2)):
    alone = speculative.speculative_decode(model, draft, expected['prompts'][b:b + 1, :length], config, 3, [b])
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[b])


def test_cache_beyond_the_length_never_matters(model, expected):
  """Slots behind the prompt hold 1e30, and nothing changes."""
  inputs = expected['prompts']
  cache = jax.jit(model.prefill, static_argnums=2)(model.params, inputs, 8)
  token, at = model.first(jnp.asarray(inputs))
  seen = (jnp.arange(cache.self_kv[0][0].shape[3]) < at[:, None])[:, None]
  dirty = dataclasses.replace(cache, self_kv=tuple(
      (jnp.where(seen[:, :, None], k, 1e30), jnp.where(seen[..., None], v, 1e30)) for k, v in cache.self_kv))
  extend = jax.jit(model.extend)
  np.testing.assert_array_equal(*(extend(model.params, c, token[:, None], at)[0] for c in (cache, dirty)))


def test_texts_have_the_model_s_distribution():
  """20 K texts of at most 3 tokens behind prompts of two lengths, EOS included; false alarm 1e-5 each."""
  config = decoder_only.GPTConfig(vocab_size=5, d_model=8, d_ff=16, num_heads=2, num_layers=1, max_positions=12)
  params = jax.tree.map(lambda a: a * 10, decoder_only.init_params(config, jax.random.key(0)))
  noisy = jax.tree.map(lambda a: a + .5 * jnp.std(a) * jax.random.normal(jax.random.key(1), a.shape), params)
  target, drafter = speculative.Model(config, params), speculative.Model(config, noisy)
  forward = jax.jit(decoder_only.DecoderOnly(config).apply)
  rows = 20_000
  prompts = [[2, 3, 4], [3]]
  inputs = np.repeat([[2, 3, 4], [3, 0, 0]], rows, axis=0)
  texts = toys.texts_of(speculative.speculative_decode(
      target, drafter, inputs, speculative.DecodeConfig(gamma=2, max_decode_len=3, temperature=1.0)))
  for i, prompt in enumerate(prompts):
    def probs(prefix):
      tokens = prompt + prefix[1:]
      logits = forward({'params': params}, np.array([tokens + [0] * (6 - len(tokens))]))
      return toys.softmax(logits[0, len(tokens) - 1])
    expected = toys.distribution(probs, 3, eos_id=1)
    assert toys.texts_chi_square(texts[i * rows:(i + 1) * rows], expected) > toys.FALSE_ALARM


def test_prompts_that_do_not_fit(model, draft):
  config = speculative.DecodeConfig(gamma=2, max_decode_len=60)
  for decode in (lambda x, c: speculative.speculative_decode(model, draft, x, c),
                 lambda x, c: speculative.autoregressive_decode(model, x, c)):
    with pytest.raises(ValueError, match=r'inputs\[1\] is all padding'):
      decode(np.array([[2, 3], [0, 0]]), config)
    with pytest.raises(ValueError, match='a prompt of 5 tokens and up to 60 behind it need 65 positions, .* has 64'):
      decode(np.array([[2, 3, 0, 4, 5]]), config)


def test_the_last_position_is_used(model, expected):
  """Prompt and output fill all positions exactly: as the full pass has it."""
  prompt = expected['tokens'][:1, :20]
  result = speculative.speculative_decode(model, model, prompt, speculative.DecodeConfig(
      gamma=5, max_decode_len=44, min_decode_len=44))
  whole = np.concatenate([prompt, result.tokens], axis=1)
  logits = np.array(decoder_only.DecoderOnly(model.config).apply({'params': model.params}, whole))
  logits[..., model.eos_id] = -np.inf
  np.testing.assert_array_equal(np.argmax(logits[0, 19:-1], axis=-1), result.tokens[0])


def test_saved_and_loaded(model, tmp_path):
  speculative.save_model(model, tmp_path / 'saved')
  again = speculative.load_model(tmp_path / 'saved', 'float32')
  assert again.config == model.config
  jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
  ours = safetensors.numpy.load_file(tmp_path / 'saved' / 'model.safetensors')
  theirs = safetensors.numpy.load_file(os.path.join(DATA, 'model.safetensors'))
  theirs = {name.removeprefix('transformer.'): array for name, array in theirs.items()}
  assert ours.keys() == theirs.keys()
  for name, array in ours.items():
    np.testing.assert_array_equal(array, theirs[name])
  with pytest.raises(FileExistsError, match='overwrite=True'):
    speculative.save_model(model, tmp_path / 'saved')


def test_a_head_of_its_own(model, expected, tmp_path):
  """Twice the embedding gives twice the logits; saved as Transformers has it, [out, in]."""
  config = dataclasses.replace(model.config, tied=False)
  untied = speculative.Model(config, {**model.params, 'head': 2 * model.params['embedding'].T})
  logits = decoder_only.DecoderOnly(config).apply({'params': untied.params}, expected['tokens'])
  np.testing.assert_allclose(logits, 2 * expected['logits'], atol=2e-4 * np.ptp(expected['logits']))
  speculative.save_model(untied, tmp_path / 'saved')
  tensors = safetensors.numpy.load_file(tmp_path / 'saved' / 'model.safetensors')
  np.testing.assert_array_equal(tensors['lm_head.weight'], 2 * tensors['wte.weight'])
  assert json.loads((tmp_path / 'saved' / 'config.json').read_text())['tie_word_embeddings'] is False
  again = speculative.load_model(tmp_path / 'saved', 'float32')
  assert again.config == config
  jax.tree.map(np.testing.assert_array_equal, again.params, untied.params)


def test_texts_are_prompts(tmp_path):
  """Without an EOS, which would end what is to be continued; the vocabulary is saved and loaded with the model."""
  vocabulary = Vocabulary(VOCABULARY)
  config = decoder_only.GPTConfig(vocab_size=vocabulary.vocab_size, d_model=16, d_ff=16, num_heads=1, num_layers=1,
                                  max_positions=64, pad_id=vocabulary.pad_id, eos_id=vocabulary.eos_id)
  model = speculative.Model(config, decoder_only.init_params(config, jax.random.key(0)), vocabulary)
  speculative.save_model(model, tmp_path / 'saved')
  again = speculative.load_model(tmp_path / 'saved', 'float32')
  assert again.vocabulary.fingerprint == vocabulary.fingerprint
  texts = ['a house', 'a']
  ids = [vocabulary.encode(text) for text in texts]
  inputs = np.array([row + [vocabulary.pad_id] * (len(ids[0]) - len(row)) for row in ids])
  decode_config = speculative.DecodeConfig(gamma=2, max_decode_len=8, min_decode_len=8)
  expected = speculative.autoregressive_decode(model, inputs, decode_config)
  expected = [vocabulary.decode(row) for row in expected.tokens]
  assert speculative.generate(again, again, texts, decode_config) == expected
  assert speculative.generate(again, None, texts, decode_config) == expected
  assert ''.join(speculative.stream(again, again, texts[0], decode_config)) == expected[0]


@pytest.fixture
def folder(tmp_path):
  shutil.copytree(DATA, tmp_path / 'model')
  return tmp_path / 'model'


@pytest.mark.parametrize('change,message', [
    (lambda t: t.pop('transformer.h.1.mlp.c_fc.bias'), 'h.1.mlp.c_fc.bias is missing'),
    (lambda t: [t.pop(name) for name in list(t) if '.h.1.' in name], 'layer h.1 is missing'),
    (lambda t: t.update({'transformer.h.2.ln_1.weight': np.ones(32, np.float32)}), 'layer h.2 is too many'),
    (lambda t: t.update({'transformer.ln_x.weight': np.ones(32, np.float32)}), 'ln_x.weight is unknown'),
    (lambda t: t.update({'ln_f.bias': np.ones(32, np.float32)}), 'ln_f.bias is there twice, as .*ln_f.bias and as '),
    (lambda t: t.update({'transformer.wpe.weight': np.ones((9, 32), np.float32)}), r'wpe.weight has shape \(9, 32\)'),
    (lambda t: t.update({'lm_head.weight': np.ones((96, 32), np.float32)}), 'differs from wte.weight'),
    (lambda t: t.update({'transformer.ln_f.bias': np.ones(32, np.int8)}), 'quantised')])
def test_damaged_weights(folder, change, message):
  file = folder / 'model.safetensors'
  tensors = safetensors.numpy.load_file(file)
  change(tensors)
  safetensors.numpy.save_file(tensors, file)
  with pytest.raises(ValueError, match=message):
    speculative.load_model(folder)


def test_what_old_files_hold_besides(folder, model):
  """Masks, and the head though it is the embedding."""
  file = folder / 'model.safetensors'
  tensors = safetensors.numpy.load_file(file)
  tensors['transformer.h.0.attn.bias'] = np.ones((1, 1, 64, 64), np.float32)
  tensors['transformer.h.0.attn.masked_bias'] = np.float32([-1e4])
  tensors['lm_head.weight'] = tensors['transformer.wte.weight']
  safetensors.numpy.save_file(tensors, file)
  jax.tree.map(np.testing.assert_array_equal, speculative.load_model(folder, 'float32').params, model.params)


@pytest.mark.parametrize('change,message', [
    ({'scale_attn_by_inverse_layer_idx': True}, 'scale_attn_by_inverse_layer_idx'),
    ({'activation_function': 'relu'}, "'relu' is not supported"), ({'n_layer': 0}, 'n_layer'),
    ({'n_head': 5}, 'not a multiple'), ({'tie_word_embeddings': False}, 'lm_head.weight is missing')])
def test_bad_configurations(folder, change, message):
  file = folder / 'config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | change))
  with pytest.raises(ValueError, match=message):
    speculative.load_model(folder)


def test_an_eos_beyond_the_vocabulary_is_none(folder):
  """Transformers writes GPT-2's own (50256) into every small model."""
  file = folder / 'config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | {'eos_token_id': 50256, 'pad_token_id': None}))
  loaded = speculative.load_model(folder)
  assert (loaded.eos_id, loaded.pad_id) == (-1, 0)


def test_dropout_and_its_absence(model, expected):
  """Training: dropout changes the logits, and differently for every key."""
  module = decoder_only.DecoderOnly(model.config)
  a, b = (module.apply({'params': model.params}, expected['tokens'], False, rngs={'dropout': jax.random.key(i)})
          for i in (0, 1))
  assert np.isfinite(a).all() and not np.allclose(a, b) and not np.allclose(a, expected['logits'], atol=.1)


def test_the_paper_s_sizes():
  """97 M and 6 M parameters with the paper's 8 K vocabulary, if a head of its own is counted, which ours shares."""
  for name, total in ('97m', 97e6), ('6m', 6e6):
    config = decoder_only.GPTConfig(vocab_size=8192, max_positions=256, **decoder_only.SHAPES[name])
    shapes = jax.eval_shape(lambda config=config: decoder_only.init_params(config, jax.random.key(0)))
    count = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert count + 8192 * config.d_model == pytest.approx(total, rel=.05)
