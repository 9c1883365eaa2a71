"""Text in, text out, by speculative decoding.

  python -m experiments.generate "translate English to German: A small text editor." [--trace] [--trace_html=trace.html]
  python -m experiments.generate --file=texts.txt        (one text a line; - is standard input, the default)

--gin.generate.draft="'base'" (a name of the zoo, or None), --gin.generate.temperature=1, and so on.
"""
import dataclasses
import os
import statistics
import sys
import tempfile
import time

from absl import flags
import gin
import numpy as np
import rich.console
import rich.text

from experiments import command
from experiments import zoo as zoos
from speculative import text as decoding
from speculative.data import packaged
from speculative.decoding.config import DecodeConfig
from speculative.measure import trace as tracing
from speculative.measure import walltime
from speculative.report import figures
from speculative.report import html
from speculative.report import results

flags.DEFINE_string('file', None, 'File with one text a line; - is standard input.')
flags.DEFINE_bool('trace', False, 'Show the rounds: accepted, rejected, replaced.')
flags.DEFINE_string('trace_html', None, 'Write the rounds, and a time-line of the first text, to this HTML file.')


@gin.configurable
def generate(output_dir, dry_run=False, texts=(), *, draft='small', task='ende', gamma=5, max_decode_len=128,
             temperature=0.0, top_k=0, top_p=1.0, lenience=1.0, seed=0, truncate=False, passes=3,
             timeline_gammas=(7, 3)):
  """Decodes texts and tells how fast.

  Args:
    texts: str; none: --file, or standard input.
    draft: name of a draft of the zoo ('unigram', 'bigram', 'small', 'base', …, 'copying', 'chain'), or None for plain
      decoding.
    task: whose n-gram counts the n-gram drafts use.
    truncate: cut texts longer than the largest length bucket instead of refusing them.
    passes: timed decodes of each kind, after one untimed.
    timeline_gammas: γ of the lines in --trace_html's time-line; none: no time-line.
    gamma, max_decode_len, temperature, top_k, top_p, lenience, seed: see `DecodeConfig`.
  """
  del output_dir
  config = DecodeConfig(gamma, max_decode_len, temperature, top_k, top_p, lenience)
  page = os.path.expanduser(flags.FLAGS.trace_html or '')
  if page:
    _check_page(page, draft)
    timeline_configs = [dataclasses.replace(config, gamma=g) for g in timeline_gammas]
  texts = list(texts) or _read(flags.FLAGS.file or '-')
  loaded = zoos.zoo(dry_run=dry_run)
  if dry_run:
    return
  if task not in loaded.texts:
    raise command.UsageError(f'generate.task = {task!r}: there are {", ".join(loaded.texts)}')
  loaded.more = tuple(packaged.MORE)[:len(loaded.drafts)]  # a chain needs two
  drafters = loaded.drafters(task)
  if draft is not None and draft not in drafters:
    raise command.UsageError(f'generate.draft = {draft!r}: there are {", ".join(drafters)}, and None')
  drafter = drafters[draft] if draft is not None else None
  console = rich.console.Console(highlight=False, soft_wrap=True)

  def decode(drafter):
    return decoding.decode_texts(loaded.target, drafter, texts, config, seed, truncate=truncate)

  if drafter is not None and (flags.FLAGS.trace or page):
    inputs = decoding.encode(loaded.target, texts, truncate)
    result, rows = tracing.record(loaded.target, drafter, inputs, config, seed)
    outputs = decoding.texts_of(result, loaded.vocabulary)
  else:
    outputs, result = decode(drafter)
  if drafter is not None and flags.FLAGS.trace:
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
    """Median tokens a second, and each text's number of tokens."""
    lengths = decode(drafter)[1].lengths  # compiles
    rates = []
    for _ in range(passes):
      start = time.perf_counter()
      decode(drafter)
      rates.append(int(lengths.sum()) / (time.perf_counter() - start))
    return statistics.median(rates), lengths

  plain, plain_lengths = rate(None)
  if drafter is None:
    print(f'{int(result.lengths.sum())} tokens, {plain:.0f} tokens/s', file=sys.stderr)
    return
  fast, _ = rate(drafter)
  print(f'{int(result.lengths.sum())} tokens in {int(result.rounds.sum())} rounds '
        f'({result.lengths.sum() / result.rounds.sum():.2f} a round), {int(result.accepted.sum())} of '
        f'{int(result.tested.sum())} tested drafts accepted; {fast:.0f} tokens/s against {plain:.0f} autoregressive '
        f'({fast / plain:.2f} ×)', file=sys.stderr)
  if page:
    run = zoos.row('generate', task, loaded, draft, temperature, top_k=top_k, top_p=top_p, lenience=lenience, seed=seed)
    settings = {key: value for key, value in run.items() if key not in ('experiment', 'label', 'task')}
    timeline = _timeline(loaded.target, drafter, inputs[:1], timeline_configs, np.ravel(seed)[:1], {gamma: rows[0]},
                         int(plain_lengths[0])) if timeline_configs else None
    text = html.trace_page(texts, rows, result, loaded.vocabulary, gamma, settings, timeline)
    results.replace_file(page, lambda f: f.write(text.encode()))
    print(f'Wrote {page}', file=sys.stderr)


def _check_page(path, draft):
  """Before anything is computed: can the page be written?"""
  if draft is None:
    raise command.UsageError('--trace_html shows the rounds of a draft: generate.draft must not be None')
  if os.path.isdir(path):
    raise command.UsageError(f'--trace_html={path}: is a folder')
  try:
    with tempfile.TemporaryFile(dir=os.path.dirname(path) or '.'):
      pass
  except OSError as e:
    raise command.UsageError(f'--trace_html={path}: {e.strerror}') from e


def _timeline(target, drafter, inputs, configs, seed, known, plain):
  """Figure 5 for inputs[1, S], decoded alone: a line for each of `configs`, which differ in γ.

  `known` is {γ: list of `Round`} of what is recorded already, `plain` the number of tokens of plain decoding.
  """
  rounds = {}
  for config in configs:
    # The first row's, where settings differ by row.
    config = dataclasses.replace(config, **{name: np.ravel(getattr(config, name))[0]
                                            for name in ('temperature', 'top_k', 'top_p', 'lenience')})
    recorded = known.get(config.gamma) or tracing.record(target, drafter, inputs, config, seed)[1][0]
    rounds[config.gamma] = [len(r.accepted + r.last) for r in recorded]
  steps = walltime.step_times(target, {'draft': drafter}, inputs, config, tuple(rounds))['draft']
  return figures.timeline(rounds, plain, steps)


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
