"""Speed at T5's shapes, side by side in one run: plain decoding beside other libraries', speculative beside plain.

  python -m experiments.benchmark [--gin.benchmark.shapes="('base','large')"] [--gin.benchmark.pairs="('large',)"]

Plain decoding has random weights. Speculative decoding has the packaged models, embedded in larger shapes without changing
what they compute (`speculative.training.grow`; labelled `widened`): the tokens, and so what is accepted, are the packaged
models', the cost is the large shape's. Other libraries run where they are installed (`experiments/peers.py`). Writes
results.jsonl, benchmark.md and benchmark.png.
"""
import dataclasses
import functools
import importlib.util
import os
import statistics
import sys
import tempfile
import time

from flax import traverse_util
import gin
import jax
import jax.numpy as jnp
import numpy as np

from experiments import alpha as alphas
from experiments import command
from experiments import peers
from experiments import walltime
import speculative
from speculative import text as decoding
from speculative.checkpoints import huggingface
from speculative.measure import walltime as measure
from speculative.models import t5
from speculative.report import figures
from speculative.report import results
from speculative.report import tables
from speculative.training import grow

DRAFT_SHAPE, DRAFT = 'small', 'base'  # the packaged draft that is embedded in T5-small's shape


@gin.configurable
def benchmark(output_dir, dry_run=False, *, shapes=('base', 'large'), pairs=('large',), others=tuple(peers.PLAIN),
              assisted=(3, 5), batches=(1, 2, 4, 8, 16, 32), slots=(128, 4096), dtype='float32', input_len=64, length=32,
              passes=5, prompts=6, seed=0):
  """Measures, prints the tables, writes the report.

  Args:
    shapes: keys of `t5.SHAPES` for plain decoding.
    pairs: shapes of the target for speculative decoding, with drafts of T5-small's shape.
    others: libraries to run beside (`peers.PLAIN`); what is not installed is left out, and said.
    assisted: draft tokens of Transformers' assisted generation beside each pair; (): do not run it.
    batches: batch sizes for the packaged models; (): none.
    slots: cache sizes at which a step is timed; (): none.
    dtype: of the parameters, 'float32' or 'bfloat16'; the other libraries run in float32.
    input_len, length: tokens of the input and of what is decoded, for plain decoding.
    passes: timed passes, in turn; medians are reported.
    prompts: texts for speculative decoding.
  """
  for shape in (*shapes, *pairs):
    if shape not in t5.SHAPES:
      raise command.UsageError(f'benchmark: shape {shape!r}: there are {", ".join(t5.SHAPES)}')
  unknown = set(others) - set(peers.PLAIN)
  if unknown:
    raise command.UsageError(f'benchmark.others: {", ".join(sorted(unknown))}: there are {", ".join(peers.PLAIN)}')
  dtype = huggingface.resolve_dtype(dtype)
  for shape in (*shapes, *pairs):
    _check_memory(shape, dtype)
  if dry_run:
    return
  os.makedirs(output_dir, exist_ok=True)
  rows = []
  for shape in shapes:
    rows += plain_rows(shape, dtype, others, input_len, length, passes, seed)
  for shape in pairs:
    rows += pair_rows(shape, dtype, assisted, prompts, passes, seed)
  if slots:
    rows += slot_rows(dtype, slots, passes)
  if batches:
    rows += batch_rows(batches, passes, seed)
  results.write_jsonl(os.path.join(output_dir, 'results.jsonl'), rows)
  found = tables.benchmark_tables(rows)
  for table in found:
    print(table.to_text(), flush=True)
  has_figure = bool(shapes or batches)
  if has_figure:
    figures.save(figures.benchmark(rows), os.path.join(output_dir, 'benchmark.png'))
  parts = [f'```\npython -m experiments.benchmark {" ".join(sys.argv[1:])}\n```\n',
           ''.join(f'- {key}: {value}\n' for key, value in results.environment().items() if value is not None),
           *(f'## {table.title}\n\n{table.to_markdown()}' for table in found), '![](benchmark.png)\n' * has_figure]
  results.replace_file(os.path.join(output_dir, 'benchmark.md'), lambda f: f.write('\n'.join(parts).encode()))


def _check_memory(shape, dtype):
  """Raises UsageError before anything is allocated, if the machine is too small for a shape."""
  config = t5.T5Config(**t5.SHAPES[shape])
  need = dtype.itemsize * sum(int(np.prod(s)) for s in huggingface.shapes_of(t5.init_params, config).values())
  stats = jax.local_devices()[0].memory_stats() or {}
  have = stats.get('bytes_limit') or os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  if 1.5 * need > have:  # the reference product reads as many bytes again
    raise command.UsageError(f'benchmark: the weights of T5-{shape} in {dtype} take {need / 1e9:.1f} GB, and the '
                             f'measurement half as much besides; the device has {have / 1e9:.1f} GB')


def _row(label, target, draft, dtype, **values):
  return {'experiment': 'benchmark', 'label': label, 'target': target, 'draft': draft,
          'device': jax.devices()[0].device_kind, 'dtype': str(dtype)} | values


def step_bytes(params):
  """Bytes of the weights that a step of plain decoding reads: the decoder's and the head's."""
  leaves = traverse_util.flatten_dict({name: params[name] for name in ('decoder', 'head')})
  # Keys and values of the encoder's output are made once an input.
  return sum(leaf.nbytes for path, leaf in leaves.items() if path[-2:] != ('cross', 'kv'))


def plain_rows(shape, dtype, others, input_len, length, passes, seed):
  """Plain decoding at batch 1: ours, the others', and one matrix-vector product over as many bytes."""
  config = t5.T5Config(**t5.SHAPES[shape], eos_id=-1)
  inputs = np.random.default_rng(seed).integers(3, config.vocab_size - 128, (1, input_len)).astype(np.int32)
  model = _random_model(config, dtype, seed)

  def make(n):
    return lambda: speculative.autoregressive_decode(model, inputs, speculative.DecodeConfig(max_decode_len=n))

  start = time.perf_counter()
  make(1)()
  first = time.perf_counter() - start
  makers = {'speculative': make}
  for name in others:
    try:
      with gin.unlock_config():  # T5X registers configurables when it is imported
        makers[name] = peers.PLAIN[name](config, inputs)
    except ImportError as e:
      print(f'{name} is not installed and left out ({e})', flush=True)
  weights = step_bytes(model.params)
  runs = {(name, n): made(n) for name, made in makers.items() for n in (1, 1 + length)}
  runs['product'] = _product(weights, config.d_model, dtype)
  seconds = _seconds(runs, passes)
  step = {name: [(b - a) / length for a, b in zip(seconds[name, 1], seconds[name, 1 + length])] for name in makers}
  reference = statistics.median(seconds['product'])
  ours = statistics.median(step['speculative'])
  return [_row('measured', f't5-{shape}', None, dtype if name == 'speculative' else 'float32', system=name, weights='random',
               task='random', temperature=0.0, gamma=None, ms_per_token=1e3 * statistics.median(times),
               ratio=statistics.median(times) / ours, step_bytes=weights,
               share_of_product=reference / statistics.median(times),
               ms_to_first_token=1e3 * statistics.median(seconds[name, 1]),
               compile_seconds=first if name == 'speculative' else None, seed=seed) for name, times in step.items()]


def _product(size, width, dtype):
  """One matrix-vector product that reads `size` bytes."""
  columns = size // dtype.itemsize // width
  weight = jax.random.normal(jax.random.key(0), (width, columns), jnp.float32).astype(dtype)
  x = jnp.ones((1, width), dtype)
  product = jax.jit(lambda x, w: jnp.dot(x, w, precision=jax.lax.Precision.HIGHEST))
  return lambda: product(x, weight).block_until_ready()


def _seconds(runs, passes):
  """{name: list of seconds} of `in_turn`."""
  return {name: [seconds for seconds, _ in timed] for name, timed in measure.in_turn(runs, passes).items()}


def _random_model(config, dtype, seed):
  params = t5.init_params(config, jax.random.key(seed))
  return speculative.Model(config, jax.tree.map(lambda a: a.astype(dtype), params))


def widened(model, shape, dtype):
  """The model in a larger shape, computing the same; what is new and guarded is random."""
  sizes = t5.SHAPES[shape]
  if any(getattr(model.config, name) > size for name, size in sizes.items()):
    raise command.UsageError(f'benchmark: {model.name} does not fit into T5-{shape}')
  config = dataclasses.replace(model.config, **sizes)
  return speculative.Model(config, grow.grow(model.params, model.config, config, jax.random.key(0), dtype),
                           model.vocabulary, name=f'{model.name} widened to t5-{shape}')


def pair_rows(shape, dtype, assisted, prompts, passes, seed):
  """Plain and speculative decoding of texts with a target of T5's shape, and Transformers' assisted generation of them."""
  narrow = speculative.load_pretrained('float32')
  draft, wide_draft = narrow.drafts[DRAFT], f't5-{DRAFT_SHAPE}'
  narrow = dataclasses.replace(narrow, texts={'ende': narrow.texts['ende']}, counts={}, drafts={DRAFT: draft})
  found = alphas.measure_alphas(narrow, tokens=2000)
  found += [row | {'draft': wide_draft} for row in found if row['draft'] == DRAFT]  # which computes the same
  wide = dataclasses.replace(narrow, target=widened(narrow.target, shape, dtype), drafts={
      wide_draft: widened(draft, DRAFT_SHAPE, dtype), DRAFT: draft})
  rows = []
  for row in walltime.measure_walltimes(wide, found, prompts=prompts, passes=passes, gammas=(1, 3, 7), max_gamma=8,
                                         loop_steps=6):
    row |= {'experiment': 'benchmark', 'label': 'widened', 'target': f't5-{shape}', 'system': 'speculative'}
    if row['draft']:
      row['of_rounds'] = row['speedup_measured'] * (row['gamma'] * row['c'] + row['v']) / row['tokens_per_round']
    rows.append(row)
  missing = [name for name in ('torch', 'transformers') if not importlib.util.find_spec(name)]
  if assisted and missing:
    print(f'assisted generation is left out: {" and ".join(missing)} not installed', flush=True)
  elif assisted:
    rows += _assisted_rows(wide, shape, rows, assisted, prompts, passes, seed)
  return rows


def _assisted_rows(wide, shape, ours, draft_tokens, prompts, passes, seed):
  """Transformers on the same two models and texts."""
  inputs = [batch[batch != wide.vocabulary.pad_id] for batch in walltime.pick(wide, 'ende', 64, prompts)]
  draft = f't5-{DRAFT_SHAPE}'
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    paths = {name: os.path.join(folder, name) for name in ('target', 'draft')}
    speculative.save_model(wide.target, paths['target'], dtype='float32')
    speculative.save_model(wide.drafts[draft], paths['draft'], dtype='float32')
    run = peers.assisted(paths['target'], paths['draft'], inputs, 128)
    for temperature in (0.0, 1.0):
      times = measure.time_side_by_side(
          {n: functools.partial(run, temperature, n) for n in (None, *draft_tokens)}, passes)
      reference = {row['draft']: row['ms_per_token'] for row in ours if row['temperature'] == temperature}
      for n, (seconds, tokens) in times.items():
        rows.append(_row('widened', f't5-{shape}', draft if n else None, 'float32', system='transformers', task='ende',
                         temperature=temperature, gamma=n, ms_per_token=1e3 * seconds, tokens=tokens,
                         ratio=1e3 * seconds / reference[draft if n else None], seed=seed))
  return rows


def slot_rows(dtype, slots, passes):
  """A step of plain decoding in caches of different sizes, equally full."""
  model = _random_model(t5.T5Config(**t5.SHAPES['base'], eos_id=-1), dtype, 0)
  inputs = np.full((1, 16), 7, np.int32)
  n = 24
  # Limits of rows are traced: the buffers have `size` slots, the decodes stop after 1 and n + 1 tokens.
  runs = {}
  for size in slots:
    for length in (1, n + 1):
      decode_config = speculative.DecodeConfig(max_decode_len=size, row_max_decode_len=length)
      runs[size, length] = functools.partial(speculative.autoregressive_decode, model, inputs, decode_config)
  seconds = _seconds(runs, passes)
  step = {size: statistics.median((b - a) / n for a, b in zip(seconds[size, 1], seconds[size, n + 1])) for size in slots}
  return [_row('measured', 't5-base', None, dtype, system='speculative', weights='random', task='slots', temperature=0.0,
               gamma=None, slots=size, ms_per_token=1e3 * step[size], ratio=step[size] / step[slots[0]]) for size in slots]


def batch_rows(batches, passes, seed, gamma=3):
  """Tokens a second of the packaged models against the batch size."""
  zoo = speculative.load_pretrained()
  texts = [text for text, _ in alphas.short_texts(zoo, 'ende', 64)]
  config = speculative.DecodeConfig(gamma=gamma, max_decode_len=64)
  rows = []
  for batch in batches:
    inputs = decoding.encode(zoo.target, texts[:batch], buckets=(64,))
    runs = {None: functools.partial(speculative.autoregressive_decode, zoo.target, inputs, config, seed),
            DRAFT: functools.partial(speculative.speculative_decode, zoo.target, zoo.drafts[DRAFT], inputs, config, seed)}
    timed = measure.in_turn(runs, passes)
    medians = {drafter: statistics.median(seconds for seconds, _ in pairs) for drafter, pairs in timed.items()}
    for drafter, median in medians.items():
      result = timed[drafter][-1][1]
      tokens = int(result.lengths.sum())
      more = {} if drafter is None else {
          'accepted_over_tested': int(result.accepted.sum()) / int(result.tested.sum()),
          'tokens_per_round': tokens / int(result.rounds.sum()), 'speedup_measured': medians[None] / median}
      rows.append(_row('measured', 'packaged', drafter, zoo.target.params['embedding'].dtype, system='speculative',
                       task='batch', temperature=0.0, gamma=gamma if drafter else None, batch=batch,
                       tokens_per_second=tokens / median, ms_per_token=1e3 * median / tokens, seed=seed, **more))
  return rows


if __name__ == '__main__':
  command.main(benchmark)
