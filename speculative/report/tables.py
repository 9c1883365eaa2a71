"""The paper's tables with our measurements in them.

Rows are those of results.jsonl: dicts with `experiment`, `label`, `task`, `target`, `draft`, `temperature`, `gamma`,
and what applies of the measured values. A row whose label is not `measured` carries that label in its first cell.
"""
import collections
import dataclasses
import importlib.resources
import io
import json

import rich.box
import rich.console
import rich.table
import rich.text

from speculative import theory

LABELS = {
    'measured': 'measured as it stands',
    'widened': 'timed on models grown without changing what they compute',
    'forced': 'the acceptance was set, not found by the models',
    'predicted': 'computed from the formulas, not run',
    'paper': 'printed in the paper, not run here',
}

# The paper's row of the same kind.
PAPER_TASKS = {'ende': 'EnDe', 'summarize': 'CNNDM'}
PAPER_TARGETS = {'ende': 'T5-XXL EnDe', 'summarize': 'T5-XXL CNNDM', 'describe': 'GPT-like 97M', 'lm1b': 'GPT-like 97M'}
PAPER_DRAFTS = {'unigram': 'unigram', 'bigram': 'bigram', 'small': 'T5-small', 'base': 'T5-base', 'large': 'T5-large',
                'gpt-small': 'GPT-like 6M'}

PAPER_NOTE = 'paper: T5-XXL (11B) and drafts of the same kind on other data, TPU-v4. Compare the shape, not the values.'

# What tells rows apart, besides task, draft, temperature and γ; shown as columns where it varies, else in a note.
SETTINGS = ('target', 'lenience', 'device', 'dtype', 'seed')

NOTHING = '–'


@dataclasses.dataclass(frozen=True)
class Table:
  """A table of texts."""
  title: str
  columns: tuple[str, ...]
  rows: tuple[tuple[str, ...], ...]
  notes: tuple[str, ...] = ()

  def is_number(self, column):
    """Whether no cell of the column has a letter: it is set to the right."""
    return not any(c.isalpha() for row in self.rows for c in row[column])

  def to_text(self):
    """For the console: as wide as it needs to be, without colours."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(self.columns):
      table.add_column(rich.text.Text(column), justify='right' if self.is_number(i) else 'left')
    for row in self.rows:
      table.add_row(*map(rich.text.Text, row))  # Not str: rich would take [forced] for markup.
    console = rich.console.Console(file=io.StringIO(), width=1000, color_system=None)
    console.print(table)
    lines = [self.title] + [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]
    return '\n'.join(lines + [f'  {note}' for note in self.notes]) + '\n'

  def to_markdown(self):
    """A Markdown table with the notes below it; the title is left to the caller's heading."""
    def line(cells):
      return '| ' + ' | '.join(cell.replace('|', r'\|') for cell in cells) + ' |'

    rule = ['---:' if self.is_number(i) else '---' for i in range(len(self.columns))]
    lines = [line(self.columns), line(rule), *map(line, self.rows), '', *(f'- {note}' for note in self.notes)]
    return '\n'.join(lines).rstrip() + '\n'

  def to_latex(self):
    """A LaTeX table (booktabs), the title as its caption, the notes below."""
    def line(cells):
      return ' & '.join(map(_latex, cells)) + r' \\'

    kinds = ''.join('r' if self.is_number(i) else 'l' for i in range(len(self.columns)))
    lines = [r'\begin{table}', r'\centering\small', rf'\caption{{{_latex(self.title)}}}', rf'\begin{{tabular}}{{{kinds}}}',
             r'\toprule', line(self.columns), r'\midrule', *map(line, self.rows), r'\bottomrule', r'\end{tabular}',
             *(rf'\par\footnotesize {_latex(note)}' for note in self.notes), r'\end{table}']
    return '\n'.join(lines) + '\n'


_LATEX = {'\\': r'\textbackslash{}', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}'} | {
    c: rf'\{c}' for c in '&%$#_{}'} | {
    'α': r'$\alpha$', 'β': r'$\beta$', 'γ': r'$\gamma$', 'ĉ': r'$\hat c$', 'Σ': r'$\Sigma$', '×': r'$\times$', '±': r'$\pm$',
    '−': '$-$', '–': '--', '’': "'", '→': r'$\to$', '≥': r'$\ge$', '…': r'\ldots{}', '“': '``', '”': "''"}


def _latex(text):
  return ''.join(_LATEX.get(c, c) for c in text)


def paper():
  """The paper's numbers, and where they are from: see paper.json."""
  return json.loads(importlib.resources.files(__package__).joinpath('paper.json').read_text('utf-8'))


def paper_draft(draft):
  """The paper's draft of the same kind, such as 'T5-small' for 'small', or None."""
  return PAPER_DRAFTS.get(str(draft).lower().removeprefix('t5').strip(' -_'))


def paper_alpha(task, draft, temperature):
  """α of the paper's target with the same kind of draft (Table 3), or None."""
  for row in paper()['table3_alpha']:
    if row['target'] == PAPER_TARGETS.get(task) and row['draft'] == paper_draft(draft):
      return {0: row['alpha_t0'], 1: row['alpha_t1']}.get(temperature)
  return None


def paper_walltime(task, draft, temperature):
  """T5-XXL's row with the same kind of draft (Table 2): dict with gamma, alpha, speed; or None."""
  tables = paper()
  for row in tables['table2_walltime_t5_xxl'] + tables['bigram_speed_at_c_0']:
    if (row['task'], row['draft'], row['temperature']) == (PAPER_TASKS.get(task), paper_draft(draft), temperature):
      return row
  return None


def number(x, digits=2, unit=''):
  return NOTHING if x is None else f'{x:.{digits}f}{unit}'


def draft_name(row):
  return 'none' if row.get('draft') is None else str(row['draft'])


def task_name(row):
  """The task, and the label unless it is `measured`."""
  label = row.get('label', 'no label')
  return str(row.get('task') or NOTHING) + ('' if label == 'measured' else f' [{label}]')


def of_experiment(rows, name):
  """The rows of an experiment: measured ones first, then by task, draft (none first), temperature and γ."""
  rows = [row for row in rows if row.get('experiment') == name]

  def order(key):  # Values in the order in which they come.
    return list(dict.fromkeys(row.get(key) for row in rows))

  tasks, drafts, labels = order('task'), order('draft'), order('label')
  return sorted(rows, key=lambda row: (
      row.get('label') != 'measured', labels.index(row.get('label')), tasks.index(row.get('task')),
      row.get('draft') is not None, drafts.index(row.get('draft')), row.get('temperature') or 0, row.get('gamma') or 0))


def setting(row, key):
  """One of SETTINGS as text; lenience is 1 unless said otherwise."""
  value = row.get(key)
  if key == 'lenience':
    value = f'{1 if value is None else value:g}'
  return NOTHING if value is None else str(value)


def varying(rows):
  """Those of SETTINGS that are not the same in all rows."""
  return [key for key in SETTINGS if len({setting(row, key) for row in rows}) > 1]


def group_alpha(rows):
  """The α rows as Table 3 groups them: list of dicts from temperature to row, one for each line of the table.

  Of rows that differ in nothing, the last one counts.
  """
  groups = collections.defaultdict(dict)
  for row in of_experiment(rows, 'alpha'):
    key = row.get('label'), row.get('task'), row.get('draft'), *(setting(row, key) for key in SETTINGS)
    groups[key][row.get('temperature')] = row
  return list(groups.values())


def _common_notes(rows):
  """Notes on what is the same in all rows, and on the labels that are not `measured`."""
  same = [f'{key}: {rows[0][key]}' for key in SETTINGS if key not in varying(rows) and rows[0].get(key) is not None]
  notes = [', '.join(same)] if same else []
  labels = dict.fromkeys(row.get('label', 'no label') for row in rows if row.get('label') != 'measured')
  return notes + [f'[{label}]: {LABELS.get(label, "not said to be measured")}' for label in labels]


def alpha_table(rows):
  """α by task and draft in the form of Table 3, the paper's values beside it.

  Columns for each temperature that occurs: α ± its standard error, accepted/tested (from a decoding run; where the
  α row has none, the mean over the wall-time rows of the same pair), the paper's α.
  """
  groups = group_alpha(rows)
  alpha_rows = [row for group in groups for row in group.values()]
  temperatures = sorted({row['temperature'] for row in alpha_rows})
  settings = varying(alpha_rows)

  def accepted_over_tested(row):
    if row.get('accepted_over_tested') is not None:
      return row['accepted_over_tested']

    def pair(row):  # Device and seed do not matter here.
      return [row.get(key) for key in ('label', 'task', 'target', 'draft', 'temperature', 'dtype')] + [
          setting(row, 'lenience')]

    values = [other['accepted_over_tested'] for other in of_experiment(rows, 'walltime')
              if other.get('accepted_over_tested') is not None and pair(other) == pair(row)]
    return sum(values) / len(values) if values else None

  columns = ['task', 'draft', *settings]
  for t in temperatures:
    columns += [f'α, T={t:g}', f'accepted/tested, T={t:g}', f'paper α, T={t:g}']
  lines = []
  for group in groups:
    first = next(iter(group.values()))
    line = [task_name(first), draft_name(first), *(setting(first, key) for key in settings)]
    for t in temperatures:
      row = group.get(t, {})
      se = f' ± {row["alpha_se"]:.3f}' if row.get('alpha_se') is not None else ''
      line += [number(row.get('alpha'), 3) + se, number(accepted_over_tested(row) if row else None, 3),
               number(paper_alpha(first.get('task'), first.get('draft'), t))]
    lines.append(tuple(line))
  notes = ['α: mean acceptance probability over the target’s own samples, ± one standard error']
  if lines:
    notes += [PAPER_NOTE] + _common_notes(alpha_rows)
  return Table('Acceptance rate α (the paper’s Table 3)', tuple(columns), tuple(lines), tuple(notes))


def expected_speedup(row, v=1.0):
  """Theorem 3.8 for a row's α, γ and c, or None where one is missing."""
  if v is None or any(row.get(key) is None for key in ('alpha', 'gamma', 'c')):
    return None
  return theory.speedup(row['alpha'], row['gamma'], row['c'], v)


def with_expected(row):
  """The row with `speedup_expected` and `speedup_expected_v`, computed from its α, γ, c and v where it has none."""
  row = dict(row)
  if row.get('speedup_expected') is None:
    row['speedup_expected'] = expected_speedup(row)
  if row.get('speedup_expected_v') is None:
    row['speedup_expected_v'] = expected_speedup(row, row.get('v'))
  return row


def walltime_table(rows):
  """Speed-ups in the form of Table 2: expected by Theorem 3.8, without and with the measured v, and measured."""
  rows = [with_expected(row) for row in of_experiment(rows, 'walltime')]
  settings = varying(rows)
  columns = ['task', 'draft', *settings, 'T', 'γ', 'α', 'c', 'v', 'tokens/round', 'ms/token', 'expected',
             'expected, v', 'measured', 'paper', 'paper γ', 'paper α']
  lines = []
  for row in rows:
    printed = paper_walltime(row.get('task'), row.get('draft'), row.get('temperature')) or {}
    lines.append((
        task_name(row), draft_name(row), *(setting(row, key) for key in settings),
        number(row.get('temperature'), 1).removesuffix('.0'), number(row.get('gamma'), 0),
        number(row.get('alpha'), 3), number(row.get('c'), 3), number(row.get('v')), number(row.get('tokens_per_round')),
        number(row.get('ms_per_token')), number(row['speedup_expected'], 2, '×'),
        number(row['speedup_expected_v'], 2, '×'), number(row.get('speedup_measured'), 2, '×'),
        f'{printed["speed"]}×' if printed else NOTHING, number(printed.get('gamma'), 0), number(printed.get('alpha'))))
  notes = ['expected: Theorem 3.8 with the measured α and c; expected, v: also with the measured v; draft none: plain '
           'decoding',
           'measured: whole texts, encoding included, which no formula counts: short outputs gain less']
  if lines:
    notes += [PAPER_NOTE] + _common_notes(rows)
  return Table('Wall time (the paper’s Table 2)', tuple(columns), tuple(lines), tuple(notes))


# What a quality row has besides its scores.
NO_SCORES = {'experiment', 'label', 'task', 'draft', 'temperature', 'gamma', 'texts', 'at_limit', 'equal', 'part', 'run',
             *SETTINGS}


def quality_table(rows):
  """Scores (whatever a row has besides NO_SCORES), the texts scored, the share that met the length limit."""
  return _quality(of_experiment(rows, 'quality'), 'Quality of the target')


def quality_of_both_table(rows):
  """The same for plain and speculative outputs of the same texts, and the share of outputs that are equal."""
  return _quality(of_experiment(rows, 'quality_of_both'), 'Quality, plain (draft none) and speculative on the same texts',
                  ('equal to plain', lambda row: number(row.get('equal'), 3)))


def _quality(rows, title, *more):
  settings = varying(rows)
  scores = list(dict.fromkeys(key for row in rows for key in row if key not in NO_SCORES))
  lines = [(task_name(row), draft_name(row), *(setting(row, key) for key in settings), temperature_name(row),
            *(number(row.get(score)) for score in scores), str(row.get('texts', NOTHING)), number(row.get('at_limit'), 3),
            *(value(row) for _, value in more)) for row in rows]
  notes = ['_low, _high: 95 % bootstrap interval', *_common_notes(rows)] if rows else []
  return Table(title, ('task', 'draft', *settings, 'T', *scores, 'texts', 'at limit', *(name for name, _ in more)),
               tuple(lines), tuple(notes))


def temperature_name(row):
  return NOTHING if row.get('temperature') is None else f'{row["temperature"]:g}'


def _by(rows, column, *more):
  """Groups rows by label, task, draft, SETTINGS and what `more` names: list of {row[column]: row}, in order."""
  groups = collections.defaultdict(dict)
  for row in rows:
    key = row.get('label'), row.get('task'), row.get('draft'), *(setting(row, key) for key in SETTINGS if key != column), *(
        row.get(key) for key in more)
    groups[key][row.get(column)] = row
  return list(groups.values())


def lenience_table(rows):
  """α and speed-up at every lenience, the paper's beside them (Table 5; speed-ups of T5-small from appendix A.5)."""
  rows = of_experiment(rows, 'lenience')
  printed = paper()
  table, speeds = printed['table5_lenience_ende_t1'], printed['lenience_speed_ende_t1_t5_small_c_0_015']
  lines = []
  for group in _by(rows, 'lenience', 'temperature'):
    for value in sorted(group, reverse=True):
      row, name = group[value], paper_draft(group[value]['draft'])
      alpha = speed = None
      if row['task'] == 'ende' and row['temperature'] == 1 and value in table['lenience']:
        here = table['lenience'].index(value)
        alpha = table[name][here] if name in table else None
        speed = speeds['speed'][here] if name == 'T5-small' else None
      se = f' ± {row["alpha_se"]:.3f}' if row.get('alpha_se') is not None else ''
      lines.append((task_name(row), draft_name(row), temperature_name(row), f'{value:g}', number(row['alpha'], 3) + se,
                    number(alpha), number(row.get('gamma'), 0), number(row.get('speedup_expected_v'), 2, '×'),
                    number(row.get('speedup_measured'), 2, '×'), number(speed, 1, '×')))
  notes = ['α(l): mean of Σ min(q, p / l) over the target’s own texts (appendix A.5); l = 1 is exact, below it the output is no '
           'longer the target’s distribution. γ: the best by theory. paper: T5-XXL; speed-ups for T5-small only']
  return Table('Lenience (the paper’s Table 5)', ('task', 'draft', 'T', 'l', 'α', 'paper α', 'γ', 'expected, v', 'measured', 'paper'),
               tuple(lines), tuple(notes + _common_notes([row | {'lenience': None} for row in rows])) if rows else ())


def gamma_table(rows):
  """Measured speed-up at every γ, in brackets what Theorem 3.8 with v expects; the best γ by either (Table 4)."""
  rows = of_experiment(rows, 'gamma')
  gammas = sorted({row['gamma'] for row in rows})
  lines = []
  for group in _by(rows, 'gamma', 'temperature'):
    first = next(iter(group.values()))
    measured = max(group, key=lambda gamma: group[gamma]['speedup_measured'])
    expected = max(group, key=lambda gamma: group[gamma]['speedup_expected_v'])
    lines.append((task_name(first), draft_name(first), temperature_name(first), number(first['alpha'], 3), number(first['c'], 3), *(
        f'{group[gamma]["speedup_measured"]:.2f} ({group[gamma]["speedup_expected_v"]:.2f})' if gamma in group else NOTHING
        for gamma in gammas), str(expected), str(measured), number(group[expected]['speedup_measured'], 2, '×'),
                  number(group[measured]['speedup_measured'], 2, '×')))
  columns = ('task', 'draft', 'T', 'α', 'c', *(f'γ={gamma}' for gamma in gammas), 'best γ, theory', 'best γ, measured',
             'measured at the former', 'at the latter')
  notes = ['speed-up of whole texts, measured; in brackets: Theorem 3.8 with the measured α, c and v']
  return Table('Speed-up at every γ, measured and expected (the paper’s Table 4)', columns, tuple(lines),
               tuple(notes + _common_notes(rows)) if rows else ())


def acceptance_tables(rows):
  """α against temperature, α against position, accepted lengths: a `Table` each, of `experiments.acceptance`."""
  found = []
  by_temperature = of_experiment(rows, 'temperature')
  if by_temperature:
    temperatures = sorted({row['temperature'] for row in by_temperature})
    found.append(Table(
        'α against temperature', ('task', 'draft', *(f'T={t:g}' for t in temperatures)),
        tuple((task_name(first), draft_name(first), *(number(group.get(t, {}).get('alpha'), 3) for t in temperatures))
              for group in _by(by_temperature, 'temperature') for first in [next(iter(group.values()))]),
        tuple(_common_notes(by_temperature))))
  by_position = of_experiment(rows, 'position')
  if by_position:
    positions = sorted({(row['first'], row['last']) for row in by_position})
    names = {(a, b): str(a + 1) if a == b else f'{a + 1}–{b + 1}' for a, b in positions}
    found.append(Table(
        'α against position in the output', ('task', 'draft', 'T', *names.values()),
        tuple((task_name(first), draft_name(first), temperature_name(first), *(number(group.get(a, {}).get('alpha'), 3)
                                                                              for a, _ in positions))
              for group in _by(by_position, 'first', 'temperature') for first in [next(iter(group.values()))]),
        ('position 1 is the first token of the output', *_common_notes(by_position))))
  accepted = of_experiment(rows, 'accepted')
  if accepted:
    gamma = max(row['gamma'] for row in accepted)
    lines = []
    for row in accepted:
      whole, a = sum(row['counts']), min(row['alpha'], 1.0)
      iid = [a**n * (1 - a) for n in range(row['gamma'])] + [a**row['gamma']]
      lines.append((task_name(row), draft_name(row), temperature_name(row), number(row['alpha'], 3), *(
          f'{count / max(whole, 1):.2f} ({expected:.2f})' for count, expected in zip(row['counts'], iid)),
                    *[NOTHING] * (gamma - row['gamma']), number(row['tokens_per_round']), number(row['tokens_per_round_iid']),
                    number(row['tokens_per_round_beta'])))
    found.append(Table(
        'Accepted lengths against the i.i.d. assumption',
        ('task', 'draft', 'T', 'α', *(f'n={n}' for n in range(gamma + 1)), 'tokens/round', 'i.i.d.', 'β of each place'),
        tuple(lines),
        ('share of rounds that accepted n drafts, in brackets α^n (1 − α); rounds cut by the end of a text are left out there, '
         'not in tokens/round', 'i.i.d.: Equation 1 with α. β of each place: the same rounds, where the i-th token’s draft is '
         'accepted with that place’s own β: it has what Theorem 3.8 leaves out, easy and hard stretches, and rounds cut by the end',
         *_common_notes(accepted))))
  return found


def distillation_table(rows):
  """α of drafts before and after distillation."""
  rows = of_experiment(rows, 'distill')
  lines = [(task_name(row), draft_name(row), temperature_name(row), str(row['divergence']),
            f'{row["alpha_before"]:.3f} ± {row["alpha_before_se"]:.3f}', f'{row["alpha"]:.3f} ± {row["alpha_se"]:.3f}',
            f'{row["alpha"] - row["alpha_before"]:+.3f}'.replace('-', '−')) for row in rows]
  return Table('Distillation of the drafts', ('task', 'draft', 'T', 'divergence', 'α before', 'α after', 'difference'),
               tuple(lines), ('measured by `experiments.distill` when the drafts were trained, on held-out texts',
                              *_common_notes(rows)) if rows else ())


# The run file for a row of the paper, by the task of ours that is of its kind.
RUN_FILES = {'ende': 'ende', 'summarize': 'cnndm', 'describe': 'lm1b'}


def coverage_table(rows):
  """Every row of the paper's Tables 2 to 5: its configuration, and the measured value of our row of its kind or why not."""
  printed = paper()
  drafts = {name: draft for draft, name in PAPER_DRAFTS.items()}
  tasks = {name: task for task, name in PAPER_TASKS.items()}

  def ours(experiment, value, digits=2, unit='', **where):
    """The measured value of the first row of that kind, with the label, or why there is none."""
    for row in of_experiment(rows, experiment):
      if all(row.get(key) == wanted for key, wanted in where.items()) and row.get(value) is not None:
        label = row.get('label', 'no label')
        return number(row[value], digits, unit) + (f' [{label}; target {row["target"]}]')
    if where['draft'] is None:
      return 'not public: the paper’s model cannot be had'
    if where['draft'] == 'large':
      return 'no packaged draft of its kind: needs T5 checkpoints and a TPU or GPU'
    return 'not measured in these results'

  lines = []
  for row in printed['table2_walltime_t5_xxl'] + printed['bigram_speed_at_c_0']:
    task = tasks[row['task']]
    lines.append(('2', f'{row["task"]}, {row["draft"]}, T = {row["temperature"]}', f'{row["speed"]:g}×', ours(
        'walltime', 'speedup_measured', 2, '×', task=task, draft=drafts[row['draft']], temperature=row['temperature']),
                  f'table_2_{RUN_FILES[task]}.gin'))
  targets = {name: task for task, name in reversed(PAPER_TARGETS.items())}
  for row in printed['table3_alpha']:
    for temperature, key in ((0, 'alpha_t0'), (1, 'alpha_t1')):
      task = targets.get(row['target'])
      lines.append(('3', f'{row["target"]}, {row["draft"]}, T = {temperature}', f'{row[key]:.2f}', ours(
          'alpha', 'alpha', 3, task=task, draft=drafts.get(row['draft']), temperature=temperature),
                    f'table_3_{RUN_FILES[task]}.gin' if task else 'none'))
  for draft, c in printed['table4_cost_coefficient_c'].items():
    lines.append(('4', f'c of {draft}', f'{c:.2f}', ours('gamma', 'c', 3, task='ende', draft=drafts[draft]), 'table_4_ende.gin'))
  table = printed['table5_lenience_ende_t1']
  for draft in (key for key in table if key != 'lenience'):
    for lenience, alpha in zip(table['lenience'], table[draft]):
      lines.append(('5', f'EnDe, {draft}, T = 1, l = {lenience:g}', f'{alpha:.2f}', ours(
          'lenience', 'alpha', 3, task='ende', draft=drafts[draft], lenience=lenience, temperature=1), 'table_5_ende.gin'))
  return Table('Every row of the paper’s Tables 2 to 5', ('table', 'row', 'paper', 'here', 'its run, of configs/runs'),
               tuple(lines), ('here: our row of the same kind, for the models and texts of this run; see the labels. The '
                              'run files are for the paper’s own sizes and data.',))


def operations_table():
  """Table 1: the growth of operations and the speed-up at c = ĉ = 0, computed and as printed."""
  lines = [(f'{row["alpha"]:g}', str(row['gamma']),
            number(theory.operations_increase(row['alpha'], row['gamma'], 0), 2, '×'), f'{row["operations"]:.2f}×',
            number(theory.speedup(row['alpha'], row['gamma'], 0), 2, '×'), f'{row["speed"]:.2f}×')
           for row in paper()['table1_operations_and_speed_at_c_0']]
  return Table('Operations and speed at c = ĉ = 0 (the paper’s Table 1)',
               ('α', 'γ', 'operations', 'paper', 'speed-up', 'paper'), tuple(lines))


def expectation_table():
  """Table 4: Theorem 3.8 at the paper's α, γ and c beside the speed-ups that it measured (Table 2)."""
  c = paper()['table4_cost_coefficient_c']
  lines = []
  for row in paper()['table2_walltime_t5_xxl']:
    best = theory.best_gamma(row['alpha'], c[row['draft']])
    lines.append((
        row['task'], row['draft'], str(row['temperature']), str(row['gamma']), f'{row["alpha"]:.2f}',
        f'{c[row["draft"]]:.2f}', number(theory.speedup(row['alpha'], row['gamma'], c[row['draft']]), 1, '×'),
        f'{row["speed"]:.1f}×', str(best), number(theory.speedup(row['alpha'], best, c[row['draft']]), 1, '×')))
  return Table('Expected and measured by the paper, T5-XXL on TPU-v4 (its Tables 2 and 4)',
               ('task', 'draft', 'T', 'γ', 'α', 'c', 'expected', 'paper measured', 'best γ', 'expected there'),
               tuple(lines))


def benchmark_tables(rows):
  """Of `experiments.benchmark`: a `Table` for each thing that it measures."""
  rows = [row for row in rows if row.get('experiment') == 'benchmark']
  plain = [row for row in rows if row.get('task') == 'random']
  pairs = [row for row in rows if row.get('label') == 'widened' and row['task'] != 'compile']
  compiled = [row for row in rows if row.get('task') == 'compile']
  slots = [row for row in rows if row.get('task') == 'slots']
  finished = [row for row in rows if row.get('task') == 'finished']
  batches = [row for row in rows if row.get('task') == 'batch']
  found = []
  if plain:
    found.append(Table(
        'Plain decoding, batch 1, random weights', ('target', 'system', 'dtype', 'ms/token', '× ours', 'of bandwidth',
                                                    'first token, ms', 'compiling, s'),
        tuple((row['target'], row['system'], row['dtype'], number(row['ms_per_token'], 1), number(row['ratio']),
               number(row['share_of_bandwidth']), number(row['ms_to_first_token'], 0), number(row['compile_seconds'], 1))
              for row in plain),
        ('ms/token: decoding alone, without encoder and start-up. of bandwidth: the time in which the weights of a step can '
         'be read, in the same process, over ours: that of one matrix-vector product over as many bytes (on a GPU or TPU, '
         'of a copy of half as many). first token: encoder and all. compiling: tracing included.',)))
  if pairs:
    found.append(Table(
        'Speculative decoding, batch 1 [widened]',
        ('target', 'draft', 'system', 'T', 'γ', 'tokens/round', 'c', 'v', 'i.i.d.', 'decoding', 'of the rounds', 'speed-up',
         'ms/token', '× ours'),
        tuple((row['target'], draft_name(row), row['system'], f'{row["temperature"]:g}', number(row['gamma'], 0),
               number(row.get('tokens_per_round')), number(row.get('c'), 3), number(row.get('v')),
               number(row.get('speedup_expected_v')), number(row.get('speedup_decoding')), number(row.get('of_rounds')),
               number(row.get('speedup_measured')),
               number(row['ms_per_token'], 1), number(row.get('ratio'))) for row in pairs),
        ('The packaged models, embedded in larger shapes without changing what they compute; a draft named as the packaged '
         'one is not. i.i.d.: speed-up expected from α with v. decoding: measured, without the prefill. of the rounds: that over '
         '(tokens a round) / (γc + v). speed-up, ms/token: of whole texts. '
         '× ours: time a token over ours with the same draft.',)))
  if compiled:
    found.append(Table('Tracing and compiling the whole speculative program [widened]', ('target', 'draft', 'γ', 'seconds'), tuple(
        (row['target'], row['draft'], str(row['gamma']), number(row['compile_seconds'], 1)) for row in compiled)))
  if slots:
    found.append(Table('A step in caches of different sizes', ('target', 'slots', 'ms/token', 'of the first'), tuple(
        (row['target'], str(row['slots']), number(row['ms_per_token'], 1), number(row['ratio'])) for row in slots)))
  if finished:
    found.append(Table(f'A step with finished rows, batch {finished[0]["batch"]}', ('target', 'finished', 'ms/step', 'of the first'),
                       tuple((row['target'], str(row['finished']), number(row['ms_per_step'], 1), number(row['ratio']))
                             for row in finished)))
  if batches:
    found.append(Table(
        'Batch size, packaged models', ('batch', 'draft', 'γ', 'tokens/s', 'accepted/tested', 'tokens/round', 'speed-up'),
        tuple((str(row['batch']), draft_name(row), number(row['gamma'], 0), number(row['tokens_per_second'], 0),
               number(row.get('accepted_over_tested')), number(row.get('tokens_per_round')),
               number(row.get('speedup_measured'))) for row in batches)))
  return found


def tpu_tables(rows):
  """Of `experiments.tpu_compile`: memory, single steps, and the paper's Table 2 as a roofline has it."""
  rows = {kind: [row for row in rows if row.get('experiment') == 'tpu_compile' and row['kind'] == kind]
          for kind in ('memory', 'step', 'table 2', 'size')}

  def memory(row):
    fits = 'yes' if row['fits'] else f'no, {(row["needed"] - row["memory"]) / 2**30:.1f} GiB too much'
    if row.get('devices_needed'):
      fits += f': {row["devices_needed"]} such devices would hold the weights'
    return fits
  found = []
  if rows['memory']:
    found.append(Table(
        'Memory of one device [compiled, not run]',
        ('topology', 'target', 'draft', 'weights', 'caches and state', 'temporaries', 'needed', 'has', 'fits', 'compiling, s'),
        tuple((row['device'], row['target'], row['draft'],
               *(NOTHING if row.get(key) is None else f'{row[key] / 2**30:.2f}'
                 for key in ('weights', 'state', 'temporaries', 'needed', 'memory')), memory(row),
               number(row.get('compile_seconds'), 0)) for row in rows['memory']),
        ('GiB. temporaries: of prefill or loop, whichever needs more.',)))
  if rows['step']:
    found.append(Table(
        'Single steps on one device [predicted: a bound]',
        ('topology', 'step', 'GB read', 'GFLOP', 'ms', 'bound by', 'compiling, s'),
        tuple((row['device'], row['step'], number(row['bytes'] / 1e9, 3), number(row['flops'] / 1e9, 2),
               number(1e3 * row['seconds'], 3), row['bound'], number(row['compile_seconds'], 0)) for row in rows['step']),
        ('Weights and caches over the published bandwidth, operations over the published peak; nothing for launching them and '
         'for what devices exchange.',)))
  if rows['table 2']:
    found.append(Table(
        'Table 2 [predicted]', ('topology', 'task', 'draft', 'T', 'α', 'γ', 'c', 'v', 'speed-up', 'best γ', 'its speed-up',
                                "paper's c", 'implies', 'paper measured'),
        tuple((row['device'], row['task'], row['draft'], f'{row["temperature"]:g}', number(row['alpha']), str(row['gamma']),
               number(row['c'], 3), number(row['v']), number(row['speedup_expected_v']), str(row['best_gamma']),
               number(row['speedup_best']), number(row['paper_c']), number(row['speedup_paper_c'], 1),
               number(row['paper_speed'], 1)) for row in rows['table 2']),
        ("α and γ are the paper's. c and v: of the bounds above. best γ: of at most 7.",)))
  if rows['size']:
    found.append(Table(
        'A plain step by size of the model [predicted: a bound]',
        ('topology', 'model', 'chips', 'batch', 'length', 'ms/step', 'ms/token'),
        tuple((row['device'], row['target'], str(row['chips']), str(row['batch']), str(row['length']),
               number(1e3 * row['seconds'], 3), number(1e3 * row['seconds'] / row['batch'], 3)) for row in rows['size']),
        ('length: of the input and of the cache, both full.',)))
  return found
