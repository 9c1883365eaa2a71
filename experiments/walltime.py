"""Wall time of speculative against plain decoding, side by side (the paper's Table 2).

  python -m experiments.walltime [--gin.walltime_settings.prompts=16]

γ is the best by theory, from α, c and v measured here.
"""
import dataclasses
import functools
import os
import statistics
import time

import gin
import jax
import numpy as np

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
  alpha = _by_pair(alpha_rows)
  rows = []
  names = list(loaded.drafters(next(iter(loaded.texts))))
  with alphas.steps('wall time', len(loaded.texts) * len(temperatures) * (len(names) + 1)) as advance:
    steps = None
    for task in loaded.texts:
      batches, drafters = pick(loaded, task, max_input_len, prompts), loaded.drafters(task)
      steps = steps or step_times(loaded, drafters, batches[0], max_decode_len, gammas, loop_steps)
      for temperature in temperatures:
        plain = DecodeConfig(max_decode_len=max_decode_len, temperature=temperature)
        runs = {None: (None, plain)}
        for name, drafter in drafters.items():
          best = theory.best_gamma(alpha[task, temperature, name], steps[name].c, steps[name].v(max_gamma), max_gamma)
          runs[name] = drafter, dataclasses.replace(plain, gamma=int(best))
        for name, values in time_runs(loaded.target, batches, runs, passes, seed, advance).items():
          row = zoos.row('walltime', task, loaded, name, temperature, seed=seed, **values)
          rows.append(row if name is None else _with_expectation(row, alpha[task, temperature, name], steps[name]))
  return rows


@gin.configurable('gamma_settings')
def measure_gammas(loaded, alpha_rows, gammas=(1, 2, 3, 5, 7, 10), drafts=None, prompts=6, passes=3,
                   temperatures=(0.0, 1.0), max_input_len=64, max_decode_len=128, loop_steps=48, seed=0):
  """Times drafts at every γ beside plain decoding (the paper's Table 4 has one γ for each).

  Args:
    loaded, alpha_rows, prompts, passes, temperatures, max_input_len, max_decode_len, loop_steps, seed: as for
      `measure_walltimes`.
    gammas: γ to decode with; a verification is timed at each.
    drafts: names; None: bigram and the models.

  Returns:
    list of rows for results.jsonl (experiment 'gamma'), without plain decoding.
  """
  alpha = _by_pair(alpha_rows)
  rows = []
  with alphas.steps('γ', len(loaded.texts) * len(temperatures)) as advance:
    steps = None
    for task in loaded.texts:
      drafters = {name: drafter for name, drafter in loaded.drafters(task).items()
                  if (name in drafts if drafts else name != 'unigram')}
      batches = pick(loaded, task, max_input_len, prompts)
      steps = steps or step_times(loaded, drafters, batches[0], max_decode_len, gammas, loop_steps)
      for temperature in temperatures:
        plain = DecodeConfig(max_decode_len=max_decode_len, temperature=temperature)
        runs = {None: (None, plain)} | {(name, gamma): (drafter, dataclasses.replace(plain, gamma=gamma))
                                        for name, drafter in drafters.items() for gamma in gammas}
        timed = time_runs(loaded.target, batches, runs, passes, seed)
        del timed[None]
        rows += [_with_expectation(zoos.row('gamma', task, loaded, name, temperature, seed=seed, **values),
                                   alpha[task, temperature, name], steps[name]) for (name, _), values in timed.items()]
        advance()
  return rows


def _by_pair(alpha_rows):
  return {(r['task'], r['temperature'], r['draft']): r['alpha'] for r in alpha_rows if r['experiment'] == 'alpha'}


def step_times(loaded, drafters, inputs, max_decode_len, gammas, loop_steps):
  """{draft: `measure.StepTimes`}: of the models, and of tables of one size, whatever the task."""
  return measure.step_times(loaded.target, drafters, inputs, DecodeConfig(max_decode_len=max_decode_len), gammas, loop_steps)


def _with_expectation(row, alpha, steps):
  """The row of a speculative run with what Theorem 3.8 expects, without and with v."""
  gamma = row['gamma']
  c, v = steps.c, steps.v(gamma)[gamma]
  return row | {'alpha': alpha, 'c': c, 'v': v, 'speedup_expected': float(theory.speedup(alpha, gamma, c)),
                'speedup_expected_v': float(theory.speedup(alpha, gamma, c, v))}


def pick(loaded, task, max_input_len, prompts):
  """The texts that are timed, each by itself: list of int32[1, max_input_len]."""
  texts = alphas.short_texts(loaded, task, max_input_len)
  picked = [texts[i][0] for i in np.random.default_rng(1).permutation(len(texts))[:prompts]]
  return [decoding.encode(loaded.target, [text], buckets=(max_input_len,)) for text in picked]


def time_runs(target, batches, runs, passes, seed, advance=lambda: None):
  """Decodes all batches with every run, in turn.

  Args:
    target: `Model`.
    batches: list of int32[1, S], decoded one by one.
    runs: {name: (drafter, `DecodeConfig`)}; the first has the drafter None, plain decoding, which others are compared with.
    passes: as for `measure.in_turn`.
    advance: called after each run's compilation.

  Returns:
    {name: dict of what rows have}. `ms_per_token` and `speedup_measured` are of whole texts, `ms_per_token_decoding` and
    `speedup_decoding` of what follows the prefill.
  """
  def decode(drafter, config):
    """(tokens made, seconds of that spent before the first, results)."""
    results, prefill = [], 0.0
    for b, batch in enumerate(batches):
      begin = time.perf_counter()
      if drafter is None:
        module, started = autoregressive, autoregressive.start(target, batch, config, seed, [b])
      else:
        module, started = speculative, speculative.start(target, drafter, batch, config, seed, [b])
      jax.block_until_ready(started[2:])
      prefill += time.perf_counter() - begin
      results.append(module.finish(*started))
    return sum(int(result.lengths[0]) for result in results), prefill, results

  timed = measure.in_turn({name: functools.partial(decode, *run) for name, run in runs.items()}, passes, advance)
  found = {}
  for name, (drafter, config) in runs.items():
    tokens, _, results = timed[name][-1][1]
    seconds, prefill = zip(*((all_, before) for all_, (_, before, _) in timed[name]))
    values = found[name] = dict(
        gamma=None, tokens=tokens, ms_per_token=1e3 * statistics.median(seconds) / tokens,
        ms_per_token_decoding=1e3 * statistics.median(a - b for a, b in zip(seconds, prefill)) / tokens,
        ms_of_prefill=1e3 * statistics.median(prefill) / len(batches))
    if drafter is not None:
      plain = next(iter(found.values()))
      total = {key: sum(int(getattr(result, key)[0]) for result in results)
               for key in ('lengths', 'rounds', 'accepted', 'tested')}
      values |= dict(
          gamma=config.gamma, accepted_over_tested=total['accepted'] / max(total['tested'], 1),
          tokens_per_round=total['lengths'] / total['rounds'],
          speedup_measured=plain['ms_per_token'] / values['ms_per_token'],
          speedup_decoding=plain['ms_per_token_decoding'] / values['ms_per_token_decoding'])
  return found


if __name__ == '__main__':
  command.main(walltime)
