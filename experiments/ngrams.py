"""Counts unigrams and bigrams, for drafts that cost nearly nothing (section 4.2).

  python -m experiments.ngrams --gin.ngrams.tokens="'tokens.txt'" --gin.ngrams.vocab_size=32100
  python -m experiments.ngrams --gin.ngrams.texts="'texts.tsv'" --gin.ngrams.vocabulary="'spiece.model'"

writes counts.npz into --output_dir, for zoo.ngrams = {task: file}.
"""
import os

import gin

from experiments import command
from speculative.data import packaged
from speculative.data.vocabulary import Vocabulary
from speculative.drafters import ngram


@gin.configurable
def ngrams(output_dir, dry_run=False, *, tokens=None, texts=None, vocabulary=None, extra_ids=0, vocab_size=None,
           pad_id=0, eos_id=1, start_id=0):
  """Counts one file.

  Args:
    tokens: file of token ids, a text a line, separated by blanks; with EOS, without the start token.
    texts: instead, a TSV file of inputs and references: the references are encoded, and an EOS added.
    vocabulary: SentencePiece file, with `texts`; its ids then serve.
    extra_ids: sentinels of the vocabulary (T5: 100).
    vocab_size, pad_id, eos_id, start_id: of the tokens, with `tokens`.
  """
  if (tokens is None) == (texts is None) or (texts is None) != (vocabulary is None) or (tokens and not vocab_size):
    raise command.UsageError('give ngrams.tokens with ngrams.vocab_size, or ngrams.texts with ngrams.vocabulary')
  for path in filter(None, (tokens, texts, vocabulary)):
    if not os.path.exists(path):
      raise command.UsageError(f'{path} does not exist')
  if dry_run:
    return
  if texts:
    references = [reference for _, reference in packaged.read_texts(texts)]
    counts = ngram.fit_texts(references, Vocabulary(vocabulary, extra_ids))
  else:
    counts = ngram.fit(ngram.read_tokens(tokens), vocab_size, pad_id, eos_id, start_id)
  os.makedirs(output_dir, exist_ok=True)
  path = os.path.join(output_dir, 'counts.npz')
  ngram.save(counts, path)
  print(f'{path}: {int(counts.unigram.sum())} tokens, {counts.count.size} kinds of bigrams')


if __name__ == '__main__':
  command.main(ngrams)
