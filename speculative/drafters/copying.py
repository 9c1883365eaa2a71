"""Drafts by copying from the input (the paper's section 6 names it for summarisation; known as prompt look-up)."""
import functools

import jax.numpy as jnp

from speculative.checks import check_integer
from speculative.drafters.base import UNLIKELY


class CopyingDrafter:
  """Finds the last committed tokens in the input and drafts what follows them there.

  Of all places in the input, the one where most of the last `max_ngram` tokens match is taken, the first of equals.
  q is one-hot. Where nothing matches or the input has ended, q is uniform. It has no parameters and costs nearly
  nothing.

  It looks for its place once a round. α as `measure_alpha` has it looks at every prefix, which is γ = 1: in a longer
  round later drafts follow the place of the first.

  Attributes:
    params, vocab_size, pad_id, eos_id, prefill, draft: the drafter protocol.
  """

  params = ()

  def __init__(self, target, max_ngram=3):
    """Args:
      target: whose vocab_size, pad_id and eos_id are taken; input and output must share a vocabulary.
      max_ngram: tokens that are compared at most (≥ 1).
    """
    check_integer('max_ngram', max_ngram, 1)
    self.vocab_size, self.pad_id, self.eos_id = target.vocab_size, target.pad_id, target.eos_id
    self.max_ngram = max_ngram

  @staticmethod
  def prefill(params, inputs, max_len):
    del params, max_len
    return inputs

  @property
  def draft(self):
    return _draft(self.vocab_size, self.pad_id, self.max_ngram)


@functools.lru_cache(maxsize=None)
def _draft(vocab_size, pad_id, max_ngram):
  """The same function for equal settings."""

  def draft(params, state, tokens, lengths, gamma, sample):
    del params
    inputs, width = state, state.shape[1]
    # run[b, s]: how many tokens up to inputs[b, s] equal the last committed ones; the start token is none of them.
    run, going = 0, True
    for k in range(max_ngram):
      last = jnp.take_along_axis(tokens, jnp.maximum(lengths - 1 - k, 0)[:, None], axis=1)
      shifted = jnp.pad(inputs, ((0, 0), (k, 0)), constant_values=-1)[:, :width]
      going = going & (shifted == last) & (lengths[:, None] - 1 - k >= 1)
      run = run + going
    place = jnp.argmax(run, axis=1)
    found = jnp.max(run, axis=1) > 0
    drawn = []
    for i in range(gamma):
      at = place + 1 + i
      token = jnp.take_along_axis(inputs, jnp.minimum(at, width - 1)[:, None], axis=1)
      known = found[:, None] & (at < width)[:, None] & (token != pad_id)
      logits = jnp.where(known & (jnp.arange(vocab_size) != token), UNLIKELY, 0.0)
      drawn.append(sample(logits, i))
    x, q = zip(*drawn)
    return jnp.stack(x, axis=1), jnp.stack(q, axis=1), state

  return draft
