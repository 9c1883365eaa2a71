"""The loop's state and the caller's result."""
import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class FinishReason(enum.IntEnum):
  """Why a row ended."""
  RUNNING = 0
  EOS = 1
  LENGTH = 2
  STOP = 3
  ERROR = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoopState:
  """What one round hands to the next. N = max_decode_len; every array has the batch axis first.

  Invariants, true before and after every round:
    * tokens[b, :lengths[b]] is committed, tokens[b, lengths[b]:] is padding; tokens[b, 0] is the start token.
    * 1 ≤ lengths[b] ≤ N + 1, so a block of γ + 1 tokens written at lengths[b] always has room.
    * The target's cache covers the first lengths[b] − 1 committed tokens (the last is fed in the next round); slots
      beyond hold rejected drafts, which no query sees.
    * A row with finish_reason ≠ 0 does not change any more.

  Attributes:
    tokens: int32[B, N + γ + 2].
    lengths: int32[B], committed tokens, start token included.
    first_positions: int32[B], the target's position of tokens[:, 0].
    log_probs: float32[B, N + γ + 2], at the same places as tokens.
    finish_reason: int32[B].
    rounds, drafted, tested, accepted: int32[B].
    accepted_per_round: int32[B, max(N, 1)], −1 where there was no such round.
    drafts: int32[B, γ], what the last round drafted, for traces (a round of fewer drafts leaves the rest as it was).
    row_keys: PRNG keys [B], from (seed, row id).
    uniforms: float32[B, max(N, 1), 3γ + 2], every round's, for `split_uniforms`.
    cache: the target's.
    draft_state: the drafter's.
  """
  tokens: jax.Array
  lengths: jax.Array
  first_positions: jax.Array
  log_probs: jax.Array
  finish_reason: jax.Array
  rounds: jax.Array
  drafted: jax.Array
  tested: jax.Array
  accepted: jax.Array
  accepted_per_round: jax.Array
  drafts: jax.Array
  row_keys: jax.Array
  uniforms: jax.Array
  cache: Any
  draft_state: Any


@dataclasses.dataclass(frozen=True)
class DecodeResult:
  """What decoding returns: NumPy arrays on the host.

  Attributes:
    tokens: int32[B, N], the start token left out; EOS kept, then padding.
    lengths: int32[B], tokens made, EOS counted.
    log_probs: float32[B, N], of each token in the distribution that was sampled from; at temperature 0 the log-softmax
      of the logits. 0 at padding.
    finish_reason: int32[B], `FinishReason`.
    rounds: int32[B], target calls after prefill.
    drafted: int32[B], γ × rounds (each round's own γ, where it adapts).
    tested: int32[B], drafts that met the acceptance test: the accepted ones and, where a round rejected, one more.
    accepted: int32[B], accepted drafts that were kept (not those behind an EOS, a stop or the limit).
    accepted_per_round: int32[B, N], −1 where there was no such round.
  """
  tokens: np.ndarray
  lengths: np.ndarray
  log_probs: np.ndarray
  finish_reason: np.ndarray
  rounds: np.ndarray
  drafted: np.ndarray
  tested: np.ndarray
  accepted: np.ndarray
  accepted_per_round: np.ndarray


def uniforms(keys, rounds, size):
  """float32[B, rounds, size] in [0, 1), of PRNG keys [B]: each round's own, whatever their number.

  Drawn before a loop, not in it: there the generator would cost XLA:CPU some hundred operations a round.
  """
  def of_round(key, i):
    return jax.random.uniform(jax.random.fold_in(key, i), (size,), jnp.float32)
  return jax.vmap(lambda key: jax.vmap(lambda i: of_round(key, i))(jnp.arange(rounds)))(keys)


def split_uniforms(u, gamma):
  """One independent uniform for every decision of a round of Algorithm 1.

  Args:
    u: float32[B, ≥ 3γ + 2].

  Returns:
    (float32[B, γ, 2] to draw the drafts with, [B, γ] to test them with, [B, 2] to draw the last token with).
  """
  return u[:, :2 * gamma].reshape(len(u), gamma, 2), u[:, 2 * gamma:3 * gamma], u[:, 3 * gamma:3 * gamma + 2]


def round_uniforms(keys, gamma):
  """As `split_uniforms`, of PRNG keys [B] that no other round has."""
  return split_uniforms(jax.vmap(lambda key: jax.random.uniform(key, (3 * gamma + 2,), jnp.float32))(keys), gamma)


def write_rows(array, new, starts):
  """array[b, starts[b] : starts[b] + K] = new[b] for array[B, M, …], new[B, K, …]; starts[b] + K ≤ M."""
  return jax.vmap(lambda a, n, s: jax.lax.dynamic_update_slice_in_dim(a, n, s, 0))(array, new, starts)


def read_rows(array, starts, size):
  """array[b, starts[b] : starts[b] + size]: [B, size]."""
  return jax.vmap(lambda a, s: jax.lax.dynamic_slice(a, (s,), (size,)))(array, starts)


def take_token(probs, tokens):
  """probs[..., V] at tokens int32[...]: [...]."""
  return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
