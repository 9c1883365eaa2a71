"""Tests of speculative.data.vocabulary and speculative.data.packaged.

tests/data/vocabulary holds two small SentencePiece models of 120 pieces, one of English, one of German lines.
"""
import os
import shutil
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece

from speculative.checkpoints import huggingface
from speculative.data import packaged
from speculative.data import vocabulary
from speculative.data.vocabulary import Vocabulary
from speculative.drafters import ngram
from speculative.models import t5
from speculative.models.model import Model

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data', 'vocabulary')
SPIECE, OTHER = os.path.join(FOLDER, 'spiece.model'), os.path.join(FOLDER, 'other.model')


class VocabularyTest(parameterized.TestCase):

  def test_round_trip(self):
    v = Vocabulary(SPIECE)
    self.assertEqual((v.vocab_size, v.pad_id, v.eos_id, v.unk_id, v.extra_ids), (120, 0, 1, 2, 0))
    ids = v.encode('the package')
    self.assertEqual([v.pieces[i] for i in ids], ['▁the', '▁package'])
    self.assertEqual(v.decode(ids), 'the package')
    self.assertEqual(v.encode('   '), [])

  def test_decode_skips_what_is_no_text(self):
    v = Vocabulary(SPIECE)
    ids = v.encode('the package')
    self.assertEqual(v.decode(jnp.array([0, ids[0], 1, ids[1], 120, 127, -1, 1, 0])), 'the package')
    self.assertEqual(v.decode([]), '')

  def test_sentinels(self):
    plain, v = Vocabulary(SPIECE), Vocabulary(SPIECE, extra_ids=100)
    self.assertEqual(v.vocab_size, 220)
    text = 'the <extra_id_0> package <extra_id_99>'
    self.assertEqual(v.encode(text), [*plain.encode('the'), 219, *plain.encode('package'), 120])
    self.assertEqual(v.decode(v.encode(text)), text)
    text = 'a package for the others'
    self.assertEqual(v.encode(text), plain.encode(text))

  def test_fingerprint(self):
    fingerprint = Vocabulary(SPIECE).fingerprint
    copy = shutil.copy(SPIECE, self.enter_context(tempfile.TemporaryDirectory()))
    self.assertEqual(Vocabulary(copy).fingerprint, fingerprint)
    self.assertNotEqual(Vocabulary(OTHER).fingerprint, fingerprint)
    self.assertNotEqual(Vocabulary(SPIECE, extra_ids=1).fingerprint, fingerprint)

  def test_bytes(self):
    """Ids as ByT5Tokenizer of Transformers 5.24 gives them."""
    v = vocabulary.ByteVocabulary()
    self.assertEqual((v.vocab_size, v.pad_id, v.eos_id), (384, 0, 1))
    text = 'Grüße <extra_id_0> a<extra_id_124>b'
    ids = [74, 117, 198, 191, 198, 162, 104, 35, 259, 35, 100, 383, 101]
    self.assertEqual(v.encode(text), ids)
    self.assertEqual(v.decode([0, *ids, 1, 2, 400]), text)
    self.assertEqual(v.encode('<extra_id_125>'), [b + 3 for b in b'<extra_id_125>'])
    self.assertEqual(v.decode(ids[:3]), 'Gr\ufffd')
    self.assertEqual(v.encode(''), [])

  def tokenizer(self, folder):
    """The pieces of spiece.model with three sentinels, as `tokenizers` has them: its own Unigram code."""
    tokenizers = pytest.importorskip('tokenizers')
    processor = sentencepiece.SentencePieceProcessor(model_file=SPIECE)
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]
    pieces += [(f'<extra_id_{i}>', 0.0) for i in reversed(range(3))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(split=True)
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.add_special_tokens([f'<extra_id_{i}>' for i in range(3)])
    tokenizer.enable_truncation(2)
    tokenizer.save(os.path.join(folder, 'tokenizer.json'))
    return os.path.join(folder, 'tokenizer.json')

  def test_tokenizer_json(self):
    """As SentencePiece itself has it; the two fit together in a pair."""
    folder = self.enter_context(tempfile.TemporaryDirectory())
    v, spiece = vocabulary.TokenizerVocabulary(self.tokenizer(folder), 0, 1), Vocabulary(SPIECE, extra_ids=3)
    for text in ('the package', 'a package for the others', 'strange: qxz'):
      self.assertEqual(v.encode(text), spiece.encode(text))
      self.assertEqual(v.decode([0, *v.encode(text), 1]), spiece.decode(spiece.encode(text)))
    self.assertEqual(v.encode('the<extra_id_1>')[-1], 121)
    self.assertEqual(v.vocab_size, spiece.vocab_size)
    self.assertEqual(v.fingerprint, spiece.fingerprint)
    self.assertNotEqual(v.fingerprint, Vocabulary(OTHER, extra_ids=3).fingerprint)
    with open(os.path.join(folder, 'tokenizer.json'), 'w', encoding='utf-8') as f:
      f.write('{"model": 3}')
    with self.assertRaisesRegex(ValueError, 'tokenizer.json: not a tokenizer'):
      vocabulary.TokenizerVocabulary(os.path.join(folder, 'tokenizer.json'), 0, 1)

  def test_each_goes_with_its_model(self):
    """Saved and loaded again; bytes with ByT5's own number of rows."""
    folder = self.enter_context(tempfile.TemporaryDirectory())
    config = t5.T5Config(384, 8, 8, 1, 8, 1, 1)
    params = t5.init_params(config, jax.random.key(0))
    for name, v in (('bytes', vocabulary.ByteVocabulary()),
                    ('tokenizer', vocabulary.TokenizerVocabulary(self.tokenizer(folder), 0, 1)),
                    ('spiece', Vocabulary(SPIECE, extra_ids=3))):
      path = os.path.join(folder, name)
      huggingface.save(Model(config, params, v), path)
      again = huggingface.load(path).vocabulary
      self.assertIs(type(again), type(v))
      self.assertEqual(again.fingerprint, v.fingerprint)
      self.assertEqual((again.pad_id, again.eos_id), (0, 1))

  @parameterized.parameters(0, 10, 1000)
  def test_damaged_file(self, size):
    path = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), 'spiece.model')
    with open(SPIECE, 'rb') as source, open(path, 'wb') as f:
      f.write(source.read()[:size])
    with self.assertRaisesRegex(ValueError, f'{path}: not a SentencePiece model'):
      Vocabulary(path)

  def test_not_unicode(self):
    with self.assertRaisesRegex(ValueError, r"'\\ud800' in position 4"):
      Vocabulary(SPIECE).encode('the \ud800')


class PackagedTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = self.enter_context(tempfile.TemporaryDirectory())
    shutil.copy(SPIECE, self.folder)
    for name, d_model in ('target', 16), ('draft_small', 8), ('draft_base', 8):
      config = t5.T5Config(128, d_model, 16, 2, 4, 1, 1)
      shapes = jax.eval_shape(lambda config=config: t5.init_params(config, jax.random.key(0)))
      params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
      huggingface.save(Model(config, params), os.path.join(self.folder, name))
    os.mkdir(os.path.join(self.folder, 'texts'))
    for task in packaged.TASKS:
      with open(os.path.join(self.folder, 'texts', f'{task}.tsv'), 'w', encoding='utf-8') as f:
        f.write(f'{task}: an input\tein "Verweis"\n{task}: b\tc\u2028d\n')
    os.mkdir(os.path.join(self.folder, 'ngrams'))
    for task in packaged.TASKS:
      ngram.save(ngram.fit([[5, 6, 1]], 120), os.path.join(self.folder, 'ngrams', f'{task}.npz'))
    self.enter_context(mock.patch.object(packaged, 'FOLDER', self.folder))

  def test_loads(self):
    zoo = packaged.load_pretrained()
    self.assertEqual(list(zoo.drafts), ['small', 'base'])
    self.assertEqual(zoo.target.config.d_model, 16)
    for model in zoo.target, *zoo.drafts.values():
      self.assertIs(model.vocabulary, zoo.vocabulary)
      self.assertEqual(model.vocab_size, 120)
    self.assertEqual(zoo.texts['ende'], [('ende: an input', 'ein "Verweis"'), ('ende: b', 'c\u2028d')])
    self.assertEqual(list(zoo.drafters('ende')), ['unigram', 'bigram', 'small', 'base'])
    self.assertEqual(packaged.load_pretrained('bfloat16').target.params['embedding'].dtype, jnp.bfloat16)

  def test_missing_files(self):
    for name in 'draft_base/config.json', 'texts/ende.tsv', 'ngrams/summarize.npz', 'spiece.model', 'target/model.safetensors':
      path = os.path.join(self.folder, name)
      os.rename(path, path + '.away')
      with self.assertRaisesRegex(FileNotFoundError, name if 'safetensors' not in name else 'target: neither'):
        packaged.load_pretrained()
      os.rename(path + '.away', path)

  def test_bad_text(self):
    path = os.path.join(self.folder, 'texts', 'ende.tsv')
    with open(path, 'a', encoding='utf-8') as f:
      f.write('no reference\n')
    with self.assertRaisesRegex(ValueError, 'ende.tsv, line 3: 1 fields'):
      packaged.load_pretrained()


if __name__ == '__main__':
  absltest.main()
