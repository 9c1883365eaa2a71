"""α as the paper measures it (section 4.2): the mean of Σ min(p, q) over tokens that the target generates.

Beside it what Theorem 3.8 leaves out: how α goes with the position, and what rounds make of β that vary along a text.
"""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speculative.checkpoints import pairs
from speculative.decoding import inputs as decode_inputs
from speculative.decoding import speculative as loop
from speculative.decoding.state import round_uniforms
from speculative.decoding.targets import Drafter
from speculative.decoding.targets import Target
from speculative.drafters.base import as_drafter


class Alpha(NamedTuple):
  """An estimate of α.

  Attributes:
    alpha: mean of β over all tokens.
    standard_error: of that mean, texts (not tokens, which hang together) being the independent units.
    tokens: how many tokens it is over.
    beta: float32[B, N], each token's β = Σ min(p, q); NaN beyond a row's end.
  """
  alpha: float
  standard_error: float
  tokens: int
  beta: np.ndarray


class Generated(NamedTuple):
  """The target's texts: tokens int32[B, N], lengths int32[B]. A `DecodeResult` serves too."""
  tokens: np.ndarray
  lengths: np.ndarray


def measure_alpha(target, drafter, inputs, generated, config, seed=0, probs=None):
  """Σ min(q, p / lenience) at every prefix of the target's own texts.

  Args:
    target, drafter: as for `speculative_decode`.
    inputs: int32[B, S].
    generated: the target's own texts for these inputs under `config`: `DecodeResult` or `Generated`.
    config: `DecodeConfig`: p and q get its adjustments.
    seed: for drafters that need to draw in order to tell q: int ≥ 0, or [B].
    probs: `target_probs` of the same arguments, to share among drafters; None: computed here.

  Returns:
    `Alpha`.

  Raises:
    TypeError, ValueError: as for `speculative_decode`; texts that are not [B, N], or of no tokens at all; a lenience below 1
      at temperature 0, where acceptance is not a ratio of p and q (there accepted / tested of a decode tells).
  """
  drafter = as_drafter(drafter)
  static = Target.of(target), Drafter.of(drafter)
  pairs.check_pair(target, drafter)
  inputs, rows, row_keys = decode_inputs.prepare(target, inputs, config, seed, drafter=drafter)
  if np.any((np.asarray(config.temperature) == 0) & (np.asarray(config.lenience) < 1)):
    raise ValueError('at temperature 0 α with a lenience below 1 is not Σ min(q, p / lenience): take accepted / tested of a '
                     'decode')
  tokens, lengths = _check_texts(target, generated, len(inputs))
  if not lengths.any():
    raise ValueError('the texts have no tokens: there is nothing to measure α over')
  if probs is None:
    probs = _target_probs((static[0], config.filtered), target.params, inputs, tokens, rows)
  elif probs.shape != (*tokens.shape, target.vocab_size):
    raise ValueError(f'probs has shape {probs.shape}: must be [B, N, V] = {(*tokens.shape, target.vocab_size)}')
  beta = np.array(_betas((*static, config.filtered), drafter.params, inputs, tokens, rows, row_keys, probs))
  beta[np.arange(beta.shape[1]) >= lengths[:, None]] = np.nan
  return pool([beta])


def target_probs(target, inputs, generated, config):
  """The target's p at every prefix of its texts, in one call: float32[B, N, V], on the device."""
  static = Target.of(target)
  inputs, rows, _ = decode_inputs.prepare(target, inputs, config)
  tokens, _ = _check_texts(target, generated, len(inputs))
  return _target_probs((static, config.filtered), target.params, inputs, tokens, rows)


def _check_texts(target, generated, batch):
  """(tokens int32[B, N], lengths [B]) of a `Generated`. Raises ValueError for other shapes and ids."""
  tokens, lengths = np.asarray(generated.tokens), np.asarray(generated.lengths)
  if tokens.ndim != 2 or lengths.shape != tokens.shape[:1] or len(tokens) != batch:
    raise ValueError(f'texts have tokens {list(tokens.shape)} and lengths {list(lengths.shape)}: must be [B, N] and [B] '
                     f'with B = {batch}, one text for each input')
  if (lengths < 0).any() or (lengths > tokens.shape[1]).any():
    raise ValueError(f'lengths of texts must be in [0, {tokens.shape[1]}], the columns of their tokens')
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < target.vocab_size:
    raise ValueError(f'texts hold ids {tokens.min()} … {tokens.max()}: the vocabulary has {target.vocab_size}')
  return tokens.astype(np.int32), lengths


def pool(betas):
  """One `Alpha` of several arrays of β, each [B, N]."""
  width = max(b.shape[1] for b in betas)
  beta = np.concatenate([np.pad(b, ((0, 0), (0, width - b.shape[1])), constant_values=np.nan) for b in betas])
  beta = beta[np.any(np.isfinite(beta), axis=1)]
  count = np.sum(np.isfinite(beta), axis=1)
  total = np.nansum(beta, axis=1)
  alpha = total.sum() / count.sum()
  # The variance of a ratio of sums over independent texts.
  n = len(beta)
  variance = np.sum(np.square(total - alpha * count)) * n / max(n - 1, 1) / count.sum()**2
  return Alpha(float(alpha), float(np.sqrt(variance)), int(count.sum()), beta)


def acceptance_by_position(result, gamma):
  """Of the drafts at each position that were tested, the fraction accepted.

  Args:
    result: `DecodeResult` of speculative decoding.
    gamma: the γ it was decoded with.

  Returns:
    float64[γ], for positions 1 … γ of a round; NaN where none was tested.
  """
  accepted = result.accepted_per_round
  # Only a row's last round can end without a rejection (cut by an EOS or the limit) though it accepted fewer than γ.
  last = np.arange(accepted.shape[1]) == result.rounds[:, None] - 1
  rejected = (accepted >= 0) & (accepted < gamma) & ~last
  rejections = result.tested - result.accepted
  rejected |= last & (rejected.sum(axis=1) < rejections)[:, None]
  position = np.arange(gamma)[:, None, None]
  passed = np.sum(accepted > position, axis=(1, 2))
  failed = np.sum((accepted == position) & rejected, axis=(1, 2))
  return np.divide(passed, passed + failed, out=np.full(gamma, np.nan), where=passed + failed > 0)


def by_position(beta, edges):
  """α of the tokens at positions edges[i] … edges[i + 1] − 1 of the texts: list of `Alpha`, None where there are none.

  Args:
    beta: float[B, N], NaN beyond a row's end, as `Alpha` has it.
    edges: increasing ints, the first 0.
  """
  parts = [beta[:, first:last] for first, last in zip(edges[:-1], edges[1:])]
  return [pool([part]) if np.isfinite(part).any() else None for part in parts]


def tokens_per_round(beta, gamma):
  """Tokens a round where a draft behind the i-th token is accepted with the probability β_i of that place.

  As Theorem 3.8, but for its one assumption: β may vary along and among texts. Rounds follow each other, so that more of
  them begin where drafts fail. A round is cut at a text's end.

  Args:
    beta: float[B, N], NaN beyond a row's end.
    gamma: γ ≥ 1.

  Returns:
    float: expected tokens / expected rounds, over all texts.
  """
  tokens = rounds = 0.0
  for row in beta:
    row = np.minimum(row[np.isfinite(row)], 1.0)  # a sum of float32 probabilities
    begins = np.zeros(len(row) + gamma + 1)  # P(a round begins at this token)
    begins[0] = 1.0
    for i in range(len(row)):
      reach = begins[i]  # P(a round began here and its first n drafts were accepted)
      for n in range(gamma):
        if i + n >= len(row):
          break
        begins[i + n + 1] += reach * (1 - row[i + n])
        reach *= row[i + n]
      else:
        begins[i + gamma + 1] += reach
    tokens += len(row)
    rounds += begins[:len(row)].sum()
  return tokens / rounds


@functools.partial(jax.jit, static_argnums=0)
def _target_probs(program, params, inputs, tokens, rows):
  target, filtered = program
  batch, n = tokens.shape
  start, first = target.start(inputs)
  fed = jnp.concatenate([start[:, None], tokens[:, :-1]], axis=1)
  logits, _ = target.extend(params, target.prefill(params, inputs, n), fed, first)
  return rows.adjust(target, filtered, logits, jnp.broadcast_to(jnp.arange(n), (batch, n))).probs


@functools.partial(jax.jit, static_argnums=0)
def _betas(program, params, inputs, tokens, rows, row_keys, probs):
  """β at each of the tokens int32[B, N]: float32[B, N]."""
  target, drafter, filtered = program
  batch, n = tokens.shape
  committed = jnp.concatenate([target.start(inputs)[0][:, None], tokens], axis=1)

  def one(state, i):
    """One draft from the first i + 1 committed tokens: only its q matters."""
    fold = jax.vmap(jax.random.fold_in, (0, None))
    sample = rows.sampler(target, filtered, jnp.full(batch, i), round_uniforms(fold(row_keys, i), 1)[0],
                          fold(row_keys, i + loop.OWN_KEYS))
    known = jnp.where(jnp.arange(n + 1) <= i, committed, target.pad_id)
    _, q, state = drafter.draft(params, state, known, jnp.full(batch, i + 1), 1, sample)
    p = jax.lax.dynamic_index_in_dim(probs, i, 1, keepdims=False)
    return state, jnp.sum(jnp.minimum(p / rows.lenience[:, None], q[:, 0]), axis=-1)  # NaN where either is

  return jax.lax.scan(one, drafter.prefill(params, inputs, n + 2), jnp.arange(n, dtype=jnp.int32))[1].T
