"""The target protocol, and what of a target or drafter is compiled into a program.

A target is any object with

  params: a tree of arrays;
  vocab_size: the number of real token ids (logits may be wider, what is beyond is never emitted);
  pad_id, eos_id (−1: none), start_id;
  prefill(params, inputs int32[B, S], max_len) → cache: everything that is computed once; room for max_len decoded slots;
  extend(params, cache, tokens int32[B, T], positions int32[B]) → (logits[B, T, ≥ V], cache): writes tokens at positions
    positions[b] … positions[b] + T − 1 and sees nothing beyond; rolling back is passing a smaller position;
  first(inputs) → (tokens int32[B], positions int32[B]): optional; where decoding starts (default: start_id at 0);
  check_inputs(inputs, lengths): optional; raises ValueError for inputs int[B, S] that the target cannot take, or that up
    to lengths int[B] tokens cannot follow.

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
    """Raises TypeError for what is no target, ValueError for special ids outside its vocabulary."""
    kind = type(target).__name__
    if isinstance(target, type):
      raise TypeError(f'{target.__name__} is a class: a target is an object of one')
    if hasattr(target, 'draft'):
      raise TypeError(f'{kind} is a drafter, not a target: it needs the probabilities of texts that it did not draft')
    for name in ('params', 'prefill', 'extend', 'vocab_size', 'pad_id', 'eos_id', 'start_id'):
      if not hasattr(target, name):
        raise TypeError(f'{kind} is no target: it has no {name} (see speculative.decoding.targets)')
    v = int(target.vocab_size)
    for name, least in (('pad_id', 0), ('eos_id', -1), ('start_id', 0)):
      if not least <= getattr(target, name) < v:
        raise ValueError(f'{name} = {getattr(target, name)} of {getattr(target, "name", "") or kind}: must be in '
                         f'[{least}, {v}), the vocabulary')
    return cls(target.prefill, target.extend, getattr(target, 'first', None), v,
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
