"""Checks for those who write their own drafters."""
import types

import jax.numpy as jnp
import numpy as np
import scipy.stats

from speculative.checks import check_integer
from speculative.decoding import speculative as loop
from speculative.decoding.config import DecodeConfig
from speculative.decoding.state import FinishReason
from speculative.drafters.base import as_drafter

BINS = 10


def check_drafter(target, drafter, inputs, config=DecodeConfig(temperature=1.0), seed=0, copies=256, rounds=8,
                  false_alarm=1e-6):
  """Runs a drafter inside the real loop and tests that what it drafts comes from the q it returns.

  The drafts' positions in their own cumulative distributions (randomised probability integral transform) are uniform
  exactly when x was drawn from q; a chi-square test looks at each draft number by itself and at each two in a row.

  Args:
    target, drafter, config, seed: as for `speculative_decode`; at a temperature above 0 the test can see most.
    inputs: int32[B, S].
    copies: how often each input is decoded, every time with other random numbers.
    rounds: of each decode, at most.
    false_alarm: chance that a right drafter fails.

  Returns:
    dict: 'drafts', how many were looked at, and 'p_value', the smallest of the tests.

  Raises:
    AssertionError: the drafter breaks the protocol, or draws from something else than q; the message says what.
    TypeError, ValueError: as for `speculative_decode`.
  """
  check_integer('copies', copies, 1)
  check_integer('rounds', rounds, 1)
  drafter = as_drafter(drafter)
  for name in ('prefill', 'draft'):
    a, b = getattr(drafter, name), getattr(drafter, name)
    assert a == b and hash(a) == hash(b), f'{name} does not equal itself from call to call: every decode would compile'
  inputs = np.repeat(np.asarray(inputs), copies, axis=0)
  recorded = _recorded(drafter, config.gamma, target.vocab_size)
  program, params, settings, state = loop.start(target, recorded, inputs, config, seed)
  positions = []  # of each draft in its cumulative distribution, float64[rows, γ], round by round
  noise = np.random.default_rng(seed)
  for i in range(rounds):
    running = np.asarray(state.finish_reason) == FinishReason.RUNNING
    if not running.any():
      break
    state = loop.run(program, params, settings, state, np.int32(1))
    x, q, unread = (np.asarray(a)[running] for a in state.draft_state[1:])
    assert unread.all(), f'round {i + 1}: drafts change with what lies beyond the committed tokens, or from call to call'
    positions.append(_transform(x, q.astype(np.float64), noise, i))
  positions = np.concatenate(positions)
  counts = np.floor(np.minimum(positions, 1 - 1e-12) * BINS).astype(int)
  tests = {f'draft {i + 1}': np.bincount(counts[:, i], minlength=BINS) for i in range(config.gamma)}
  for i in range(config.gamma - 1):
    tests[f'drafts {i + 1} and {i + 2} together'] = np.bincount(counts[:, i] * BINS + counts[:, i + 1],
                                                                minlength=BINS**2)
  p_values = {name: scipy.stats.chisquare(observed).pvalue for name, observed in tests.items()}
  for name, p in p_values.items():
    assert p >= false_alarm / len(p_values), (
        f'{name}: not drawn from the q that is returned (p-value {p:.1e} of {positions.shape[0]} rounds); return the very '
        'q that `sample` gave with the draft')
  return {'drafts': positions.size, 'p_value': float(min(p_values.values()))}


def _transform(x, q, noise, i):
  """x int[R, γ], q float64[R, γ, V] → float64[R, γ], uniform in [0, 1] where x was drawn from q."""
  where = f'round {i + 1}'
  assert np.isfinite(q).all(), f'{where}: q is not finite'
  assert (q >= 0).all(), f'{where}: q is negative'
  np.testing.assert_allclose(q.sum(axis=-1), 1, atol=1e-3, err_msg=f'{where}: q does not sum to 1')
  assert (x >= 0).all() and (x < q.shape[-1]).all(), f'{where}: a draft is no token id'
  q_x = np.take_along_axis(q, x[..., None], axis=-1)[..., 0]
  assert (q_x > 0).all(), f'{where}: a token was drafted to which q gives no probability'
  below = np.take_along_axis(np.cumsum(q, axis=-1), x[..., None], axis=-1)[..., 0] - q_x
  return below + noise.uniform(size=x.shape) * q_x


def _recorded(drafter, gamma, vocab_size):
  """A drafter that draws as `drafter` does, with state (its state, x, q, unread bool[B]) of the last round."""

  def prefill(params, inputs, max_len):
    batch = inputs.shape[0]
    return (drafter.prefill(params, inputs, max_len), jnp.zeros((batch, gamma), jnp.int32),
            jnp.zeros((batch, gamma, vocab_size), jnp.float32), jnp.ones(batch, bool))

  def draft(params, state, tokens, lengths, gamma, sample):
    x, q, inner = drafter.draft(params, state[0], tokens, lengths, gamma, sample)
    assert x.shape == (tokens.shape[0], gamma), f'x has shape {x.shape}, not [B, γ] = {(tokens.shape[0], gamma)}'
    assert q.shape == (*x.shape, vocab_size), f'q has shape {q.shape}, not [B, γ, V] = {(*x.shape, vocab_size)}'
    committed = jnp.arange(tokens.shape[1]) < lengths[:, None]
    again = drafter.draft(params, state[0], jnp.where(committed, tokens, vocab_size - 1), lengths, gamma, sample)
    unread = jnp.all(again[0] == x, axis=1) & jnp.all(jnp.abs(again[1] - q) < 1e-3, axis=(1, 2))
    return x, q, (inner, x.astype(jnp.int32), q, unread)

  ids = {name: getattr(drafter, name) for name in ('vocab_size', 'pad_id', 'eos_id', 'start_id', 'vocabulary', 'check_inputs')
         if hasattr(drafter, name)}
  return types.SimpleNamespace(params=drafter.params, prefill=prefill, draft=draft, **ids)
