"""The drafter protocol.

A drafter is any object with

  params: a tree of arrays;
  prefill(params, inputs int32[B, S], max_len) → state: called once; max_len slots hold every token ever drafted from;
  draft(params, state, tokens int32[B, L], lengths int32[B], gamma, sample) → (x int32[B, γ], q float32[B, γ, V], state).

tokens[b, :lengths[b]] is everything committed, from the start token on; the rest is padding. `sample(logits[B, ≥ V], i)`
belongs to the loop (`Sampler`): it adjusts logits as the target's are adjusted, draws draft number i (0 … γ − 1), and
returns (x_i int32[B], q_i float32[B, V]). Return those very q: exactness rests on q being what x was drawn from.
`speculative.testing.check_drafter` finds a drafter that does otherwise.

Between two calls a row commits at most γ + 1 tokens: some of the drafts it returned, then one of the target's.

`prefill` and `draft` are pure and compare equal from call to call (see `speculative.decoding.targets`). Every leaf of the
state has the batch axis first. Optional, compared with the target's before anything is compiled: vocab_size, pad_id,
eos_id, start_id, vocabulary; check_inputs, as a target may have it.
"""
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp

from speculative import algorithm


UNLIKELY = -1e9  # a logit in −inf's stead: whatever a setting forbids, something is left to draw


class Sampler(NamedTuple):
  """The `sample` of the protocol.

  Attributes:
    adjust: adjust(logits[B, …, ≥ V], i int or int32[B, …]) → float32[B, …, V], the distribution at draft number i.
    u: float32[B, γ, 2], what drafts are drawn with.
    keys: PRNG keys [B], for drafters that draw by themselves; nothing else of the round comes from them.
  """
  adjust: Callable[..., Any]
  u: jax.Array
  keys: jax.Array

  def __call__(self, logits, i):
    """logits[B, ≥ V], draft number i → (x int32[B], q float32[B, V])."""
    q = self.adjust(logits, i)
    return algorithm.draw(q, self.u[:, i]), q


def over_logits(counts, logits):
  """counts int32[B], shaped to be added to int32[B, …] that go with logits[B, …, V]."""
  return counts.reshape(-1, *[1] * (logits.ndim - 2))


class NoDrafter:
  """Drafts nothing (γ = 0): every round is a step of plain decoding."""
  params = ()

  @staticmethod
  def prefill(params, inputs, max_len):
    del params, inputs, max_len
    return ()

  @staticmethod
  def draft(params, state, tokens, lengths, gamma, sample):
    del params, lengths, gamma, sample
    batch = tokens.shape[0]
    return jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0, 1)), state  # q: nothing of any vocabulary


def as_drafter(drafter, refeed=2):
  """A drafter as it is; a target (anything with `extend`) wrapped as `ModelDrafter`. Raises TypeError for others.

  Args:
    drafter: a drafter or a target.
    refeed: how many of the last committed tokens a drafter with a cache may have missed.
  """
  from speculative.drafters.model import ModelDrafter
  if isinstance(drafter, type):
    raise TypeError(f'{drafter.__name__} is a class: a drafter is an object of one')
  if hasattr(drafter, 'with_refeed'):
    return drafter.with_refeed(refeed)
  if hasattr(drafter, 'draft') and hasattr(drafter, 'prefill'):
    return drafter
  if hasattr(drafter, 'extend') and hasattr(drafter, 'prefill'):
    return ModelDrafter(drafter, refeed)
  raise TypeError(f'{type(drafter).__name__} is no drafter: it needs prefill and draft (or extend, as a model has)')
