"""SentencePiece vocabularies, with T5's sentinels."""
import functools
import hashlib
import json
import os

import sentencepiece


class Vocabulary:
  """A SentencePiece model as T5 uses it: text to ids and back.

  Attributes:
    extra_ids: number of sentinels that follow the file's own pieces; <extra_id_0> is the last id, as in T5.
    vocab_size: real ids, sentinels included (T5's spiece.model: 32000 + 100). A model may have more rows.
    pad_id, eos_id, unk_id: int.
    proto: bytes, the contents of the file.
  """

  def __init__(self, path, extra_ids=0):
    """Reads a SentencePiece model.

    Args:
      path: of the file, usually `spiece.model`.
      extra_ids: number of sentinels to add.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no SentencePiece model, or it has no padding or end-of-sequence piece.
    """
    path = os.path.expanduser(path)
    with open(path, 'rb') as f:
      self.proto = f.read()
    self.extra_ids = extra_ids
    # Serialised protocol buffers are extended by appending. The pieces are those that seqio adds.
    sentinels = b''.join(_user_defined(f'▁<extra_id_{i}>') for i in reversed(range(extra_ids)))
    self._processor = sentencepiece.SentencePieceProcessor()
    try:
      self._processor.LoadFromSerializedProto(self.proto + sentinels)
    except RuntimeError as e:
      raise ValueError(f'{path}: not a SentencePiece model, or a damaged one ({e})') from e
    self.vocab_size = self._processor.get_piece_size()
    self.pad_id = self._processor.pad_id()
    self.eos_id = self._processor.eos_id()
    self.unk_id = self._processor.unk_id()
    for name in ('pad', 'eos'):
      if getattr(self, f'{name}_id') < 0:
        raise ValueError(f'{path}: the vocabulary has no {name} piece; T5 needs one')

  def encode(self, text):
    """str → list of ids, without EOS; [] for an empty text or spaces only."""
    # As bytes: what is not valid Unicode is an error that names the character.
    return self._processor.encode(text.encode('utf-8'))

  def decode(self, ids):
    """Ids → str. Padding, EOS and ids that stand for no piece are skipped; nothing ends the text."""
    skipped = (self.pad_id, self.eos_id)
    return self._processor.decode([i for i in map(int, ids) if 0 <= i < self.vocab_size and i not in skipped])

  @functools.cached_property
  def pieces(self):
    """All pieces, by id."""
    return self._processor.id_to_piece(list(range(self.vocab_size)))

  @functools.cached_property
  def fingerprint(self):
    """str, equal for two vocabularies exactly when they have the same pieces in the same order."""
    return hashlib.sha256(json.dumps(self.pieces).encode()).hexdigest()


def _user_defined(piece):
  """A serialised ModelProto that holds one user-defined piece of score 0."""
  piece = piece.encode('utf-8')
  fields = b'\x0a' + bytes([len(piece)]) + piece + b'\x15' + bytes(4) + b'\x18\x04'  # piece, score, type
  return b'\x0a' + bytes([len(fields)]) + fields
