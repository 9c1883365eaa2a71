"""Speculative decoding: prefill, then rounds of draft → verify → accept → commit in one `lax.while_loop`."""
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speculative import algorithm
from speculative import sampling
from speculative import sharding
from speculative.checkpoints import pairs
from speculative.decoding import inputs as decode_inputs
from speculative.decoding import state as loop
from speculative.decoding.config import DecodeConfig
from speculative.decoding.state import FinishReason
from speculative.decoding.targets import Drafter
from speculative.decoding.targets import Target
from speculative.drafters.base import NoDrafter
from speculative.drafters.base import as_drafter


OWN_KEYS = 1 << 30  # a drafter's own keys: rounds never get there


class Program(NamedTuple):
  """Everything static: two calls with equal programs and shapes share one compilation.

  `gamma` may change from `run` to `run` of one state, up to what `prefill` made room for.
  """
  target: Target
  drafter: Drafter
  gamma: int
  max_decode_len: int
  filtered: bool
  layout: sharding.Layout | None = None

  def shardings(self, state):
    """Where the arrays of a `LoopState` are, on more than one device: a `LoopState` of shardings."""
    layout = self.layout
    placed = layout.shardings(dataclasses.replace(state, cache=None, draft_state=None))
    return dataclasses.replace(placed, cache=layout.shardings(state.cache, layout.split[0]),
                               draft_state=layout.shardings(state.draft_state, layout.split[1]))

  def place(self, state):
    if self.layout is None:
      return state
    return jax.tree.map(jax.lax.with_sharding_constraint, state, self.shardings(state))


def speculative_decode(target, drafter, inputs, config=DecodeConfig(), seed=0, row_ids=None):
  """Decodes with drafts: the output is distributed exactly as the target's own (Algorithm 1; theorem in A.1).

  Args:
    target: see `speculative.decoding.targets`; a `Model` is one.
    drafter: see `speculative.drafters.base`; a model is wrapped.
    inputs: int32[B, S], padding at the end.
    config: `DecodeConfig`.
    seed: int ≥ 0, or [B].
    row_ids: int32[B], default 0 … B − 1. A row depends on its inputs, its settings, its seed and its id only.

  Returns:
    `DecodeResult`.

  Raises:
    ValueError: settings out of range, inputs of a wrong shape, a target and drafter of different vocabularies.
    TypeError: what is passed is no target, drafter or `DecodeConfig`.
  """
  return finish(*start(target, drafter, inputs, config, seed, row_ids))


def start(target, drafter, inputs, config, seed=0, row_ids=None, gamma=None):
  """Checks everything, then prefills: (program, params, settings, state), which `run` takes.

  Args:
    drafter: None decodes without drafts, one token a round.
    gamma: instead of `config.gamma`.
  """
  drafting = drafter is not None
  drafter = as_drafter(drafter) if drafting else NoDrafter
  static = Target.of(target), Drafter.of(drafter)
  pairs.check_pair(target, drafter)
  inputs, settings, row_keys = decode_inputs.prepare(target, inputs, config, seed, row_ids, drafter)
  gamma = (gamma or config.gamma) if drafting else 0
  params = target.params, drafter.params
  layout = sharding.layout_of(*params)
  if layout:
    inputs, settings, row_keys = layout.replicated((inputs, settings, row_keys))
  program = Program(*static, gamma, config.max_decode_len, config.filtered, layout)
  return program, params, settings, prefill(program, params, settings, inputs, row_keys)


def lay_out(target, draft, inputs, config=DecodeConfig()):
  """Parameters laid out in memory as the compiled loop likes them best. For TPUs, where each call would otherwise begin by
  laying out a third of the target anew; elsewhere the default is as good.

  Args:
    target, draft: `Model`s; inputs, config: of the size of those to come.

  Returns:
    (target, draft) with parameters of their own; the given ones may be dropped.
  """
  program, params, settings, state = start(target, draft, inputs, config)
  compiled = jax.jit(run.__wrapped__, static_argnums=0, donate_argnums=3, in_shardings=(
      sharding.best_layouts(params), None, None, None)).lower(program, params, settings, state, np.int32(0)).compile()
  formats = compiled.input_formats[0][0]
  return tuple(dataclasses.replace(model, params=jax.tree.map(jax.device_put, model.params, wanted))
               for model, wanted in zip((target, draft), formats))


def finish(program, params, settings, state):
  """What `start` returned → `DecodeResult`."""
  return to_result(program, run(program, params, settings, state, np.int32(program.max_decode_len)))


@functools.partial(jax.jit, static_argnums=0)
def prefill(program, params, settings, inputs, row_keys):
  """`RowSettings`, inputs int32[B, S], PRNG keys [B] → the `LoopState` before the first round."""
  n, gamma = program.max_decode_len, program.gamma
  batch = inputs.shape[0]
  # The last round may begin one token before the limit and writes γ + 1 slots: nothing is ever clamped.
  room = n + gamma + 1
  start, first_positions = program.target.start(inputs)
  zeros = jnp.zeros(batch, jnp.int32)
  tokens = jnp.full((batch, room + 1), program.target.pad_id, jnp.int32).at[:, 0].set(start)
  return program.place(loop.LoopState(
      tokens=tokens, lengths=zeros + 1, first_positions=first_positions,
      log_probs=jnp.zeros(tokens.shape, jnp.float32),
      finish_reason=jnp.where(settings.max_decode_len > 0, FinishReason.RUNNING, FinishReason.LENGTH).astype(jnp.int32),
      rounds=zeros, drafted=zeros, tested=zeros, accepted=zeros,
      accepted_per_round=jnp.full((batch, max(n, 1)), -1, jnp.int32),
      drafts=jnp.zeros((batch, gamma), jnp.int32), row_keys=row_keys,
      uniforms=loop.uniforms(row_keys, max(n, 1), 3 * gamma + 2),
      cache=program.target.prefill(params[0], inputs, room),
      draft_state=program.drafter.prefill(params[1], inputs, room)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def run(program, params, settings, state, budget):
  """At most `budget` (traced) rounds, fewer if every row finishes. `state` is donated."""
  def unfinished(carry):
    i, s = carry
    return (i < budget) & jnp.any(s.finish_reason == FinishReason.RUNNING)

  def one_round(carry):
    i, s = carry
    return i + 1, _round(program, params, settings, s)

  return jax.lax.while_loop(unfinished, one_round, (jnp.int32(0), state))[1]


def _round(program, params, settings, s):
  """One round of Algorithm 1 for every row, each at its own length."""
  target, gamma = program.target, program.gamma
  rows = jnp.arange(s.tokens.shape[0])
  emitted = s.lengths - 1
  u = jnp.take_along_axis(s.uniforms, s.rounds[:, None, None], axis=1, mode='clip')[:, 0]
  u_draft, r, u_last = loop.split_uniforms(u, gamma)

  with jax.named_scope('draft'):  # x_1 … x_γ and the distributions they were drawn from
    own_keys = jax.vmap(jax.random.fold_in)(s.row_keys, s.rounds + OWN_KEYS)
    sample = settings.sampler(target, program.filtered, emitted, u_draft, own_keys)
    x, q, draft_state = program.drafter.draft(params[1], s.draft_state, s.tokens, s.lengths, gamma, sample)

  with jax.named_scope('verify'):  # p_1 … p_{γ+1} for all prefixes in one call
    last = jnp.take_along_axis(s.tokens, s.lengths[:, None] - 1, axis=1)
    block = jnp.concatenate([last, x], axis=1)
    logits, cache = target.extend(params[0], s.cache, block, s.first_positions + s.lengths - 1)
    p, soft = settings.adjust(target, program.filtered, logits, emitted[:, None] + jnp.arange(gamma + 1))

  with jax.named_scope('accept'):  # n drafts, then one token more
    accepted = algorithm.accept(p, q, x, r, settings.lenience)
    accepted = jnp.where(greedy_lenience(settings)[:, None], lenient_argmax(soft, x, settings.lenience), accepted)
    # A distribution that is not finite is NaN in every entry. What was accepted before it stands, the row ends there.
    bad = jnp.isnan(p[..., 0]) | jnp.pad(jnp.isnan(q[..., 0]), ((0, 0), (0, 1)))
    n = algorithm.accepted_length(accepted & ~bad[:, :-1])
    broken = jnp.take_along_axis(bad, n[:, None], axis=1)[:, 0]
    weights = algorithm.replacement(p, q, n)
    t = algorithm.draw(weights, u_last)

  with jax.named_scope('commit'):  # x_1 … x_n, t, cut behind an EOS or a stop sequence and at the limit
    j = jnp.arange(gamma + 1)
    new = jnp.where(j < n[:, None], jnp.pad(x, ((0, 0), (0, 1))), t[:, None])
    count = n + ~broken
    is_eos = new == target.eos_id
    is_stop = settings.completes_stop(loop.write_rows(s.tokens, new, s.lengths)[:, 1:], emitted[:, None] + j)
    ends = (is_eos | is_stop) & (j < count[:, None])
    count = jnp.where(jnp.any(ends, axis=1), sampling.first_true(ends) + 1, count)
    count = jnp.minimum(count, settings.max_decode_len - emitted)
    running = s.finish_reason == FinishReason.RUNNING
    count = jnp.where(running, count, 0)
    kept = j < count[:, None]
    lengths = s.lengths + count
    finish = jnp.where(
        jnp.any(is_eos & kept, axis=1), FinishReason.EOS, jnp.where(
            jnp.any(is_stop & kept, axis=1), FinishReason.STOP, jnp.where(
                lengths - 1 >= settings.max_decode_len, FinishReason.LENGTH, jnp.where(
                    broken, FinishReason.ERROR, FinishReason.RUNNING))))
    kept_drafts = jnp.minimum(n, count)
    rejected = (n < gamma) & (count > n)
    log_probs = jnp.log(loop.take_token(soft, new))
    return program.place(dataclasses.replace(
        s,
        tokens=loop.write_rows(s.tokens, jnp.where(kept, new, target.pad_id), s.lengths),
        lengths=lengths,
        log_probs=loop.write_rows(s.log_probs, jnp.where(kept, log_probs, 0.0), s.lengths),
        finish_reason=jnp.where(running, finish, s.finish_reason).astype(jnp.int32),
        rounds=s.rounds + running,
        drafted=s.drafted + gamma * running,
        tested=s.tested + jnp.where(running, kept_drafts + rejected, 0),
        accepted=s.accepted + jnp.where(running, kept_drafts, 0),
        accepted_per_round=s.accepted_per_round.at[rows, jnp.where(running, s.rounds, s.accepted_per_round.shape[1])].set(
            kept_drafts, mode='drop'),
        drafts=s.drafts.at[:, :gamma].set(x), cache=cache, draft_state=draft_state))


def greedy_lenience(settings):
  """bool[B]: rows at temperature 0 with a lenience under 1, where the ratio of one-hot distributions says nothing."""
  return (settings.temperature == 0) & (settings.lenience < 1)


def lenient_argmax(soft, x, lenience):
  """bool[B, γ]: p(x) ≥ l · max p, p the softmax at temperature 1 (appendix A.5, before the argmax)."""
  soft = soft[:, :-1]
  return loop.take_token(soft, x) >= lenience[:, None] * jnp.max(soft, axis=-1)


def to_result(program, s):
  """`LoopState` → `DecodeResult`, on the host."""
  n = program.max_decode_len
  s = dataclasses.replace(s, cache=None, draft_state=None, row_keys=None, uniforms=None)
  s = jax.device_get(program.layout.replicated(s) if program.layout else s)
  return loop.DecodeResult(
      tokens=s.tokens[:, 1:n + 1], lengths=s.lengths - 1, log_probs=s.log_probs[:, 1:n + 1],
      finish_reason=s.finish_reason, rounds=s.rounds, drafted=s.drafted, tested=s.tested,
      accepted=s.accepted, accepted_per_round=s.accepted_per_round[:, :n])
