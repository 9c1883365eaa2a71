"""The report of one run or of several: report.html (one file), report.md with figures beside it, tables.tex."""
import dataclasses
import os
from typing import Any

from speculative.measure import trace
from speculative.report import figures
from speculative.report import html
from speculative.report import results
from speculative.report import tables

TITLE = 'Speculative decoding: results'

HOW_TO_READ = (
    '**α**, the acceptance rate: the mean over prefixes of β = Σ min(p, q), the probability that a token of the draft (q) is '
    'accepted by the target (p). The prefixes are the target’s own samples.',
    '**accepted/tested**: of the drafted tokens that the target tested, the fraction it accepted; an estimate of α from decoding '
    'itself. Tokens behind a rejected one are not tested.',
    '**γ**: tokens drafted in a round. **tokens/round**: those a round emits, between 1 and γ+1; (1 − α^(γ+1)) / (1 − α) are '
    'expected.',
    '**c**: time of one step of the draft / of the target. **v**: time of the target on γ+1 tokens / on one.',
    '**expected**: (1 − α^(γ+1)) / ((1 − α)(γc + 1)), Theorem 3.8. It takes v to be 1. **expected, v** has γc + v instead.',
    '**measured**: time of plain decoding with the target / of speculative decoding, for the same inputs and device.',
    '**T**: temperature. At 0 the most likely token is taken, and p and q are one-hot.')


@dataclasses.dataclass
class Section:
  """A part of the report.

  Attributes:
    title: of the section.
    tables: of `tables.Table`.
    figures: of (file name, caption, Figure).
    points: a list of texts, with **bold** words.
    code: a command.
    details: what few will read: a configuration.
    traces: of what `html.describe_trace` gives.
  """
  title: str
  tables: Any = ()
  figures: Any = ()
  points: Any = ()
  code: str = ''
  details: str = ''
  traces: Any = ()


def write_report(rows, headers, output_dir, latex=False):
  """Writes report.html, report.md and figures/*.png, each under a temporary name first, report.md last.

  Args:
    rows, headers: as `results.merge` gives them; see `tables`.
    output_dir: directory to write to, made if missing.
    latex: write tables.tex, too.

  Returns:
    Path of report.md.
  """
  made = sections(rows, headers)
  os.makedirs(os.path.join(output_dir, 'figures'), exist_ok=True)
  files = {'report.html': html.report_page(TITLE, made)}
  if latex:
    files['tables.tex'] = '\n'.join(table.to_latex() for section in made for table in section.tables)
  for section in made:
    for name, _, figure in section.figures:
      figures.save(figure, os.path.join(output_dir, 'figures', name))
  files['report.md'] = '\n'.join([f'# {TITLE}\n', *map(_markdown, made)])
  for name, text in files.items():
    path = os.path.join(output_dir, name)
    results.replace_file(path, lambda f, text=text: f.write(text.encode()))
  return path


def sections(rows, headers):
  """The report's parts: list of `Section`; what the rows say nothing of is left out."""
  timed = [row for row in rows if row.get('experiment') == 'walltime' and row.get('draft') is not None]
  has = {row.get('experiment') for row in rows}
  made = [_run(header, rows) for header in headers]
  if 'theory' in has:
    made.append(Section('The formulas', [tables.operations_table(), tables.expectation_table()], [
        ('figure_2.png', 'Tokens a round against α (the paper’s Figure 2)', figures.tokens_per_round()),
        ('figure_3.png', 'The best γ against α (Figure 3)', figures.best_gamma()),
        ('figure_4.png', 'Speed-up and operations against γ (Figure 4)', figures.speedup_and_operations())]))
  if 'alpha' in has:
    table = tables.alpha_table(rows)
    made.append(Section(table.title, [table], [(
        'alpha.png', 'Acceptance rate by draft and task, ± one standard error; diamonds: the paper’s values',
        figures.alpha_by_draft(rows))]))
  if 'walltime' in has:
    table = tables.walltime_table(rows)
    gammas = sorted({row['gamma'] for row in timed if row.get('gamma')})
    made.append(Section(table.title, [table], [
        ('speedup.png', 'Speed-up, measured (bars) and expected (markers); dashed: plain decoding',
         figures.speedup_expected_and_measured(rows)),
        ('tokens_per_round.png', 'Tokens a round, expected (lines, the paper’s Figure 2) and measured (hollow)',
         figures.tokens_per_round(gammas, rows))] if timed else ()))
  for experiment, table, caption, draw in (
      ('gamma', tables.gamma_table, 'Speed-up at every γ, measured and expected with v', figures.gammas),
      ('lenience', tables.lenience_table, 'α and speed-up against lenience', figures.lenience)):
    if experiment in has:
      table = table(rows)
      made.append(Section(table.title, [table], [(f'{experiment}.png', caption, draw(rows))]))
  if has & {'temperature', 'position', 'accepted'}:
    made.append(Section('Acceptance: temperature, position, accepted lengths', tables.acceptance_tables(rows), [
        ('acceptance.png', 'α against temperature and position; tokens a round beside what is expected of them',
         figures.acceptance(rows))]))
  for table in tables.quality_table(rows), tables.quality_of_both_table(rows), tables.distillation_table(rows):
    if table.rows:
      made.append(Section(table.title, [table]))
  traces = [row for row in rows if row.get('experiment') == 'trace']
  if traces:
    made.append(Section('Round by round (the paper’s Figure 1)', traces=traces))
  if has & {'alpha', 'walltime', 'gamma', 'lenience'}:
    table = tables.coverage_table(rows)
    made.append(Section(table.title, [table]))
  return made + [Section('How to read', points=HOW_TO_READ), Section('Notes', points=[
      *_notes(rows), f'The paper: {tables.paper()["source"]}'])]


def _run(header, rows):
  """How a run was done."""
  mine = [row for row in rows if row.get('run') == header['run']]
  seeds = sorted({row['seed'] for row in mine if row.get('seed') is not None})
  machine = [f'{key}: {value}' for key, value in header['environment'].items() if value is not None]
  models = [f'{name}: {fingerprint}' for name, fingerprint in header['models'].items()]
  return Section(f'Run {header["run"]}', code=header['command'], details=header['config'], points=[
      *machine, *models, f'seeds: {", ".join(map(str, seeds)) or "none"}', f'rows: {len(mine)}'])


def _notes(rows):
  """What a reader should hold against the numbers."""
  notes = ['The paper’s numbers are of other models (T5-XXL, 11B, with T5 drafts), other data and other hardware '
           '(TPU-v4). They show what kind of values to expect; ours need not be equal.',
           'The formulas take the acceptances in a round to be independent with the same α. Real ones are not.']
  measured = [row for row in rows if row.get('experiment') == 'walltime' and row.get('label') == 'measured'
              and row.get('draft') is not None and row.get('speedup_measured') is not None]
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


def _markdown(section):
  parts = [f'## {section.title}\n']
  if section.code:
    parts.append(f'```\n{section.code}\n```\n')
  if section.points:
    parts.append(''.join(f'- {point}\n' for point in section.points))
  for table in section.tables:
    parts += [f'### {table.title}\n'] * (table.title != section.title) + [table.to_markdown()]
  parts += [f'![{caption}](figures/{name})\n\n*{caption}*\n' for name, caption, _ in section.figures]
  parts += map(_markdown_trace, section.traces)
  if section.details:
    parts.append(f'<details><summary>Configuration</summary>\n\n```\n{section.details}\n```\n</details>\n')
  return '\n'.join(parts)


_MARKS = {trace.ACCEPTED: '{}', trace.REJECTED: '~~{}~~', trace.REPLACED: '**{}**', trace.BONUS: '*{}*'}


def _markdown_trace(described):
  """A line a round; rejected drafts are struck out, the target's own tokens bold (replacing) or italic (behind γ drafts)."""
  lines = [', '.join(f'{name}: {value}' for name, value in described['settings'].items()) + f', γ = {described["gamma"]}\n']
  for decode in described['decodes']:
    lines += [f'Input: {decode["input"]}\n', f'{decode["totals"]}.\n']
    for i, line in enumerate(decode['lines'], start=1):
      pieces = ' '.join(_MARKS[kind].format(text.strip()) for text, kind in line['spans'] if text.strip())
      lines.append(f'{i}. {pieces}')
  return '\n'.join(lines) + '\n'
