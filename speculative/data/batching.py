"""Texts to token batches of few shapes, so that few programs are compiled."""
import warnings

import numpy as np

BUCKETS = (32, 64, 128, 256, 512)


def encode_batch(vocabulary, texts, max_len=512, truncate=False, buckets=BUCKETS, eos=True):
  """Encodes texts, padding at the end.

  Args:
    vocabulary: `Vocabulary`.
    texts: list of B strings, or of sequences of token ids, to which no EOS is added.
    max_len: most tokens of a text, EOS included; the largest bucket limits it too.
    truncate: cut longer texts, with a warning, instead of refusing them.
    buckets: lengths to pad to.
    eos: each string is followed by EOS.

  Returns:
    int32[B, S] NumPy array, S the smallest bucket that holds every text.

  Raises:
    ValueError: no text at all, an empty one, or one that is too long; the message says which.
  """
  if isinstance(texts, str):
    raise ValueError('texts is a string; pass a list of strings')
  if not texts:
    raise ValueError('there are no texts to encode')
  limit = min(max_len, max(buckets))
  if limit < 1 + eos:
    raise ValueError(f'max_len = {max_len} leaves no room for a token{" and EOS" if eos else ""}')
  rows, cut = [], []
  for i, text in enumerate(texts):
    if isinstance(text, str):
      ids = vocabulary.encode(text) if text.strip() else []
      end = [vocabulary.eos_id] if eos else []
    else:
      ids, end = np.asarray(text, np.int32).tolist(), []
    if not ids:
      raise ValueError(f'text {i} is empty')
    if len(ids) + len(end) > limit:
      if not truncate:
        raise ValueError(f'text {i} has {len(ids) + len(end)} tokens{" (EOS included)" if end else ""}, the limit is '
                         f'{limit}: shorten it or pass truncate=True')
      ids = ids[:limit - len(end)]
      cut.append(i)
    rows.append(ids + end)
  if cut:
    warnings.warn(f'texts cut to {limit} tokens: {", ".join(map(str, cut))}', stacklevel=2)
  longest = max(map(len, rows))
  batch = np.full((len(rows), min(b for b in buckets if b >= longest)), vocabulary.pad_id, np.int32)
  for row, ids in zip(batch, rows):
    row[:len(ids)] = ids
  return batch
