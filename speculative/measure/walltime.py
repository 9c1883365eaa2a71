"""Wall time: of whole decodes, side by side, and of single steps (c and v of section 3.3)."""
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from speculative import algorithm
from speculative.decoding.config import DecodeConfig
from speculative.decoding.targets import Drafter
from speculative.decoding.targets import Target
from speculative.drafters.base import as_drafter


def time_side_by_side(runs, passes=5, compiled=lambda: None):
  """Times callables in turn, so that the machine's moods meet all of them alike.

  Args:
    runs: {name: callable that returns the number of tokens it made, all work done on return}.
    passes: timed passes after one untimed (which compiles).
    compiled: called after each untimed run, for a progress bar.

  Returns:
    {name: (median seconds a token over the passes, tokens of one pass)}.
  """
  tokens = {}
  for name, run in runs.items():
    tokens[name] = run()
    compiled()
  seconds = {name: [] for name in runs}
  for _ in range(passes):
    for name, run in runs.items():
      start = time.perf_counter()
      made = run()
      seconds[name].append((time.perf_counter() - start) / made)
  return {name: (statistics.median(times), tokens[name]) for name, times in seconds.items()}


@dataclasses.dataclass(frozen=True)
class StepTimes:
  """Seconds of single steps.

  Attributes:
    target: T_p(1), one step of plain decoding: a target call on one token, its adjustment and its draw.
    draft: T_q, one draft.
    verify: {γ: T_p(γ+1)}, a target call on γ + 1 tokens with all of a round's work but the drafting.
  """
  target: float
  draft: float
  verify: dict

  @property
  def c(self):
    """Cost coefficient (definition 3.7)."""
    return self.draft / self.target

  def v(self, max_gamma):
    """v(γ) = T_p(γ+1) / T_p(1) for γ = 0 … max_gamma: list, linear between the measured γ."""
    known = {0: self.target} | self.verify
    return list(np.interp(range(max_gamma + 1), sorted(known), [known[g] / self.target for g in sorted(known)]))


def step_times(target, drafter, inputs, config=DecodeConfig(), gammas=(1, 3, 7), steps=64, passes=7):
  """Measures `StepTimes` in loops of `steps` steps on the device, compilation apart; medians of `passes`.

  Args:
    target, drafter: as for `speculative_decode`.
    inputs: int32[B, S].
    config: temperature and filters are used; the caches are as large as max_decode_len wants them, half full.
    gammas: γ of the verification calls to time, the first also for drafting.
  """
  drafter = as_drafter(drafter)
  static = Target.of(target), Drafter.of(drafter)
  inputs = jnp.asarray(inputs)
  rows = config.rows(inputs.shape[0])
  params = target.params, drafter.params
  n = config.max_decode_len
  state = _step_state(static, params, inputs, n, max(gammas))

  def measure(kind, gamma):
    """Seconds of one step: the median difference between a longer and a shorter loop, per extra step."""
    run = functools.partial(_loop, static, kind, gamma, config.filtered, params, rows, state)

    def once(count):
      start = time.perf_counter()
      jax.block_until_ready(run(np.int32(count)))
      return time.perf_counter() - start
    once(1)
    return statistics.median((once(2 * steps) - once(steps)) / steps for _ in range(passes))

  draft_gamma = max(gammas)
  verify = {gamma: measure('verify', gamma) for gamma in gammas}
  return StepTimes(measure('verify', 0), measure('draft', draft_gamma) / draft_gamma, verify)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _step_state(static, params, inputs, n, gamma):
  """(target cache, drafter state, tokens, lengths) in the middle of a decode."""
  target, drafter = static
  batch, room = inputs.shape[0], n + gamma + 1
  tokens = jnp.full((batch, room + 1), target.eos_id + 1, jnp.int32)
  return (target.prefill(params[0], inputs, room), drafter.prefill(params[1], inputs, room), tokens,
          jnp.full(batch, n // 2 + 1, jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _loop(static, kind, gamma, filtered, params, rows, state, count):
  """`count` (traced) steps of one kind; each depends on the one before through the tokens."""
  target, drafter = static
  cache, draft_state, tokens, lengths = state
  batch = tokens.shape[0]
  keys = jax.vmap(jax.random.key)(jnp.arange(batch, dtype=jnp.uint32))

  def uniform(i, size):
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, i), (size,)))(keys)

  def adjust(logits):
    return rows.adjust(target, filtered, logits, jnp.broadcast_to(lengths[:, None], logits.shape[:-1]))

  def draft(i, carry):
    token, draft_state = carry
    u = uniform(i, 2 * gamma).reshape(batch, gamma, 2)

    def sample(logits, j):
      q = adjust(logits[:, None]).probs[:, 0]
      return algorithm.draw(q, u[:, j]), q
    x, _, draft_state = drafter.draft(params[1], draft_state, tokens.at[:, n_last].set(token), lengths, gamma, sample)
    return x[:, -1], draft_state

  def verify(i, carry):
    block, cache = carry
    logits, cache = target.extend(params[0], cache, block, lengths - 1)
    p = adjust(logits).probs
    u = uniform(i, gamma + 2)
    if gamma:
      n, weights = algorithm.verify(p, p[:, 1:], block[:, 1:], u[:, 2:])
    else:
      n, weights = 0, p[:, 0]
    token = algorithm.draw(weights, u[:, :2])
    return jnp.broadcast_to((token + n)[:, None] % target.vocab_size, block.shape).astype(jnp.int32), cache

  n_last = lengths[0] - 1
  if kind == 'draft':
    return jax.lax.fori_loop(0, count, draft, (tokens[:, 0], draft_state))[0]
  return jax.lax.fori_loop(0, count, verify, (tokens[:, :gamma + 1], cache))[0]
