"""A draft model that is itself sped up by a smaller drafter: the paper's hierarchy of approximation models (section 6)."""
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from speculative import algorithm
from speculative.checkpoints import pairs
from speculative.checks import check_integer
from speculative.decoding import state as loop
from speculative.decoding.targets import Drafter
from speculative.decoding.targets import Target
from speculative.drafters.base import Sampler
from speculative.drafters.base import as_drafter
from speculative.drafters.base import over_logits
from speculative.drafters.model import AroundModel
from speculative.drafters.model import last_tokens


class ChainState(NamedTuple):
  """The model's cache, its position of the start token int32[B], and the smaller drafter's state."""
  cache: Any
  first_positions: jax.Array
  draft_state: Any


@dataclasses.dataclass(eq=False)
class ChainDrafter(AroundModel):
  """Drafts from `model`, by speculative decoding with `drafter`.

  Algorithm 1 inside of Algorithm 1: what comes out is distributed as the model's own drafts would be, so the q that is
  returned is the model's. Longer chains: `drafter` may be a ChainDrafter.

  Attributes:
    model: a target, the larger draft model.
    drafter: a model or drafter, smaller still.
    gamma: drafts of `drafter` for each call of `model` (≥ 1).
    refeed: as for `ModelDrafter`.

  Raises:
    TypeError: `model` is no target, or `drafter` no drafter.
    ValueError: the two do not fit; a number out of range.
  """
  model: Any
  drafter: Any
  gamma: int = 2
  refeed: int = 2

  def __post_init__(self):
    Target.of(self.model)
    check_integer('gamma', self.gamma, 1)
    check_integer('refeed', self.refeed, 2)
    # What the outer loop rejects or adds, the inner drafter has missed too.
    self.drafter = as_drafter(self.drafter, self.refeed + 1)
    pairs.check_pair(self.model, self.drafter)

  @property
  def params(self):
    return self.model.params, self.drafter.params

  def check_inputs(self, inputs, lengths):
    for part in (self.model, self.drafter):
      if hasattr(part, 'check_inputs'):
        part.check_inputs(inputs, lengths)

  @property
  def prefill(self):
    return self._functions[0]

  @property
  def draft(self):
    return self._functions[1]

  @property
  def _functions(self):
    return _functions(Target.of(self.model), Drafter.of(self.drafter), self.gamma, self.refeed)


@functools.lru_cache(maxsize=None)
def _functions(model, drafter, inner_gamma, refeed):
  """(prefill, draft); the same objects for equal arguments."""
  room = inner_gamma + 1  # an inner round may run this far beyond the last draft

  def prefill(params, inputs, max_len):
    return ChainState(model.prefill(params[0], inputs, max_len + room), model.start(inputs)[1],
                      drafter.prefill(params[1], inputs, max_len + room))

  def draft(params, state, tokens, lengths, gamma, sample):
    batch = tokens.shape[0]
    j = jnp.arange(inner_gamma + 1)

    def inner_round(carry):
      """As the outer loop's round, but what is verified with is `model`, and every distribution is kept."""
      i, tokens, q, made, cache, draft_state = carry
      fold = jax.vmap(jax.random.fold_in, (0, None))
      u_draft, u_test, u_last = loop.round_uniforms(fold(sample.keys, 2 * i), inner_gamma)
      inner = Sampler(lambda logits, ahead: sample.adjust(logits, over_logits(made, logits) + ahead), u_draft,
                      fold(sample.keys, 2 * i + 1))
      at = lengths + made
      y, r, draft_state = drafter.draft(params[1], draft_state, tokens, at, inner_gamma, inner)

      # The last `refeed` tokens and the drafts, from logits of which the model's distributions of all prefixes follow.
      begin, block = last_tokens(loop.write_rows(tokens, y, at), at, refeed, inner_gamma)
      logits, cache = model.extend(params[0], cache, block, state.first_positions + begin)
      logits = jnp.take_along_axis(logits, ((at - 1 - begin)[:, None] + j)[..., None], axis=1)
      p = sample.adjust(logits, made[:, None] + j)
      # A distribution of the smaller drafter that is not finite spoils what is drawn here; the outer loop must see that.
      p = jnp.where(jnp.any(jnp.isnan(r[..., 0]), axis=1)[:, None, None], jnp.nan, p)
      n, weights = algorithm.verify(p, r, y, u_test)
      t = algorithm.draw(weights, u_last)

      # What lies beyond γ drafts, or beyond n + 1, is overwritten or never looked at.
      new = jnp.where(j < n[:, None], jnp.pad(y, ((0, 0), (0, 1))), t[:, None])
      tokens = loop.write_rows(tokens, new, at)
      q = loop.write_rows(q, p, made)
      return i + 1, tokens, q, jnp.minimum(made + n + 1, gamma), cache, draft_state

    start = (jnp.int32(0), jnp.pad(tokens, ((0, 0), (0, room))),
             jnp.zeros((batch, gamma + room, model.vocab_size), jnp.float32), jnp.zeros(batch, jnp.int32),
             state.cache, state.draft_state)
    _, tokens, q, _, cache, draft_state = jax.lax.while_loop(lambda c: jnp.any(c[3] < gamma), inner_round, start)
    return loop.read_rows(tokens, lengths, gamma), q[:, :gamma], ChainState(cache, state.first_positions, draft_state)

  return prefill, draft
