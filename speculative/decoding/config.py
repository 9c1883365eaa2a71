"""What a decoding run is given: static settings (a change compiles anew) and per-row arrays (a change does not)."""
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speculative import sampling


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
  """
  gamma: int = 7
  max_decode_len: int = 128
  temperature: Any = 0.0
  top_k: Any = 0
  top_p: Any = 1.0
  lenience: Any = 1.0
  min_decode_len: Any = 0

  def __post_init__(self):
    _check_integer('gamma', self.gamma, 1)
    _check_integer('max_decode_len', self.max_decode_len, 0)
    _check('temperature', self.temperature, lambda a: (a >= 0) & (a <= np.finfo(np.float32).max),
           'at least 0 and finite')
    _check('top_k', self.top_k, lambda a: a >= 0, 'at least 0 (0: off)', np.integer)
    _check('top_p', self.top_p, lambda a: (a > 0) & (a <= 1), 'in (0, 1] (1: off)')
    _check('lenience', self.lenience, lambda a: (a > 0) & (a <= 1), 'in (0, 1] (1: exact)')
    _check('min_decode_len', self.min_decode_len, lambda a: (a >= 0) & (a <= self.max_decode_len),
           f'between 0 and max_decode_len ({self.max_decode_len})', np.integer)

  @property
  def filtered(self):
    """Whether any row uses top-k or top-p. Static: without filters nothing is searched."""
    return bool(np.any(np.asarray(self.top_k) > 0) or np.any(np.asarray(self.top_p) < 1))

  def rows(self, batch):
    """`RowSettings` with every array [batch]. Raises ValueError naming an array of another shape."""
    return RowSettings(**{
        name: per_row(name, getattr(self, name), batch, dtype) for name, dtype in
        (('temperature', np.float32), ('top_k', np.int32), ('top_p', np.float32), ('lenience', np.float32),
         ('min_decode_len', np.int32))})


class RowSettings(NamedTuple):
  """`DecodeConfig`'s traced part: arrays [B]."""
  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  lenience: jax.Array
  min_decode_len: jax.Array

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
    temperature, top_k, top_p, _, min_decode_len = (
        setting.reshape(-1, *[1] * (emitted.ndim - 1)) for setting in self)
    logits = logits[..., :target.vocab_size].astype(jnp.float32)
    if target.eos_id >= 0:
      early = (emitted < min_decode_len)[..., None]
      logits = jnp.where(early & (jnp.arange(target.vocab_size) == target.eos_id), -jnp.inf, logits)
    return sampling.adjust(logits, temperature, top_k, top_p, filtered)


def per_row(name, value, batch, dtype):
  """A number or array [batch] → array [batch]. Raises ValueError for any other shape."""
  value = np.asarray(value)
  if value.shape not in ((), (batch,)):
    raise ValueError(f'{name} has shape {value.shape}: give a number, or one entry for each of the {batch} rows')
  return np.broadcast_to(value.astype(dtype), (batch,))


def _check_integer(name, value, least):
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
    raise ValueError(f'{name} = {value!r}: must be an integer of at least {least}')


def _check(name, value, valid, what, kind=np.number):
  try:
    a = np.asarray(value)
    good = np.issubdtype(a.dtype, kind) and np.all(valid(a))
  except (TypeError, ValueError):
    good = False
  if not good:
    raise ValueError(f'{name} = {value!r}: must be {"integers " if kind is np.integer else ""}{what}')
