"""Vocabularies, text to token ids and back: SentencePiece with T5's sentinels, bytes (ByT5), and `tokenizer.json`."""
import functools
import hashlib
import json
import os
import re

import sentencepiece

from speculative.json_files import write_json

SPIECE, TOKENIZER, TOKENIZER_CONFIG = 'spiece.model', 'tokenizer.json', 'tokenizer_config.json'
_SENTINEL = re.compile(r'▁?(<extra_id_\d+>)')


class Pieces:
  """What the vocabularies share; each has `pieces`, all of them by id, and `extra_ids`, the sentinels that it adds."""
  extra_ids = 0

  @functools.cached_property
  def fingerprint(self):
    """str, equal for two vocabularies exactly when they have the same pieces in the same order."""
    # T5's sentinels are named with and without a space before them.
    pieces = [_SENTINEL.sub(r'\1', piece) for piece in self.pieces]
    return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()

  def _real(self, ids):
    """Ids that stand for a piece: list of int. Padding and EOS do not."""
    return [i for i in map(int, ids) if 0 <= i < self.vocab_size and i not in (self.pad_id, self.eos_id)]


class Vocabulary(Pieces):
  """A SentencePiece model as T5 uses it: text to ids and back.

  Attributes:
    extra_ids: number of sentinels that follow the file's own pieces; <extra_id_0> is the last id, as in T5.
    vocab_size: real ids, sentinels included (T5's spiece.model: 32000 + 100). A model may have more rows.
    pad_id, eos_id, unk_id: int.
    proto: bytes, the contents of the file.
  """

  def __init__(self, path, extra_ids=0, proto=None):
    """Reads a SentencePiece model.

    Args:
      path: of the file, usually `spiece.model`.
      extra_ids: number of sentinels to add.
      proto: bytes, the file's contents where they are at hand; then `path` is only for messages.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no SentencePiece model, or it has no padding or end-of-sequence piece.
    """
    if proto is None:
      with open(os.path.expanduser(path), 'rb') as f:
        proto = f.read()
    self.proto = proto
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
    return self._processor.decode(self._real(ids))

  @functools.cached_property
  def pieces(self):
    """All pieces, by id."""
    return self._processor.id_to_piece(list(range(self.vocab_size)))

  def save(self, folder):
    """Writes spiece.model and what says how many sentinels follow it, as T5's tokenizers of Transformers read them."""
    with open(os.path.join(folder, SPIECE), 'wb') as f:
      f.write(self.proto)
    write_json(os.path.join(folder, TOKENIZER_CONFIG), {
        'tokenizer_class': 'T5Tokenizer',
        'extra_ids': self.extra_ids,
        'legacy': False,  # SentencePiece's own treatment of spaces
        'eos_token': self.pieces[self.eos_id],
        'pad_token': self.pieces[self.pad_id],
        'unk_token': self.pieces[self.unk_id]})


class ByteVocabulary(Pieces):
  """ByT5's: byte b is id b + 3; padding, EOS and unknown come before, sentinels behind, <extra_id_0> first.

  Attributes:
    extra_ids, vocab_size, pad_id, eos_id, unk_id: int.
  """
  pad_id, eos_id, unk_id = 0, 1, 2

  def __init__(self, extra_ids=125):
    self.extra_ids = extra_ids
    self.vocab_size = 3 + 256 + extra_ids

  def encode(self, text):
    """str → list of ids, without EOS."""
    sentinels = {f'<extra_id_{i}>': 259 + i for i in range(self.extra_ids)}
    ids = []
    for part in re.split(r'(<extra_id_\d+>)', text):
      ids += [sentinels[part]] if part in sentinels else [b + 3 for b in part.encode('utf-8')]
    return ids

  def decode(self, ids):
    """Ids → str. Padding, EOS and ids that stand for no byte are skipped; bytes that are no character become U+FFFD."""
    data = b''.join(bytes([i - 3]) if i < 259 else self.pieces[i].encode() for i in self._real(ids) if i > 2)
    return data.decode('utf-8', errors='replace')

  @functools.cached_property
  def pieces(self):
    """All pieces, by id."""
    return (['<pad>', '</s>', '<unk>'] + [f'<0x{b:02X}>' for b in range(256)] +
            [f'<extra_id_{i}>' for i in range(self.extra_ids)])

  def save(self, folder):
    """Writes what Transformers reads as ByT5's tokenizer."""
    write_json(os.path.join(folder, TOKENIZER_CONFIG), {
        'tokenizer_class': 'ByT5Tokenizer', 'extra_ids': self.extra_ids, 'eos_token': '</s>', 'pad_token': '<pad>',
        'unk_token': '<unk>'})


class TokenizerVocabulary(Pieces):
  """A `tokenizer.json`, through the `tokenizers` package.

  Attributes:
    vocab_size, pad_id, eos_id: int.
  """

  def __init__(self, path, pad_id, eos_id):
    """Reads a tokenizer.

    Args:
      path: of the file.
      pad_id, eos_id: which the file need not tell.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: the `tokenizers` package is not installed.
      ValueError: it is no tokenizer.
    """
    try:
      import tokenizers
    except ImportError as e:
      raise ImportError(f'{path}: reading it takes the tokenizers package: pip install tokenizers') from e
    path = os.path.expanduser(path)
    with open(path, encoding='utf-8') as f:
      self._json = f.read()
    try:
      self._tokenizer = tokenizers.Tokenizer.from_str(self._json)
    except Exception as e:  # the package raises plain Exception
      raise ValueError(f'{path}: not a tokenizer, or a damaged one ({e})') from e
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self.vocab_size = self._tokenizer.get_vocab_size()
    self.pad_id, self.eos_id = pad_id, eos_id

  def encode(self, text):
    """str → list of ids, without EOS."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids):
    """Ids → str. Padding, EOS and ids that stand for no piece are skipped."""
    return self._tokenizer.decode(self._real(ids), skip_special_tokens=False)

  @functools.cached_property
  def pieces(self):
    """All pieces, by id."""
    return [self._tokenizer.id_to_token(i) or '' for i in range(self.vocab_size)]

  def save(self, folder):
    """Writes the file as it was read."""
    with open(os.path.join(folder, TOKENIZER), 'w', encoding='utf-8') as f:
      f.write(self._json)
    eos = {'eos_token': self.pieces[self.eos_id]} if self.eos_id >= 0 else {}
    write_json(os.path.join(folder, TOKENIZER_CONFIG), {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'pad_token': self.pieces[self.pad_id]} | eos)


def _user_defined(piece):
  """A serialised ModelProto that holds one user-defined piece of score 0."""
  piece = piece.encode('utf-8')
  fields = b'\x0a' + bytes([len(piece)]) + piece + b'\x15' + bytes(4) + b'\x18\x04'  # piece, score, type
  return b'\x0a' + bytes([len(fields)]) + fields
