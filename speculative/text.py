"""Text in, text out."""
import jax
import numpy as np

from speculative.checks import check_integer
from speculative.data import batching
from speculative.decoding import speculative as loop
from speculative.decoding.autoregressive import autoregressive_decode
from speculative.decoding.config import DecodeConfig
from speculative.decoding.state import FinishReason


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
  inputs = encode(target, texts, truncate)
  if drafter is None:
    result = autoregressive_decode(target, inputs, config, seed, row_ids)
  else:
    result = loop.speculative_decode(target, drafter, inputs, config, seed, row_ids)
  return texts_of(result, target.vocabulary), result


def texts_of(result, vocabulary):
  """The texts of a `DecodeResult`: list of str."""
  return [vocabulary.decode(np.asarray(row[:n])) for row, n in zip(result.tokens, result.lengths)]


def stream(target, drafter, text, config=DecodeConfig(), seed=0, *, truncate=False, rounds=1):
  """Decodes one text and yields its pieces as they are committed; put together, they are what `generate` gives.

  Args:
    target, drafter, config, seed, truncate: as for `generate`.
    text: str.
    rounds: between two looks at what has been committed (≥ 1).

  Returns:
    Iterator of str, none of them empty. Half a character is held back until it is whole.

  Raises:
    ValueError: as for `generate`, at once, not at the first piece.
  """
  check_integer('rounds', rounds, 1)
  if not isinstance(text, str):
    raise ValueError(f'text = {text!r}: stream decodes one text, a str')
  program, params, settings, state = loop.start(target, drafter, encode(target, [text], truncate), config, seed)

  def pieces(state):
    shown, running = 0, True
    while running:
      state = loop.run(program, params, settings, state, np.int32(rounds))
      tokens, length, reason = jax.device_get((state.tokens[0], state.lengths[0], state.finish_reason[0]))
      running = reason == FinishReason.RUNNING
      whole = target.vocabulary.decode(tokens[1:length])
      safe = whole.rstrip('\ufffd') if running else whole  # bytes that are no character yet
      if len(safe) > shown:
        yield safe[shown:]
        shown = len(safe)

  return pieces(state)


def encode(target, texts, truncate=False, buckets=batching.BUCKETS):
  """Texts as the target takes them: int32[B, S], arguments as for `batching.encode_batch`. They end with EOS, but prompts,
  which the target continues, do not."""
  if getattr(target, 'vocabulary', None) is None:
    raise ValueError(f'{getattr(target, "name", "") or "the target"} has no vocabulary: decode token ids with '
                     'speculative_decode')
  return batching.encode_batch(target.vocabulary, texts, truncate=truncate, buckets=buckets,
                               eos=getattr(target, 'first', None) is None)
