"""Wall time of speculative against plain decoding, side by side (the paper's Table 2).

  python -m experiments.walltime [--gin.walltime_settings.prompts=16]

γ is the best by theory, from α, c and v measured here.
"""
import functools
import os
import statistics
import time

import gin
import jax
import numpy as np
from rich import progress

from experiments import alpha as alphas
from experiments import command
from experiments import zoo as zoos
from speculative import text as decoding
from speculative import theory
from speculative.decoding import autoregressive
from speculative.decoding import speculative
from speculative.decoding.config import DecodeConfig
from speculative.measure import walltime as measure
from speculative.report import results
from speculative.report import tables


@gin.configurable
def walltime(output_dir, dry_run=False, *, alpha_tokens=2000):
  """Measures α on `alpha_tokens` tokens, then wall times; prints Table 2's form, writes results.jsonl."""
  loaded = zoos.zoo(dry_run=dry_run)
  if dry_run:
    return
  rows = alphas.measure_alphas(loaded, tokens=alpha_tokens)
  rows += measure_walltimes(loaded, rows)
  os.makedirs(output_dir, exist_ok=True)
  results.write_jsonl(os.path.join(output_dir, 'results.jsonl'), rows)
  print(tables.walltime_table(rows).to_text())


@gin.configurable('walltime_settings')
def measure_walltimes(loaded, alpha_rows, prompts=12, passes=5, temperatures=(0.0, 1.0), gammas=(1, 3, 7, 10),
                      max_gamma=10, max_input_len=64, max_decode_len=128, loop_steps=48, seed=0):
  """Times every draft on every task at batch 1, beside plain decoding in the same process.

  Args:
    loaded: `packaged.Zoo`.
    alpha_rows: rows of `alphas.measure_alphas`, for the choice of γ and the prediction.
    prompts: texts of each task, decoded one at a time.
    passes: timed passes over all of them, plain and speculative in turn; medians are reported.
    temperatures: of target and draft.
    gammas: γ at which a verification is timed; v is interpolated between them.
    max_gamma: γ is chosen in 1 … max_gamma.
    max_input_len: texts of more tokens are left out, so that one length bucket serves.
    max_decode_len: tokens a text at most.
    loop_steps: `steps` of `walltime.step_times`; fewer for large models.

  Returns:
    list of rows for results.jsonl, plain decoding first (draft None). `ms_per_token` and `speedup_measured` are of whole
    texts, `ms_per_token_decoding` and `speedup_decoding` of what follows the prefill.
  """
  alpha = {(r['task'], r['temperature'], r['draft']): r['alpha'] for r in alpha_rows if r['experiment'] == 'alpha'}
  rows, steps = [], {}
  columns = (progress.TextColumn('{task.description}'), progress.BarColumn(), progress.TimeElapsedColumn())
  names = list(loaded.drafters(next(iter(loaded.texts))))
  with progress.Progress(*columns, transient=True) as bar:
    step = bar.add_task('wall time', total=len(loaded.texts) * len(temperatures) * (len(names) + 1) + len(names))
    for task in loaded.texts:
      batches = pick(loaded, task, max_input_len, prompts)
      drafters = loaded.drafters(task)
      if not steps:  # the models, and tables of the same size, whatever the task
        bar.update(step, description='single steps')
        steps = measure.step_times(loaded.target, drafters, batches[0], DecodeConfig(max_decode_len=max_decode_len),
                                   gammas, loop_steps)
        bar.advance(step, len(names))
      for temperature in temperatures:
        bar.update(step, description=f'{task} at T = {temperature:g}')
        rows += _measure_task(loaded, task, temperature, batches, drafters, alpha, steps, passes, max_gamma,
                              max_decode_len, seed, lambda: bar.advance(step))
  return rows


def pick(loaded, task, max_input_len, prompts):
  """The texts that are timed, each by itself: list of int32[1, max_input_len]."""
  texts = alphas.short_texts(loaded, task, max_input_len)
  picked = [texts[i][0] for i in np.random.default_rng(1).permutation(len(texts))[:prompts]]
  return [decoding.encode(loaded.target, [text], buckets=(max_input_len,)) for text in picked]


def _measure_task(loaded, task, temperature, batches, drafters, alpha, steps, passes, max_gamma, max_decode_len, seed,
                  advance):
  """Plain decoding and every draft on one task at one temperature: list of rows."""
  config = {name: DecodeConfig(
      gamma=int(theory.best_gamma(alpha[task, temperature, name], steps[name].c, steps[name].v(max_gamma), max_gamma)),
      max_decode_len=max_decode_len, temperature=temperature) for name in drafters}
  plain = DecodeConfig(max_decode_len=max_decode_len, temperature=temperature)

  def decode(name):
    """Decodes every prompt by itself: (tokens made, seconds of that spent before the first, results)."""
    results, prefill = [], 0.0
    for b, batch in enumerate(batches):
      begin = time.perf_counter()
      if name is None:
        module, started = autoregressive, autoregressive.start(loaded.target, batch, plain, seed, [b])
      else:
        module, started = speculative, speculative.start(loaded.target, drafters[name], batch, config[name], seed, [b])
      jax.block_until_ready(started[2:])
      prefill += time.perf_counter() - begin
      results.append(module.finish(*started))
    return sum(int(result.lengths[0]) for result in results), prefill, results

  timed = measure.in_turn({name: functools.partial(decode, name) for name in (None, *drafters)}, passes, advance)

  rows = []
  for name in timed:
    tokens, _, results = timed[name][-1][1]
    seconds, prefill = zip(*((all_, before) for all_, (_, before, _) in timed[name]))
    row = zoos.row(
        'walltime', task, loaded, name, temperature, gamma=None, tokens=tokens, seed=seed,
        ms_per_token=1e3 * statistics.median(seconds) / tokens,
        ms_per_token_decoding=1e3 * statistics.median(a - b for a, b in zip(seconds, prefill)) / tokens,
        ms_of_prefill=1e3 * statistics.median(prefill) / len(batches))
    if name is not None:
      gamma, c, v, a = config[name].gamma, steps[name].c, steps[name].v(max_gamma), alpha[task, temperature, name]
      total = {key: sum(int(getattr(result, key)[0]) for result in results)
               for key in ('lengths', 'rounds', 'accepted', 'tested')}
      row |= dict(
          gamma=gamma, alpha=a, accepted_over_tested=total['accepted'] / max(total['tested'], 1),
          tokens_per_round=total['lengths'] / total['rounds'], c=c, v=v[gamma],
          speedup_expected=float(theory.speedup(a, gamma, c)),
          speedup_expected_v=float(theory.speedup(a, gamma, c, v[gamma])),
          speedup_measured=rows[0]['ms_per_token'] / row['ms_per_token'],
          speedup_decoding=rows[0]['ms_per_token_decoding'] / row['ms_per_token_decoding'])
    rows.append(row)
  return rows


if __name__ == '__main__':
  command.main(walltime)
