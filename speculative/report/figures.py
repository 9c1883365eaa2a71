"""The paper's Figures 2–5, and what was measured beside what it printed or what its formulas expect.

Every function returns a Figure of its own, made without pyplot and its global state. Colours (Okabe and Ito's) can be
told apart by the colour-blind, and markers and lines in print without colours.
"""
import itertools

from matplotlib import ticker
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
import numpy as np

from speculative import theory
from speculative.report import results
from speculative.report import tables

COLORS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')
MARKERS = 'osD^vPX'
LINES = ('-', '--', '-.', ':', (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
GRAY = '#555555'
HOLLOW = {'linestyle': '', 'markersize': 6, 'markerfacecolor': 'white', 'markeredgewidth': 1.3}


def save(figure, path, dpi=150):
  """Writes a PNG under a temporary name, then renames it to `path`."""
  results.replace_file(path, lambda f: figure.savefig(f, format='png', dpi=dpi))


def _bar(i, measured=True):
  """Style of the bars of the i-th kind: light enough for what is drawn over them; hatched if not measured."""
  color = COLORS[i % len(COLORS)]
  strength = 0.6 if i % 2 == 0 else 0.3  # Also in print neighbours differ.
  fill = tuple(1 - strength * (1 - channel) for channel in to_rgb(color))
  return {'facecolor': fill if measured else 'white', 'edgecolor': color, 'hatch': None if measured else '///'}


def _hatch_handles(rows):
  """For the legend: which labels the hatched bars have."""
  labels = dict.fromkeys(row.get('label', 'no label') for row in rows if row.get('label') != 'measured')
  text = ', '.join(f'[{label}]' for label in labels)
  return [Patch(facecolor='white', edgecolor=GRAY, hatch='///', label=text)] if labels else []


def _styles():
  return ({'color': color, 'marker': marker, 'linestyle': line}
          for color, marker, line in itertools.cycle(zip(COLORS, MARKERS, LINES)))


def _plain(axes, grid='y'):
  """Leaves of the frame and the grid what helps to read values off."""
  axes.spines[['top', 'right']].set_visible(False)
  axes.spines[['left', 'bottom']].set_color(GRAY)
  axes.tick_params(color=GRAY)
  axes.grid(axis=grid, color='#DDDDDD', linewidth=0.8)
  axes.set_axisbelow(True)


def _axes(xlabel, ylabel, size=(6, 4)):
  figure = Figure(figsize=size, layout='constrained')
  axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel)
  _plain(axes)
  return figure, axes


def tokens_per_round(gammas=(1, 3, 5, 7, 10), rows=()):
  """Figure 2: E[tokens a round] against α, one line for each γ.

  Args:
    gammas: the lines' γ.
    rows: results; the measured wall-time rows with α and tokens_per_round at one of these γ appear as hollow points.
  """
  figure, axes = _axes('Acceptance rate α', 'Tokens a round')
  alphas = np.linspace(0, 1, 101)
  points = [row for row in tables.of_experiment(rows, 'walltime') if row.get('label') == 'measured'
            and row.get('alpha') is not None and row.get('tokens_per_round') is not None]
  for gamma, style in zip(gammas, _styles()):
    axes.plot(alphas, theory.expected_tokens(alphas, gamma), label=f'γ = {gamma}', markevery=10, markersize=4,
              clip_on=False, **style)
    mine = [row for row in points if row.get('gamma') == gamma]
    if mine:
      axes.plot([row['alpha'] for row in mine], [row['tokens_per_round'] for row in mine], label='_points',
                marker=style['marker'], markeredgecolor=style['color'], zorder=3, clip_on=False, **HOLLOW)
  handles, _ = axes.get_legend_handles_labels()
  if any(row.get('gamma') in gammas for row in points):
    handles.append(Line2D([], [], marker='o', markeredgecolor=GRAY, label='measured', **HOLLOW))
  axes.legend(handles=handles[::-1], frameon=False, loc='upper left')  # From top to bottom, as the lines lie.
  axes.set(xlim=(0, 1), ylim=(1, None))
  axes.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  return figure


def best_gamma(cs=(0.01, 0.02, 0.05, 0.1), max_alpha=0.95):
  """Figure 3: the best γ against α, one line for each c. α ends before 1, where the best γ grows without bound."""
  figure, axes = _axes('Acceptance rate α', 'Best γ (tokens a draft)')
  alphas = np.linspace(0, max_alpha, 951)
  for c, style in zip(cs, _styles()):
    axes.plot(alphas, theory.best_gamma(alphas, c, max_gamma=256), label=f'c = {c:g}', drawstyle='steps-mid',
              markevery=(25, 100), markersize=4, **style)
  axes.legend(frameon=False, loc='upper left')
  axes.set(xlim=(0, 1), ylim=(0, None))
  axes.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  return figure


def speedup_and_operations(alphas=(0.5, 0.6, 0.7, 0.8, 0.9), c=0.0, c_hat=0.0, max_gamma=10):
  """Figure 4: speed-up and growth of the operations against γ, a line for each α. The paper's has c = ĉ = 0."""
  figure = Figure(figsize=(9, 4), layout='constrained')
  left, right = figure.subplots(1, 2)
  gammas = np.arange(1, max_gamma + 1)
  for alpha, style in zip(alphas, _styles()):
    left.plot(gammas, theory.speedup(alpha, gammas, c), label=f'α = {alpha:g}', markersize=4, **style)
    right.plot(gammas, theory.operations_increase(alpha, gammas, c_hat), label=f'α = {alpha:g}', markersize=4, **style)
  for axes, title, ylabel, reverse in (
      (left, f'Speed-up, c = {c:g}', 'Times as fast as plain decoding', True),
      (right, f'Arithmetic operations, ĉ = {c_hat:g}', 'Times those of plain decoding', False)):
    _plain(axes)
    axes.set(xlabel='γ (tokens a draft)', ylabel=ylabel, ylim=(1, None))
    axes.set_title(title, fontsize='medium')
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter('{x:g}×')
    axes.legend(frameon=False, loc='upper left', reverse=reverse)
  return figure


def timeline(rounds, plain, steps):
  """Figure 5: the target's and the draft's calls for one text, one after the other, each as long as its step.

  Args:
    rounds: {γ: tokens that each round made, list of int}; a line each, in this order.
    plain: target calls of plain decoding, the last line.
    steps: `walltime.StepTimes` with a verification of each γ.
  """
  lines = [(f'γ = {gamma}', gamma, tokens, steps.verify[gamma]) for gamma, tokens in rounds.items()]
  lines.append(('plain', 0, [1] * plain, steps.target))
  ends = [1e3 * len(tokens) * (gamma * steps.draft + call) for _, gamma, tokens, call in lines]
  inches = 8.5 / max(*ends, 1e-9)  # of a millisecond, about
  figure = Figure(figsize=(10, 1.4 + 0.75 * len(lines)), layout='constrained')
  axes = figure.add_subplot(xlabel='Milliseconds')
  _plain(axes, grid='x')

  def bars(y, lefts, width, height, color, label, apart=True):
    gap = min(0.8, 0.15 * 72 * inches * width) if apart else 0  # In points; much narrower than the bar.
    axes.barh(np.full(np.size(lefts), y), width, height, np.ravel(lefts), color=color, edgecolor='white', linewidth=gap,
              snap=False, label=label)  # Snapped to pixels, narrow ones vanish.

  names = []
  for y, ((name, gamma, tokens, call), end) in enumerate(zip(lines, ends)):
    call, draft = 1e3 * call, 1e3 * steps.draft
    starts = np.arange(len(tokens)) * (gamma * draft + call)
    if gamma:
      bars(y, starts[:, None] + draft * np.arange(gamma), draft, 0.3, COLORS[4], 'draft call')
    bars(y, starts + gamma * draft, call, 0.6, COLORS[0], 'target call', apart=not gamma)
    if gamma and inches * (gamma * draft + call) > 0.15:
      for start, made in zip(starts, tokens):
        axes.text(start + gamma * draft + call / 2, y - 0.33, made, ha='center', va='bottom', fontsize='small',
                  bbox={'facecolor': 'white', 'edgecolor': 'none', 'pad': 0.5})
    names.append(f'{name}\n{len(tokens)} target calls\n{sum(tokens)} tokens, {end:.1f} ms')
  handles = dict(zip(*axes.get_legend_handles_labels()[::-1]))
  axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.6), xlim=(0, None))
  axes.tick_params(axis='y', length=0)
  numbers = '; numbers: tokens the round made' if axes.texts else ''
  axes.set_title(f'Calls for one text{numbers} (measured steps, encoder left out)', fontsize='medium', loc='left')
  figure.legend(handles=handles.values(), labels=handles.keys(), loc='outside upper right', ncols=2, frameon=False)
  return figure


def alpha_by_draft(rows):
  """α by task and draft: a bar for each temperature, ± one standard error; the paper's values as hollow diamonds.

  ValueError if there are no α rows.
  """
  groups = tables.group_alpha(rows)
  alpha_rows = [row for group in groups for row in group.values() if row.get('alpha') is not None]
  if not alpha_rows:
    raise ValueError("no rows with the experiment 'alpha'")
  settings = tables.varying(alpha_rows)
  temperatures = sorted({row['temperature'] for row in alpha_rows})
  tasks = list(dict.fromkeys(row.get('task') for row in alpha_rows))
  width = 0.8 / len(temperatures)
  sizes = [sum(next(iter(group.values())).get('task') == task for group in groups) for task in tasks]

  figure = Figure(figsize=(1.5 + 1.2 * max(sum(sizes), 4), 4), layout='constrained')
  all_axes = figure.subplots(1, len(tasks), sharey=True, squeeze=False, width_ratios=sizes)[0]
  paper = []
  for task, axes in zip(tasks, all_axes):
    names = []
    for x, group in enumerate(g for g in groups if next(iter(g.values())).get('task') == task):
      first = next(iter(group.values()))
      measured = first.get('label') == 'measured'
      names.append('\n'.join([tables.draft_name(first), *(tables.setting(first, key) for key in settings),
                              *([] if measured else [f'[{first.get("label", "no label")}]'])]))
      for i, t in enumerate(temperatures):
        row = group.get(t, {})
        if row.get('alpha') is None:
          continue
        center = x + (i - (len(temperatures) - 1) / 2) * width
        axes.bar(center, row['alpha'], 0.9 * width, yerr=row.get('alpha_se'), capsize=3, ecolor='black',
                 **_bar(i, measured))
        printed = tables.paper_alpha(task, first.get('draft'), t)
        if printed is not None:  # Beside the middle, where the error bar is.
          paper = axes.plot(center + 0.27 * width, printed, marker='D', markeredgecolor='black', zorder=3,
                            label='paper (T5-XXL)', **HOLLOW)
    _plain(axes)
    axes.set(xticks=range(len(names)), xticklabels=names, xlim=(-0.6, len(names) - 0.4), ylim=(0, 1), xlabel='Draft')
    axes.set_title(str(task), fontsize='medium')
    axes.tick_params(axis='x', length=0)
  all_axes[0].set_ylabel('Acceptance rate α')
  handles = [Patch(label=f'T = {t:g}', **_bar(i)) for i, t in enumerate(temperatures)]
  handles += _hatch_handles(alpha_rows) + paper
  figure.legend(handles=handles, loc='outside upper center', ncols=len(handles), frameon=False)
  return figure


def speedup_expected_and_measured(rows):
  """Measured speed-up of every wall-time row as a bar, what Theorem 3.8 expects, without and with v, as markers.

  Rows without a draft are left out: they are the 1. ValueError if no other ones are there.
  """
  rows = [tables.with_expected(row) for row in tables.of_experiment(rows, 'walltime') if row.get('draft') is not None]
  if not rows:
    raise ValueError("no rows with the experiment 'walltime' and a draft")
  settings = tables.varying(rows)
  names = [', '.join([tables.task_name(row), tables.draft_name(row), *(tables.setting(row, key) for key in settings),
                      f'T={row["temperature"]:g}', f'γ={row["gamma"]}']) for row in rows]
  figure, axes = _axes('Speed-up over plain decoding', None, size=(8, 1.3 + 0.3 * len(rows)))
  axes.grid(False)
  _plain(axes, grid='x')
  for y, row in enumerate(rows):
    if row.get('speedup_measured') is not None:
      axes.barh(y, row['speedup_measured'], 0.7, **_bar(0, row.get('label') == 'measured'))
  handles = [Patch(label='measured', **_bar(0)), *_hatch_handles(rows)]
  for key, label, marker, color in (('speedup_expected', 'expected (Theorem 3.8)', 'D', COLORS[1]),
                                    ('speedup_expected_v', 'expected with v', 'o', 'black')):
    points = [(row[key], y) for y, row in enumerate(rows) if row[key] is not None]
    if points:
      handles += axes.plot(*zip(*points), marker=marker, markeredgecolor=color, label=label, zorder=3, **HOLLOW)
  axes.axvline(1, color='black', linestyle='--', linewidth=1, zorder=2)
  axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6), xlim=(0, None))
  axes.xaxis.set_major_formatter('{x:g}×')
  axes.tick_params(axis='y', length=0)
  figure.legend(handles=handles, loc='outside upper center', ncols=2 if len(handles) > 3 else 3, frameon=False)
  return figure


def benchmark(rows):
  """Milliseconds a token of plain decoding by system and shape, and speed-up against batch size where there are such rows."""
  rows = [row for row in rows if row.get('experiment') == 'benchmark']
  plain = [row for row in rows if row.get('task') == 'random']
  batches = [row for row in rows if row.get('task') == 'batch' and row.get('speedup_measured') is not None]
  figure = Figure(figsize=(9 if plain and batches else 5, 3.6), layout='constrained')
  panels = iter(figure.subplots(1, bool(plain) + bool(batches), squeeze=False)[0])
  if plain:
    axes = next(panels)
    targets, systems = (list(dict.fromkeys(row[key] for row in plain)) for key in ('target', 'system'))
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
      these = {row['target']: row['ms_per_token'] for row in plain if row['system'] == system}
      axes.bar([targets.index(target) + (i - (len(systems) - 1) / 2) * width for target in these], these.values(), width,
               label=system, **_bar(i))
    axes.set(ylabel='ms a token, plain', xticks=range(len(targets)), xticklabels=targets)
    axes.legend(frameon=False)
    _plain(axes)
  if batches:
    axes = next(panels)
    axes.plot([row['batch'] for row in batches], [row['speedup_measured'] for row in batches], **next(_styles()))
    axes.axhline(1, color=GRAY, linestyle='--')
    axes.set(xlabel='batch size', ylabel='speed-up over plain decoding', xscale='log')
    axes.set_xticks([row['batch'] for row in batches], [str(row['batch']) for row in batches])
    axes.minorticks_off()
    _plain(axes)
  return figure


def tpu(rows):
  """Of `experiments.tpu_compile`: Table 2 predicted beside the paper's, and a step's time by size of the model."""
  rows = [row for row in rows if row.get('experiment') == 'tpu_compile']
  predicted, sizes = ([row for row in rows if row['kind'] == kind] for kind in ('table 2', 'size'))
  figure = Figure(figsize=(11 if predicted and sizes else 6, 4.2), layout='constrained')
  panels = iter(figure.subplots(1, max(1, bool(predicted) + bool(sizes)), squeeze=False)[0])
  if predicted:
    axes = next(panels)
    keys = list(dict.fromkeys((row['task'], row['draft'], row['temperature']) for row in predicted))
    at = {key: i for i, key in enumerate(keys)}
    for style, device in zip(_styles(), dict.fromkeys(row['device'] for row in predicted)):
      these = [row for row in predicted if row['device'] == device]
      axes.plot([at[row['task'], row['draft'], row['temperature']] for row in these],
                [row['speedup_expected_v'] for row in these], label=device, **style | {'linestyle': ''})
    axes.bar(range(len(keys)), [next(row['paper_speed'] for row in predicted if
                                     (row['task'], row['draft'], row['temperature']) == key) for key in keys], 0.7,
             label='paper, measured on v4', **_bar(0))
    axes.set_xticks(range(len(keys)), [f'{task} {draft} T={temperature:g}' for task, draft, temperature in keys], rotation=60,
                    ha='right')
    axes.set(ylabel='speed-up [predicted: a bound]')
    axes.legend(frameon=False, fontsize='small')
    _plain(axes)
  if sizes:
    axes = next(panels)
    groups = dict.fromkeys((row['chips'], row['batch'], row['length']) for row in sizes)
    names = list(dict.fromkeys(row['target'] for row in sizes))
    for style, (chips, batch, length) in zip(_styles(), groups):
      these = [row for row in sizes if (row['chips'], row['batch'], row['length']) == (chips, batch, length)]
      axes.plot([names.index(row['target']) for row in these], [1e3 * row['seconds'] / row['batch'] for row in these],
                label=f'{chips} chip{"s" * (chips > 1)}, batch {batch}, length {length}', **style)
    axes.set_xticks(range(len(names)), names)
    axes.set(yscale='log', ylabel=f'ms a token, plain, {sizes[0]["device"].split(":")[0]} [predicted: a bound]')
    axes.legend(frameon=False, fontsize='small')
    _plain(axes)
  return figure


def _name(row):
  return f'{tables.task_name(row)}, {tables.draft_name(row)}'


def _panels(n, width=5):
  figure = Figure(figsize=(width * n, 4), layout='constrained')
  axes = figure.subplots(1, n, squeeze=False)[0]
  for each in axes:
    _plain(each)
  return figure, axes


def _grouped(rows, *keys):
  """{values of keys: rows}, in the order in which they come."""
  found = {}
  for row in rows:
    found.setdefault(tuple(row.get(key) for key in keys), []).append(row)
  return found


def gammas(rows):
  """Speed-up against γ, a panel for each task and temperature: measured (lines) and by Theorem 3.8 with v (hollow)."""
  panels = _grouped(tables.of_experiment(rows, 'gamma'), 'task', 'temperature')
  figure, axes = _panels(len(panels), 4)
  for panel, ((task, temperature), these) in zip(axes, panels.items()):
    for style, ((draft,), group) in zip(_styles(), _grouped(these, 'draft').items()):
      group = sorted(group, key=lambda row: row['gamma'])
      x = [row['gamma'] for row in group]
      panel.plot(x, [row['speedup_measured'] for row in group], label=draft, **style)
      panel.plot(x, [row['speedup_expected_v'] for row in group], marker=style['marker'], markeredgecolor=style['color'],
                 **HOLLOW)
    panel.axhline(1, color=GRAY, linewidth=1)
    panel.set(xlabel='γ', ylabel='Speed-up', ylim=(0, None))
    panel.set_title(f'{task}, T = {temperature:g}', fontsize='medium')
    panel.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  handles, _ = axes[0].get_legend_handles_labels()
  handles.append(Line2D([], [], marker='o', markeredgecolor=GRAY, label='expected, v', **HOLLOW))
  figure.legend(handles=handles, loc='outside upper center', ncols=len(handles), frameon=False)
  return figure


def lenience(rows):
  """α and, where it was measured, speed-up against lenience, a line for each task and draft."""
  rows = tables.of_experiment(rows, 'lenience')
  timed = any(row.get('speedup_measured') is not None for row in rows)
  figure, axes = _panels(1 + timed)
  for style, group in zip(_styles(), _grouped(rows, 'task', 'draft', 'label').values()):
    group = sorted(group, key=lambda row: row['lenience'])
    for panel, key in zip(axes, ('alpha', 'speedup_measured')):
      points = [(row['lenience'], row[key]) for row in group if row.get(key) is not None]
      if points:
        panel.plot(*zip(*points), label=_name(group[0]), **style)
  for panel, label in zip(axes, ('Acceptance rate α', 'Speed-up, measured')):
    panel.set(xlabel='Lenience l (1: exact)', ylabel=label, xlim=(1.02, 0), ylim=(0, None))
    panel.legend(frameon=False, fontsize='small')
  return figure


def acceptance(rows):
  """Of `experiments.acceptance`: α against temperature, α against position, tokens a round measured and expected."""
  by = {name: tables.of_experiment(rows, name) for name in ('temperature', 'position', 'accepted')}
  by = {name: found for name, found in by.items() if found}
  figure, axes = _panels(len(by))
  for panel, (kind, these) in zip(axes, by.items()):
    if kind == 'accepted':
      names = [f'{_name(row)}, T={row["temperature"]:g}' for row in these]
      y = np.arange(len(these))
      panel.grid(False)
      _plain(panel, grid='x')
      panel.barh(y, [row['tokens_per_round'] for row in these], 0.7, label='measured', **_bar(0))
      for key, label, marker, color in (('tokens_per_round_iid', 'i.i.d. (Equation 1)', 'D', COLORS[1]),
                                        ('tokens_per_round_beta', 'β of each place', 'o', 'black')):
        panel.plot([row[key] for row in these], y, marker=marker, markeredgecolor=color, label=label, zorder=3, **HOLLOW)
      panel.set(yticks=y, yticklabels=names, ylim=(len(y) - 0.4, -0.6), xlabel='Tokens a round', xlim=(1, None))
    else:
      for style, group in zip(_styles(), _grouped(these, 'task', 'draft', 'label', *(
          ['temperature'] if kind == 'position' else [])).values()):
        x = [row['temperature'] if kind == 'temperature' else row['first'] + 1 for row in group]
        name = _name(group[0]) + (f', T={group[0]["temperature"]:g}' if kind == 'position' else '')
        panel.errorbar(x, [row['alpha'] for row in group], [row['alpha_se'] for row in group], label=name, markersize=4, **style)
      panel.set(xlabel='Temperature' if kind == 'temperature' else 'Position in the output', ylabel='Acceptance rate α',
                ylim=(0, 1))
      if kind == 'position':
        panel.set_xscale('log', base=2)
        panel.xaxis.set_major_formatter('{x:g}')
    panel.legend(frameon=False, fontsize='x-small')
  return figure
