"""The main job: the paper's α table and wall-time table for the packaged models, or for your own.

  python -m experiments.reproduce [--gin_file=configs/runs/reproduce_small.gin] [--output_dir=results/reproduce]

Writes report.md, figures and results.jsonl.
"""
import os
import sys

import gin

from experiments import alpha
from experiments import command
from experiments import walltime
from experiments import zoo as zoos
from speculative.report import markdown
from speculative.report import results
from speculative.report import tables


@gin.configurable
def reproduce(output_dir, dry_run=False):
  """Measures α, quality and wall time; prints both tables; writes the report."""
  loaded = zoos.zoo(dry_run=dry_run)
  if dry_run:
    return
  os.makedirs(output_dir, exist_ok=True)
  print(f'Measuring α: {loaded.target.name} against {", ".join(loaded.drafters(next(iter(loaded.texts))))}', flush=True)
  rows = alpha.measure_alphas(loaded)
  print('Measuring wall time at batch 1, plain and speculative side by side', flush=True)
  rows += walltime.measure_walltimes(loaded, rows)
  for table in tables.alpha_table(rows), tables.walltime_table(rows), tables.quality_table(rows):
    print(table.to_text(), flush=True)
  results.write_jsonl(os.path.join(output_dir, 'results.jsonl'), rows)
  command_line = ' '.join(['python -m experiments.reproduce', *sys.argv[1:]])
  print('Report:', markdown.write_report(rows, output_dir, results.environment(), command_line))


if __name__ == '__main__':
  command.main(reproduce)
