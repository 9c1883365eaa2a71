"""α and speed-up against lenience (appendix A.5, the paper's Table 5).

  python -m experiments.lenience [--gin.lenience_settings.tokens=10000]
"""
import dataclasses
import os

import gin

from experiments import alpha as alphas
from experiments import command
from experiments import walltime
from experiments import zoo as zoos
from speculative import theory
from speculative.decoding.config import DecodeConfig
from speculative.report import results
from speculative.report import tables


@gin.configurable
def lenience(output_dir, dry_run=False):
  """Measures, prints Table 5's form, writes results.jsonl."""
  loaded = zoos.zoo(dry_run=dry_run)
  if dry_run:
    return
  rows = measure_lenience(loaded)
  os.makedirs(output_dir, exist_ok=True)
  results.write_jsonl(os.path.join(output_dir, 'results.jsonl'), rows)
  print(tables.lenience_table(rows).to_text())


@gin.configurable('lenience_settings')
def measure_lenience(loaded, values=(1.0, 0.5, 0.3, 0.1), temperature=1.0, tokens=10000, prompts=6, passes=3, gammas=(1, 3, 7),
                     max_gamma=10, max_input_len=64, max_decode_len=128, loop_steps=48, seed=0):
  """α of every draft at every lenience, on the same texts of the target's; speed-ups of the models as drafts.

  Args:
    loaded: `packaged.Zoo`.
    values: of lenience, 1 first.
    temperature: of target and draft; above 0, where α is defined by A.5.
    tokens: α is over at least so many of the target's.
    prompts, passes, gammas, max_gamma, max_input_len, max_decode_len, loop_steps, seed: as for
      `walltime.measure_walltimes`; 0 prompts: only α. γ is the best by theory for each lenience.

  Returns:
    list of rows for results.jsonl (experiment 'lenience').
  """
  if temperature <= 0:
    raise command.UsageError(f'lenience_settings.temperature = {temperature}: must be above 0')
  rows = []
  with alphas.steps('lenience', len(loaded.texts) * len(values) * (1 + bool(prompts))) as advance:
    steps = None
    for task in loaded.texts:
      config = DecodeConfig(max_decode_len=max_decode_len, temperature=temperature)
      texts = alphas.short_texts(loaded, task, max_input_len)
      groups, _ = alphas.target_texts(loaded, texts, config, tokens, seed, max_input_len)
      found = {}
      for value in values:
        lenient = dataclasses.replace(config, lenience=value)
        for name, a in alphas.alphas_of(loaded, task, groups, lenient, seed).items():
          found[name, value] = zoos.row('lenience', task, loaded, name, temperature, gamma=None, lenience=value, alpha=a.alpha,
                                        alpha_se=a.standard_error, tokens=a.tokens, seed=seed)
        advance()
      if prompts:
        batches = walltime.pick(loaded, task, max_input_len, prompts)
        steps = steps or walltime.step_times(loaded, loaded.drafts, batches[0], max_decode_len, gammas, loop_steps)
        runs = {None: (None, config)}
        for name, drafter in loaded.drafts.items():
          for value in values:
            alpha, v = found[name, value]['alpha'], steps[name].v(max_gamma)
            gamma = int(theory.best_gamma(min(alpha, 1.0), steps[name].c, v, max_gamma))
            found[name, value] |= {'c': steps[name].c, 'v': v[gamma],
                                   'speedup_expected': float(theory.speedup(min(alpha, 1.0), gamma, steps[name].c)),
                                   'speedup_expected_v': float(theory.speedup(min(alpha, 1.0), gamma, steps[name].c, v[gamma]))}
            runs[name, value] = drafter, dataclasses.replace(config, gamma=gamma, lenience=value)
        for key, values_ in walltime.time_runs(loaded.target, batches, runs, passes, seed).items():
          if key is not None:
            found[key] |= {k: v for k, v in values_.items() if k != 'tokens'}
      rows += found.values()
  return rows


if __name__ == '__main__':
  command.main(lenience)
