"""The report of a run, as Markdown with figures beside it."""
import os

from speculative.report import figures
from speculative.report import results
from speculative.report import tables

HOW_TO_READ = """\
- **α**, the acceptance rate: the mean over prefixes of β = Σ min(p, q), the probability that a token of the draft (q)
  is accepted by the target (p). The prefixes are the target’s own samples.
- **accepted/tested**: of the drafted tokens that the target tested, the fraction it accepted; an estimate of α from
  decoding itself. Tokens behind a rejected one are not tested.
- **γ**: tokens drafted in a round. **tokens/round**: those a round emits, between 1 and γ+1;
  (1 − α^(γ+1)) / (1 − α) are expected.
- **c**: time of one step of the draft / of the target. **v**: time of the target on γ+1 tokens / on one.
- **expected**: (1 − α^(γ+1)) / ((1 − α)(γc + 1)), Theorem 3.8. It takes v to be 1. **expected, v** has γc + v instead.
- **measured**: time of plain decoding with the target / of speculative decoding, for the same inputs and device.
- **T**: temperature. At 0 the most likely token is taken, and p and q are one-hot.
"""


def _notes(rows):
  """What a reader should hold against the numbers."""
  notes = ['The paper’s numbers are of other models (T5-XXL, 11B, with T5 drafts), other data and other hardware '
           '(TPU-v4). They show what kind of values to expect; ours need not be equal.',
           'The formulas take the acceptances in a round to be independent with the same α. Real ones are not.']
  timed = [row for row in rows if row.get('experiment') == 'walltime' and row.get('draft') is not None
           and row.get('speedup_measured') is not None]
  measured = [row for row in timed if row.get('label') == 'measured']
  slower = sum(row['speedup_measured'] < 1 for row in measured)
  if measured:
    notes.append(f'{slower} of {len(measured)} measured settings were slower than plain decoding.')
  largest = max((row.get('v') or 1 for row in measured), default=1)
  if largest > 1.2:
    notes.append(f'v goes up to {largest:.2f}: here the target’s time grows with the number of tokens, which Theorem '
                 '3.8 leaves out. “expected, v” is the honest prediction.')
  others = sum(row.get('label') != 'measured' for row in rows)
  if others:
    notes.append(f'{others} of {len(rows)} results are not plain measurements; their label says what they are.')
  for experiment, name in (('alpha', 'α'), ('walltime', 'wall-time')):
    if not any(row.get('experiment') == experiment for row in rows):
      notes.append(f'The results have no {name} rows.')
  return notes


def _bullets(lines):
  return ''.join(f'- {line}\n' for line in lines)


def write_report(rows, output_dir, environment, command):
  """Writes report.md and figures/*.png; each file under a temporary name first, report.md last.

  Args:
    rows: list of dicts, see `tables`.
    output_dir: directory to write to, made if missing.
    environment: dict, see `results.environment`.
    command: the command that produced the rows.

  Returns:
    Path of report.md.
  """
  os.makedirs(os.path.join(output_dir, 'figures'), exist_ok=True)

  def embed(figure, name, caption):
    figures.save(figure, os.path.join(output_dir, 'figures', name))
    return f'![{caption}](figures/{name})\n\n*{caption}*\n'

  alpha = tables.alpha_table(rows)
  walltime = tables.walltime_table(rows)
  quality = tables.quality_table(rows)
  timed = [row for row in rows if row.get('experiment') == 'walltime' and row.get('draft') is not None]
  seeds = sorted({row['seed'] for row in rows if row.get('seed') is not None})
  machine = [f'{key}: {value}' for key, value in environment.items() if value is not None]

  parts = ['# Speculative decoding: results\n', '## How it was run\n', f'```\n{command}\n```\n',
           _bullets(machine + [f'seeds: {", ".join(map(str, seeds)) or "none"}', f'rows: {len(rows)}'])]
  if alpha.rows:
    parts += [f'## {alpha.title}\n', alpha.to_markdown(),
              embed(figures.alpha_by_draft(rows), 'alpha.png',
                    'Acceptance rate by draft and task, ± one standard error; diamonds: the paper’s values')]
  if walltime.rows:
    parts += [f'## {walltime.title}\n', walltime.to_markdown()]
  if timed:
    gammas = sorted({row['gamma'] for row in timed if row.get('gamma')})
    parts += [embed(figures.speedup_expected_and_measured(rows), 'speedup.png',
                    'Speed-up, measured (bars) and expected (markers); dashed: plain decoding'),
              embed(figures.tokens_per_round(gammas, rows), 'tokens_per_round.png',
                    'Tokens a round, expected (lines, the paper’s Figure 2) and measured (hollow)')]
  if quality.rows:
    parts += [f'## {quality.title}\n', quality.to_markdown()]
  parts += ['## How to read\n', HOW_TO_READ, '## Notes\n', _bullets(_notes(rows)),
            f'The paper: {tables.paper()["source"]}\n']

  path = os.path.join(output_dir, 'report.md')
  results.replace_file(path, lambda f: f.write('\n'.join(parts).encode()))
  return path
