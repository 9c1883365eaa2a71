"""α of every draft on the target's own texts (the paper's Table 3), and the target's quality.

  python -m experiments.alpha [--gin.alpha.tokens=10000]
"""
import contextlib
import os

import gin
import numpy as np
from rich import progress

from experiments import command
from experiments import zoo as zoos
from speculative import text as decoding
from speculative.data import packaged
from speculative.decoding.autoregressive import autoregressive_decode
from speculative.decoding.config import DecodeConfig
from speculative.decoding.speculative import speculative_decode
from speculative.decoding.state import FinishReason
from speculative.measure import alpha as measure
from speculative.measure import quality
from speculative.report import results
from speculative.report import tables

BATCH = 32
LENGTHS = (32, 128)  # of outputs; each is a program for every draft


@gin.configurable
def alpha(output_dir, dry_run=False):
  """Measures, prints Table 3's form, writes results.jsonl."""
  loaded = zoos.zoo(dry_run=dry_run)
  if dry_run:
    return
  rows = measure_alphas(loaded)
  os.makedirs(output_dir, exist_ok=True)
  results.write_jsonl(os.path.join(output_dir, 'results.jsonl'), rows)
  print(tables.alpha_table(rows).to_text())
  print(tables.quality_table(rows).to_text())


@gin.configurable('alpha_settings')
def measure_alphas(loaded, tokens=10000, temperatures=(0.0, 1.0), max_input_len=128, max_decode_len=128, seed=0):
  """α and quality of all drafts on all tasks.

  Args:
    loaded: `packaged.Zoo`.
    tokens: α is over at least this many tokens of the target's for each task and temperature; where the texts do not
      suffice, over all of them (at temperature > 0 they are decoded again with other seeds).
    temperatures: of target and draft.
    max_input_len: texts of more tokens are left out.
    max_decode_len: tokens a text at most.

  Returns:
    list of rows for results.jsonl.
  """
  rows = []
  with steps('α', len(loaded.texts) * len(temperatures) * (1 + len(loaded.drafters(next(iter(loaded.texts)))))) as advance:
    for task in loaded.texts:
      texts = short_texts(loaded, task, max_input_len)
      for temperature in temperatures:
        config = DecodeConfig(max_decode_len=max_decode_len, temperature=temperature)
        groups, made = target_texts(loaded, texts, config, tokens, seed, max_input_len)
        advance()
        if task != packaged.GPT_TASK:  # a continuation has no score
          rows.append(quality_row(loaded, task, None, temperature, made, seed))
        for name, a in alphas_of(loaded, task, groups, config, seed, advance).items():
          rows.append(zoos.row('alpha', task, loaded, name, temperature, gamma=None, alpha=a.alpha,
                               alpha_se=a.standard_error, tokens=a.tokens, seed=seed))
  return rows


@contextlib.contextmanager
def steps(description, total):
  """A progress bar: a function that advances it by one of `total` steps."""
  columns = (progress.TextColumn('{task.description}'), progress.BarColumn(), progress.TimeElapsedColumn())
  with progress.Progress(*columns, transient=True) as bar:
    step = bar.add_task(description, total=total)
    yield lambda: bar.advance(step)


def alphas_of(loaded, task, groups, config, seed, advance=lambda: None):
  """{draft: `measure.Alpha`} on the target's texts `groups`, as `target_texts` gives them."""
  drafters = loaded.drafters(task)
  betas = {name: [] for name in drafters}
  for i, (inputs, texts) in enumerate(groups):
    probs = measure.target_probs(loaded.target, inputs, texts, config)
    for name, drafter in drafters.items():
      betas[name].append(measure.measure_alpha(loaded.target, drafter, inputs, texts, config, seed, probs).beta)
      if i == len(groups) - 1:
        advance()
  return {name: measure.pool(found) for name, found in betas.items()}


@gin.configurable('quality_settings')
def measure_quality(loaded, texts=128, temperatures=(0.0, 1.0), gamma=3, max_input_len=128, max_decode_len=128, seed=0):
  """Scores of the target's outputs for the same texts, decoded plainly (draft None) and with every model as its draft.

  Args:
    loaded: `packaged.Zoo`.
    texts: of each task, at most.
    temperatures: of target and draft.
    gamma: γ.
    max_input_len, max_decode_len: as for `measure_alphas`.

  Returns:
    list of rows for results.jsonl; `equal` is the share of outputs that are plain decoding's token for token.
  """
  rows = []
  with steps('quality', len(loaded.texts) * len(temperatures) * (1 + len(loaded.drafts))) as advance:
    for task in loaded.texts:
      picked = shuffled(short_texts(loaded, task, max_input_len))[:texts]
      for temperature in temperatures:
        config = DecodeConfig(gamma=gamma, max_decode_len=max_decode_len, temperature=temperature)
        plain = None
        for name, drafter in {None: None, **loaded.drafts}.items():
          made = [(ids, picked[i][1], reason) for i, _, ids, reason in decode_texts(
              loaded.target, drafter, picked, range(len(picked)), config, seed)]
          plain = plain or made
          equal = sum(np.array_equal(a[0], b[0]) for a, b in zip(made, plain)) / len(made)
          row = quality_row(loaded, task, name, temperature, made, seed)
          rows.append(row | {'experiment': 'quality_of_both', 'gamma': name and gamma, 'equal': round(equal, 4)})
          advance()
  return rows


def short_texts(loaded, task, max_input_len):
  """[(text or token ids, reference)] of a task whose inputs have at most max_input_len tokens with EOS."""
  def length(text):
    return len(loaded.vocabulary.encode(text)) + 1 if isinstance(text, str) else len(text)

  short = [pair for pair in loaded.texts[task] if length(pair[0]) <= max_input_len]
  if not short:
    shortest = min((length(text) for text, _ in loaded.texts[task]), default=0)
    raise command.UsageError(f'{task}: of {len(loaded.texts[task])} inputs none has at most max_input_len = '
                             f'{max_input_len} tokens, the shortest has {shortest}')
  return short


def shuffled(texts):
  """The texts in an order that is arbitrary yet always the same: their file may be sorted."""
  return [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]


def decode_texts(target, drafter, texts, order, config, seed):
  """Decodes texts[i] for i in `order`, with a drafter or without: [(i, input ids, output ids, finish reason)].

  Texts of like length share a batch; the last is filled up, so that there is one batch size and one program.
  """
  made = []
  order = sorted(order, key=lambda i: len(texts[i][0]))
  for first in range(0, len(order), BATCH):
    picked = order[first:first + BATCH]
    filled = np.array([*picked, *[picked[0]] * (BATCH - len(picked))])
    inputs = decoding.encode(target, [texts[i][0] for i in filled])
    if drafter is None:
      result = autoregressive_decode(target, inputs, config, seed, row_ids=filled)
    else:
      result = speculative_decode(target, drafter, inputs, config, seed, row_ids=filled)
    made += [(i, inputs[b], result.tokens[b, :result.lengths[b]], FinishReason(result.finish_reason[b]))
             for b, i in enumerate(picked)]
  return made


def target_texts(loaded, texts, config, tokens, seed, max_input_len):
  """The target decodes until it has made `tokens` tokens.

  Returns:
    groups: [(inputs int32[B, S], Generated of few lengths)], for α.
    made: [(token ids, reference, finish reason)], one for each of the texts decoded.
  """
  texts = shuffled(texts)
  finished, made, total, again = [], [], 0, 0
  size = BATCH * min(4, 1 + tokens // 1000)  # whole chunks are decoded, so that short texts are not preferred
  while total < tokens and (again == 0 or np.any(np.asarray(config.temperature) > 0)):
    for start in range(0, len(texts), size):
      if total >= tokens:
        break
      order = range(start, min(start + size, len(texts)))
      for i, inputs, ids, reason in decode_texts(loaded.target, None, texts, order, config, seed + again):
        finished.append((inputs, ids))
        made.append((ids, texts[i][1], reason))
        total += len(ids)
    again += 1
  return _regroup(finished, loaded.vocabulary.pad_id, max_input_len), made


def _regroup(finished, pad_id, width):
  """Batches of like output length, so that little padding is measured: [(inputs int32[B, width], Generated)]."""
  groups = []
  finished = sorted(finished, key=lambda pair: len(pair[1]))
  for first in range(0, len(finished), BATCH):
    group = finished[first:first + BATCH]
    group += [(group[0][0], group[0][1][:0])] * (BATCH - len(group))
    lengths = np.array([len(ids) for _, ids in group], np.int32)
    longest = max(lengths)
    n = next((size for size in LENGTHS if size >= longest), longest)
    tokens = np.full((BATCH, n), pad_id, np.int32)
    inputs = np.full((BATCH, width), pad_id, np.int32)
    for b, (row, ids) in enumerate(group):
      tokens[b, :len(ids)] = ids
      inputs[b, :len(row)] = row
    groups.append((inputs, measure.Generated(tokens, lengths)))
  return groups


def quality_row(loaded, task, draft, temperature, made, seed):
  """A task's own metrics, else BLEU and chrF of translations, ROUGE of others; the share of outputs at the length limit."""
  outputs, references, reasons = zip(*made)
  if task in loaded.scores:
    scores = loaded.scores[task](outputs, references)
  else:
    score = quality.bleu if task == 'ende' else quality.rouge
    scores = score([loaded.vocabulary.decode(ids) for ids in outputs], references, samples=200)
  limited = sum(reason == FinishReason.LENGTH for reason in reasons) / len(reasons)
  row = zoos.row('quality', task, loaded, draft, temperature, gamma=None, texts=len(made), at_limit=round(limited, 4),
                 seed=seed)
  return row | {f'metric {name}' if name in row else name: round(float(value), 2) for name, value in scores.items()}


if __name__ == '__main__':
  command.main(alpha)
