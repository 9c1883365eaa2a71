"""Tests of speculative.data.batching."""
import os
import warnings

from absl.testing import absltest
import numpy as np

from speculative.data import batching
from speculative.data.vocabulary import Vocabulary

SPIECE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data', 'vocabulary', 'spiece.model')


class EncodeBatchTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.vocabulary = Vocabulary(SPIECE)
    self.the = self.vocabulary.encode('the')[0]

  def encode(self, texts, **kwargs):
    return batching.encode_batch(self.vocabulary, texts, **kwargs)

  def test_rows(self):
    batch = self.encode(['the', 'the the the'])
    self.assertEqual(batch.dtype, np.int32)
    self.assertEqual(batch.shape, (2, 32))
    np.testing.assert_array_equal(batch[0, :3], [self.the, 1, 0])
    np.testing.assert_array_equal(batch[1, :5], [self.the] * 3 + [1, 0])
    self.assertFalse(batch[:, 4:].any())

  def test_token_ids_stay_as_they_are(self):
    batch = self.encode([[5, 6], np.array([7]), 'the'])
    np.testing.assert_array_equal(batch[:, :3], [[5, 6, 0], [7, 0, 0], [self.the, 1, 0]])
    with self.assertRaisesRegex(ValueError, 'text 1 has 33 tokens, the limit is 32'):
      self.encode([[5], [5] * 33], max_len=32)
    for text in b'the', b'12', None, [[5]]:
      with self.assertRaises((ValueError, TypeError)):
        self.encode([text])

  def test_smallest_bucket(self):
    for n, length in (31, 32), (32, 64), (63, 64), (64, 128), (511, 512):
      self.assertEqual(self.encode(['the', 'the ' * n]).shape, (2, length))
    self.assertEqual(self.encode(['the ' * 5], buckets=(4, 6, 9)).shape, (1, 6))
    self.assertEqual(self.encode(['the ' * 39], max_len=40).shape, (1, 64))

  def test_empty(self):
    for text in '', ' ', '\n\t ', '\u2003':
      with self.assertRaisesRegex(ValueError, 'text 1 is empty'):
        self.encode(['the', text])
    with self.assertRaisesRegex(ValueError, 'no texts'):
      self.encode([])
    with self.assertRaisesRegex(ValueError, 'pass a list'):
      self.encode('the')

  def test_too_long(self):
    with self.assertRaisesRegex(ValueError, r'text 1 has 513 tokens \(EOS included\), the limit is 512.*truncate=True'):
      self.encode(['the', 'the ' * 512])
    with self.assertRaisesRegex(ValueError, 'the limit is 512'):
      self.encode(['the ' * 512], max_len=1000)
    with self.assertRaisesRegex(ValueError, 'text 0 has 11 tokens .* the limit is 10'):
      self.encode(['the ' * 10], max_len=10)

  def test_truncated(self):
    with self.assertWarnsRegex(UserWarning, 'cut to 512 tokens: 1, 2'):
      batch = self.encode(['the', 'the ' * 512, 'the ' * 900], truncate=True)
    np.testing.assert_array_equal(batch[1:], [[self.the] * 511 + [1]] * 2)
    with warnings.catch_warnings(action='error'):
      self.encode(['the ' * 511], truncate=True)


if __name__ == '__main__':
  absltest.main()
