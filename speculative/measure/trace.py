"""The rounds of a decode one by one, as in the paper's Figure 1."""
from typing import NamedTuple

import jax
import numpy as np

from speculative.decoding import speculative as loop

ACCEPTED, REJECTED, REPLACED, BONUS = 'accepted', 'rejected', 'replaced', 'bonus'
STYLES = {ACCEPTED: 'green', REJECTED: 'red strike', REPLACED: 'blue', BONUS: 'cyan'}


class Round(NamedTuple):
  """One round of one row: token ids.

  Attributes:
    accepted: drafts that were accepted.
    rejected: the drafts after them (only the first was tested).
    last: the target's own token (0 or 1 of them; none behind an EOS or the limit).
  """
  accepted: list
  rejected: list
  last: list


def record(target, drafter, inputs, config, seed=0, row_ids=None):
  """Decodes as `speculative_decode` does, with the same program, stopping after every round to look.

  Returns:
    (DecodeResult, rows): rows[b] is the list of row b's `Round`s.
  """
  program, params, settings, state = loop.start(target, drafter, inputs, config, seed, row_ids)
  rows = [[] for _ in range(state.tokens.shape[0])]

  def look(state):
    return jax.device_get((state.tokens, state.lengths, state.rounds, state.drafts, state.accepted))

  before = look(state)
  while np.any(np.asarray(state.finish_reason) == 0):
    state = loop.run(program, params, settings, state, np.int32(1))
    tokens, lengths, rounds, drafts, accepted = after = look(state)
    for b in np.flatnonzero(rounds > before[2]):
      new = tokens[b, before[1][b]:lengths[b]].tolist()
      n = accepted[b] - before[4][b]
      # Behind an EOS or the limit, drafts were neither accepted nor rejected.
      rejected = drafts[b, n:].tolist() if len(new) > n else []
      rows[b].append(Round(new[:n], rejected, new[n:]))
    before = after
  return loop.to_result(program, state), rows


def spans(rounds, vocabulary):
  """Texts of each round: list of [(text, kind)], kind one of ACCEPTED, REJECTED, REPLACED, BONUS."""
  lines, done = [], []

  def text(ids):
    """What ids add to the text so far."""
    return vocabulary.decode(done + ids)[len(vocabulary.decode(done)):]

  for r in rounds:
    kind = REPLACED if r.rejected else BONUS
    line = [(text(r.accepted), ACCEPTED)]
    done = done + r.accepted
    line.append((text(r.rejected), REJECTED))
    line.append((text(r.last), kind))
    done = done + r.last
    lines.append([(t, kind) for t, kind in line if t])
  return lines
