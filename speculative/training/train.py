"""Training of T5 and decoder-only models with optax: length-bucketed batches, Orbax checkpoints, exact resumption."""
import dataclasses
import functools
import itertools
import os
import time

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from speculative import sharding
from speculative.checkpoints import orbax
from speculative.models import decoder_only
from speculative.models import t5
from speculative.models.model import MODULES


@dataclasses.dataclass(frozen=True)
class Example:
  """Token ids of one example, EOS included. A decoder-only model learns all tokens of `targets` but the first, and has no
  inputs."""
  inputs: tuple
  targets: tuple


def read_examples(path, vocabulary, max_input_len, max_target_len):
  """Examples of a TSV file (input, tab, target), both cut to their limits with EOS kept at the end."""
  with open(path, encoding='utf-8') as f:
    pairs = [line.rstrip('\n').split('\t') for line in f]
  bad = [i for i, pair in enumerate(pairs) if len(pair) != 2]
  if bad:
    raise ValueError(f'{path}: line {bad[0] + 1} is not "input<TAB>target"')
  sides = []
  for texts, limit in zip(zip(*pairs), (max_input_len, max_target_len)):
    sides.append([np.array([*ids[:limit - 1], vocabulary.eos_id], np.int32) for ids in map(vocabulary.encode, texts)])
  return [Example(*pair) for pair in zip(*sides)]


def joined(examples, eos_id, max_len):
  """For decoder-only models: each example's input and target as one text, cut to max_len tokens with EOS at the end."""
  texts = []
  for e in examples:
    text = np.concatenate([e.inputs[:-1] if len(e.inputs) and e.inputs[-1] == eos_id else e.inputs, e.targets])
    if len(text) > max_len:
      text = np.append(text[:max_len - 1], eos_id)
    texts.append(Example(np.zeros(0, np.int32), text.astype(np.int32)))
  return texts


def bucket(length, buckets):
  """The smallest bucket that holds `length`; 0 for nothing.

  Raises:
    ValueError: if none does.
  """
  found = next((b for b in (0, *buckets) if b >= length), None)
  if found is None:
    raise ValueError(f'an example has {length} tokens, the longest of the buckets {tuple(buckets)} holds {buckets[-1]}: '
                     'add a longer bucket, or shorten the examples')
  return found


def _shape(example, buckets):
  return bucket(len(example.inputs), buckets), bucket(len(example.targets), buckets)


def rows_of(shape, tokens_per_batch, multiple=1):
  """Rows of a batch of (input length, target length): as many as fit, rounded down to a multiple but not to 0."""
  return max(multiple, tokens_per_batch // sum(shape) // multiple * multiple)


def plan_epoch(tasks, epoch, seed, tokens_per_batch, shapes, buckets, multiple=1):
  """One epoch's batches: the same for the same arguments, so that a resumed run goes on where it stopped.

  Args:
    tasks: [(examples, passes per epoch)].
    shapes: as `merge_shapes` gives them.
    buckets: increasing lengths; both sides are padded to one.
    multiple: of which the rows are one, for devices that share a batch.

  Returns:
    list of (list of (task, index), input length, target length, rows); batches of one shape have one size.
  """
  rng = np.random.default_rng((seed, epoch))
  groups = {}
  for t, (examples, passes) in enumerate(tasks):
    for i in itertools.chain(*(rng.permutation(len(examples)) for _ in range(passes))):
      groups.setdefault(shapes[_shape(examples[i], buckets)], []).append((t, int(i)))
  batches = []
  for (s, n), members in sorted(groups.items()):
    size = rows_of((s, n), tokens_per_batch, multiple)
    for start in range(0, len(members), size):
      batches.append((members[start:start + size], s, n, size))
  return [batches[i] for i in rng.permutation(len(batches))]


def make_batch(tasks, members, s, n, size, pad_id):
  """(inputs int32[size, s], targets int32[size, n]); missing members are rows of padding, which weigh nothing."""
  inputs, targets = np.full((size, s), pad_id, np.int32), np.full((size, n), pad_id, np.int32)
  for row, (t, i) in enumerate(members):
    example = tasks[t][0][i]
    inputs[row, :len(example.inputs)] = example.inputs
    targets[row, :len(example.targets)] = example.targets
  return inputs, targets


def merge_shapes(tasks, buckets, tokens_per_batch, min_batches):
  """Fewer program shapes: `buckets` applied, shapes with under `min_batches` batches an epoch merged upwards.

  Args:
    tasks: [(examples, passes per epoch)].

  Returns:
    dict (input bucket, target bucket) → the shape to use.
  """
  count = {}
  for examples, passes in tasks:
    for e in examples:
      shape = _shape(e, buckets)
      count[shape] = count.get(shape, 0) + passes
  use = {shape: shape for shape in count}
  for shape in sorted(count, key=lambda x: (sum(x), x)):
    if count[shape] >= min_batches * rows_of(shape, tokens_per_batch):
      continue
    larger = [o for o in count if o != shape and o[0] >= shape[0] and o[1] >= shape[1] and count[o]]
    if larger:
      to = min(larger, key=lambda x: (sum(x), x))
      count[to] += count[shape]
      count[shape] = 0
      use = {k: to if v == shape else v for k, v in use.items()}
  return use


def logits_and_labels(params, module, inputs, targets, dropout_key=None):
  """What a model predicts, and what it should have: (logits float32[B, N, V], labels int32[B, N]).

  Args:
    module: `t5.T5` or `decoder_only.DecoderOnly`, which predicts targets[:, 1:] from what stands before.
    inputs: int32[B, S]; targets: int32[B, T].
    dropout_key: PRNG key; None: no dropout.
  """
  rngs = None if dropout_key is None else {'dropout': dropout_key}
  apply = functools.partial(module.apply, {'params': params}, deterministic=dropout_key is None, rngs=rngs)
  if isinstance(module, decoder_only.DecoderOnly):
    return apply(targets)[:, :-1], targets[:, 1:]
  shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=module.config.start_id)
  return apply(inputs, shifted), targets


def loss_fn(params, module, inputs, targets, dropout_key, z_loss=1e-4):
  """Mean cross-entropy in nats per target token, plus T5's z-loss (1e-4 log² Z).

  Args:
    inputs: int32[B, S].
    targets: int32[B, T], padding weighs nothing.
    dropout_key: PRNG key, or None for evaluation (no dropout, no z-loss).

  Returns:
    (loss, (summed cross-entropy, number of target tokens)).
  """
  logits, labels = logits_and_labels(params, module, inputs, targets, dropout_key)
  weights = (labels != module.config.pad_id).astype(jnp.float32)
  log_z = jax.nn.logsumexp(logits, axis=-1)
  nll = log_z - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
  count = jnp.maximum(weights.sum(), 1.0)
  loss = (weights * nll).sum() / count
  if dropout_key is not None:
    loss += z_loss * (weights * jnp.square(log_z)).sum() / count
  return loss, ((weights * nll).sum(), weights.sum())


def step_scales(params, config):
  """Each parameter's step relative to the learning rate: the scale at which T5 stores it.

  Adam moves every entry by about the learning rate, but T5 stores embeddings at standard deviation 1 and query
  projections at 1/√(d_model · d_kv), where 1/√d_model is usual. Scaling the steps is the same as training in the
  usual parametrisation. Relative biases are added to scores of order 1: with the matrices' small steps they stay flat
  for thousands of steps, and translation is not learnt before they are not. GPT-2 stores everything at one scale.
  """
  if isinstance(config, decoder_only.GPTConfig):
    return jax.tree.map(lambda _: 1.0, params)
  q = jnp.array([config.d_kv ** -0.5, 1.0, 1.0])[None, :, None]
  qkv = jnp.broadcast_to(q, (config.num_heads, 3, config.d_kv)).reshape(1, -1)

  def scale(path, leaf):
    name = path[-1].key
    return {'embedding': config.d_model ** 0.5, 'relative_bias': config.d_model ** 0.5, 'q': config.d_kv ** -0.5,
            'qkv': qkv}.get(name, 1.0)
  return jax.tree_util.tree_map_with_path(scale, params)


def make_optimizer(params, config, name='adafactor', clip=1.0, b2=0.98, accumulate=1):
  """`adam` (steps scaled as T5 stores its parameters) or `adafactor` (which scales by itself), gradients clipped.

  Its updates are to be multiplied by minus the learning rate. With `accumulate` > 1 they are zero but at every so many
  steps, which then have the mean gradient.

  Raises:
    ValueError: unknown name.
  """
  if name == 'adam':
    scales = step_scales(params, config)
    scaling = optax.stateless(lambda updates, _: jax.tree.map(lambda u, s: u * s, updates, scales))
    inner = optax.chain(optax.scale_by_adam(b2=b2), scaling)
  elif name == 'adafactor':
    inner = optax.chain(optax.adafactor(multiply_by_parameter_scale=True), optax.scale(-1.0))  # it has the sign in it
  else:
    raise ValueError(f'optimizer {name!r} is unknown: adam or adafactor')
  optimizer = optax.chain(optax.clip_by_global_norm(clip), inner)
  return optax.MultiSteps(optimizer, accumulate) if accumulate > 1 else optimizer


def make_schedule(peak, warmup, steps, decay):
  """Linear warm-up, constant, linear decay to zero over the last `decay` steps (0: constant to the end)."""
  return lambda step: peak * min(1.0, (step + 1) / max(warmup, 1), max(steps - step, 0) / max(decay, 1))


def initial_params(config, key):
  """The architecture's initialisation; T5's residual-writing matrices are divided by √(sublayers), so that depth does not
  grow the stream."""
  if isinstance(config, decoder_only.GPTConfig):
    return decoder_only.init_params(config, key)
  params = t5.init_params(config, key)
  for stack, sublayers in (('encoder', 2 * config.num_encoder_layers), ('decoder', 3 * config.num_decoder_layers)):
    params[stack] = jax.tree_util.tree_map_with_path(
        lambda path, w, n=sublayers: w * n ** -0.5 if path[-1].key in ('out', 'wo') else w, params[stack])
  return params


def evaluate(module, params, tasks, eval_batches):
  """Validation loss of each task in nats a token: list of floats."""
  run = _evaluation_step(module)
  result = []
  for examples, _ in tasks:
    total = np.zeros(2)
    for batch in eval_batches(examples):
      total += np.array(run(params, *batch))
    result.append(float(total[0] / total[1]))
  return result


@functools.lru_cache(maxsize=None)
def _evaluation_step(module):
  return jax.jit(lambda params, inputs, targets: loss_fn(params, module, inputs, targets, None)[1])


def place(tree, params, config, mesh):
  """Puts parameters, or an optimizer's state of them, on a mesh: leaves like a parameter where it goes, others everywhere."""
  flat = traverse_util.flatten_dict(params)
  split = sharding.param_shardings(config, {'/'.join(path): np.shape(leaf) for path, leaf in flat.items()}, mesh)
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def put(path, leaf):
    names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
    # Moments have their parameter's shape; Adafactor's factors have not.
    alike = names in flat and np.shape(flat[names]) == np.shape(leaf)
    return jax.device_put(leaf, split['/'.join(names)] if alike else everywhere)
  return jax.tree_util.tree_map_with_path(put, tree)


def train(config, params, train_tasks, validation_tasks, *, output_dir, steps, learning_rate=1e-3, warmup=0, decay=0,
          tokens_per_batch=2048, buckets=(24, 32, 64, 96, 128, 256), min_batches=300, optimizer='adafactor', accumulate=1,
          dtype='bfloat16', seed=0, log_every=100, evaluate_every=1000, save_every=500, log=print, vocabulary=None,
          mesh=None, metrics=None, loss=loss_fn, loss_arguments=()):
  """Trains, saving to `output_dir`/checkpoints; goes on from the newest checkpoint there, exactly.

  The defaults are T5's for fine-tuning: Adafactor at a constant 1e-3.

  Args:
    config: `t5.T5Config` or `decoder_only.GPTConfig`.
    params: initial parameters (used where there is no checkpoint).
    train_tasks, validation_tasks: [(name, examples, passes per epoch)].
    steps: total steps; the learning rate falls to zero over the last `decay`.
    tokens_per_batch: input and target slots, padding included.
    buckets, min_batches: shapes of batches (`merge_shapes`); each costs a compilation.
    accumulate: batches whose mean gradient makes one update; each counts as a step.
    dtype: operands' dtype in matrix products; parameters and sums are float32.
    log: called with dicts of numbers.
    vocabulary: saved beside the checkpoints, so that `load_model` reads them whole; or None.
    mesh: batches are split over its axis `data`, parameters over `model` (`speculative.sharding`); None: one device.
    metrics: function of parameters → {name: number}, called with each evaluation; or None.
    loss: as `loss_fn`, with `loss_arguments` (arrays, as a teacher's parameters) behind its own.

  Returns:
    The trained parameters.
  """
  module = MODULES[type(config)](config, dtype)
  schedule = make_schedule(learning_rate, warmup, steps, decay)
  names = [name for name, _, _ in validation_tasks]
  tasks = [task[1:] for task in train_tasks]
  shapes = merge_shapes(tasks, buckets, tokens_per_batch, min_batches)
  multiple = 1 if mesh is None else mesh.shape[sharding.DATA]

  def batches_of(epoch):
    return plan_epoch(tasks, epoch, seed, tokens_per_batch, shapes, buckets, multiple)

  def split(batch):
    """Rows over `data`."""
    if mesh is None:
      return batch
    return jax.device_put(batch, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(sharding.DATA)))

  # Key and learning rate are arguments, so that runs that differ in them share compiled programs.
  base_key = jax.random.key(seed, impl='rbg')

  params = jax.tree.map(jnp.array, params)  # a copy: the steps donate it
  if mesh is not None:
    params = place(params, params, config, mesh)
  optimizer = make_optimizer(params, config, optimizer, accumulate=accumulate)
  state = jax.jit(optimizer.init)(params)
  if mesh is not None:
    state = place(state, params, config, mesh)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def update(params, state, key, step, rate, inputs, targets, *more):
    key = jax.random.fold_in(key, step)
    (_, (total, count)), grads = jax.value_and_grad(loss, has_aux=True)(params, module, inputs, targets, key, *more)
    updates, state = optimizer.update(grads, state, params)
    return jax.tree.map(lambda p, u: p - rate * u, params, updates), state, total, count

  step = 0
  options = ocp.CheckpointManagerOptions(max_to_keep=2)  # saves go on beside the steps
  folder = os.path.abspath(os.path.join(output_dir, 'checkpoints'))
  orbax.write_config(folder, config, vocabulary)
  with ocp.CheckpointManager(folder, options=options) as manager:
    if manager.latest_step() is not None:
      step = manager.latest_step()
      restored = manager.restore(step, args=ocp.args.StandardRestore({'params': params, 'state': state}))
      params, state = restored['params'], restored['state']
      log({'resumed_at': step})

    def eval_batches(examples):
      order = sorted(range(len(examples)), key=lambda i: (len(examples[i].inputs), i))
      one = [(examples, 1)]
      rows = -(-16 // multiple) * multiple
      for start in range(0, len(order), rows):
        chunk = order[start:start + rows]
        s = bucket(max(len(examples[i].inputs) for i in chunk), buckets)
        n = bucket(max(len(examples[i].targets) for i in chunk), buckets)
        yield split(make_batch(one, [(0, i) for i in chunk], s, n, rows, config.pad_id))

    def save(step, params, state):
      manager.save(step, args=ocp.args.StandardSave({'params': params, 'state': state}))

    # Epochs have different numbers of batches; find the one that the next step belongs to.
    epoch, first = 0, 0
    batches = batches_of(0)
    while first + len(batches) <= step:
      first += len(batches)
      epoch += 1
      batches = batches_of(epoch)
    start, seen, total_nll, total_count = time.perf_counter(), 0, 0.0, 0.0
    while step < steps:
      if step - first == len(batches):
        first += len(batches)
        epoch += 1
        batches = batches_of(epoch)
      members, s, n, size = batches[step - first]
      batch = make_batch(tasks, members, s, n, size, config.pad_id)
      seen += int((batch[0] != config.pad_id).sum() + (batch[1] != config.pad_id).sum())
      params, state, nll, count = update(params, state, base_key, step, np.float32(schedule(step)), *split(batch),
                                         *loss_arguments)
      total_nll, total_count = total_nll + nll, total_count + count
      step += 1
      if step % log_every == 0 or step == steps:
        mean = float(total_nll) / float(total_count)
        seconds = time.perf_counter() - start
        log({'step': step, 'epoch': round(epoch + (step - first) / len(batches), 2), 'loss': round(mean, 4),
             'tokens_per_second': round(seen / seconds)})
        start, seen, total_nll, total_count = time.perf_counter(), 0, 0.0, 0.0
      if step % evaluate_every == 0 or step == steps:
        losses = evaluate(module, params, [task[1:] for task in validation_tasks], eval_batches)
        log({'step': step} | {f'validation_{name}': round(value, 4) for name, value in zip(names, losses)} |
            (metrics(params) if metrics else {}))
        start, seen = time.perf_counter(), 0
      if step % save_every == 0 or step == steps:
        save(step, params, state)
    manager.wait_until_finished()
  return params
