"""What a decoding run is given: static settings (a change compiles anew) and per-row arrays (a change does not)."""
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speculative import sampling
from speculative.checks import check_integer
from speculative.checks import check_numbers
from speculative.drafters.base import Sampler
from speculative.drafters.base import over_logits


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
  """How to decode. Everything but `gamma` and `max_decode_len` may be a number or an array [B], one entry a row.

  Attributes:
    gamma: drafted tokens a round (γ ≥ 1). Static.
    max_decode_len: tokens at most, EOS counted (≥ 0). Static.
    temperature: ≥ 0; 0 is argmax.
    top_k: keep the k most probable tokens; 0: off.
    top_p: keep the smallest set of tokens that reaches this probability, in (0, 1]; 1: off.
    lenience: l in (0, 1] of appendix A.5; 1: exact.
    min_decode_len: no EOS among the first this many tokens.
    row_max_decode_len: tokens at most, for each row by itself (≤ max_decode_len); None: max_decode_len.
    stop_sequences: sequences of token ids, [[5, 6], [7]], or such a list for each row, [[[5, 6], [7]], []]. A row ends
      with the first token that completes one (finish reason `STOP`); the sequence itself stays in the output, as EOS
      does. Kept as tuples; None: none.
    repetition_penalty, no_repeat_ngram_size: not supported, so that anything but 1 and 0 is refused.
  """
  gamma: int = 7
  max_decode_len: int = 128
  temperature: Any = 0.0
  top_k: Any = 0
  top_p: Any = 1.0
  lenience: Any = 1.0
  min_decode_len: Any = 0
  row_max_decode_len: Any = None
  stop_sequences: Any = ()
  repetition_penalty: float = 1.0
  no_repeat_ngram_size: int = 0

  def __post_init__(self):
    check_integer('gamma', self.gamma, 1)
    check_integer('max_decode_len', self.max_decode_len, 0)
    check_numbers('temperature', self.temperature, lambda a: (a >= 0) & (a <= np.finfo(np.float32).max),
                  'at least 0 and finite')
    check_numbers('top_k', self.top_k, lambda a: a >= 0, 'at least 0 (0: off)', integers=True)
    check_numbers('top_p', self.top_p, lambda a: (a > 0) & (a <= 1), 'in (0, 1] (1: off)')
    check_numbers('lenience', self.lenience, lambda a: (a > 0) & (a <= 1), 'in (0, 1] (1: exact)')
    for name in ('min_decode_len', 'row_max_decode_len'):
      if getattr(self, name) is not None:
        check_numbers(name, getattr(self, name), lambda a: (a >= 0) & (a <= self.max_decode_len),
                      f'between 0 and max_decode_len ({self.max_decode_len})', integers=True)
    object.__setattr__(self, 'stop_sequences', _normalised(self.stop_sequences))
    for name, off in (('repetition_penalty', 1.0), ('no_repeat_ngram_size', 0)):
      if np.any(np.asarray(getattr(self, name)) != off):
        raise ValueError(f'{name} = {getattr(self, name)!r}: not supported, leave it at {off}; it changes the target\'s '
                         'distribution with every token, also inside a block of drafts')

  @property
  def filtered(self):
    """Whether any row uses top-k or top-p. Static: without filters nothing is searched."""
    return bool(np.any(np.asarray(self.top_k) > 0) or np.any(np.asarray(self.top_p) < 1))

  def rows(self, target, batch):
    """`RowSettings` with every array [batch]. Raises ValueError naming an array of another shape, or a stop id beyond the
    target's vocabulary."""
    longest = self.max_decode_len if self.row_max_decode_len is None else self.row_max_decode_len
    return RowSettings(
        per_row('temperature', self.temperature, batch, np.float32),
        per_row('top_k', np.minimum(self.top_k, np.iinfo(np.int32).max), batch, np.int32),
        per_row('top_p', self.top_p, batch, np.float32), per_row('lenience', self.lenience, batch, np.float32),
        per_row('min_decode_len', self.min_decode_len, batch, np.int32),
        per_row('row_max_decode_len', longest, batch, np.int32),
        _stop_array(self.stop_sequences, batch, target.vocab_size))


class RowSettings(NamedTuple):
  """`DecodeConfig`'s traced part: arrays [B], and `stop` int32[B, K, M]: K sequences of at most M tokens, aligned at their
  ends, −1 before; all −1 where there is none."""
  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  lenience: jax.Array
  min_decode_len: jax.Array
  max_decode_len: jax.Array
  stop: jax.Array

  def adjust(self, target, filtered, logits, emitted):
    """The adjustments of each row's settings, the same for the target's logits and the draft's.

    Args:
      target: static `targets.Target`.
      filtered: static, as `sampling.adjust` has it.
      logits: [B, …, ≥ V]; ids beyond the vocabulary are cut off.
      emitted: int32[B, …], how many tokens come before.

    Returns:
      `sampling.Distribution` [B, …, V].
    """
    temperature, top_k, top_p, min_decode_len = (
        setting.reshape(-1, *[1] * (emitted.ndim - 1))
        for setting in (self.temperature, self.top_k, self.top_p, self.min_decode_len))
    return sampling.adjust(allowed(target, logits, emitted, min_decode_len), temperature, top_k, top_p, filtered)

  def sampler(self, target, filtered, emitted, u, keys):
    """The drafters' `Sampler` behind `emitted` int32[B] tokens, with its u and keys."""
    def adjust(logits, i):
      at = over_logits(emitted, logits) + i
      return self.adjust(target, filtered, logits, jnp.broadcast_to(at, logits.shape[:-1])).probs
    return Sampler(adjust, u, keys)

  def completes_stop(self, tokens, index):
    """bool[B, J]: does tokens[b, index[b, j]] complete a stop sequence of row b?

    Args:
      tokens: int32[B, L], emitted tokens only (no start token).
      index: int32[B, J] in [0, L).
    """
    if not self.stop.shape[1]:
      return jnp.zeros(index.shape, bool)
    size = self.stop.shape[2]
    at = index[..., None] - size + 1 + jnp.arange(size)  # [B, J, M]
    seen = jax.vmap(lambda row, i: row[i])(tokens, jnp.maximum(at, 0))
    seen = jnp.where(at >= 0, seen, -2)[:, :, None]
    stop = self.stop[:, None]
    return jnp.any(jnp.all((stop == -1) | (stop == seen), axis=-1) & jnp.any(stop != -1, axis=-1), axis=-1)


def allowed(target, logits, emitted, min_decode_len):
  """float32[…, V] of logits[…, ≥ V]: ids beyond the vocabulary are cut off, EOS is −inf below the minimum length.

  Args:
    emitted: int32[…], how many tokens come before; min_decode_len: broadcastable to it.
  """
  logits = logits[..., :target.vocab_size].astype(jnp.float32)
  if target.eos_id < 0:
    return logits
  early = (emitted < min_decode_len)[..., None]
  return jnp.where(early & (jnp.arange(target.vocab_size) == target.eos_id), -jnp.inf, logits)


def per_row(name, value, batch, dtype):
  """A number or array [batch] → array [batch]. Raises ValueError for any other shape."""
  value = np.asarray(value)
  if value.shape not in ((), (batch,)):
    raise ValueError(f'{name} has shape {value.shape}: give a number, or one entry for each of the {batch} rows')
  return np.broadcast_to(value.astype(dtype), (batch,))


def check_config(config):
  """Raises TypeError for anything but a `DecodeConfig`."""
  if not isinstance(config, DecodeConfig):
    raise TypeError(f'config = {config!r}: must be a DecodeConfig')


def _normalised(stop_sequences):
  """Stop sequences as nested tuples of int: of sequences, or of one such tuple for each row. Raises ValueError."""
  def plain(item):
    if isinstance(item, (str, bytes, dict)):
      raise TypeError
    item = item.tolist() if hasattr(item, 'tolist') else item
    return item if isinstance(item, int) else tuple(map(plain, item))
  try:
    nested = plain(() if stop_sequences is None else stop_sequences)
  except TypeError:
    nested = None
  if isinstance(nested, tuple) and all(isinstance(item, tuple) for item in nested):
    if all(map(_is_sequence, nested)) or all(all(map(_is_sequence, row)) for row in nested):
      return nested
  raise ValueError(f'stop_sequences = {stop_sequences!r}: must be a list of sequences, each at least one token id (an '
                   'integer of at least 0), or one such list for each row')


def _is_sequence(item):
  return isinstance(item, tuple) and len(item) > 0 and all(
      isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in item)


def _stop_array(stop_sequences, batch, vocab_size):
  """int32[B, K, M], K and M rounded up to powers of two so that few programs are compiled; K = 0: none at all."""
  rows = [stop_sequences] * batch if all(map(_is_sequence, stop_sequences)) else stop_sequences
  if len(rows) != batch:
    raise ValueError(f'stop_sequences is for {len(rows)} rows: give one list of sequences, or one for each of the '
                     f'{batch} rows')
  count = max(map(len, rows), default=0)
  if not count:
    return np.full((batch, 0, 1), -1, np.int32)
  longest = max(len(sequence) for row in rows for sequence in row)
  stop = np.full((batch, 1 << (count - 1).bit_length(), 1 << (longest - 1).bit_length()), -1, np.int32)
  for b, row in enumerate(rows):
    for k, sequence in enumerate(row):
      if max(sequence) >= vocab_size:
        raise ValueError(f'stop_sequences: {max(sequence)} is no token id: the vocabulary has {vocab_size}')
      stop[b, k, -len(sequence):] = sequence
  return stop
