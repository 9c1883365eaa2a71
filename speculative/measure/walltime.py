"""Wall time: of whole decodes, side by side, and of single steps (c and v of section 3.3)."""
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from speculative import algorithm
from speculative.decoding import state as decode_state
from speculative.decoding.config import DecodeConfig
from speculative.decoding.targets import Drafter
from speculative.decoding.targets import Target
from speculative.drafters.base import as_drafter


def in_turn(runs, passes, compiled=lambda: None):
  """Runs callables in turn, so that the machine's moods meet all of them alike.

  Args:
    runs: {name: callable, all work done on return}.
    passes: timed passes after one untimed (which compiles).
    compiled: called after each untimed run, for a progress bar.

  Returns:
    {name: [(seconds, what the callable returned) of every timed pass]}.
  """
  for run in runs.values():
    run()
    compiled()
  timed = {name: [] for name in runs}
  for _ in range(passes):
    for name, run in runs.items():
      start = time.perf_counter()
      made = run()
      timed[name].append((time.perf_counter() - start, made))
  return timed


def time_side_by_side(runs, passes=5, compiled=lambda: None):
  """Times callables by what they make.

  Args:
    runs: {name: callable that returns the number of tokens it made}, as for `in_turn`.
    passes, compiled: as for `in_turn`.

  Returns:
    {name: (median seconds a token over the passes, tokens of one pass)}.
  """
  return {name: (statistics.median(seconds / made for seconds, made in timed), timed[-1][1])
          for name, timed in in_turn(runs, passes, compiled).items()}


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


def step_times(target, drafters, inputs, config=DecodeConfig(), gammas=(1, 3, 7), steps=48, passes=7):
  """Measures `StepTimes` in loops on the device, compilation apart; medians of `passes`.

  Args:
    target: as for `speculative_decode`.
    drafters: {name: drafter}.
    inputs: int32[B, S].
    config: temperature and filters are used; the caches are as large as max_decode_len wants them, half full.
    gammas: γ of the verification calls to time; the largest is also what drafts are timed at.
    steps: of the shorter loop; a longer one of twice as many is timed beside it, and a step is the difference.

  Returns:
    {name: StepTimes}, with the target's times shared.
  """
  inputs = np.asarray(inputs)
  rows = config.rows(target, len(inputs))
  room = config.max_decode_len + max(gammas) + 1
  middle = np.full(len(inputs), config.max_decode_len // 2 + 1, np.int32)
  tokens = np.full((len(inputs), room + 1), target.eos_id + 1, np.int32)

  static = Target.of(target)
  cache = jax.jit(static.prefill, static_argnums=2)(target.params, inputs, room)
  loops = {gamma: functools.partial(_verify_loop, static, gamma, config.filtered, target.params, rows, cache)
           for gamma in (0, *gammas)}
  for name, drafter in drafters.items():
    drafter = as_drafter(drafter)
    state = jax.jit(drafter.prefill, static_argnums=2)(drafter.params, inputs, room)
    loops[name] = functools.partial(_draft_loop, static, Drafter.of(drafter), max(gammas), config.filtered,
                                    drafter.params, rows, state)

  def once(loop, count):
    start = time.perf_counter()
    jax.block_until_ready(loop(tokens, middle, np.int32(count)))
    return time.perf_counter() - start

  for loop in loops.values():
    once(loop, 1)  # compiles
  # In turn, so that the machine's moods meet all of them alike: c and v are ratios.
  seconds = {key: [] for key in loops}
  for _ in range(passes):
    for key, loop in loops.items():
      seconds[key].append((once(loop, 2 * steps) - once(loop, steps)) / steps)
  median = {key: statistics.median(times) for key, times in seconds.items()}
  return {name: StepTimes(median[0], median[name] / max(gammas), {gamma: median[gamma] for gamma in gammas})
          for name in drafters}


def verify_step(target, gamma, filtered, params, rows, cache, block, lengths, u):
  """A round without its drafts: int32[B, γ + 1] → (int32[B, γ + 1], cache); γ = 0: a step of plain decoding.

  Args:
    target, gamma, filtered: static.
    params, rows, cache: the target's, `RowSettings`.
    block: the last token and γ drafts; lengths: int32[B], tokens before the drafts.
    u: float32[B, γ + 2], uniform.
  """
  logits, cache = target.extend(params, cache, block, lengths - 1)
  p = rows.adjust(target, filtered, logits, jnp.broadcast_to(lengths[:, None], logits.shape[:-1])).probs
  if gamma:
    n, weights = algorithm.verify(p, p[:, 1:], block[:, 1:], u[:, 2:])
  else:
    n, weights = 0, p[:, 0]
  token = (algorithm.draw(weights, u[:, :2]) + n) % target.vocab_size
  return jnp.broadcast_to(token[:, None], block.shape).astype(jnp.int32), cache


def draft_step(target, drafter, gamma, filtered, params, rows, state, tokens, lengths, u, keys):
  """γ drafts behind tokens int32[B, L], of which lengths int32[B] count: (the last int32[B], the drafter's state)."""
  sample = rows.sampler(target, filtered, lengths, u.reshape(len(u), gamma, 2), keys)
  x, _, state = drafter.draft(params, state, tokens, lengths, gamma, sample)
  return x[:, -1], state


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _verify_loop(target, gamma, filtered, params, rows, cache, tokens, lengths, count):
  """`count` (traced) times `verify_step`, each depending on the one before."""
  uniforms = _uniforms(tokens.shape[0], gamma + 2)

  def step(i, carry):
    block, cache = carry
    return verify_step(target, gamma, filtered, params, rows, cache, block, lengths, uniforms[:, i % uniforms.shape[1]])

  return jax.lax.fori_loop(0, count, step, (tokens[:, :gamma + 1], cache))[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _draft_loop(target, drafter, gamma, filtered, params, rows, state, tokens, lengths, count):
  """`count` (traced) times `draft_step`, each depending on the ones before."""
  batch = tokens.shape[0]
  uniforms = _uniforms(batch, 2 * gamma)

  def step(i, carry):
    token, state = carry
    known = tokens.at[jnp.arange(batch), lengths - 1].set(token)
    return draft_step(target, drafter, gamma, filtered, params, rows, state, known, lengths,
                      uniforms[:, i % uniforms.shape[1]], jax.vmap(jax.random.fold_in, (0, None))(_keys(batch), i))

  return jax.lax.fori_loop(0, count, step, (tokens[:, 0], state))[0]


def _keys(batch):
  return jax.vmap(lambda row: jax.random.key(row, impl='threefry2x32'))(jnp.arange(batch, dtype=jnp.uint32))


def _uniforms(batch, size):
  """float32[B, 16, size], drawn ahead as the loop's are."""
  return decode_state.uniforms(_keys(batch), 16, size)
