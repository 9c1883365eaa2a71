"""A γ that adapts: chosen anew every few rounds, from what was accepted and what rounds cost so far (section 6).

Still exact: which γ a round uses depends on earlier rounds only, and a round is exact for every γ. But the choice depends
on the clock and on the whole batch, so at a temperature above 0 the same seed need not give the same text again.
"""
from collections.abc import Iterable
import time

import jax
import numpy as np

from speculative import theory
from speculative.checks import check_integer
from speculative.checks import check_number
from speculative.decoding import speculative as loop
from speculative.decoding.config import DecodeConfig
from speculative.decoding.state import FinishReason

TRY_AFTER = 40  # choices


class AdaptiveGamma:
  """Statistics of rounds, and the γ that they speak for. It remembers from call to call for as long as you keep it.

  Attributes:
    gammas: what may be chosen; each is compiled once.
    rounds, tested, accepted: {γ: int}, so far, all rows together.
    seconds: {γ: float}, of the rounds so far, all rows at once; compilation apart.
    steps: {γ: int}, calls of the target for these seconds.
  """

  def __init__(self, gammas=(1, 2, 4, 7), rounds_per_choice=4, forget=0.98):
    """Args:
      gammas: distinct integers ≥ 1.
      rounds_per_choice: rounds between two choices.
      forget: weight that each choice leaves to what was known before it, in (0, 1].

    Raises:
      ValueError: no γ at all, or one below 1; a number out of range.
    """
    if isinstance(gammas, str) or not isinstance(gammas, Iterable):
      raise ValueError(f'gammas = {gammas!r}: give one or more integers of at least 1')
    gammas = list(gammas)
    for gamma in gammas or [None]:
      check_integer('one of gammas', gamma, 1)
    self.gammas = tuple(sorted(set(map(int, gammas))))
    check_integer('rounds_per_choice', rounds_per_choice, 1)
    check_number('forget', forget, lambda a: (a > 0) & (a <= 1), 'in (0, 1]')
    self.rounds_per_choice = rounds_per_choice
    self._forget = forget
    self.rounds, self.tested, self.accepted, self.steps = ({g: 0 for g in self.gammas} for _ in range(4))
    self.seconds = {g: 0.0 for g in self.gammas}
    self._weighted = np.zeros(2)  # accepted and tested drafts, fading
    self._cost = {}  # γ → seconds a step, fading
    self._choices, self._last = 0, {}  # how many updates there were, and the last of each γ

  @property
  def alpha(self):
    """Accepted over tested drafts, the latest weighing most; 0.5 before any."""
    accepted, tested = self._weighted
    return (accepted + 0.5) / (tested + 1)

  def choose(self):
    """The γ of the next rounds: the one with most expected tokens a second; each is tried now and then."""
    idle = min(self.gammas, key=lambda gamma: self._last.get(gamma, -TRY_AFTER))
    if self._choices - self._last.get(idle, -TRY_AFTER) >= TRY_AFTER:  # not tried, or what it costs may have changed
      return idle
    return max(self.gammas, key=lambda gamma: theory.expected_tokens(self.alpha, gamma) / self._cost[gamma])

  def update(self, gamma, steps, seconds, rounds, tested, accepted):
    """Tells what a few rounds with γ = `gamma` did: `steps` of the batch, `rounds` of its rows together."""
    self.steps[gamma] += steps
    self.seconds[gamma] += seconds
    self.rounds[gamma] += rounds
    self.tested[gamma] += tested
    self.accepted[gamma] += accepted
    self._weighted = self._weighted * self._forget + [accepted, tested]
    self._choices += 1
    self._last[gamma] = self._choices
    cost = seconds / steps
    self._cost[gamma] = cost if gamma not in self._cost else 0.7 * self._cost[gamma] + 0.3 * cost


def adaptive_decode(target, drafter, inputs, config=DecodeConfig(), adaptive=None, seed=0, row_ids=None):
  """As `speculative_decode`, with a γ that adapts; `config.gamma` is not used.

  Args:
    adaptive: `AdaptiveGamma`, which is told of every round; None: a new one.

  Returns:
    `DecodeResult`.

  Raises:
    TypeError, ValueError: as for `speculative_decode`; no drafter; `adaptive` is something else.
  """
  if drafter is None:
    raise TypeError('adaptive_decode needs a drafter; without one there is no γ: use autoregressive_decode')
  adaptive = AdaptiveGamma() if adaptive is None else adaptive
  if not isinstance(adaptive, AdaptiveGamma):
    raise TypeError(f'adaptive = {adaptive!r}: must be an AdaptiveGamma')
  program, params, settings, state = loop.start(target, drafter, inputs, config, seed, row_ids, max(adaptive.gammas))

  def look():
    return jax.device_get((state.finish_reason, state.rounds, state.tested, state.accepted))
  before, compiled = look(), set()
  while np.any(before[0] == FinishReason.RUNNING):
    gamma = adaptive.choose()
    now = program._replace(gamma=gamma)
    if gamma not in compiled:  # outside of the timing
      state = jax.block_until_ready(loop.run(now, params, settings, state, np.int32(0)))
      compiled.add(gamma)
    start = time.perf_counter()
    state = loop.run(now, params, settings, state, np.int32(adaptive.rounds_per_choice))
    after = look()
    rounds, tested, accepted = (int(np.sum(b - a)) for a, b in zip(before[1:], after[1:]))
    adaptive.update(gamma, int(np.max(after[1] - before[1])), time.perf_counter() - start, rounds, tested, accepted)
    before = after
  return loop.to_result(program, state)
