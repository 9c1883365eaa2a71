"""Training: exact resumption, growth that preserves the function, schedules and batches."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.models import precision
from speculative.models import t5
from speculative.training import grow
from speculative.training import train

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
                     tokens_per_batch=64, buckets=(8, 16), min_batches=1, dtype='float32', log=log, log_every=1,
                     evaluate_every=4, **({'save_every': 3} | settings))


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
