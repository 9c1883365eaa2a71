"""Speed-up at every γ, expected and measured, and the best γ by either (the paper's Tables 2 and 4).

  python -m experiments.gammas [--gin.gamma_settings.gammas="(1, 2, 3, 5, 7, 10)"]
"""
import os

import gin

from experiments import alpha as alphas
from experiments import command
from experiments import walltime
from experiments import zoo as zoos
from speculative.report import results
from speculative.report import tables


@gin.configurable
def gammas(output_dir, dry_run=False, *, alpha_tokens=2000):
  """Measures α on `alpha_tokens` tokens, then every γ beside plain decoding; prints the table, writes results.jsonl."""
  loaded = zoos.zoo(dry_run=dry_run)
  if dry_run:
    return
  rows = alphas.measure_alphas(loaded, tokens=alpha_tokens)
  rows += walltime.measure_gammas(loaded, rows)
  os.makedirs(output_dir, exist_ok=True)
  results.write_jsonl(os.path.join(output_dir, 'results.jsonl'), rows)
  print(tables.gamma_table(rows).to_text())


if __name__ == '__main__':
  command.main(gammas)
