"""From logits to the distribution that is sampled from: temperature, top-k, top-p; argmax is the one-hot distribution.

Section 2.2 of the paper ("standardized sampling"). The target's and the draft's logits go through the same function.
Everything is float32, whatever the model computes in.
"""
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp


class Distribution(NamedTuple):
  """What `adjust` gives.

  Attributes:
    probs: [..., V], sampled from.
    soft: [..., V], the same but at temperature 0 the softmax of the logits themselves: for log-probabilities.
  """
  probs: jax.Array
  soft: jax.Array


def adjust(logits, temperature, top_k=0, top_p=1.0, filtered=True):
  """Temperature, then top-k, then top-p (the smallest set of tokens that reaches p).

  Args:
    logits: [..., V].
    temperature: ≥ 0, broadcastable to [...]; 0 means argmax (the smallest id among equals).
    top_k: int, broadcastable to [...]; 0: off. Tokens that tie with the k-th are kept.
    top_p: in (0, 1], broadcastable to [...]; 1: off. Tokens that tie with the last are kept.
    filtered: static; False promises that top_k and top_p are off everywhere, and costs nothing.

  Returns:
    `Distribution`; NaN in every entry if a logit is NaN or +inf, or all are −inf.
  """
  logits = logits.astype(jnp.float32)
  temperature, top_k, top_p = (jnp.asarray(a)[..., None] for a in (temperature, top_k, top_p))
  greedy = temperature == 0
  peak = jnp.max(logits, axis=-1, keepdims=True)
  # The peak is subtracted before the division: a tiny temperature must not overflow.
  weights = jnp.exp((logits - peak) / jnp.where(greedy, 1.0, temperature))
  soft = weights / jnp.sum(weights, axis=-1, keepdims=True)
  if filtered:
    soft = jnp.where(greedy, soft, _filter(soft, top_k, top_p))
  one_hot = jnp.arange(logits.shape[-1]) == first_true(logits == peak)[..., None]
  valid = is_valid(logits)[..., None]
  return Distribution(*(jnp.where(valid, a, jnp.nan) for a in (jnp.where(greedy, one_hot, soft), soft)))


def is_valid(logits):
  """bool[...] of logits[..., V]: neither NaN nor +inf, and not all −inf."""
  # Compared, not computed: vectorised maxima and exponentials need not let a NaN through. The maximum is `adjust`'s own.
  return jnp.all(logits < jnp.inf, axis=-1) & (jnp.max(logits, axis=-1) > -jnp.inf)


def first_true(condition):
  """int32[...]: the first True of bool[..., K] (0 if none). Two plain reductions, which vectorise; argmax does not."""
  size = condition.shape[-1]
  index = jnp.min(jnp.where(condition, jnp.arange(size), size), axis=-1)
  return jnp.where(index == size, 0, index).astype(jnp.int32)


def _filter(probs, top_k, top_p):
  """Top-k, then top-p of what is left, each followed by normalisation; a threshold search, no sort."""
  k = jnp.where(top_k == 0, probs.shape[-1], jnp.minimum(top_k, probs.shape[-1]))
  kept = jnp.where(probs >= _threshold(probs, jnp.ones_like(probs), k), probs, 0)
  kept /= jnp.sum(kept, axis=-1, keepdims=True)
  # A sum of all probabilities may fall short of 1 by rounding: top_p = 1 must keep everything. And a top_p that float32
  # takes for 0 must keep the most probable token.
  top_p = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)
  kept = jnp.where((kept >= _threshold(kept, kept, top_p)) | (top_p >= 1), kept, 0)
  return kept / jnp.sum(kept, axis=-1, keepdims=True)


def _threshold(probs, weights, target):
  """The largest t with Σ weights[probs ≥ t] ≥ target: [..., 1]. Bisection over the bits of a positive float32."""
  def halve(_, bounds):
    low, high = bounds  # the answer is in [low, high)
    middle = low + (high - low) // 2
    t = lax.bitcast_convert_type(middle, jnp.float32)
    enough = jnp.sum(jnp.where(probs >= t, weights, 0), axis=-1, keepdims=True) >= target
    return jnp.where(enough, middle, low), jnp.where(enough, high, middle)
  low = jnp.zeros((*probs.shape[:-1], 1), jnp.int32)
  high = jnp.full_like(low, 0x3F800001)  # just above 1.0
  low, _ = lax.fori_loop(0, 30, halve, (low, high))
  return lax.bitcast_convert_type(low, jnp.float32)
