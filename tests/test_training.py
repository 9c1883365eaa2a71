"""Training: exact resumption, growth that preserves the function, schedules and batches."""
import dataclasses
import inspect
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speculative
from speculative.models import decoder_only
from speculative.models import precision
from speculative.models import t5
from speculative.training import distill
from speculative.training import grow
from speculative.training import train

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONFIG = t5.T5Config(vocab_size=64, d_model=16, d_ff=32, num_heads=2, d_kv=8, num_encoder_layers=1,
                     num_decoder_layers=1, dropout=0.1)


def copy_task(n, seed):
  rng = np.random.default_rng(seed)
  ids = [tuple(rng.integers(2, 64, rng.integers(2, 7))) + (1,) for _ in range(n)]
  return [train.Example(i, i) for i in ids]


def run(output_dir, steps, log=lambda _: None, **settings):
  params = train.initial_params(CONFIG, jax.random.key(0))
  return train.train(CONFIG, params, [('copy', copy_task(40, 0), 1)], [('copy', copy_task(10, 1), 1)],
                     output_dir=str(output_dir), steps=steps, learning_rate=1e-2, warmup=2, decay=20,
                     tokens_per_batch=64, min_batches=1, dtype='float32', log=log, log_every=1, evaluate_every=4,
                     **({'save_every': 3, 'optimizer': 'adam', 'buckets': (8, 16)} | settings))


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_resumes_exactly(tmp_path):
  """A run killed after step 6 and started again ends with the very bits of one that was not."""
  class Killed(Exception):
    pass

  def kill(entry):
    if entry.get('step') == 8:  # checkpoints exist at 3 and 6
      raise Killed

  whole = run(tmp_path / 'whole', 14)
  with pytest.raises(Killed):
    run(tmp_path / 'killed', 14, kill)
  entries = []
  resumed = run(tmp_path / 'killed', 14, entries.append)
  assert entries[0] == {'resumed_at': 6}
  assert_equal(whole, resumed)


def test_learns(tmp_path):
  losses = []
  run(tmp_path, 60, lambda entry: losses.append(entry.get('loss')), save_every=1000)
  losses = [loss for loss in losses if loss is not None]
  assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5


def test_epoch_visits_every_example_as_often_as_asked():
  tasks = [(copy_task(23, 0), 2), (copy_task(11, 1), 1)]
  shapes = train.merge_shapes(tasks, (4, 8), 32, 1)
  seen = [member for members, *_ in train.plan_epoch(tasks, 3, 0, 32, shapes, (4, 8)) for member in members]
  assert sorted(seen) == sorted([(0, i) for i in range(23)] * 2 + [(1, i) for i in range(11)])
  # Another epoch is another order; the same epoch is the same one.
  again = train.plan_epoch(tasks, 3, 0, 32, shapes, (4, 8))
  assert again == train.plan_epoch(tasks, 3, 0, 32, shapes, (4, 8))
  assert again != train.plan_epoch(tasks, 4, 0, 32, shapes, (4, 8))


def test_schedule():
  rate = train.make_schedule(2.0, 10, 100, 40)
  assert float(rate(0)) == pytest.approx(0.2)
  assert float(rate(9)) == float(rate(50)) == pytest.approx(2.0)
  assert float(rate(80)) == pytest.approx(1.0)
  assert float(rate(100)) == 0


def test_an_example_beyond_the_buckets_is_named(tmp_path):
  with pytest.raises(ValueError, match=r'example has 7 tokens.*\(2, 6\) holds 6: add a longer bucket'):
    run(tmp_path, 2, buckets=(2, 6))


def test_unknown_optimizer(tmp_path):
  with pytest.raises(ValueError, match='adam or adafactor'):
    run(tmp_path, 1, optimizer='sgd')


def test_gradient_in_bfloat16_is_near_that_in_float32():
  params = train.initial_params(CONFIG, jax.random.key(0))
  inputs, targets = train.make_batch([(copy_task(8, 0), 1)], [(0, i) for i in range(8)], 8, 8, 8, 0)
  grads = [jax.jit(jax.grad(lambda p, m=t5.T5(CONFIG, dtype): train.loss_fn(p, m, inputs, targets, None)[0]))(params)
           for dtype in ('float32', 'bfloat16')]
  for exact, rounded in zip(*map(jax.tree.leaves, grads)):
    assert np.linalg.norm(exact - rounded) < 0.03 * np.linalg.norm(exact) + 1e-6


@pytest.mark.parametrize('key', [None, 7])
def test_growth_preserves_the_function(key):
  """Wider, deeper, more and larger heads; new parts zero (key None) or random: the logits stay."""
  larger = dataclasses.replace(CONFIG, vocab_size=128, d_model=48, d_ff=96, num_heads=3, d_kv=16,
                               num_encoder_layers=3, num_decoder_layers=2)
  params = train.initial_params(CONFIG, jax.random.key(1))
  grown = grow.grow(params, CONFIG, larger, None if key is None else jax.random.key(key))
  assert jax.tree.map(np.shape, grown) == jax.tree.map(np.shape, t5.init_params(larger, jax.random.key(0)))
  rng = np.random.default_rng(0)
  inputs, outputs = rng.integers(2, 64, (3, 9)), rng.integers(2, 64, (3, 11))
  inputs[1, 5:] = 0
  before = jax.jit(t5.T5(CONFIG).apply)({'params': params}, inputs, outputs)
  after = jax.jit(t5.T5(larger).apply)({'params': grown}, inputs, outputs)[..., :64]
  np.testing.assert_allclose(before, after, atol=1e-5 * np.ptp(before))


def test_growth_refuses_what_it_cannot_preserve():
  params = train.initial_params(CONFIG, jax.random.key(1))
  with pytest.raises(ValueError, match='d_ff would shrink from 32 to 16'):
    grow.grow(params, CONFIG, dataclasses.replace(CONFIG, d_ff=16))
  with pytest.raises(ValueError, match='gated differs'):
    grow.grow(params, CONFIG, dataclasses.replace(CONFIG, gated=False))


def test_embedding_in_bfloat16_has_a_gradient():
  """Rows are taken as bits, which by itself has none."""
  table = jnp.arange(12, dtype=jnp.bfloat16).reshape(4, 3)
  ids = jnp.array([[2, 0, 2]])
  np.testing.assert_array_equal(precision.take_rows(table, ids), table[ids].astype(jnp.float32))
  gradient = jax.grad(lambda t: jnp.sum(precision.take_rows(t, ids) * jnp.array([1., 2., 4.])[:, None]))(table)
  np.testing.assert_array_equal(gradient.astype(jnp.float32), np.outer([2., 0., 5., 0.], np.ones(3)))


GPT = decoder_only.GPTConfig(vocab_size=64, d_model=16, d_ff=32, num_heads=2, num_layers=1, max_positions=32, dropout=0.0)


def count_task(n, seed):
  """Texts that count upwards."""
  rng = np.random.default_rng(seed)
  return [train.Example((), tuple(range(first, first + 8)) + (1,)) for first in rng.integers(2, 50, n)]


def test_a_decoder_only_model_learns(tmp_path):
  losses = []
  train.train(GPT, train.initial_params(GPT, jax.random.key(0)), [('count', count_task(60, 0), 1)],
              [('count', count_task(10, 1), 1)], output_dir=str(tmp_path), steps=150, learning_rate=1e-2, tokens_per_batch=64,
              buckets=(12,), min_batches=1, dtype='float32', optimizer='adam', log_every=10, evaluate_every=50, save_every=1000,
              log=lambda entry: losses.append(entry.get('validation_count')))
  losses = [loss for loss in losses if loss is not None]
  assert losses[-1] < losses[0] - 0.5


def test_loss_of_a_decoder_only_model_is_that_of_every_token_but_the_first():
  params = train.initial_params(GPT, jax.random.key(0))
  tokens = np.array([[5, 9, 7, 1, 0, 0], [3, 1, 0, 0, 0, 0]])
  _, (nll, count) = train.loss_fn(params, decoder_only.DecoderOnly(GPT), np.zeros((2, 0), np.int32), tokens, None)
  logits = np.asarray(decoder_only.DecoderOnly(GPT).apply({'params': params}, tokens), np.float64)
  log_p = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
  expected = -(log_p[0, 0, 9] + log_p[0, 1, 7] + log_p[0, 2, 1] + log_p[1, 0, 1])
  assert count == 4 and float(nll) == pytest.approx(expected, rel=1e-5)


def test_joined_examples_are_one_text():
  joined = train.joined([train.Example((4, 5, 1), (6, 7, 1)), train.Example((), tuple(range(2, 9)))], 1, 5)
  assert [e.targets.tolist() for e in joined] == [[4, 5, 6, 7, 1], [2, 3, 4, 5, 1]]
  assert all(len(e.inputs) == 0 for e in joined)


def test_accumulated_gradients_are_the_mean():
  """Two batches in one update are one batch of both, where all rows are as long."""
  params = train.initial_params(GPT, jax.random.key(0))
  batches = [train.make_batch([(count_task(8, seed), 1)], [(0, i) for i in range(8)], 0, 12, 8, 0)[1] for seed in (0, 1)]

  def gradient(tokens):
    return jax.grad(lambda p: train.loss_fn(p, decoder_only.DecoderOnly(GPT), None, tokens, None)[0])(params)

  updates = {}
  for accumulate, parts in ((2, batches), (1, [np.concatenate(batches)])):
    optimizer = train.make_optimizer(params, GPT, 'adafactor', accumulate=accumulate)
    state = jax.jit(optimizer.init)(params)
    for i, part in enumerate(parts):
      updates[accumulate, i], state = jax.jit(optimizer.update)(gradient(part), state, params)
  assert all(not np.any(leaf) for leaf in jax.tree.leaves(updates[2, 0]))
  # A first step is nearly the gradient's sign, which rounding decides where it is tiny.
  assert _cosine(updates[2, 1]['embedding'], updates[1, 0]['embedding']) > 0.999


def _cosine(a, b):
  return np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b)


def test_fine_tuning_defaults_are_adafactor_at_a_constant_rate():
  defaults = inspect.signature(train.train).parameters
  assert (defaults['optimizer'].default, defaults['learning_rate'].default) == ('adafactor', 1e-3)
  rate = train.make_schedule(1e-3, defaults['warmup'].default, 100, defaults['decay'].default)
  assert {rate(step) for step in range(100)} == {1e-3}


@pytest.mark.parametrize('kind,expected', [
    ('forward_kl', .1 * np.log(.1 / .5) + .6 * np.log(.6 / .3) + .3 * np.log(.3 / .2)),
    ('reverse_kl', .5 * np.log(.5 / .1) + .3 * np.log(.3 / .6) + .2 * np.log(.2 / .3)),
    ('tvd', 0.4)])
def test_divergences(kind, expected):
  p, q = np.log([.1, .6, .3]), np.log([.5, .3, .2])
  assert float(distill.divergence(p + 3, q - 1, kind)) == pytest.approx(expected, rel=1e-5)
  assert float(distill.divergence(p, p, kind)) == pytest.approx(0, abs=1e-6)


def test_unknown_divergence():
  with pytest.raises(ValueError, match='forward_kl, reverse_kl, tvd'):
    distill.divergence(np.zeros(3), np.zeros(3), 'kl')


@pytest.mark.parametrize('kind', distill.DIVERGENCES)
def test_distillation_brings_the_draft_nearer(kind, tmp_path):
  """Every divergence lowers total variation, 1 − α, on the target's own samples."""
  target = speculative.Model(GPT, jax.tree.map(lambda a: 4 * a, train.initial_params(GPT, jax.random.key(0))), dtype='float32')
  prompts = [train.Example(np.array([i]), np.zeros(0)) for i in range(2, 50)]
  samples = distill.sample(target, prompts, max_decode_len=10, batch=16)
  assert sorted(e.targets[0] for e in samples) == list(range(2, 50)) and all(len(e.inputs) == 0 for e in samples)
  start = train.initial_params(GPT, jax.random.key(1))
  tvd = distill.loss(GPT, 'float32', 'tvd', 64)
  batch = train.make_batch([(samples, 1)], [(0, i) for i in range(48)], 0, 12, 48, 0)

  def distance(params):
    return float(tvd(params, decoder_only.DecoderOnly(GPT), *batch, None, target.params)[0])

  params = train.train(GPT, start, [('samples', samples, 1)], [('samples', samples[:4], 1)], output_dir=str(tmp_path), steps=60,
                       learning_rate=1e-2, tokens_per_batch=200, buckets=(12,), min_batches=1, dtype='float32',
                       optimizer='adam', evaluate_every=1000, save_every=1000, log=lambda _: None,
                       loss=distill.loss(GPT, 'float32', kind, 64), loss_arguments=(target.params,))
  assert distance(params) < distance(start) - 0.02


@pytest.mark.slow
def test_several_devices_train_as_one():
  """Data-parallel and model-parallel steps on 8 simulated devices: the losses of one device."""
  program = '''
import sys, tempfile
sys.path.insert(0, 'tests')
import jax
import test_training as t
from speculative import sharding
for model in (None, 1, 2):
  mesh = None if model is None else sharding.make_mesh(model)
  with tempfile.TemporaryDirectory() as folder:
    losses = []
    config = t.dataclasses.replace(t.CONFIG, dropout=0.0, d_ff=256)
    t.train.train(config, t.train.initial_params(config, jax.random.key(0)), [('copy', t.copy_task(64, 0), 1)],
                  [('copy', t.copy_task(8, 1), 1)], output_dir=folder, steps=8, tokens_per_batch=128, buckets=(8,),
                  min_batches=1, dtype='float32', log_every=1, mesh=mesh, save_every=4,
                  log=lambda entry: losses.append(entry['loss']) if 'loss' in entry else None)
  print('LOSSES', *losses)
'''
  result = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {
      'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_force_host_platform_device_count=8'})
  lines = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith('LOSSES')]
  assert len(lines) == 3, result.stderr[-2000:]
  one, data, both = (np.array(line, float) for line in lines)
  np.testing.assert_allclose(data, one, atol=2e-3)
  np.testing.assert_allclose(both, one, atol=2e-3)
