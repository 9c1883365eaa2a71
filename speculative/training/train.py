"""Training of T5 models with optax: length-bucketed batches, Orbax checkpoints, exact resumption."""
import dataclasses
import functools
import itertools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from speculative.checkpoints import orbax
from speculative.models import t5


@dataclasses.dataclass(frozen=True)
class Example:
  """Token ids of one example, EOS included."""
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
    sides.append([(*ids[:limit - 1], vocabulary.eos_id) for ids in map(vocabulary.encode, texts)])
  return [Example(*pair) for pair in zip(*sides)]


def bucket(length, buckets):
  """The smallest bucket that holds `length`."""
  return next(b for b in buckets if b >= length)


def _shape(example, buckets):
  return bucket(len(example.inputs), buckets), bucket(len(example.targets), buckets)


def plan_epoch(tasks, epoch, seed, tokens_per_batch, shapes, buckets):
  """One epoch's batches: the same for the same arguments, so that a resumed run goes on where it stopped.

  Args:
    tasks: [(examples, passes per epoch)].
    shapes: as `merge_shapes` gives them.
    buckets: increasing lengths; both sides are padded to one.

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
    size = max(1, tokens_per_batch // (s + n))
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
    size = max(1, tokens_per_batch // sum(shape))
    if count[shape] >= min_batches * size:
      continue
    larger = [o for o in count if o != shape and o[0] >= shape[0] and o[1] >= shape[1] and count[o]]
    if larger:
      to = min(larger, key=lambda x: (sum(x), x))
      count[to] += count[shape]
      count[shape] = 0
      use = {k: to if v == shape else v for k, v in use.items()}
  return use


def loss_fn(params, module, inputs, targets, dropout_key, z_loss=1e-4):
  """Mean cross-entropy in nats per target token, plus T5's z-loss (1e-4 log² Z).

  Args:
    inputs: int32[B, S].
    targets: int32[B, T], padding weighs nothing.
    dropout_key: PRNG key, or None for evaluation (no dropout, no z-loss).

  Returns:
    (loss, (summed cross-entropy, number of target tokens)).
  """
  c = module.config
  shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=c.start_id)
  rngs = None if dropout_key is None else {'dropout': dropout_key}
  logits = module.apply({'params': params}, inputs, shifted, deterministic=dropout_key is None, rngs=rngs)
  weights = (targets != c.pad_id).astype(jnp.float32)
  log_z = jax.nn.logsumexp(logits, axis=-1)
  nll = log_z - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
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
  for thousands of steps, and translation is not learnt before they are not.
  """
  q = jnp.array([config.d_kv ** -0.5, 1.0, 1.0])[None, :, None]
  qkv = jnp.broadcast_to(q, (config.num_heads, 3, config.d_kv)).reshape(1, -1)

  def scale(path, leaf):
    name = path[-1].key
    return {'embedding': config.d_model ** 0.5, 'relative_bias': config.d_model ** 0.5, 'q': config.d_kv ** -0.5,
            'qkv': qkv}.get(name, 1.0)
  return jax.tree_util.tree_map_with_path(scale, params)


def make_optimizer(params, config, name='adam', clip=1.0, b2=0.98):
  """`adam` (steps scaled as T5 stores its parameters) or `adafactor` (which scales by itself), gradients clipped.

  Its updates are to be multiplied by minus the learning rate.

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
  return optax.chain(optax.clip_by_global_norm(clip), inner)


def make_schedule(peak, warmup, steps, decay):
  """Linear warm-up, constant, linear decay to zero over the last `decay` steps."""
  return lambda step: peak * min(1.0, (step + 1) / max(warmup, 1), max(steps - step, 0) / max(decay, 1))


def initial_params(config, key):
  """T5's initialisation, residual-writing matrices divided by √(sublayers) so that depth does not grow the stream."""
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


def train(config, params, train_tasks, validation_tasks, *, output_dir, steps, learning_rate, warmup=200, decay=1000,
          tokens_per_batch=2048, buckets=(24, 32, 64, 96, 128, 256), min_batches=300, optimizer='adam', dtype='bfloat16',
          seed=0, log_every=100, evaluate_every=1000, save_every=500, log=print, vocabulary=None):
  """Trains, saving to `output_dir`/checkpoints; goes on from the newest checkpoint there, exactly.

  Args:
    config: `t5.T5Config`.
    params: initial parameters (used where there is no checkpoint).
    train_tasks, validation_tasks: [(name, examples, passes per epoch)].
    steps: total steps; the learning rate falls to zero over the last `decay`.
    tokens_per_batch: input and target slots, padding included.
    buckets, min_batches: shapes of batches (`merge_shapes`); each costs a compilation.
    dtype: operands' dtype in matrix products; parameters and sums are float32.
    log: called with dicts of numbers.
    vocabulary: saved beside the checkpoints, so that `load_model` reads them whole; or None.

  Returns:
    The trained parameters.
  """
  module = t5.T5(config, dtype)
  optimizer = make_optimizer(params, config, optimizer)
  schedule = make_schedule(learning_rate, warmup, steps, decay)
  names = [name for name, _, _ in validation_tasks]
  tasks = [task[1:] for task in train_tasks]
  shapes = merge_shapes(tasks, buckets, tokens_per_batch, min_batches)

  def batches_of(epoch):
    return plan_epoch(tasks, epoch, seed, tokens_per_batch, shapes, buckets)

  # Key and learning rate are arguments, so that runs that differ in them share compiled programs.
  base_key = jax.random.key(seed, impl='rbg')

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def update(params, state, key, step, rate, inputs, targets):
    key = jax.random.fold_in(key, step)
    (_, (nll, count)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, module, inputs, targets, key)
    updates, state = optimizer.update(grads, state, params)
    return jax.tree.map(lambda p, u: p - rate * u, params, updates), state, nll, count

  params = jax.tree.map(jnp.array, params)  # a copy: the steps donate it
  state = jax.jit(optimizer.init)(params)
  step = 0
  options = ocp.CheckpointManagerOptions(max_to_keep=2)
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
      for start in range(0, len(order), 16):
        chunk = order[start:start + 16]
        s = bucket(max(len(examples[i].inputs) for i in chunk), buckets)
        n = bucket(max(len(examples[i].targets) for i in chunk), buckets)
        yield make_batch(one, [(0, i) for i in chunk], s, n, 16, config.pad_id)

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
      params, state, nll, count = update(params, state, base_key, step, np.float32(schedule(step)), *batch)
      total_nll, total_count = total_nll + nll, total_count + count
      step += 1
      if step % log_every == 0 or step == steps:
        loss = float(total_nll) / float(total_count)
        seconds = time.perf_counter() - start
        log({'step': step, 'epoch': round(epoch + (step - first) / len(batches), 2), 'loss': round(loss, 4),
             'tokens_per_second': round(seen / seconds)})
        start, seen, total_nll, total_count = time.perf_counter(), 0, 0.0, 0.0
      if step % evaluate_every == 0 or step == steps:
        losses = evaluate(module, params, [task[1:] for task in validation_tasks], eval_batches)
        log({'step': step} | {f'validation_{name}': round(loss, 4) for name, loss in zip(names, losses)})
        start, seen = time.perf_counter(), 0
      if step % save_every == 0 or step == steps:
        save(step, params, state)
    manager.wait_until_finished()
  return params
