"""What the paper's formulas say, without any model: its Tables 1 and 4, its Figures 2, 3 and 4.

  python -m experiments.theory --output_dir=results/theory
"""
import os

import gin

from experiments import command
from speculative import theory as formulas
from speculative.report import figures
from speculative.report import results
from speculative.report import tables


def compare_table_1():
  """Rows of results.jsonl, one for each row of Table 1, with what the paper prints."""
  return [{
      'experiment': 'theory', 'label': 'predicted', 'task': None, 'target': None, 'draft': None, 'temperature': None,
      'gamma': row['gamma'], 'alpha': row['alpha'], 'c': 0.0,
      'tokens_per_round': formulas.expected_tokens(row['alpha'], row['gamma']),
      'speedup_expected': formulas.speedup(row['alpha'], row['gamma'], c=0),
      'operations_increase': formulas.operations_increase(row['alpha'], row['gamma'], c_hat=0),
      'paper_speedup': row['speed'], 'paper_operations_increase': row['operations'],
  } for row in tables.paper()['table1_operations_and_speed_at_c_0']]


@gin.configurable
def theory(output_dir: str, dry_run: bool = False, gammas=(1, 3, 5, 7, 10), cs=(0.01, 0.02, 0.05, 0.1),
           alphas=(0.5, 0.6, 0.7, 0.8, 0.9), c=0.0, c_hat=0.0):
  """Prints the tables, writes figures/*.png and results.jsonl.

  Args:
    output_dir: directory to write to, made if missing.
    dry_run: only check the settings and say what would be written.
    gammas: lines of Figure 2.
    cs: lines of Figure 3.
    alphas: lines of Figure 4.
    c: cost coefficient in Figure 4.
    c_hat: the same of the operations.
  """
  try:
    plots = {
        'figure_2.png': figures.tokens_per_round(gammas),
        'figure_3.png': figures.best_gamma(cs),
        'figure_4.png': figures.speedup_and_operations(alphas, c, c_hat),
    }
  except ValueError as e:
    raise command.UsageError(f'theory: {e}')
  if dry_run:
    print(f'Would write to {output_dir}: results.jsonl, {", ".join(f"figures/{name}" for name in plots)}')
    print(f'  gammas = {gammas}, cs = {cs}, alphas = {alphas}, c = {c}, c_hat = {c_hat}')
    return

  print(tables.operations_table().to_text())
  print(tables.expectation_table().to_text())
  os.makedirs(os.path.join(output_dir, 'figures'), exist_ok=True)
  for name, figure in plots.items():
    figures.save(figure, os.path.join(output_dir, 'figures', name))
  results.write_jsonl(os.path.join(output_dir, 'results.jsonl'), compare_table_1())
  print(f'Wrote {output_dir}: results.jsonl, {", ".join(f"figures/{name}" for name in plots)}')


if __name__ == '__main__':
  command.main(theory)
