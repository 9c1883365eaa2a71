"""Unigram and bigram drafters (section 4.2 of the paper, "negligible-cost approximation models")."""
import dataclasses
import os

import jax.numpy as jnp
import numpy as np

from speculative.checks import check_integer
from speculative.checks import check_number
from speculative.drafters.base import UNLIKELY


@dataclasses.dataclass(frozen=True)
class Counts:
  """Token counts of a corpus of target texts.

  Attributes:
    unigram: int[V].
    previous, following, count: int[K], the bigrams that occurred; `previous` is sorted. A text's first token follows
      the start token.
    pad_id, eos_id, start_id: as in the vocabulary.
  """
  unigram: np.ndarray
  previous: np.ndarray
  following: np.ndarray
  count: np.ndarray
  pad_id: int
  eos_id: int
  start_id: int

  @property
  def vocab_size(self):
    return self.unigram.shape[0]


def fit(texts, vocab_size, pad_id=0, eos_id=1, start_id=0):
  """Counts unigrams and bigrams.

  Args:
    texts: sequences of token ids, EOS included, start token not.
    vocab_size: number of real ids.

  Returns:
    `Counts`.

  Raises:
    ValueError: no tokens at all, or an id outside the vocabulary.
  """
  texts = [np.asarray(text, np.int64) for text in texts]
  tokens = np.concatenate(texts) if texts else np.zeros(0, np.int64)
  if not tokens.size:
    raise ValueError('no tokens to count')
  if tokens.min() < 0 or tokens.max() >= vocab_size:
    raise ValueError(f'token ids must be in [0, {vocab_size}); found {tokens.min()} … {tokens.max()}')
  previous = np.concatenate([np.concatenate([[start_id], text[:-1]]) for text in texts if text.size])
  pairs, count = np.unique(previous * vocab_size + tokens, return_counts=True)
  return Counts(np.bincount(tokens, minlength=vocab_size), pairs // vocab_size, pairs % vocab_size, count,
                pad_id, eos_id, start_id)


def fit_texts(texts, vocabulary):
  """`fit` on texts (str), encoded and an EOS added; padding is the start token, as in T5."""
  ids = [[*vocabulary.encode(text), vocabulary.eos_id] for text in texts]
  return fit(ids, vocabulary.vocab_size, vocabulary.pad_id, vocabulary.eos_id, vocabulary.pad_id)


def read_tokens(path):
  """A file of token ids, a text a line, separated by blanks → list of lists. Raises ValueError naming a bad line."""
  texts = []
  with open(path, encoding='utf-8') as f:
    for i, line in enumerate(f):
      try:
        texts.append([int(token) for token in line.split()])
      except ValueError as e:
        raise ValueError(f'{path}, line {i + 1}: {e}') from e
  return texts


def save(counts, path):
  """Writes `Counts` as a NumPy archive, under a temporary name first."""
  fields = {f.name: np.asarray(getattr(counts, f.name), np.int32) for f in dataclasses.fields(counts)}
  temporary = f'{path}.tmp'
  with open(temporary, 'wb') as f:
    np.savez_compressed(f, **fields)
  os.replace(temporary, path)


def load(path):
  """Reads what `save` wrote. Raises ValueError naming the file if it is something else."""
  try:
    with np.load(path) as f:
      fields = {field.name: f[field.name] for field in dataclasses.fields(Counts)}
  except FileNotFoundError:
    raise
  except Exception as e:  # a damaged archive raises one of many kinds
    raise ValueError(f'{path}: no n-gram counts ({e})') from e
  return Counts(**{name: int(a) if a.ndim == 0 else a for name, a in fields.items()})


class NgramDrafter:
  """Drafts from counts alone; its cost is that of a table look-up.

  Attributes:
    params, vocab_size, pad_id, eos_id, start_id, prefill, draft: the drafter protocol.
  """

  def __init__(self, params, counts, draft):
    self.params = params
    self.vocab_size = counts.vocab_size
    self.pad_id, self.eos_id, self.start_id = counts.pad_id, counts.eos_id, counts.start_id
    self.draft = draft

  @staticmethod
  def prefill(params, inputs, max_len):
    del params, inputs, max_len
    return ()


def unigram(counts, smoothing=1.0):
  """Drafts every token from the unigram distribution, `smoothing` ≥ 0 added to each count."""
  return NgramDrafter({'log_probs': _log(_unigram(counts, smoothing))}, counts, _draft_unigram)


def bigram(counts, smoothing=1.0, backoff=1.0, max_following=256):
  """Drafts from the bigram distribution with unigram back-off (Witten–Bell: the more kinds of tokens have followed,
  the more weight the unigrams get).

  p(y | x) = (c(x, y) + b · k(x) · p(y)) / (c(x) + b · k(x)), k(x) the number of kinds that followed x, b = `backoff`.

  Args:
    counts: `Counts`.
    smoothing: ≥ 0, added to every unigram count.
    backoff: b > 0.
    max_following: ≥ 1; the table keeps that many of each token's most frequent followers [V, max_following]; what is
      cut off goes to the unigrams.

  Raises:
    ValueError: a number out of range.
  """
  check_number('backoff', backoff, lambda a: (a > 0) & (a < np.inf), 'above 0')
  check_integer('max_following', max_following, 1)
  v = counts.vocab_size
  order = np.lexsort((-counts.count, counts.previous))
  previous, following, count = counts.previous[order], counts.following[order], counts.count[order]
  kinds = np.bincount(previous, minlength=v)
  rank = np.arange(previous.size) - np.searchsorted(previous, previous)
  width = min(max_following, max(1, kinds.max()))
  kept = rank < width
  total = np.bincount(previous, weights=count, minlength=v) + backoff * np.maximum(kinds, 1)
  ids, probs = np.zeros((v, width), np.int32), np.zeros((v, width), np.float32)
  ids[previous[kept], rank[kept]] = following[kept]
  probs[previous[kept], rank[kept]] = count[kept] / total[previous[kept]]
  params = {'unigram': jnp.asarray(_unigram(counts, smoothing)), 'following': jnp.asarray(ids),
            'probs': jnp.asarray(probs)}
  return NgramDrafter(params, counts, _draft_bigram)


def _log(probs):
  return jnp.maximum(jnp.log(probs), UNLIKELY)


def _unigram(counts, smoothing):
  check_number('smoothing', smoothing, lambda a: (a >= 0) & (a < np.inf), 'at least 0')
  weights = counts.unigram + smoothing
  return (weights / weights.sum()).astype(np.float32)


def _draft_unigram(params, state, tokens, lengths, gamma, sample):
  del lengths
  logits = jnp.broadcast_to(params['log_probs'], (tokens.shape[0], params['log_probs'].size))
  return (*_stack([sample(logits, i) for i in range(gamma)]), state)


def _draft_bigram(params, state, tokens, lengths, gamma, sample):
  token = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
  rows = jnp.arange(tokens.shape[0])[:, None]
  drawn = []
  for i in range(gamma):
    probs = params['probs'][token]
    rest = 1.0 - jnp.sum(probs, axis=1, keepdims=True)
    p = (rest * params['unigram']).at[rows, params['following'][token]].add(probs)
    drawn.append(sample(_log(p), i))
    token = drawn[-1][0]
  return (*_stack(drawn), state)


def _stack(drawn):
  """γ pairs (x[B], q[B, V]) → x[B, γ], q[B, γ, V]."""
  x, q = zip(*drawn)
  return jnp.stack(x, axis=1), jnp.stack(q, axis=1)
