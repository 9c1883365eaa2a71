"""The main job: the paper's tables and figures for the packaged models, or for your own, in one report.

  python -m experiments.reproduce [--gin_file=configs/runs/report.gin] [--output_dir=results/reproduce]

Writes report.html (one file), report.md, figures and results.jsonl. An interrupted run goes on where it stopped: the parts
that results.jsonl has whole are not measured again, as long as configuration and models are the same.
"""
import dataclasses
import functools
import os
import sys

import gin
import jax
import numpy as np

from experiments import acceptance
from experiments import alpha
from experiments import benchmark
from experiments import command
from experiments import lenience
from experiments import theory
from experiments import walltime
from experiments import zoo as zoos
from speculative import text as decoding
from speculative.data import packaged
from speculative.decoding.config import DecodeConfig
from speculative.measure import trace
from speculative.report import html
from speculative.report import report
from speculative.report import results
from speculative.report import tables

# What `reproduce.parts` may name.
PARTS = {
    'table 1': 'operations and speed by the formulas, with Figures 2–4',
    'table 2': 'wall time',
    'table 3': 'α and quality',
    'table 4': 'expected and measured speed-up at every γ',
    'table 5': 'lenience',
    'acceptance': 'α against position and temperature, accepted lengths against the i.i.d. assumption',
    'quality': 'scores of plain and speculative outputs side by side',
    'figure 1': 'a coloured trace',
    'distillation': "α of the packaged drafts before and after distillation, as their training measured it",
    'widened': 'wall time of the packaged models in the shapes of `reproduce.widened`',
}


@gin.configurable
def reproduce(output_dir, dry_run=False, *, parts=('table 1', 'table 2', 'table 3', 'figure 1'), families=('t5',),
              trace_text=None, trace_gamma=7, widened=('large',), widened_prompts=4, latex=False):
  """Measures, prints the tables, writes the report.

  Args:
    parts: of PARTS. Each task's α is measured once, also where only other parts need it.
    families: of the packaged models, where zoo.target is not given.
    trace_text: for Figure 1; None: the first text of the first task.
    trace_gamma: its γ.
    widened: target shapes of the part 'widened', its drafts in T5-small's shape and as they are; float32.
    widened_prompts: texts that it decodes.
    latex: write tables.tex too.
  """
  unknown = [part for part in parts if part not in PARTS]
  if unknown:
    raise command.UsageError(f'reproduce.parts: there is no {unknown[0]!r}; there are {", ".join(PARTS)}')
  own = gin.query_parameter('zoo.target') if _bound('zoo.target') else None
  for family in families:
    if family not in packaged.FAMILIES:
      raise command.UsageError(f'reproduce.families: there is no {family!r}; there are {", ".join(packaged.FAMILIES)}')
  zoos_ = [zoos.zoo(dry_run=dry_run)] if own else [zoos.zoo(dry_run=dry_run, family=family) for family in families]
  if dry_run:
    return
  os.makedirs(output_dir, exist_ok=True)
  store = results.Store(os.path.join(output_dir, 'results.jsonl'), {
      'command': ' '.join(['python -m experiments.reproduce', *sys.argv[1:]]), 'config': gin.config_str(),
      'environment': results.environment(), 'models': _fingerprints(zoos_)})
  if 'table 1' in parts:
    store.part('table 1', theory.compare_table_1)
  for loaded in zoos_:
    for task in loaded.texts:
      _measure(store, dataclasses.replace(loaded, texts={task: loaded.texts[task]}), task, parts)
    if 'figure 1' in parts:
      store.part(f'figure 1 {loaded.target.name}', functools.partial(_trace, loaded, trace_text, trace_gamma))
  if 'widened' in parts:
    for shape in widened:
      store.part(f'widened {shape}', functools.partial(_widened, shape, widened_prompts))
  if 'distillation' in parts and not own:
    store.part('distillation', _distillation)
  for table in tables.alpha_table(store.rows), tables.walltime_table(store.rows), tables.quality_table(store.rows):
    if table.rows:
      print(table.to_text(), flush=True)
  print('Report:', report.write_report(*results.merge([store.path]), output_dir, latex))


def _measure(store, loaded, task, parts):
  """All parts for a zoo of one task."""
  def part(name, function, *arguments):
    name = f'{name} {task}'
    print(f'{name}: {loaded.target.name} against {", ".join(loaded.drafters(task))}', flush=True)
    return store.part(name, functools.partial(function, loaded, *arguments))

  needs_alpha = {'table 2', 'table 3', 'table 4', 'acceptance'}
  if needs_alpha & set(parts):
    alphas = part('table 3', alpha.measure_alphas)
  if 'table 2' in parts:
    part('table 2', walltime.measure_walltimes, alphas)
  if 'table 4' in parts:
    part('table 4', walltime.measure_gammas, alphas)
  if 'table 5' in parts:
    part('table 5', lenience.measure_lenience)
  if 'acceptance' in parts:
    part('acceptance', acceptance.measure_acceptance)
  if 'quality' in parts and task != packaged.GPT_TASK:  # continuations have no score
    part('quality', alpha.measure_quality)


def _bound(name):
  try:
    gin.query_parameter(name)
  except ValueError:
    return False
  return True


def _fingerprints(zoos_):
  """{name: what tells two models of one name apart}: sizes, and sums over all parameters."""
  found = {}
  for loaded in zoos_:
    for name, model in {loaded.target.name or 'target': loaded.target, **loaded.drafts}.items():
      leaves = jax.tree.leaves(model.params)
      total = sum(float(np.sum(np.abs(np.asarray(leaf, np.float32)), dtype=np.float64)) for leaf in leaves)
      found[name] = f'{sum(leaf.size for leaf in leaves)} parameters, {leaves[0].dtype}, sum of magnitudes {total:.6g}'
  return found


def _trace(loaded, text, gamma):
  """Figure 1: a row that holds the rounds."""
  text = text or next(iter(loaded.texts.values()))[0][0]
  inputs = decoding.encode(loaded.target, [text])
  config = DecodeConfig(gamma=gamma, max_decode_len=128)
  name, draft = list(loaded.drafts.items())[-1]
  result, rows = trace.record(loaded.target, draft, inputs, config)
  described = html.describe_trace([text], rows, result, loaded.vocabulary, gamma, {'target': loaded.target.name, 'draft': name})
  return [zoos.row('trace', None, loaded, name, 0.0) | described]


def _widened(shape, prompts):
  dtype = np.dtype('float32')
  return benchmark.widened_walltimes(shape, benchmark.widened_zoo(shape, ('small',), dtype), (0.0, 1.0), dtype,
                                     prompts=prompts, passes=3)


def _distillation():
  return results.read_jsonl(os.path.join(packaged.FOLDER, 'distillation.jsonl'))


if __name__ == '__main__':
  command.main(reproduce)
