"""A loaded model: configuration, parameters and vocabulary, usable as a decoding target."""
import dataclasses
from typing import Any

from speculative.models import t5


@dataclasses.dataclass(eq=False)
class Model:
  """Satisfies the target protocol (`speculative.decoding`); wrapped, it also drafts.

  Attributes:
    config: `t5.T5Config`.
    params: tree of arrays, as `t5.init_params` lays it out.
    vocabulary: `speculative.data.vocabulary.Vocabulary`, or None (then every row of the embedding is a real id).
    dtype: operands' dtype in matrix products; None: the parameters' own.
    name: for tables and messages.
  """
  config: t5.T5Config
  params: Any
  vocabulary: Any = None
  dtype: str | None = None
  name: str = ''

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
    return t5.decoding_functions(self.config, self.dtype)[0]

  @property
  def extend(self):
    """extend(params, cache, tokens int32[B, T], positions int32[B]) → (logits float32[B, T, rows], cache)."""
    return t5.decoding_functions(self.config, self.dtype)[1]
