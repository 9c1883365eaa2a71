"""The target protocol, and what of a target or drafter is compiled into a program.

A target is any object with

  params: a tree of arrays;
  vocab_size: the number of real token ids (logits may be wider, what is beyond is never emitted);
  pad_id, eos_id (−1: none), start_id;
  prefill(params, inputs int32[B, S], max_len) → cache: everything that is computed once; room for max_len decoded slots;
  extend(params, cache, tokens int32[B, T], positions int32[B]) → (logits[B, T, ≥ V], cache): writes tokens at positions
    positions[b] … positions[b] + T − 1 and sees nothing beyond; rolling back is passing a smaller position;
  first(inputs) → (tokens int32[B], positions int32[B]): optional; where decoding starts (default: start_id at 0);
  check_inputs(inputs, max_decode_len): optional; raises ValueError for inputs int[B, S] that the target cannot take.

`prefill` and `extend` are pure and compare equal from call to call (plain functions, or properties that return the same
function), so that a second call finds the program of the first. Every leaf of the cache has the batch axis first.
"""
from typing import Any, Callable, NamedTuple

import jax.numpy as jnp


class Target(NamedTuple):
  """The static part of a target: a hashable key of a compiled program."""
  prefill: Callable[..., Any]
  extend: Callable[..., Any]
  first: Callable[..., Any] | None
  vocab_size: int
  pad_id: int
  eos_id: int
  start_id: int

  @classmethod
  def of(cls, target):
    return cls(target.prefill, target.extend, getattr(target, 'first', None), int(target.vocab_size),
               int(target.pad_id), int(target.eos_id), int(target.start_id))

  def start(self, inputs):
    """(tokens int32[B], positions int32[B]) to decode from."""
    if self.first is not None:
      return self.first(inputs)
    batch = inputs.shape[0]
    return jnp.full(batch, self.start_id, jnp.int32), jnp.zeros(batch, jnp.int32)


class Drafter(NamedTuple):
  """The static part of a drafter (`speculative.drafters.base`)."""
  prefill: Callable[..., Any]
  draft: Callable[..., Any]

  @classmethod
  def of(cls, drafter):
    return cls(drafter.prefill, drafter.draft)
