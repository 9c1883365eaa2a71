"""N-gram drafters: counts, files, probabilities by hand."""
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.drafters import ngram

TEXTS = [[2, 3, 2, 1], [2, 3, 3, 1], [4, 1]]
V = 5


def test_counts():
  counts = ngram.fit(TEXTS, V)
  assert counts.unigram.tolist() == [0, 3, 3, 3, 1]
  pairs = dict(zip(zip(counts.previous.tolist(), counts.following.tolist()), counts.count.tolist()))
  assert pairs == {(0, 2): 2, (0, 4): 1, (2, 1): 1, (2, 3): 2, (3, 1): 1, (3, 2): 1, (3, 3): 1, (4, 1): 1}


def test_saved_and_loaded(tmp_path):
  counts = ngram.fit(TEXTS, V, start_id=4)
  ngram.save(counts, tmp_path / 'counts.npz')
  again = ngram.load(tmp_path / 'counts.npz')
  assert again.start_id == 4 and again.vocab_size == V
  for name in ('unigram', 'previous', 'following', 'count'):
    np.testing.assert_array_equal(getattr(again, name), getattr(counts, name))


def q_of(drafter, token):
  """The distribution after `token`."""
  seen = {}

  def sample(logits, i):
    seen[i] = np.exp(logits)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.exp(logits)
  drafter.draft(drafter.params, (), jnp.array([[0, token, 0]]), jnp.array([2]), 1, sample)
  return seen[0][0]


def test_bigram_probabilities_by_hand():
  """After 2: 1 once, 3 twice, two kinds; (c(2, y) + 2 p(y)) / (3 + 2), p the unigrams with one added to each count."""
  p = np.array([1, 4, 4, 4, 2]) / 15
  drafter = ngram.bigram(ngram.fit(TEXTS, V))
  np.testing.assert_allclose(q_of(drafter, 2), (np.array([0, 1, 0, 2, 0]) + 2 * p) / 5, rtol=1e-5)
  np.testing.assert_allclose(q_of(drafter, 1), p, rtol=1e-5)  # nothing ever followed: the unigrams alone
  np.testing.assert_allclose(q_of(ngram.unigram(ngram.fit(TEXTS, V)), 2), p, rtol=1e-5)


@pytest.mark.parametrize('max_following', [1, 2, 256])
def test_bigram_probabilities_sum_to_one(max_following):
  """Also where rare followers are cut off: their share goes to the unigrams."""
  drafter = ngram.bigram(ngram.fit(TEXTS, V), max_following=max_following)
  for token in range(V):
    np.testing.assert_allclose(q_of(drafter, token).sum(), 1, rtol=1e-5)
    assert (q_of(drafter, token) > 0).all()


def test_token_files(tmp_path):
  (tmp_path / 'tokens.txt').write_text('2 3 2 1\n2 3 3 1\n\n4 1\n')
  assert ngram.read_tokens(tmp_path / 'tokens.txt') == [[2, 3, 2, 1], [2, 3, 3, 1], [], [4, 1]]
  (tmp_path / 'bad.txt').write_text('2 3\n2 x\n')
  with pytest.raises(ValueError, match='bad.txt, line 2'):
    ngram.read_tokens(tmp_path / 'bad.txt')


def test_bad_input(tmp_path):
  with pytest.raises(ValueError, match='no tokens'):
    ngram.fit([], V)
  with pytest.raises(ValueError, match=r'in \[0, 5\)'):
    ngram.fit([[2, 7]], V)
  (tmp_path / 'bad.npz').write_bytes(b'PK\x03\x04 cut off')
  with pytest.raises(ValueError, match='bad.npz: no n-gram counts'):
    ngram.load(tmp_path / 'bad.npz')
  with pytest.raises(FileNotFoundError):
    ngram.load(tmp_path / 'missing.npz')
