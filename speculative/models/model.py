"""A loaded model: configuration, parameters and vocabulary, usable as a decoding target."""
import dataclasses
import functools
from typing import Any

from speculative.models import decoder_only
from speculative.models import t5

MODULES = {t5.T5Config: t5.T5, decoder_only.GPTConfig: decoder_only.DecoderOnly}


@dataclasses.dataclass(eq=False)
class Model:
  """Satisfies the target protocol (`speculative.decoding`); wrapped, it also drafts.

  Attributes:
    config: `t5.T5Config` or `decoder_only.GPTConfig`.
    params: tree of arrays, as the architecture's `init_params` lays it out.
    vocabulary: `speculative.data.vocabulary.Vocabulary`, or None (then every row of the embedding is a real id).
    dtype: operands' dtype in matrix products; None: the parameters' own.
    name: for tables and messages.
    ignored: names of what the checkpoint holds besides (copies of the embedding, optimizer state).
  """
  config: t5.T5Config | decoder_only.GPTConfig
  params: Any
  vocabulary: Any = None
  dtype: str | None = None
  name: str = ''
  ignored: tuple = ()

  @property
  def vocab_size(self):
    """Real ids; the logits may be wider."""
    return min(self.vocabulary.vocab_size, self.config.vocab_size) if self.vocabulary else self.config.vocab_size

  @property
  def pad_id(self):
    return self.config.pad_id

  @property
  def eos_id(self):
    return self.config.eos_id

  @property
  def start_id(self):
    return self.config.start_id

  @property
  def prefill(self):
    """prefill(params, inputs int32[B, S], max_len) → cache."""
    return self._functions[0]

  @property
  def extend(self):
    """extend(params, cache, tokens int32[B, T], positions int32[B]) → (logits float32[B, T, rows], cache)."""
    return self._functions[1]

  @property
  def first(self):
    """first(inputs int32[B, S]) → (tokens int32[B], positions int32[B]) to decode from; None: start_id, 0."""
    return self._functions[2]

  def check_inputs(self, inputs, lengths):
    """Raises ValueError for inputs int[B, S] that this architecture cannot take, with lengths int[B] behind them."""
    if hasattr(self.config, 'check_inputs'):
      self.config.check_inputs(inputs, lengths)

  @property
  def _functions(self):
    return _functions(self.config, self.dtype)


@functools.lru_cache(maxsize=None)
def _functions(config, dtype):
  """(prefill, extend, first) of the target protocol as pure functions; the same objects for equal configurations."""
  module = MODULES[type(config)](config, dtype)

  def prefill(params, inputs, max_len):
    return module.apply({'params': params}, inputs, max_len, method='prefill')

  def extend(params, cache, tokens, positions):
    return module.apply({'params': params}, cache, tokens, positions, method='extend')

  return prefill, extend, getattr(config, 'first', None)
