"""What TPUs would need and take for the paper's models: compiled here and predicted, not run.

  python -m experiments.tpu_compile [--gin.tpu_compile.topologies="('v5e:2x2',)"]

For every topology: prefill, the whole speculative loop and its single steps, compiled for that TPU by libtpu; bytes on each
device, whether they fit, and times by the roofline, hence c, v and the speed-up that Theorem 3.8 expects for each row of
the paper's Table 2, at the paper's α and γ. A roofline is a bound: where the paper measured c = 0.02, 0.04 and 0.11, bytes
alone give a third of that, so both are shown with what they imply. Writes results.jsonl, tpu_compile.md and tpu_compile.png.
"""
from concurrent import futures
import math
import multiprocessing
import os
import sys
import warnings

os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # before JAX: with libtpu installed it would look for a TPU

import gin
import jax
import numpy as np
from rich import console
from rich import progress

from experiments import command
from speculative import sharding
from speculative import theory
from speculative.decoding.config import DecodeConfig
from speculative.measure import aot
from speculative.models import t5
from speculative.report import figures
from speculative.report import results
from speculative.report import tables

GAMMA = 7  # the largest of the paper's


@gin.configurable
def tpu_compile(output_dir, dry_run=False, *, topologies=('v4:1x1x1', 'v5e:1x1', 'v5p:1x1x1', 'v6e:1x1', 'v4:2x2x1',
                                                         'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2'),
                target='xxl', drafts=('small', 'base', 'large'), input_len=128, max_decode_len=128, batch=1,
                sizes=('small', 'base', 'large', 'xl', 'xxl'), size_topology='v5p:2x2x1',
                processes=None):
  """Compiles, prints the tables, writes them.

  Args:
    topologies: as 'v4:2x2x1', generation and chips; the target is split over all of a topology's devices.
    target, drafts: keys of `t5.SHAPES`; bfloat16. Drafts of at most 1 GiB, and those that the devices do not divide, are copied to
      every device.
    input_len, max_decode_len, batch: static shapes.
    sizes: models whose plain step is compiled for one chip and the whole of `size_topology`, with several batch sizes and
      lengths; (): none.
    processes: that compile side by side; None: one a core.
  """
  for shape in (target, *drafts, *sizes):
    if shape not in t5.SHAPES:
      raise command.UsageError(f'tpu_compile: shape {shape!r}: there are {", ".join(t5.SHAPES)}')
  try:
    found = {name: aot.topology(name) for name in dict.fromkeys((*topologies, *([size_topology] if sizes else [])))}
  except RuntimeError as e:
    raise command.UsageError(str(e)) from e
  for name in topologies:  # before anything is compiled
    _models(found[name], target, drafts)
  if dry_run:
    return
  os.makedirs(output_dir, exist_ok=True)
  config = DecodeConfig(gamma=GAMMA, max_decode_len=max_decode_len)
  rows = []
  # A compilation keeps one core busy.
  with futures.ProcessPoolExecutor(processes or os.cpu_count(), multiprocessing.get_context('spawn')) as pool:
    parts = [pool.submit(_rows, topology_rows, name, target, drafts, config, input_len, batch) for name in topologies]
    parts += [pool.submit(_rows, size_rows, size_topology, size) for size in sizes]
    for part in progress.track(parts, 'compiling', console=console.Console(stderr=True), transient=True):
      rows += part.result()
      results.write_jsonl(os.path.join(output_dir, 'results.jsonl'), rows)
  made = tables.tpu_tables(rows)
  for table in made:
    print(table.to_text(), flush=True)
  figures.save(figures.tpu(rows), os.path.join(output_dir, 'tpu_compile.png'))
  text = [f'```\npython -m experiments.tpu_compile {" ".join(sys.argv[1:])}\n```\n',
          *(f'## {table.title}\n\n{table.to_markdown()}' for table in made), '![](tpu_compile.png)\n']
  results.replace_file(os.path.join(output_dir, 'tpu_compile.md'), lambda f: f.write('\n'.join(text).encode()))


def _rows(function, name, *arguments):
  """What a process of its own makes for the topology `name`."""
  warnings.filterwarnings('ignore', message='Some donated buffers were not usable')
  return list(function(aot.topology(name), *arguments))


def _row(topology, kind, target, draft, **values):
  return {'experiment': 'tpu_compile', 'label': 'predicted', 'kind': kind, 'task': None, 'target': f't5-{target}',
          'draft': draft and f't5-{draft}', 'temperature': None, 'gamma': None, 'device': topology.name, 'dtype': 'bfloat16',
          } | values


def topology_rows(topology, target, drafts, config, input_len, batch):
  """Memory of every pair, single steps, and the paper's Table 2."""
  models, chip = _models(topology, target, drafts), topology.chip
  (big, mesh), step, seconds, prefill = models[target], {}, {}, None
  for name in drafts:
    draft = models[name][0]
    weights = aot.device_bytes((big.params, draft.params))
    memory = dict(weights=weights, memory=chip.memory)
    if weights > chip.memory:
      yield _row(topology, 'memory', target, name, fits=False, needed=weights,
                 devices_needed=math.ceil(weights * len(topology.devices) / chip.memory), **memory)
      continue
    decoding = aot.Decoding(big, draft, mesh, config, input_len, batch)
    # Prefill is the target's, compiled once, and the draft's.
    prefill = prefill or aot.Decoding(big, None, mesh, config, input_len, batch).prefill()
    own = aot.Decoding(draft, None, models[name][1], config, input_len, batch).prefill()
    whole, state = decoding.loop(), aot.device_bytes(decoding.state)
    temporaries = max(whole.temporaries, prefill.temporaries, own.temporaries)
    needed = weights + state + temporaries
    yield _row(topology, 'memory', target, name, fits=needed <= chip.memory, needed=needed, state=state,
               temporaries=temporaries, compile_seconds=whole.compile_seconds + prefill.compile_seconds + own.compile_seconds,
               loop_copies=len(whole.loop_copies), host_transfers=whole.host_transfers, gamma=config.gamma, **memory)
    costs = {}
    if not step:  # the target's, whatever the draft
      step = {gamma: decoding.verification(gamma) for gamma in (0, config.gamma)}
      costs = {'plain step': step[0], f'verification of {config.gamma}': step[config.gamma]}
    costs[f'draft of t5-{name}'] = cost = decoding.draft()
    seconds[name] = cost.seconds(chip)
    for what, cost in costs.items():
      yield _row(topology, 'step', target, name if what.startswith('draft') else None, step=what, bytes=cost.bytes,
                 flops=cost.flops, seconds=cost.seconds(chip), bound='bytes' if cost.bytes / chip.bandwidth >=
                 cost.flops / chip.peak else 'operations', compile_seconds=cost.compile_seconds)
    jax.clear_caches()  # a GB each
  if not step:
    return
  plain, block = (step[gamma].seconds(chip) for gamma in (0, config.gamma))
  # What a token more costs: linear between the two that were compiled.
  v = np.interp(range(config.gamma + 1), (0, config.gamma), (1, block / plain))
  paper = tables.paper()
  for row in paper['table2_walltime_t5_xxl'] if target == 'xxl' else ():
    name = row['draft'].removeprefix('T5-')
    if name not in seconds:
      continue
    c, alpha, gamma = seconds[name] / plain, row['alpha'], row['gamma']
    best = int(theory.best_gamma(alpha, c, v, config.gamma))
    paper_c = paper['table4_cost_coefficient_c'][row['draft']]
    yield _row(topology, 'table 2', target, name, task=row['task'], temperature=row['temperature'], gamma=gamma, alpha=alpha,
               c=c, v=v[gamma], speedup_expected_v=float(theory.speedup(alpha, gamma, c, v[gamma])), best_gamma=best,
               speedup_best=float(theory.speedup(alpha, best, c, v[best])), paper_c=paper_c, paper_speed=row['speed'],
               speedup_paper_c=float(theory.speedup(alpha, gamma, paper_c)))


def size_rows(topology, size, batches=(1, 16, 128), lengths=(128, 2048)):
  """A plain step of one model: on one chip and on all, with larger batches and longer texts."""
  per_chip = len(topology.devices) // topology.chips
  for count in (per_chip, len(topology.devices)):
    mesh = sharding.make_mesh(None, list(topology.devices[:count]))
    try:
      model = aot.abstract_model(t5.T5Config(**t5.SHAPES[size]), mesh)
    except ValueError:  # heads that the devices do not divide
      continue
    if aot.device_bytes(model.params) > topology.chip.memory:
      continue
    for batch, length in [(batch, lengths[0]) for batch in batches] + [(batches[0], length) for length in lengths[1:]]:
      cost = aot.plain_step(model, mesh, length, batch)
      yield _row(topology, 'size', size, None, devices=count, chips=count // per_chip, batch=batch, length=length,
                 seconds=cost.seconds(topology.chip), bytes=cost.bytes, flops=cost.flops, compile_seconds=cost.compile_seconds)


def _models(topology, target, drafts):
  """({name: (abstract model, its mesh)} of the target and the drafts). UsageError where no mesh fits them."""
  devices = list(topology.devices)
  whole, copies = sharding.make_mesh(None, devices), sharding.make_mesh(1, devices)
  try:
    models = {target: (aot.abstract_model(t5.T5Config(**t5.SHAPES[target]), whole), whole)}
  except ValueError as e:
    raise command.UsageError(f'tpu_compile: {topology.name}: {e}') from e
  for name in drafts:
    config = t5.T5Config(**t5.SHAPES[name])
    models[name] = aot.abstract_model(config, copies), copies
    if aot.device_bytes(models[name][0].params) > 2**30:
      try:
        models[name] = aot.abstract_model(config, whole), whole
      except ValueError:  # 22 blocks of hidden units over 8 devices
        pass
  return models


if __name__ == '__main__':
  command.main(tpu_compile)
