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

# The paper's row of the same kind. Its targets are T5-XXL throughout.
PAPER_TASKS = {'ende': 'EnDe', 'summarize': 'CNNDM'}
PAPER_DRAFTS = {'unigram': 'unigram', 'bigram': 'bigram', 'small': 'T5-small', 'base': 'T5-base', 'large': 'T5-large'}

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

  def _is_number(self, column):
    return not any(c.isalpha() for row in self.rows for c in row[column])

  def to_text(self):
    """For the console: as wide as it needs to be, without colours."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(self.columns):
      table.add_column(rich.text.Text(column), justify='right' if self._is_number(i) else 'left')
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

    rule = ['---:' if self._is_number(i) else '---' for i in range(len(self.columns))]
    lines = [line(self.columns), line(rule), *map(line, self.rows), '', *(f'- {note}' for note in self.notes)]
    return '\n'.join(lines).rstrip() + '\n'


def paper():
  """The paper's numbers, and where they are from: see paper.json."""
  return json.loads(importlib.resources.files(__package__).joinpath('paper.json').read_text('utf-8'))


def paper_draft(draft):
  """The paper's draft of the same kind, such as 'T5-small' for 'small', or None."""
  return PAPER_DRAFTS.get(str(draft).lower().removeprefix('t5').strip(' -_'))


def paper_alpha(task, draft, temperature):
  """α of T5-XXL with the same kind of draft (Table 3), or None."""
  for row in paper()['table3_alpha']:
    if task in PAPER_TASKS and row['target'] == f'T5-XXL {PAPER_TASKS[task]}' and row['draft'] == paper_draft(draft):
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
NO_SCORES = {'experiment', 'label', 'task', 'draft', 'temperature', 'gamma', 'texts', 'at_limit', *SETTINGS}


def quality_table(rows):
  """Scores (whatever a row has besides NO_SCORES), the texts scored, the share that met the length limit."""
  rows = of_experiment(rows, 'quality')
  settings = varying(rows)
  scores = list(dict.fromkeys(key for row in rows for key in row if key not in NO_SCORES))
  lines = [(task_name(row), draft_name(row), *(setting(row, key) for key in settings),
            number(row.get('temperature'), 1).removesuffix('.0'), *(number(row.get(score)) for score in scores),
            str(row.get('texts', '–')), number(row.get('at_limit'), 3)) for row in rows]
  notes = _common_notes(rows) if rows else []
  return Table('Quality', ('task', 'draft', *settings, 'T', *scores, 'texts', 'at limit'), tuple(lines), tuple(notes))


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
