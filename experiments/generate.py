"""Text in, text out, by speculative decoding.

  python -m experiments.generate "translate English to German: A small text editor." [--trace]
  python -m experiments.generate --file=texts.txt        (one text a line; - is standard input, the default)

--gin.generate.draft="'base'" (a name of the zoo, or None), --gin.generate.temperature=1, and so on.
"""
import statistics
import sys
import time

from absl import flags
import gin
import rich.console
import rich.text

from experiments import command
from experiments import zoo as zoos
from speculative import text as decoding
from speculative.data import batching
from speculative.decoding.config import DecodeConfig
from speculative.measure import trace as tracing

flags.DEFINE_string('file', None, 'File with one text a line; - is standard input.')
flags.DEFINE_bool('trace', False, 'Show the rounds: accepted, rejected, replaced.')


@gin.configurable
def generate(output_dir, dry_run=False, texts=(), *, draft='small', task='ende', gamma=5, max_decode_len=128,
             temperature=0.0, top_k=0, top_p=1.0, lenience=1.0, seed=0, truncate=False, passes=3):
  """Decodes texts and tells how fast.

  Args:
    texts: str; none: --file, or standard input.
    draft: name of a draft of the zoo ('unigram', 'bigram', 'small', 'base', …), or None for plain decoding.
    task: whose n-gram counts the n-gram drafts use.
    truncate: cut texts longer than the largest length bucket instead of refusing them.
    passes: timed decodes of each kind, after one untimed.
    gamma, max_decode_len, temperature, top_k, top_p, lenience, seed: see `DecodeConfig`.
  """
  del output_dir
  config = DecodeConfig(gamma, max_decode_len, temperature, top_k, top_p, lenience)
  texts = list(texts) or _read(flags.FLAGS.file or '-')
  loaded = zoos.zoo(dry_run=dry_run)
  if dry_run:
    return
  drafters = loaded.drafters(task)
  if draft is not None and draft not in drafters:
    raise command.UsageError(f'generate.draft = {draft!r}: there are {", ".join(drafters)}, and None')
  drafter = drafters[draft] if draft is not None else None
  console = rich.console.Console(highlight=False, soft_wrap=True)

  def decode(drafter):
    return decoding.decode_texts(loaded.target, drafter, texts, config, seed, truncate=truncate)

  outputs, result = decode(drafter)
  if flags.FLAGS.trace and drafter is not None:
    inputs = batching.encode_batch(loaded.vocabulary, texts, truncate=truncate)
    _, rows = tracing.record(loaded.target, drafter, inputs, config, seed)
    legend = rich.text.Text()
    for kind, style in tracing.STYLES.items():
      legend.append(kind, style).append('  ')
    console.print(legend)
    for rounds in rows:
      for line in tracing.spans(rounds, loaded.vocabulary):
        console.print(rich.text.Text.assemble(*((text, tracing.STYLES[kind]) for text, kind in line)))
      console.print()
  for output in outputs:
    print(output)

  def rate(drafter):
    decode(drafter)  # compiles
    rates = []
    for _ in range(passes):
      start = time.perf_counter()
      lengths = decode(drafter)[1].lengths
      rates.append(int(lengths.sum()) / (time.perf_counter() - start))
    return statistics.median(rates)

  plain = rate(None)
  if drafter is None:
    print(f'{int(result.lengths.sum())} tokens, {plain:.0f} tokens/s', file=sys.stderr)
    return
  fast = rate(drafter)
  print(f'{int(result.lengths.sum())} tokens in {int(result.rounds.sum())} rounds '
        f'({result.lengths.sum() / result.rounds.sum():.2f} a round), {int(result.accepted.sum())} of '
        f'{int(result.tested.sum())} tested drafts accepted; {fast:.0f} tokens/s against {plain:.0f} autoregressive '
        f'({fast / plain:.2f} ×)', file=sys.stderr)


def _read(path):
  try:
    file = sys.stdin if path == '-' else open(path, encoding='utf-8')
    with file:
      texts = file.read().splitlines()
  except OSError as e:
    raise command.UsageError(f'{path}: {e.strerror}') from e
  if not texts:
    raise command.UsageError('no text: give one as an argument, with --file, or on standard input')
  return texts


if __name__ == '__main__':
  command.main(generate, positional='texts')
