"""Tests of speculative.report on made-up rows, and of experiments.theory."""
import json
import os
import re
import subprocess
import sys
import warnings
from unittest import mock

import numpy as np
import pytest

from experiments import command
from experiments import report as report_experiment
from experiments import theory as theory_experiment
from speculative import theory
from speculative.report import figures
from speculative.report import report
from speculative.report import results
from speculative.report import tables

COMMON = {'label': 'measured', 'task': 'ende', 'target': 'large', 'draft': 'small', 'temperature': 0.0, 'gamma': None,
          'device': 'cpu', 'dtype': 'float32', 'seed': 0}


def alpha_row(alpha, **kwargs):
  return {**COMMON, 'experiment': 'alpha', 'alpha': alpha, 'alpha_se': 0.004, **kwargs}


def walltime_row(alpha, gamma, measured, **kwargs):
  return {**COMMON, 'experiment': 'walltime', 'alpha': alpha, 'gamma': gamma, 'c': 0.05, 'v': 1.75,
          'tokens_per_round': float(theory.expected_tokens(alpha, gamma)), 'speedup_measured': measured,
          'ms_per_token': 3.21, **kwargs}


ROWS = [
    alpha_row(0.712, accepted_over_tested=0.707),
    alpha_row(0.601, temperature=1.0),
    alpha_row(0.783, draft='base'),
    alpha_row(0.214, draft='bigram', task='summarize'),
    alpha_row(0.3, draft='copying', task='summarize'),
    alpha_row(0.9, label='forced'),
    walltime_row(0.8, 5, 1.81),
    walltime_row(0.601, 3, 0.97, temperature=1.0, accepted_over_tested=0.59),
    walltime_row(0.601, 7, 0.91, temperature=1.0, accepted_over_tested=0.61),
    {**COMMON, 'experiment': 'walltime', 'draft': None, 'speedup_measured': 1.0, 'ms_per_token': 5.5},
    walltime_row(0.9, 5, 2.5, label='widened', draft='base'),
    {**COMMON, 'experiment': 'quality', 'draft': None, 'bleu': 31.25, 'chrf': 50.0, 'texts': 384, 'at_limit': 0.0104},
]


def cells(table, **where):
  """The lines of a table whose named cells are as given, as dicts."""
  lines = [dict(zip(table.columns, row)) for row in table.rows]
  return [line for line in lines if all(line[column] == value for column, value in where.items())]


# Tables.


def test_alpha_table():
  table = tables.alpha_table(ROWS)
  small, = cells(table, task='ende', draft='small')
  assert small['α, T=0'] == '0.712 ± 0.004' and small['α, T=1'] == '0.601 ± 0.004'
  assert small['accepted/tested, T=0'] == '0.707'
  assert small['accepted/tested, T=1'] == '0.600'  # From the decoding runs.
  assert (small['paper α, T=0'], small['paper α, T=1']) == ('0.75', '0.62')
  base, = cells(table, draft='base')
  assert (base['α, T=1'], base['paper α, T=0']) == ('–', '0.80')
  bigram, = cells(table, task='summarize', draft='bigram')
  assert bigram['paper α, T=0'] == '0.23'
  copying, = cells(table, draft='copying')
  assert copying['paper α, T=0'] == '–'  # The paper has no such draft.
  assert table.rows[-1][0] == 'ende [forced]'
  assert any(note.startswith('[forced]: ') for note in table.notes)
  assert 'target: large, device: cpu, dtype: float32, seed: 0' in table.notes


def test_walltime_table():
  table = tables.walltime_table(ROWS)
  row, = cells(table, task='ende', draft='small', T='0')
  assert (row['γ'], row['α'], row['c'], row['v']) == ('5', '0.800', '0.050', '1.75')
  assert (row['tokens/round'], row['ms/token']) == ('3.69', '3.21')
  assert (row['expected'], row['expected, v'], row['measured']) == ('2.95×', '1.84×', '1.81×')
  assert (row['paper'], row['paper γ'], row['paper α']) == ('3.4×', '7', '0.75')
  assert table.rows[0][1] == 'none' and cells(table, draft='none')[0]['γ'] == '–'
  assert [row['γ'] for row in cells(table, T='1')] == ['3', '7']
  widened, = cells(table, task='ende [widened]')
  assert widened['paper'] == '2.8×'
  assert table.rows[-1][0] == 'ende [widened]'


def test_given_expectations_are_kept():
  row = walltime_row(0.8, 5, 1.8, speedup_expected=9.0)
  assert tables.with_expected(row)['speedup_expected'] == 9.0
  assert tables.with_expected(row)['speedup_expected_v'] == pytest.approx(3.68928 / 2)
  assert tables.with_expected({**row, 'v': None})['speedup_expected_v'] is None


def test_settings_that_vary_become_columns():
  rows = [walltime_row(0.8, 5, 1.8), walltime_row(0.8, 5, 1.9, seed=1), walltime_row(0.8, 5, 2.9, lenience=0.3)]
  table = tables.walltime_table(rows)
  assert table.columns[2:4] == ('lenience', 'seed')
  assert [row[2:4] for row in table.rows] == [('1', '0'), ('1', '1'), ('0.3', '0')]


def test_a_label_is_needed_to_count_as_measured():
  row = alpha_row(0.5)
  del row['label']
  assert tables.alpha_table([row]).rows[0][0] == 'ende [no label]'


@pytest.mark.parametrize('draft,name', [
    ('unigram', 'unigram'), ('small', 'T5-small'), ('T5-small', 'T5-small'), ('t5_base', 'T5-base'), ('tiny', None),
    (None, None)])
def test_paper_draft(draft, name):
  assert tables.paper_draft(draft) == name


def test_quality_table():
  line, = cells(tables.quality_table(ROWS), task='ende')
  assert line['bleu'] == '31.25' and line['chrf'] == '50.00' and line['texts'] == '384' and line['at limit'] == '0.010'
  assert 'seed' not in line and 'gamma' not in line
  row = {**COMMON, 'experiment': 'quality', 'exact match': 12.5}
  assert cells(tables.quality_table([row]), task='ende')[0]['exact match'] == '12.50'


def test_text_and_markdown():
  table = tables.alpha_table(ROWS)
  text, lines = table.to_text(), table.to_markdown().splitlines()
  assert 'ende [forced]' in text and '0.712 ± 0.004' in text and table.title in text
  assert all(note in text for note in table.notes)
  assert lines[0].startswith('| task | draft | α, T=0 |')
  assert lines[1].startswith('| --- | --- | ---: |')
  assert {line.count('|') for line in lines[:2 + len(table.rows)]} == {len(table.columns) + 1}
  assert '- ' + table.notes[0] in lines
  assert r'| a\|b |' in tables.Table('', ('x',), (('a|b',),)).to_markdown()


def test_tables_without_rows():
  for make in (tables.alpha_table, tables.walltime_table, tables.quality_table):
    table = make([])
    assert table.rows == () and table.to_text() and table.to_markdown()


def test_paper_tables():
  for row in tables.operations_table().rows:
    assert row[2] == row[3] and row[4] == row[5]  # Ours rounds to what is printed.
  table = tables.expectation_table()
  assert len(table.rows) == 12
  assert cells(table, task='EnDe', draft='T5-small', T='0')[0]['expected'] == '3.2×'


# Figures.


def legend(axes_or_figure):
  found = axes_or_figure.get_legend() if hasattr(axes_or_figure, 'get_legend') else axes_or_figure.legends[0]
  return [text.get_text() for text in found.get_texts()]


def test_figure_2():
  figure = figures.tokens_per_round((1, 5))
  axes, = figure.axes
  assert legend(axes) == ['γ = 5', 'γ = 1'] and len(axes.lines) == 2
  x, y = axes.lines[1].get_data()
  assert y[np.searchsorted(x, 0.8)] == pytest.approx(3.689, abs=5e-4) and y[-1] == 6
  assert 'α' in axes.get_xlabel() and axes.get_ylabel()
  assert axes.lines[0].get_linestyle() != axes.lines[1].get_linestyle()
  assert axes.lines[0].get_marker() != axes.lines[1].get_marker()


def test_figure_2_with_measurements():
  axes, = figures.tokens_per_round((3, 5), ROWS).axes
  assert legend(axes) == ['measured', 'γ = 5', 'γ = 3'] and len(axes.lines) == 4
  points = {line.get_marker(): list(line.get_xdata()) for line in axes.lines if line.get_linestyle() == 'None'}
  assert points == {'o': [0.601], 's': [0.8]}  # The widened row is none of them.


def test_figure_3():
  axes, = figures.best_gamma((0.02, 0.1)).axes
  assert legend(axes) == ['c = 0.02', 'c = 0.1']
  x, y = axes.lines[0].get_data()
  assert y[np.searchsorted(x, 0.75)] == theory.best_gamma(0.75, 0.02)
  assert np.all(np.diff(y) >= 0) and x[-1] < 1


def test_figure_4():
  left, right = figures.speedup_and_operations((0.6, 0.9)).axes
  assert legend(left) == ['α = 0.9', 'α = 0.6'] and legend(right) == ['α = 0.6', 'α = 0.9']
  assert left.lines[1].get_ydata()[9] == pytest.approx(6.86, abs=0.005)
  assert right.lines[1].get_ydata()[9] == pytest.approx(1.60, abs=0.005)


def test_alpha_figure():
  figure = figures.alpha_by_draft(ROWS)
  ende, summarize = figure.axes
  assert (ende.get_title(), summarize.get_title()) == ('ende', 'summarize')
  assert [tick.get_text() for tick in ende.get_xticklabels()] == ['small', 'base', 'small\n[forced]']
  assert [bar.get_height() for bar in ende.patches] == [0.712, 0.601, 0.783, 0.9]
  assert [bool(bar.get_hatch()) for bar in ende.patches] == [False, False, False, True]
  diamonds = [line.get_ydata()[0] for line in ende.lines if line.get_marker() == 'D']
  assert diamonds == [0.75, 0.62, 0.80, 0.75]
  assert legend(figure) == ['T = 0', 'T = 1', '[forced]', 'paper (T5-XXL)']


def test_speedup_figure():
  figure = figures.speedup_expected_and_measured(ROWS)
  axes, = figure.axes
  names = [tick.get_text() for tick in axes.get_yticklabels()]
  assert names[0] == 'ende, small, T=0, γ=5' and names[-1] == 'ende [widened], base, T=0, γ=5' and len(names) == 4
  assert [bar.get_width() for bar in axes.patches] == [1.81, 0.97, 0.91, 2.5]
  assert legend(figure) == ['measured', '[widened]', 'expected (Theorem 3.8)', 'expected with v']
  assert axes.lines[0].get_xdata()[0] == pytest.approx(2.951, abs=5e-4)
  assert list(axes.lines[-1].get_xdata()) == [1, 1]


def test_figures_refuse_to_be_empty():
  for draw in (figures.alpha_by_draft, figures.speedup_expected_and_measured):
    with pytest.raises(ValueError):
      draw([])


def test_figures_leave_pyplot_alone():
  code = ('import sys; from speculative.report import figures; figures.tokens_per_round(); '
          'assert "matplotlib.pyplot" not in sys.modules')
  subprocess.run([sys.executable, '-c', code], check=True, cwd=os.path.dirname(os.path.dirname(__file__)))


def test_save(tmp_path):
  path = tmp_path / 'a.png'
  figures.save(figures.best_gamma((0.1,)), path, dpi=50)
  assert path.read_bytes().startswith(b'\x89PNG')
  old = path.read_bytes()
  figure = mock.Mock()
  figure.savefig.side_effect = lambda f, **_: f.write(b'half') and 1 / 0
  with pytest.raises(ZeroDivisionError):
    figures.save(figure, path)
  assert path.read_bytes() == old and os.listdir(tmp_path) == ['a.png']


# Results.


def test_jsonl_round_trip(tmp_path):
  path = tmp_path / 'results.jsonl'
  for row in ROWS:
    results.append_jsonl(path, row)
  assert results.read_jsonl(path) == ROWS
  results.append_jsonl(path, {'x': np.float32(0.5), 'n': np.int32(3), 'ok': np.bool_(True), 'text': 'ü\n'})
  assert results.read_jsonl(path)[-1] == {'x': 0.5, 'n': 3, 'ok': True, 'text': 'ü\n'}
  assert len(path.read_text().splitlines()) == len(ROWS) + 1
  results.write_jsonl(path, ROWS[:2])
  assert results.read_jsonl(path) == ROWS[:2]


@pytest.mark.parametrize('row,error', [
    ({'x': float('nan')}, ValueError), ({'x': [float('inf')]}, ValueError), ({'x': np.float32('nan')}, ValueError),
    ({'x': np.zeros(2)}, ValueError), ({'x': object()}, TypeError), ([1], TypeError)])
def test_jsonl_refuses(tmp_path, row, error):
  path = tmp_path / 'results.jsonl'
  results.append_jsonl(path, {'a': 1})
  with pytest.raises(error):
    results.append_jsonl(path, row)
  assert results.read_jsonl(path) == [{'a': 1}]


def test_jsonl_cut_anywhere(tmp_path):
  path = tmp_path / 'results.jsonl'
  results.write_jsonl(path, [{'a': 1}, {'b': 'ü'}])
  whole = path.read_bytes()
  first = len(b'{"a": 1}\n')
  for length in range(first + 1, len(whole) - 1):
    path.write_bytes(whole[:length])
    with pytest.warns(UserWarning, match='half-written'):
      assert results.read_jsonl(path) == [{'a': 1}]
    with pytest.warns(UserWarning, match='half-written'):
      results.append_jsonl(path, {'c': 2})
    assert results.read_jsonl(path) == [{'a': 1}, {'c': 2}]
  path.write_bytes(whole[:-1])  # Only the newline is missing.
  assert results.read_jsonl(path) == [{'a': 1}, {'b': 'ü'}]
  results.append_jsonl(path, {'c': 2})
  assert results.read_jsonl(path) == [{'a': 1}, {'b': 'ü'}, {'c': 2}]


@pytest.mark.parametrize('line', ['{"b": ', '[1]', '{"b": NaN}'])
def test_jsonl_names_a_bad_line(tmp_path, line):
  path = tmp_path / 'results.jsonl'
  path.write_text('{"a": 1}\n' + line + '\n{"c": 2}\n')
  with pytest.raises(ValueError, match='line 2'):
    results.read_jsonl(path)


def test_environment():
  environment = results.environment()
  assert set(environment) >= {'device', 'backend', 'platform', 'python', 'jax', 'jaxlib', 'flax', 'cpu', 'cores'}
  assert environment['cores'] >= 1 and re.match(r'3\.\d+', environment['python'])
  assert os.uname().nodename not in environment.values() and os.getcwd() not in json.dumps(environment)


# The report.

RUN = {'command': 'python -m experiments.x', 'config': 'a.b = 1', 'environment': {'device': 'cpu', 'jax': '1.2.3', 'none': None},
       'models': {'target': '5 parameters'}}
HEADER = {'experiment': 'run', 'label': 'measured', 'run': 'abc', **RUN}


def lenience_row(value, alpha, **kwargs):
  return alpha_row(alpha, experiment='lenience', lenience=value, temperature=1.0, **kwargs)


MORE = [
    {**COMMON, 'experiment': 'theory', 'label': 'predicted'},
    lenience_row(1.0, 0.6, gamma=3, speedup_measured=1.2, speedup_expected_v=1.25), lenience_row(0.1, 0.8),
    walltime_row(0.8, 1, 1.4, experiment='gamma', speedup_expected_v=1.5),
    walltime_row(0.8, 5, 1.3, experiment='gamma', speedup_expected_v=1.6),
    alpha_row(0.5, experiment='temperature', temperature=2.0), alpha_row(0.7, experiment='position', first=0, last=0),
    alpha_row(0.6, experiment='position', first=1, last=3),
    alpha_row(0.5, experiment='accepted', gamma=2, counts=[4, 4, 2], cut=3, tokens_per_round=1.8, tokens_per_round_iid=1.75,
              tokens_per_round_beta=1.79, by_position=[0.6, None]),
    {**COMMON, 'experiment': 'quality_of_both', 'bleu': 30.0, 'texts': 9, 'at_limit': 0.0, 'equal': 1.0},
    alpha_row(0.7, experiment='distill', divergence='forward_kl', alpha_before=0.65, alpha_before_se=0.01),
    {**COMMON, 'experiment': 'trace', 'gamma': 2, 'settings': {'target': 'large'}, 'totals': 'in all', 'by_position': [0.5, None],
     'decodes': [{'input': 'a <b>', 'output': 'c d', 'end': 'end of text', 'totals': '1 round',
                  'lines': [{'accepted': 1, 'before': '', 'spans': [['c', 'accepted'], [' x', 'rejected'], [' d', 'replaced']]}]}]},
]


def test_write_report(tmp_path):
  path = report.write_report([row | {'run': 'abc'} for row in ROWS + MORE], [HEADER], tmp_path / 'out', latex=True)
  with open(path) as f:
    text = f.read()
  for part in ('python -m experiments.x', 'jax: 1.2.3', 'seeds: 0', '0.712 ± 0.004', 'ende [widened]', '31.25', 'a.b = 1',
               '2 of 3 measured settings were slower', '5 parameters', 'arXiv 2211.17192', '1. c ~~x~~ **d**',
               '0.650 ± 0.010', '+0.050', '1.40 (1.50)', 'Lenience'):
    assert part in text, part
  images = re.findall(r'!\[[^\]]+\]\(([^)]+)\)', text)
  assert len(images) == len(set(images)) == 9
  for image in images:
    assert (tmp_path / 'out' / image).read_bytes().startswith(b'\x89PNG')
  written = [name for _, _, names in os.walk(tmp_path) for name in names]
  assert sorted(written) == sorted(['report.md', 'report.html', 'tables.tex'] + [os.path.basename(image) for image in images])
  assert str(tmp_path) not in text
  page = (tmp_path / 'out' / 'report.html').read_text()
  assert page.count('data:image/png;base64,') == 9 and 'a &lt;b&gt;' in page and '<b>α</b>' in page
  assert not re.search(r'(src|href)="(?!data:)', page) and '<script' not in page
  assert '0.712 ± 0.004' in page and '<span class="rejected"> x</span>' in page
  latex = (tmp_path / 'out' / 'tables.tex').read_text()
  assert latex.count(r'\begin{tabular}') == latex.count(r'\end{tabular}') == page.count('<thead>') - 1  # the trace is none
  assert r'$\alpha$' in latex and '0.712 $\\pm$ 0.004' in latex and r'1.81$\times$' in latex and 'α' not in latex


def test_report_survives_a_failing_one(tmp_path):
  path = report.write_report([], [HEADER], tmp_path)
  with mock.patch.object(report.figures, 'alpha_by_draft', side_effect=RuntimeError):
    with pytest.raises(RuntimeError):
      report.write_report(ROWS, [HEADER | {'command': 'second'}], tmp_path)
  with open(path) as f:
    text = f.read()
  assert 'experiments.x' in text and 'second' not in text and 'no α rows' in text and 'no wall-time rows' in text


def test_latex_escapes():
  table = tables.Table('50 % of a_b', ('x & y',), (('#1 \\ ^',),)).to_latex()
  assert r'\caption{50 \% of a\_b}' in table and r'x \& y \\' in table and r'\#1 \textbackslash{} \textasciicircum{}' in table


def test_lenience_table():
  assert tables.lenience_table(MORE).rows == (
      ('ende', 'small', '1', '1', '0.600 ± 0.004', '0.62', '3', '1.25×', '1.20×', '2.5×'),
      ('ende', 'small', '1', '0.1', '0.800 ± 0.004', '0.84', '–', '–', '–', '5.0×'))


def test_gamma_table():
  line, = cells(tables.gamma_table(MORE))
  assert (line['γ=1'], line['γ=5'], line['best γ, theory'], line['best γ, measured']) == ('1.40 (1.50)', '1.30 (1.60)', '5', '1')
  assert (line['measured at the former'], line['at the latter']) == ('1.30×', '1.40×')


def test_acceptance_tables():
  temperature, position, accepted = tables.acceptance_tables(MORE)
  assert cells(temperature)[0]['T=2'] == '0.500'
  assert (cells(position)[0]['1'], cells(position)[0]['2–4']) == ('0.700', '0.600')
  line, = cells(accepted)
  assert [line[f'n={n}'] for n in range(3)] == ['0.40 (0.50)', '0.40 (0.25)', '0.20 (0.25)']


def test_every_row_of_the_paper_is_accounted_for():
  """Tables 2 to 5 have 13, 2 × 16, 3 and 16 rows; each is measured or says why not, and names a run that exists."""
  table = tables.coverage_table(ROWS + MORE)
  count = {number: sum(row[0] == number for row in table.rows) for number in '2345'}
  assert count == {'2': 13, '3': 32, '4': 3, '5': 16}
  found = {row[1]: row[3] for row in table.rows if row[0] == '3'}
  assert found['T5-XXL EnDe, T5-small, T = 0'] == '0.712 [measured; target large]'
  assert found['LaMDA 137B, LaMDA 8B, T = 0'].startswith('not public')
  assert found['T5-XXL CNNDM, T5-large, T = 1'].startswith('no packaged draft')
  runs = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'configs', 'runs')
  assert all(row[4] == 'none' or os.path.exists(os.path.join(runs, row[4])) for row in table.rows)
  assert {row[1].split(',')[0] for row in table.rows if row[4] == 'none'} == {'LaMDA 137B'}


# Runs of several parts.


def test_an_interrupted_run_goes_on(tmp_path):
  path = tmp_path / 'results.jsonl'
  store = results.Store(path, RUN)
  assert [row['alpha'] for row in store.part('one', lambda: [alpha_row(0.5)])] == [0.5]
  whole = path.read_bytes()
  store.part('two', lambda: [alpha_row(0.6), alpha_row(0.7)])
  both = path.read_bytes()
  for length in range(len(whole), len(both)):  # killed anywhere in the second part
    path.write_bytes(both[:length])
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # of half-written lines
      again = results.Store(path, RUN)
    assert again.part('one', lambda: pytest.fail('measured again'))[0]['alpha'] == 0.5
    made = []
    again.part('two', lambda: made.append(1) or [alpha_row(0.6), alpha_row(0.7)])
    # Only the last newline is missing: the part is whole.
    assert len(made) == (length < len(both) - 1)
    assert path.read_bytes() == both and [row['alpha'] for row in again.rows] == [0.5, 0.6, 0.7]


def test_a_failing_part_leaves_nothing(tmp_path):
  store = results.Store(tmp_path / 'results.jsonl', RUN)
  before = (tmp_path / 'results.jsonl').read_bytes()
  with pytest.raises(ZeroDivisionError):
    store.part('one', lambda: 1 / 0)
  with pytest.raises(ValueError):
    store.part('one', lambda: [alpha_row(0.5), alpha_row(float('nan'))])
  assert (tmp_path / 'results.jsonl').read_bytes() == before


@pytest.mark.parametrize('change', [{'config': 'a.b = 2'}, {'models': {'target': '6 parameters'}}])
def test_another_run_is_not_mixed_in(tmp_path, change):
  path = tmp_path / 'results.jsonl'
  results.Store(path, RUN).part('one', lambda: [alpha_row(0.5)])
  before = path.read_bytes()
  with pytest.raises(ValueError, match='another configuration'):
    results.Store(path, RUN | change)
  results.Store(path, RUN | {'command': 'other words', 'environment': {}})
  assert path.read_bytes() == before


def test_merge(tmp_path):
  paths = [tmp_path / name for name in ('a.jsonl', 'b.jsonl')]
  for i, path in enumerate(paths):
    results.Store(path, RUN | {'config': str(i)}).part('one', lambda i=i: [alpha_row(0.5 + i / 10)])
  rows, headers = results.merge([*paths, paths[0]])
  assert [row['alpha'] for row in rows] == [0.5, 0.6] and [header['config'] for header in headers] == ['0', '1']
  report_experiment.report(str(tmp_path / 'out'), paths=[str(path) for path in paths])
  text = (tmp_path / 'out' / 'report.md').read_text()
  assert all(f'Run {header["run"]}' in text for header in headers)
  paths[1].unlink()
  results.Store(paths[1], RUN | {'models': {'target': '6 parameters'}})
  with pytest.raises(ValueError, match='target: two different models under one name'):
    results.merge(paths)


@pytest.mark.parametrize('paths,message', [([], 'arguments'), (['nowhere.jsonl'], 'nowhere.jsonl: no such file')])
def test_report_experiment_refuses(tmp_path, paths, message):
  with pytest.raises(command.UsageError, match=message):
    report_experiment.report(str(tmp_path / 'out'), paths=paths)
  assert not (tmp_path / 'out').exists()


# The experiment.


def test_theory_experiment(tmp_path, capsys):
  theory_experiment.theory(str(tmp_path / 'out'), dry_run=True)
  assert not (tmp_path / 'out').exists()
  theory_experiment.theory(str(tmp_path / 'out'))
  assert '6.86×' in capsys.readouterr().out
  rows = results.read_jsonl(tmp_path / 'out' / 'results.jsonl')
  assert len(rows) == 6 and all(row['label'] == 'predicted' for row in rows)
  assert all(round(row['speedup_expected'], 2) == row['paper_speedup'] for row in rows)
  assert sorted(os.listdir(tmp_path / 'out' / 'figures')) == ['figure_2.png', 'figure_3.png', 'figure_4.png']
  with pytest.raises(command.UsageError, match='alpha'):
    theory_experiment.theory(str(tmp_path / 'out'), dry_run=True, alphas=(2,))
