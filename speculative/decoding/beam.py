"""Beam search, plain and speculative (appendix A.4).

A text is complete when it ends with EOS or has max_decode_len tokens. Its score is log p(text) / ((5 + length) / 6)^a, a
the length penalty, EOS counted (Wu et al. 2016). The search keeps the w most probable unfinished texts (its beams) and the
w best complete ones; a step extends every beam by every token. A row ends when no beam can beat its complete texts any
more. Equal probabilities: the earlier beam, then the smaller token.

Speculatively, the draft model searches γ steps ahead with u ≥ w beams, and the target scores all that it found in one call.
A step of the target's own search follows from these scores as long as the step before stayed inside of the draft's beams
(top_w(M_p) ⊆ top_u(M_q)); so a round makes between 1 and γ + 1 steps, and the result is that of plain search. One call is
w + uγ rows of γ + 1 tokens: every hypothesis is a row of its own, as the target's cache knows no trees.
"""
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speculative import sampling
from speculative.checks import check_integer
from speculative.checks import check_number
from speculative.checkpoints import pairs
from speculative.decoding import inputs as decode_inputs
from speculative.decoding import state as loop
from speculative.decoding.config import DecodeConfig
from speculative.decoding.config import allowed
from speculative.decoding.config import check_config
from speculative.decoding.state import FinishReason
from speculative.decoding.targets import Target


@dataclasses.dataclass(frozen=True)
class BeamResult:
  """The best complete text of each row, and all that were kept; NumPy arrays on the host.

  Attributes:
    tokens: int32[B, N], as in `DecodeResult`.
    lengths: int32[B].
    scores: float32[B], log-probability over length penalty.
    finish_reason: int32[B]: EOS, LENGTH, or ERROR, where logits were not finite; what had been found then is returned.
    rounds: int32[B], target calls after prefill.
    steps: int32[B], steps of the search; more than rounds where drafts were right.
    beams: int32[B, w, N], best first; beam_lengths int32[B, w]; beam_scores float32[B, w], −inf where there is none.
  """
  tokens: np.ndarray
  lengths: np.ndarray
  scores: np.ndarray
  finish_reason: np.ndarray
  rounds: np.ndarray
  steps: np.ndarray
  beams: np.ndarray
  beam_lengths: np.ndarray
  beam_scores: np.ndarray


class _Program(NamedTuple):
  """Everything static."""
  target: Target
  draft: Target | None
  gamma: int
  max_decode_len: int
  beams: int
  draft_beams: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Search:
  """The state of plain beam search; w = beams, N = max_decode_len.

  Attributes:
    tokens: int32[B, w, N + 1] of the beams, start token first.
    log_probs: float32[B, w], −inf where there is no such beam.
    length: int32[B], tokens of each beam; all of a row are equally long.
    done_tokens, done_scores, done_lengths, done_reasons: the complete texts, best first, [B, w, …].
    running: bool[B].
  """
  tokens: jax.Array
  log_probs: jax.Array
  length: jax.Array
  done_tokens: jax.Array
  done_scores: jax.Array
  done_lengths: jax.Array
  done_reasons: jax.Array
  running: jax.Array


def beam_decode(target, inputs, config=DecodeConfig(), beam_size=4, length_penalty=0.6, drafter=None,
                draft_beam_size=None):
  """Finds probable texts by beam search.

  Args:
    target: as for `speculative_decode`.
    inputs: int32[B, S].
    config: `DecodeConfig`: max_decode_len, min_decode_len and, with a drafter, gamma. Nothing is sampled: temperature,
      filters, lenience, limits by row and stop sequences must be as they are by default.
    beam_size: w ≥ 1.
    length_penalty: a ≥ 0; 0 prefers the most probable text.
    drafter: a model (its `extend` is called); None: plain search.
    draft_beam_size: u ≥ w; None: 2 w.

  Returns:
    `BeamResult`.

  Raises:
    ValueError: settings that do not go with beam search or are out of range; inputs or pair as for `speculative_decode`.
    TypeError: a drafter that is no model.
  """
  check_config(config)
  static = Target.of(target)
  default = DecodeConfig()
  for name in ('temperature', 'top_k', 'top_p', 'lenience', 'row_max_decode_len'):
    if np.any(np.asarray(getattr(config, name)) != np.asarray(getattr(default, name))):
      raise ValueError(f'{name} = {getattr(config, name)!r}: beam search samples nothing; leave it at '
                       f'{getattr(default, name)!r}')
  if config.stop_sequences:
    raise ValueError('stop_sequences: beam search does not support them')
  draft_beam_size = 2 * beam_size if draft_beam_size is None else draft_beam_size
  check_integer('beam_size', beam_size, 1)
  check_integer('draft_beam_size', draft_beam_size, 1)
  if beam_size > target.vocab_size:
    raise ValueError(f'beam_size = {beam_size}: must be at most the number of tokens, {target.vocab_size}')
  check_number('length_penalty', length_penalty, lambda a: (a >= 0) & (a < np.inf),
                'at least 0 and finite')
  draft = None
  if drafter is not None:
    drafter = getattr(drafter, 'model', drafter)
    if not hasattr(drafter, 'extend'):
      raise TypeError(f'{type(drafter).__name__} has no `extend`: beam search needs a model as drafter')
    if not beam_size <= draft_beam_size <= beam_size * target.vocab_size:
      raise ValueError(f'draft_beam_size = {draft_beam_size}: must be at least beam_size ({beam_size}) and at most that '
                       'times the number of tokens')
    pairs.check_pair(target, drafter)
    draft = Target.of(drafter)
  inputs, settings, _ = decode_inputs.prepare(target, inputs, config, drafter=drafter)
  program = _Program(static, draft, config.gamma if draft else 0, config.max_decode_len, beam_size, draft_beam_size)
  s, rounds, steps, failed = jax.device_get(_run(program, (target.params, drafter.params if draft else ()), inputs,
                                                 np.float32(length_penalty), settings.min_decode_len))
  return BeamResult(
      tokens=s.done_tokens[:, 0], lengths=s.done_lengths[:, 0], scores=s.done_scores[:, 0],
      finish_reason=np.where(failed, np.int32(FinishReason.ERROR), s.done_reasons[:, 0]), rounds=rounds, steps=steps,
      beams=s.done_tokens, beam_lengths=s.done_lengths, beam_scores=s.done_scores)


@functools.partial(jax.jit, static_argnums=0)
def _run(program, params, inputs, length_penalty, min_len):
  """(final `_Search`, rounds int32[B], steps int32[B], failed bool[B])."""
  target, draft, w, n = program.target, program.draft, program.beams, program.max_decode_len
  batch = inputs.shape[0]
  room = n + program.gamma + 2
  start, first = target.start(inputs)
  zeros = jnp.zeros(batch, jnp.int32)
  # One beam holds the empty text. Without steps to make, that is what is returned.
  search = _Search(
      tokens=jnp.full((batch, w, n + 1), target.pad_id, jnp.int32).at[:, :, 0].set(start[:, None]),
      log_probs=jnp.where(jnp.arange(w) == 0, 0., -jnp.inf) + jnp.zeros((batch, 1)), length=zeros,
      done_tokens=jnp.full((batch, w, n), target.pad_id, jnp.int32),
      done_scores=jnp.where((jnp.arange(w) == 0) & (n == 0), 0., -jnp.inf) + jnp.zeros((batch, 1)),
      done_lengths=jnp.zeros((batch, w), jnp.int32), done_reasons=jnp.full((batch, w), FinishReason.LENGTH, jnp.int32),
      running=jnp.full(batch, n > 0))

  def prefill(model, params):
    return jax.tree.map(lambda a: jnp.repeat(a, w, axis=0), model.prefill(params, inputs, room))

  caches = prefill(target, params[0]), prefill(draft, params[1]) if draft else ()
  draft_first = draft.start(inputs)[1] if draft else first

  def one_round(carry):
    s, caches, rounds, steps, failed = carry
    now = s.running
    s, caches, error = _round(program, params, length_penalty, min_len, (first, draft_first), s, caches)
    return s, caches, rounds + now, steps + s.length - carry[0].length, failed | error

  carry = search, caches, zeros, zeros, jnp.zeros(batch, bool)
  s, _, rounds, steps, failed = jax.lax.while_loop(lambda c: jnp.any(c[0].running), one_round, carry)
  return s, rounds, steps, failed


def _round(program, params, length_penalty, min_len, first, s, caches):
  """A call of the target and all steps of its search that follow from it: (search, caches, failed bool[B])."""
  w, u, gamma = program.beams, program.draft_beams, program.gamma
  batch = s.length.shape[0]
  # The rows of the call: first the beams themselves, then the draft's hypotheses of every step.
  origin = jnp.broadcast_to(jnp.arange(w), (batch, w))  # the beam that a row continues
  ahead = jnp.zeros((batch, w, gamma), jnp.int32)  # and with which tokens
  draft_cache, nodes = caches[1], []
  if gamma:
    draft_cache, nodes = _draft(program, params[1], min_len, first[1], s, draft_cache)
    origin = jnp.concatenate([origin, *(node.origin for node in nodes)], axis=1)
    ahead = jnp.concatenate([ahead, *(node.path for node in nodes)], axis=1)
  last = jnp.take_along_axis(_last(s), origin, axis=1)
  block = jnp.concatenate([last[..., None], ahead], axis=2).reshape(-1, gamma + 1)
  positions = jnp.repeat(first[0] + s.length, origin.shape[1])
  logits, cache = program.target.extend(params[0], _take(caches[0], origin, w), block, positions)
  logits = logits.reshape(batch, -1, *logits.shape[1:])

  row = origin[:, :w]  # where each beam's text is fed
  fed = row  # and at the end: where the text before its last token was fed
  going, failed = s.running, jnp.zeros(batch, bool)
  for i in range(gamma + 1):
    new, parent, error = _step(program, length_penalty, min_len, s, jax.vmap(lambda a, r, i=i: a[r, i])(logits, row))
    s = _where(going, new, s)
    fed = jnp.where(going[:, None], jnp.take_along_axis(row, parent, axis=1), fed)
    failed |= going & error
    if i < gamma:
      same = (nodes[i].parent_row[:, None] == fed[..., None]) & (nodes[i].token[:, None] == _last(s)[..., None])
      same &= nodes[i].exists[:, None]
      inside = jnp.all(jnp.any(same, axis=2) | (s.log_probs == -jnp.inf), axis=1)
      row = w + i * u + jnp.argmax(same, axis=2)
      going &= inside & s.running
  caches = _take(cache, fed, origin.shape[1]), _take(draft_cache, jnp.take_along_axis(origin, fed, axis=1), w)
  return s, caches, failed


def _step(program, length_penalty, min_len, s, logits):
  """One step of plain beam search.

  Args:
    s: `_Search`.
    logits: [B, w, ≥ V], the target's after each beam.

  Returns:
    (`_Search`, the beam that each new one continues int32[B, w], not finite bool[B]).
  """
  target, w, n, old = program.target, program.beams, program.max_decode_len, s
  v = target.vocab_size
  logits = allowed(target, logits, s.length[:, None], min_len[:, None])
  alive = s.log_probs > -jnp.inf
  sound = sampling.is_valid(logits)
  error = jnp.any(alive & ~sound, axis=1)
  logits = jnp.where(sound[..., None], logits, 0.0)
  total = s.log_probs[..., None] + jax.nn.log_softmax(logits)
  # Of the best 2w at most w end, so that w that go on are among them.
  score, index = jax.lax.top_k(total.reshape(total.shape[0], -1), min(2 * w, w * v))
  parent, token = index // v, (index % v).astype(jnp.int32)
  ends = token == target.eos_id
  length = s.length + 1
  tokens = jnp.take_along_axis(s.tokens, parent[..., None], axis=1)
  tokens = jnp.where(jnp.arange(n + 1) == length[:, None, None], token[..., None], tokens)

  done = _keep_best(s, jnp.where(ends, score, -jnp.inf), tokens, length, length_penalty, FinishReason.EOS)
  log_probs, kept = jax.lax.top_k(jnp.where(ends, -jnp.inf, score), w)
  s = dataclasses.replace(
      done, tokens=jnp.take_along_axis(tokens, kept[..., None], axis=1), log_probs=log_probs, length=length)
  full = length >= n
  s = _where(full, _keep_best(s, log_probs, s.tokens, length, length_penalty, FinishReason.LENGTH), s)
  hope = jnp.max(log_probs, axis=1) / _penalty(n, length_penalty)  # no continuation of a beam scores higher
  new = dataclasses.replace(s, running=s.running & ~full & (hope > s.done_scores[:, -1]))
  so_far = _keep_best(old, old.log_probs, old.tokens, old.length, length_penalty, FinishReason.ERROR)
  s = _where(error, dataclasses.replace(so_far, running=jnp.zeros_like(error)), new)
  return s, jnp.take_along_axis(parent, kept, axis=1), error


def _keep_best(s, log_probs, tokens, length, length_penalty, reason):
  """`s` with the best w of its complete texts and new ones: log_probs[B, K] (−inf: none), tokens[B, K, N + 1]."""
  scores = jnp.concatenate([s.done_scores, log_probs / _penalty(length, length_penalty)[:, None]], axis=1)
  scores, best = jax.lax.top_k(scores, s.done_scores.shape[1])
  count = log_probs.shape[1]

  def pick(old, new):
    both = jnp.concatenate([old, new], axis=1)
    return jnp.take_along_axis(both, best.reshape(*best.shape, *[1] * (both.ndim - 2)), axis=1)
  return dataclasses.replace(
      s, done_scores=scores, done_tokens=pick(s.done_tokens, tokens[:, :, 1:]),
      done_lengths=pick(s.done_lengths, jnp.repeat(length[:, None], count, axis=1)),
      done_reasons=pick(s.done_reasons, jnp.full((length.shape[0], count), reason, jnp.int32)))


class _Nodes(NamedTuple):
  """The draft's hypotheses of one step: [B, u].

  Attributes:
    origin: the beam that it continues.
    path: int32[B, u, γ], with which tokens; 0 beyond.
    token: the last of them.
    parent_row: the row of the target's call that feeds what is before it.
    exists: whether the draft gives it any probability.
  """
  origin: jax.Array
  path: jax.Array
  token: jax.Array
  parent_row: jax.Array
  exists: jax.Array


def _draft(program, params, min_len, first, s, cache):
  """Beam search of the draft, γ steps from the target's beams: (cache of the beams, [`_Nodes`] of each step)."""
  draft, w, u, gamma = program.draft, program.beams, program.draft_beams, program.gamma
  batch, v = s.length.shape[0], program.target.vocab_size
  # A round adds up to γ + 1 tokens that this cache has not seen.
  refeed = min(gamma + 2, s.tokens.shape[2])
  begin = jnp.maximum(s.length + 1 - refeed, 0)
  block = loop.read_rows(s.tokens.reshape(batch * w, -1), jnp.repeat(begin, w), refeed)
  logits, cache = draft.extend(params, cache, block, jnp.repeat(first + begin, w))
  logits = jnp.take_along_axis(logits, jnp.repeat(s.length - begin, w)[:, None, None], axis=1)[:, 0]

  going_on = jnp.where(jnp.arange(v) == draft.eos_id, -jnp.inf, 0.0)  # a text that has ended has no next step
  log_probs, step_cache, beams, nodes = s.log_probs, cache, w, []
  origin = row = jnp.broadcast_to(jnp.arange(w), (batch, w))
  path = jnp.zeros((batch, w, gamma), jnp.int32)
  for i in range(gamma):
    if i:
      logits, step_cache = draft.extend(params, step_cache, nodes[-1].token.reshape(-1, 1),
                                        jnp.repeat(first + s.length + i, u))
      logits = logits[:, 0]
    logits = allowed(program.target, logits.reshape(batch, beams, -1), s.length[:, None] + i, min_len[:, None])
    total = log_probs[..., None] + jax.nn.log_softmax(logits) + going_on
    log_probs, index = jax.lax.top_k(jnp.where(jnp.isnan(total), -jnp.inf, total).reshape(batch, -1), u)
    parent, token = index // v, (index % v).astype(jnp.int32)
    origin = jnp.take_along_axis(origin, parent, axis=1)
    path = jnp.take_along_axis(path, parent[..., None], axis=1).at[:, :, i].set(token)
    nodes.append(_Nodes(origin, path, token, jnp.take_along_axis(row, parent, axis=1), log_probs > -jnp.inf))
    row = jnp.broadcast_to(w + i * u + jnp.arange(u), (batch, u))
    step_cache = _take(step_cache, parent, beams)
    beams = u
  return cache, nodes


def _last(s):
  """int32[B, w]: the last token of each beam."""
  return jnp.take_along_axis(s.tokens, s.length[:, None, None], axis=2)[..., 0]


def _penalty(length, length_penalty):
  return ((5.0 + length) / 6.0) ** length_penalty


def _take(tree, index, size):
  """Rows index[B, K] of each group of `size` rows: leaves [B · size, …] → [B · K, …]."""
  flat = (jnp.arange(index.shape[0])[:, None] * size + index).reshape(-1)
  return jax.tree.map(lambda a: a[flat], tree)


def _where(condition, a, b):
  """a where condition bool[B], else b, for trees of arrays [B, …]."""
  return jax.tree.map(lambda x, y: jnp.where(condition.reshape(-1, *[1] * (x.ndim - 1)), x, y), a, b)
