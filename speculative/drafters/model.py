"""A language model as drafter: the paper's M_q."""
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speculative.decoding import state as loop
from speculative.decoding.targets import Target


class ModelState(NamedTuple):
  """The model's cache and its position of the start token, int32[B]."""
  cache: Any
  first_positions: jax.Array


@dataclasses.dataclass(eq=False)
class ModelDrafter:
  """Drafts with any target (`speculative.decoding.targets`), which encodes the input by itself."""
  model: Any

  def __getattr__(self, name):  # params, vocab_size, eos_id, …: the model's
    if name == 'model':
      raise AttributeError(name)
    return getattr(self.model, name)

  @property
  def prefill(self):
    return _functions(Target.of(self.model))[0]

  @property
  def draft(self):
    return _functions(Target.of(self.model))[1]


@functools.lru_cache(maxsize=None)
def _functions(model):
  """(prefill, draft) of a static `Target`; the same objects for equal ones."""

  def prefill(params, inputs, max_len):
    return ModelState(model.prefill(params, inputs, max_len), model.start(inputs)[1])

  def draft(params, state, tokens, lengths, gamma, sample):
    # The last two committed tokens are fed again: after a round that accepted everything the cache lacks the last
    # draft. Where there is only the start token, what follows it is padding, overwritten before it can be seen.
    begin = jnp.maximum(lengths - 2, 0)
    logits, cache = model.extend(params, state.cache, loop.read_rows(tokens, begin, 2), state.first_positions + begin)
    logits = jnp.take_along_axis(logits, (lengths - 1 - begin)[:, None, None], axis=1)[:, 0]
    x, q = sample(logits, 0)

    def step(carry, i):
      cache, token = carry
      logits, cache = model.extend(params, cache, token[:, None], state.first_positions + lengths + i - 1)
      token, q = sample(logits[:, 0], i)
      return (cache, token), (token, q)

    (cache, _), (xs, qs) = jax.lax.scan(step, (cache, x), jnp.arange(1, gamma))
    x = jnp.concatenate([x[None], xs]).T
    q = jnp.moveaxis(jnp.concatenate([q[None], qs]), 0, 1)
    return x, q, ModelState(cache, state.first_positions)

  return prefill, draft
