"""Builds the report anew from results.jsonl alone, of one run or of several together.

  python -m experiments.report --output_dir=results/all results/reproduce/results.jsonl results/other/results.jsonl
"""
import os

import gin

from experiments import command
from speculative.report import report as reports
from speculative.report import results


@gin.configurable
def report(output_dir, dry_run=False, *, paths, latex=False):
  """Writes report.html, report.md and figures (and tables.tex).

  Args:
    paths: files of results; given as arguments on the command line.
    latex: write tables.tex, too.
  """
  if not paths:
    raise command.UsageError('give the results.jsonl files as arguments')
  for path in paths:
    if not os.path.isfile(path):
      raise command.UsageError(f'{path}: no such file')
  rows, headers = results.merge(paths)
  if not rows:
    raise command.UsageError(f'{", ".join(paths)}: no results')
  if not dry_run:
    print('Report:', reports.write_report(rows, headers, output_dir, latex))


if __name__ == '__main__':
  command.main(report, positional='paths')
