"""Targets small enough that NumPy knows everything about them, and what tests compare with."""
import dataclasses
import itertools
from typing import Any, Callable

import jax.numpy as jnp
import numpy as np
import scipy.stats

# Chance that a statistical test with a new seed fails though nothing is wrong (the seeds are fixed, so it never does).
FALSE_ALARM = 1e-5


@dataclasses.dataclass(frozen=True, eq=False)
class Toy:
  """A target by the protocol. `params` are logits [states, ≥ V], which `extend` picks from."""
  params: Any
  prefill: Callable[..., Any]
  extend: Callable[..., Any]
  vocab_size: int
  pad_id: int = 0
  eos_id: int = -1
  start_id: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class PromptToy(Toy):
  """Starts as a decoder-only target does: at each row's last prompt token."""
  first: Callable[..., Any] = lambda inputs: _last_token(inputs)


def markov(logits, **kwargs):
  """p(next | prefix) = softmax(logits[last token])."""
  return _toy(Toy, logits, _prefill, _extend_markov, **kwargs)


def history(logits, **kwargs):
  """p(next | prefix) = softmax(logits[state(prefix)]): every token read from the cache, its place, and the input
  matter, so that any slip of a position, a row or the cache shows. NaN where a slot beyond the cache is asked for."""
  return _toy(Toy, logits, _prefill, _extend_history, **kwargs)


def prompted(logits, **kwargs):
  """As `history`, with a prompt in the cache instead of an encoder's input."""
  return _toy(PromptToy, logits, _prefill_prompt, _extend_history, **kwargs)


def clock(logits, **kwargs):
  """p(next | prefix) = softmax(logits[position])."""
  return _toy(Toy, logits, _prefill, _extend_clock, **kwargs)


def _toy(kind, logits, prefill, extend, vocab_size=None, **kwargs):
  logits = np.asarray(logits, np.float32)
  return kind(jnp.asarray(logits), prefill, extend, vocab_size or logits.shape[1], **kwargs)


def state(prefix, states, offset=0):
  """The state of `history` after a prefix (start token first)."""
  return (offset + sum((k + 1) * (t + 1) for k, t in enumerate(prefix))) % states


def _prefill(params, inputs, max_len):
  return {'tokens': jnp.full((inputs.shape[0], max_len), 777, jnp.int32), 'offset': jnp.sum(inputs, axis=1)}


def _prefill_prompt(params, inputs, max_len):
  room = jnp.full((inputs.shape[0], max_len), 777, jnp.int32)
  return {'tokens': jnp.concatenate([inputs, room], axis=1), 'offset': jnp.zeros(inputs.shape[0], jnp.int32)}


def _last_token(inputs):
  last = jnp.sum(inputs != 0, axis=1) - 1
  return jnp.take_along_axis(inputs, last[:, None], axis=1)[:, 0], last


def _extend_markov(params, cache, tokens, positions):
  return params[tokens], cache


def _extend_clock(params, cache, tokens, positions):
  return params[positions[:, None] + jnp.arange(tokens.shape[1])], cache


def _extend_history(params, cache, tokens, positions):
  slots = positions[:, None] + jnp.arange(tokens.shape[1])
  written = cache['tokens'].at[jnp.arange(tokens.shape[0])[:, None], slots].set(tokens, mode='drop')
  size = written.shape[1]
  sums = cache['offset'][:, None] + jnp.cumsum((jnp.arange(size) + 1) * (written + 1), axis=1)
  logits = params[jnp.take_along_axis(sums, slots, axis=1, mode='clip') % params.shape[0]]
  return jnp.where((slots >= size)[..., None], jnp.nan, logits), dict(cache, tokens=written)


def history_logits(toy, offset=0):
  """What `history` computes, in NumPy: function of a prefix → float64[V]."""
  table = np.asarray(toy.params, np.float64)[:, :toy.vocab_size]
  return lambda prefix: table[state(prefix, len(table), offset)]


def greedy(logits, n, start=(0,), eos_id=-1, min_len=0):
  """Greedy decoding, one token at a time: list of at most n tokens. `logits` is a function of the prefix."""
  prefix, out = list(start), []
  while len(out) < n:
    row = logits(prefix).copy()
    if eos_id >= 0 and len(out) < min_len:
      row[eos_id] = -np.inf
    out.append(int(np.argmax(row)))
    prefix.append(out[-1])
    if out[-1] == eos_id:
      break
  return out


def softmax(logits, axis=-1):
  logits = np.asarray(logits, np.float64)
  weights = np.exp(logits - logits.max(axis=axis, keepdims=True))
  return weights / weights.sum(axis=axis, keepdims=True)


def distribution(probs, n, start=0, eos_id=-1):
  """Probability of every text of at most n tokens: {tuple: float}. `probs` is a function of the prefix."""
  texts = {(): 1.0}
  for _ in range(n):
    longer = {}
    for text, weight in texts.items():
      if text and text[-1] == eos_id:
        longer[text] = weight
        continue
      for token, p in enumerate(probs([start, *text])):
        longer[(*text, token)] = weight * p
    texts = longer
  return texts


def texts_of(result):
  """Each row's tokens up to its length."""
  return [tuple(row[:n].tolist()) for row, n in zip(result.tokens, result.lengths)]


def chi_square(counts, probs):
  """p-value of counts[...] under probs[...]. What cannot happen must not have; rare outcomes (< 5) are pooled."""
  counts, expected = np.ravel(counts), np.ravel(probs) * np.sum(counts)
  assert counts[expected == 0].sum() == 0, 'an outcome of probability 0'
  counts, expected = counts[expected > 0], expected[expected > 0]
  np.testing.assert_allclose(expected.sum(), counts.sum(), rtol=1e-5)
  rare = expected < 5
  if rare.any():
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
  expected *= counts.sum() / expected.sum()
  return scipy.stats.chisquare(counts, expected).pvalue


def texts_chi_square(texts, expected):
  """`chi_square` of texts against {text: probability}."""
  index = {text: i for i, text in enumerate(expected)}
  counts = np.bincount([index[text] for text in texts], minlength=len(index))
  return chi_square(counts, np.array(list(expected.values())))


def all_tokens(v, n):
  return itertools.product(range(v), repeat=n)
