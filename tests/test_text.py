"""Streaming: pieces put together are the whole, and nothing is shown that does not stay."""
import dataclasses
from typing import Any

import numpy as np
import pytest

from speculative import text as decoding
from speculative.decoding.config import DecodeConfig
from tests import toys

TEXT = 'Grüße, 北京 🎉!'


class Bytes:
  """A vocabulary of bytes: id = byte + 2."""
  vocab_size, pad_id, eos_id = 258, 0, 1

  def encode(self, text):
    return [b + 2 for b in text.encode()]

  def decode(self, ids):
    return bytes(int(i) - 2 for i in ids if i > 1).decode(errors='replace')


@dataclasses.dataclass(frozen=True, eq=False)
class Writer(toys.Toy):
  vocabulary: Any = Bytes()


def writer(text, doubt=0.0):
  """A target that writes `text`, a byte at each position, and ends; with doubt, a draft that errs now and then."""
  ids = [*Bytes().encode(text), 1]
  logits = np.full((len(ids) + 30, 258), -9.)
  logits[np.arange(len(ids)), ids] = 9
  logits[len(ids):, 1] = 9
  wrong = np.random.default_rng(0).uniform(size=len(logits)) < doubt
  logits[wrong] = 0
  toy = toys.clock(logits, eos_id=1)
  return Writer(**{field.name: getattr(toy, field.name) for field in dataclasses.fields(toy)})


@pytest.mark.parametrize('gamma', [1, 2, 5])
@pytest.mark.parametrize('drafted', [True, False])
def test_characters_of_several_bytes_come_whole(gamma, drafted):
  config = DecodeConfig(gamma=gamma, max_decode_len=60)
  drafter = writer(TEXT, .3) if drafted else None
  pieces = list(decoding.stream(writer(TEXT), drafter, 'text', config))
  assert ''.join(pieces) == TEXT == decoding.generate(writer(TEXT), drafter, ['text'], config)[0]
  assert len(pieces) > 2 and all(pieces) and not any('\ufffd' in piece for piece in pieces)


def test_what_is_no_character_comes_at_the_end():
  """A text cut inside a character: the pieces are still the whole of what `generate` gives."""
  config = DecodeConfig(gamma=2, max_decode_len=3)
  pieces = list(decoding.stream(writer('Grü'), writer('Grü'), 'text', dataclasses.replace(config, max_decode_len=3)))
  assert ''.join(pieces) == decoding.generate(writer('Grü'), None, ['text'], config)[0] == 'Gr\ufffd'


@pytest.mark.parametrize('gamma', [1, 3, 7])
def test_nothing_behind_a_stop_is_shown(gamma):
  config = DecodeConfig(gamma=gamma, max_decode_len=60, stop_sequences=[Bytes().encode('北')])
  assert ''.join(decoding.stream(writer(TEXT), writer(TEXT), 'text', config)) == 'Grüße, 北'


@pytest.mark.parametrize('rounds', [1, 3])
def test_several_rounds_a_piece(rounds):
  config = DecodeConfig(gamma=1, max_decode_len=60)
  pieces = list(decoding.stream(writer('abcdefgh'), writer('abcdefgh'), 'text', config, rounds=rounds))
  assert [len(piece) for piece in pieces] == ([2, 2, 2, 2] if rounds == 1 else [6, 2])


def test_mistakes_are_told_at_once():
  with pytest.raises(ValueError, match='text 0 is empty'):
    decoding.stream(writer('a'), None, '')
  with pytest.raises(ValueError, match='rounds = 0'):
    decoding.stream(writer('a'), None, 'text', rounds=0)
  with pytest.raises(ValueError, match='no vocabulary'):
    decoding.stream(dataclasses.replace(writer('a'), vocabulary=None), None, 'text')
