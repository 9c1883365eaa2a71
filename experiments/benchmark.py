"""Speed at T5's shapes, side by side in one run: plain decoding beside other libraries', speculative beside plain.

  python -m experiments.benchmark [--gin.benchmark.shapes="('base','large')"] [--gin.benchmark.pairs="('large',)"]

Plain decoding has random weights. Speculative decoding has the packaged models, embedded in larger shapes without changing
what they compute (`speculative.training.grow`; labelled `widened`): the tokens, and so what is accepted, are the packaged
models', the cost is the large shape's. Other libraries run where they are installed (`experiments/peers.py`). Writes
results.jsonl (as they are measured, so that those of an interrupted run are there), benchmark.md and benchmark.png.
Programs are compiled anew, the persistent cache is not used: compilation is timed too.

What was tried on CPU and did not help (XLA of jax 0.10.2, two cores): splitting the rows of a verification over several
matrix-vector products, transposing its weights, or summing over blocks of 64 to 512 of the contracted axis; leaving YNN
out; unrolling the draft loop; dividing the attention after its product (the exponentials are then computed twice); two
rows of queries for one in the attention; XLA's flags for cheaper LLVM passes or fewer parts of the code generation
(compilation got slower). What did: two-dimensional weights, Q/K/V and gates fused; keys stored transposed; a single
token written to two slots (nothing of the cache is copied); random numbers drawn before the loop (half of a small
model's operations had been the generator).
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
from speculative.decoding import autoregressive
from speculative.decoding import speculative as loop
from speculative.measure import walltime as measure
from speculative.models import precision
from speculative.models import t5
from speculative.report import figures
from speculative.report import results
from speculative.report import tables
from speculative.training import grow

DRAFT = 'base'  # the packaged draft that is embedded in T5's shapes


@gin.configurable
def benchmark(output_dir, dry_run=False, *, shapes=('base', 'large'), pairs=('large',), drafts=('small',),
              others=tuple(peers.PLAIN), assisted=(3, 5), batches=(1, 2, 4, 8, 16, 32), slots=(128, 4096), dtype=None,
              input_len=64, length=32, passes=5, prompts=6, temperatures=(0.0, 1.0), seed=0):
  """Measures, prints the tables, writes the report.

  Args:
    shapes: keys of `t5.SHAPES` for plain decoding.
    pairs: shapes of the target for speculative decoding.
    drafts: shapes of its drafts.
    others: libraries to run beside (`peers.PLAIN`); what is not installed is left out, and said.
    assisted: draft tokens of Transformers' assisted generation beside each pair; (): do not run it.
    batches: batch sizes for the packaged models; (): none.
    slots: cache sizes at which a step is timed, and with them finished rows; (): none.
    dtype: of the parameters, 'float32' or 'bfloat16', for every library; None: float32 on CPU, else bfloat16.
    input_len, length: tokens of the input and of what is decoded, for plain decoding.
    passes: timed passes, in turn; medians are reported.
    prompts, temperatures: for speculative decoding.
  """
  for shape in (*shapes, *pairs, *drafts):
    if shape not in t5.SHAPES:
      raise command.UsageError(f'benchmark: shape {shape!r}: there are {", ".join(t5.SHAPES)}')
  unknown = set(others) - set(peers.PLAIN)
  if unknown:
    raise command.UsageError(f'benchmark.others: {", ".join(sorted(unknown))}: there are {", ".join(peers.PLAIN)}')
  dtype = huggingface.resolve_dtype(dtype or ('float32' if jax.default_backend() == 'cpu' else 'bfloat16'))
  for shape in (*shapes, *pairs):
    _check_memory(shape, dtype)
  parts = {f'T5-{shape}': functools.partial(plain_rows, shape, dtype, others, input_len, length, passes, seed)
           for shape in shapes}
  parts |= {f'T5-{shape} with drafts': functools.partial(
      pair_rows, shape, drafts, dtype, assisted, prompts, temperatures, passes, seed)
            for shape in pairs}
  if slots:
    parts['caches'] = functools.partial(slot_rows, dtype, slots, passes)
    parts['finished rows'] = functools.partial(finished_rows, dtype, passes)
  if batches:
    parts['batches'] = functools.partial(batch_rows, batches, passes, seed)
  if dry_run:
    return
  os.makedirs(output_dir, exist_ok=True)
  rows = []
  for name, measured in parts.items():
    print(f'{name} …', file=sys.stderr, flush=True)
    for row in measured():
      rows.append(row)
      results.write_jsonl(os.path.join(output_dir, 'results.jsonl'), rows)
  found = tables.benchmark_tables(rows)
  for table in found:
    print(table.to_text(), flush=True)
  has_figure = bool(shapes or batches)
  if has_figure:
    figures.save(figures.benchmark(rows), os.path.join(output_dir, 'benchmark.png'))
  text = [f'```\npython -m experiments.benchmark {" ".join(sys.argv[1:])}\n```\n',
          ''.join(f'- {key}: {value}\n' for key, value in results.environment().items() if value is not None),
          *(f'## {table.title}\n\n{table.to_markdown()}' for table in found), '![](benchmark.png)\n' * has_figure]
  results.replace_file(os.path.join(output_dir, 'benchmark.md'), lambda f: f.write('\n'.join(text).encode()))


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

  compiling = _compile_seconds(model, None, inputs, speculative.DecodeConfig(max_decode_len=1 + length))
  makers = {'speculative': make}
  for name in others:
    try:
      with gin.unlock_config():  # T5X registers configurables when it is imported
        makers[name] = peers.PLAIN[name](config, inputs, str(dtype))
    except ImportError as e:
      print(f'{name} is not installed and left out ({e})', flush=True)
  weights = step_bytes(model.params)
  runs = {(name, n): made(n) for name, made in makers.items() for n in (1, 1 + length)}
  runs['reference'] = _reference(weights, config.d_model, dtype)
  seconds = _seconds(runs, passes)
  step = {name: [(b - a) / length for a, b in zip(seconds[name, 1], seconds[name, 1 + length])] for name in makers}
  reference = statistics.median(seconds['reference'])
  ours = statistics.median(step['speculative'])
  return [_row('measured', f't5-{shape}', None, dtype, system=name, weights='random', task='random', temperature=0.0,
               gamma=None, ms_per_token=1e3 * statistics.median(times), ratio=statistics.median(times) / ours,
               step_bytes=weights, share_of_bandwidth=reference / statistics.median(times),
               ms_to_first_token=1e3 * statistics.median(seconds[name, 1]),
               compile_seconds=compiling if name == 'speculative' else None, seed=seed) for name, times in step.items()]


def _reference(size, width, dtype):
  """What takes the time in which `size` bytes can be read: a matrix-vector product over them; but on an accelerator a copy
  of half as many, since a copy reads and writes."""
  if jax.default_backend() != 'cpu':
    source = jnp.ones(size // dtype.itemsize // 2, dtype)
    copy = jax.jit(jnp.copy)
    return lambda: copy(source).block_until_ready()
  columns = size // dtype.itemsize // width
  weight = jax.random.normal(jax.random.key(0), (width, columns), jnp.float32).astype(dtype)
  x = jnp.ones((1, width), dtype)
  product = jax.jit(precision.matmul)
  return lambda: product(x, weight).block_until_ready()


def _compile_seconds(target, drafter, inputs, config):
  """Seconds for tracing and compiling prefill and loop, speculative or (drafter None) plain."""
  def once():
    """Everything but rounds (plain: with one step)."""
    start = time.perf_counter()
    if drafter is None:
      jax.block_until_ready(autoregressive.run(*autoregressive.start(target, inputs, one)))
    else:
      jax.block_until_ready(loop.run(*loop.start(target, drafter, inputs, config), np.int32(0)))
    return time.perf_counter() - start
  one = dataclasses.replace(config, row_max_decode_len=1)
  return once() - once()


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


def widened_zoo(shape, drafts, dtype):
  """The packaged models on their translations, the target in T5's shape `shape`, its base draft in those of `drafts` and as
  it is."""
  narrow = speculative.load_pretrained(str(dtype))
  draft = narrow.drafts[DRAFT]
  wide = {f't5-{name}': widened(draft, name, dtype) for name in drafts} | {DRAFT: draft}
  return dataclasses.replace(narrow, target=widened(narrow.target, shape, dtype), drafts=wide, counts={},
                             texts={'ende': narrow.texts['ende']})


def widened_walltimes(shape, wide, temperatures, dtype, **settings):
  """Rows of `walltime.measure_walltimes` for a `widened_zoo`, labelled so."""
  narrow = speculative.load_pretrained(str(dtype))
  narrow = dataclasses.replace(narrow, texts=wide.texts, counts={}, drafts={DRAFT: narrow.drafts[DRAFT]})
  found = alphas.measure_alphas(narrow, tokens=2000, temperatures=temperatures)
  found += [row | {'draft': name} for row in found if row['draft'] == DRAFT for name in wide.drafts]  # the same function
  rows = walltime.measure_walltimes(wide, found, temperatures=temperatures, gammas=(1, 3, 7), max_gamma=8, loop_steps=6,
                                    **settings)
  return [row | {'label': 'widened', 'target': f't5-{shape}'} for row in rows]


def pair_rows(shape, drafts, dtype, assisted, prompts, temperatures, passes, seed):
  """Plain and speculative decoding of texts with a target of T5's shape, and Transformers' assisted generation of them."""
  wide = widened_zoo(shape, drafts, dtype)
  inputs = walltime.pick(wide, 'ende', 64, prompts)
  for name, drafter in wide.drafts.items():
    seconds = _compile_seconds(wide.target, drafter, inputs[0], speculative.DecodeConfig(gamma=5))
    yield _row('widened', f't5-{shape}', name, dtype, system='speculative', task='compile', gamma=5, temperature=None,
               compile_seconds=seconds)
  rows = widened_walltimes(shape, wide, temperatures, dtype, prompts=prompts, passes=passes)
  for row in rows:
    row |= {'experiment': 'benchmark', 'system': 'speculative'}
    if row['draft']:
      row['of_rounds'] = row['speedup_decoding'] * (row['gamma'] * row['c'] + row['v']) / row['tokens_per_round']
    yield row
  missing = [name for name in ('torch', 'transformers') if not importlib.util.find_spec(name)]
  if assisted and missing:
    print(f'assisted generation is left out: {" and ".join(missing)} not installed', flush=True)
    return
  if not assisted:
    return
  # The same two models and texts. Ours leave the memory first.
  name, inputs = f't5-{drafts[0]}', [batch[batch != wide.vocabulary.pad_id] for batch in inputs]
  with tempfile.TemporaryDirectory() as folder:
    paths = {'target': os.path.join(folder, 'target'), 'draft': os.path.join(folder, 'draft')}
    speculative.save_model(wide.target, paths['target'], dtype=str(dtype))
    speculative.save_model(wide.drafts[name], paths['draft'], dtype=str(dtype))
    del wide, drafter
    run = peers.assisted(paths['target'], paths['draft'], inputs, 128, str(dtype))
  for temperature in temperatures:
    times = measure.time_side_by_side({n: functools.partial(run, temperature, n) for n in (None, *assisted)}, passes)
    reference = {row['draft']: row['ms_per_token'] for row in rows if row['temperature'] == temperature}
    for n, (seconds, tokens) in times.items():
      yield _row('widened', f't5-{shape}', name if n else None, dtype, system='transformers', task='ende',
                 temperature=temperature, gamma=n, ms_per_token=1e3 * seconds, tokens=tokens,
                 ratio=1e3 * seconds / reference[name if n else None], seed=seed)


def slot_rows(dtype, slots, passes):
  """A step of plain decoding in caches of different sizes, equally full."""
  # Limits of rows are traced: the buffers have `size` slots, the decodes stop after as many tokens as they are told.
  step = _steps({size: (size, [1], [25]) for size in slots}, dtype, passes)
  return [_row('measured', 't5-base', None, dtype, system='speculative', weights='random', task='slots', temperature=0.0,
               gamma=None, slots=size, ms_per_token=1e3 * step[size], ratio=step[size] / step[slots[0]]) for size in slots]


def finished_rows(dtype, passes, batch=4):
  """A step of a batch of which some rows have finished."""
  step = _steps({finished: (64, [1] * batch, [1] * finished + [25] * (batch - finished)) for finished in range(batch)},
                dtype, passes)
  return [_row('measured', 't5-base', None, dtype, system='speculative', weights='random', task='finished',
               temperature=0.0, gamma=None, batch=batch, finished=finished, ms_per_step=1e3 * seconds,
               ratio=seconds / step[0]) for finished, seconds in step.items()]


def _steps(cases, dtype, passes):
  """Seconds of a step of plain decoding, T5-base's shape: {name: median} of {name: (slots, limits of the rows in a short
  decode, in a long one)}."""
  model = _random_model(t5.T5Config(**t5.SHAPES['base'], eos_id=-1), dtype, 0)
  runs = {}
  for name, (slots, *limits) in cases.items():
    for limit in limits:
      config = speculative.DecodeConfig(max_decode_len=slots, row_max_decode_len=limit)
      inputs = np.full((len(limit), 16), 7, np.int32)
      runs[name, max(limit)] = functools.partial(speculative.autoregressive_decode, model, inputs, config)
  seconds = _seconds(runs, passes)
  return {name: statistics.median((b - a) / (max(long) - max(short))
                                  for a, b in zip(seconds[name, max(short)], seconds[name, max(long)]))
          for name, (_, short, long) in cases.items()}


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
  command.main(benchmark, keep_programs=False)
