"""Text in, text out."""
import numpy as np

from speculative.data import batching
from speculative.decoding.autoregressive import autoregressive_decode
from speculative.decoding.config import DecodeConfig
from speculative.decoding.speculative import speculative_decode


def generate(target, drafter, texts, config=DecodeConfig(), seed=0, *, truncate=False):
  """Decodes texts in one batch.

  Args:
    target: `Model` with a vocabulary.
    drafter: a drafter or model; None: autoregressive decoding.
    texts: list of str.
    config: `DecodeConfig`.
    seed: int ≥ 0, or one a text.
    truncate: cut a text that is longer than the largest length bucket, with a warning; otherwise an error.

  Returns:
    list of str.

  Raises:
    ValueError: an empty text, one that is too long, bad settings, or a pair that does not fit.
  """
  return decode_texts(target, drafter, texts, config, seed, truncate=truncate)[0]


def decode_texts(target, drafter, texts, config=DecodeConfig(), seed=0, *, truncate=False, row_ids=None):
  """As `generate`, and the `DecodeResult` with it: (list of str, DecodeResult)."""
  if isinstance(texts, str):
    raise ValueError('texts must be a list of texts, not one text')
  if target.vocabulary is None:
    raise ValueError(f'{target.name or "the target"} has no vocabulary: decode token ids with speculative_decode')
  inputs = batching.encode_batch(target.vocabulary, texts, truncate=truncate)
  if drafter is None:
    result = autoregressive_decode(target, inputs, config, seed, row_ids)
  else:
    result = speculative_decode(target, drafter, inputs, config, seed, row_ids)
  return [target.vocabulary.decode(np.asarray(row[:n])) for row, n in zip(result.tokens, result.lengths)], result
