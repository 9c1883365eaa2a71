"""A language model as drafter: the paper's M_q."""
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speculative.checks import check_integer
from speculative.decoding import state as loop
from speculative.decoding.targets import Target


class ModelState(NamedTuple):
  """The model's cache and its position of the start token, int32[B]."""
  cache: Any
  first_positions: jax.Array


class AroundModel:
  """What drafters with a `model` and a `refeed` share: vocab_size, eos_id and so on are the model's."""

  def __getattr__(self, name):
    if name == 'model':
      raise AttributeError(name)
    return getattr(self.model, name)

  def with_refeed(self, refeed):
    return dataclasses.replace(self, refeed=max(refeed, self.refeed))


@dataclasses.dataclass(eq=False)
class ModelDrafter(AroundModel):
  """Drafts with any target (`speculative.decoding.targets`), which encodes the input by itself.

  Attributes:
    model: the target that drafts.
    refeed: how many of the last committed tokens are fed again. After a round that accepted everything the cache lacks
      the last draft, so at least 2; one more for every chain that this drafter is inside of.

  Raises:
    TypeError: `model` is no target.
    ValueError: `refeed` below 2.
  """
  model: Any
  refeed: int = 2

  def __post_init__(self):
    Target.of(self.model)
    check_integer('refeed', self.refeed, 2)

  @property
  def prefill(self):
    return _functions(Target.of(self.model), self.refeed)[0]

  @property
  def draft(self):
    return _functions(Target.of(self.model), self.refeed)[1]


def last_tokens(tokens, lengths, refeed, ahead=0):
  """The last `refeed` of tokens[b, :lengths[b]], and `ahead` behind them: (where they begin int32[B], int32[B, ≤ refeed +
  ahead]). Where fewer are there, padding follows, overwritten in the cache before it can be seen."""
  size = min(refeed, tokens.shape[1] - 1 - ahead)  # no more than there are slots in a cache
  begin = jnp.maximum(lengths - size, 0)
  return begin, loop.read_rows(tokens, begin, size + ahead)


@functools.lru_cache(maxsize=None)
def _functions(model, refeed):
  """(prefill, draft) of a static `Target`; the same objects for equal ones."""

  def prefill(params, inputs, max_len):
    return ModelState(model.prefill(params, inputs, max_len), model.start(inputs)[1])

  def draft(params, state, tokens, lengths, gamma, sample):
    begin, block = last_tokens(tokens, lengths, refeed)
    logits, cache = model.extend(params, state.cache, block, state.first_positions + begin)
    logits = jnp.take_along_axis(logits, (lengths - 1 - begin)[:, None, None], axis=1)[:, 0]
    x, q = sample(logits, 0)
    if gamma == 1:  # under disable_jit, a scan of no steps is an error
      return x[:, None], q[:, None], ModelState(cache, state.first_positions)

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
