"""Adjusted distributions against exact values and a NumPy reference that sorts."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import sampling
import toys

P = np.array([.5, .3, .15, .05])
adjust = jax.jit(sampling.adjust, static_argnames='filtered')


def probs(logits, temperature=1.0, top_k=0, top_p=1.0, filtered=True):
  return np.asarray(adjust(jnp.asarray(logits, jnp.float32), temperature, top_k, top_p, filtered=filtered).probs)


def reference(logits, temperature, top_k, top_p):
  """Sort, cut, normalise; float64, one row. Returns (distribution, sum of probabilities at which top_p was met)."""
  p = toys.softmax(np.asarray(logits, np.float64) / temperature)
  if top_k:
    p = np.where(p >= np.sort(p)[::-1][min(top_k, len(p)) - 1], p, 0)
    p /= p.sum()
  order = np.argsort(-p, kind='stable')
  sums = np.cumsum(p[order])
  n = int(np.argmax(sums >= top_p)) + 1 if top_p < 1 else len(p)
  kept = np.zeros_like(p)
  kept[order[:n]] = p[order[:n]]
  return kept / kept.sum(), np.min(np.abs(sums - top_p))


@pytest.mark.parametrize('settings, expected', [
    (dict(top_k=1), [1, 0, 0, 0]),
    (dict(top_k=2), [.625, .375, 0, 0]),
    (dict(top_k=3), [.5 / .95, .3 / .95, .15 / .95, 0]),
    (dict(top_k=4), P),
    (dict(top_k=100), P),
    (dict(top_p=.2), [1, 0, 0, 0]),
    (dict(top_p=.49), [1, 0, 0, 0]),
    (dict(top_p=.51), [.625, .375, 0, 0]),
    (dict(top_p=.79), [.625, .375, 0, 0]),
    (dict(top_p=.81), [.5 / .95, .3 / .95, .15 / .95, 0]),
    (dict(top_p=.96), P),
    (dict(top_p=1.0), P),
    (dict(top_k=3, top_p=.6), [.625, .375, 0, 0]),  # top-p of what top-k left: .5 / .95 = .526 < .6
    (dict(top_k=2, top_p=.62), [1, 0, 0, 0]),
    (dict(temperature=2.0), np.sqrt(P) / np.sqrt(P).sum()),
    (dict(temperature=.5), P**2 / (P**2).sum()),
    (dict(temperature=.5, top_k=2), [.25 / .34, .09 / .34, 0, 0]),
    (dict(temperature=.5, top_p=.7), [.25 / .34, .09 / .34, 0, 0]),  # temperature comes first: .25 / .365 = .685 < .7
    (dict(temperature=0.0), [1, 0, 0, 0]),
    (dict(temperature=0.0, top_k=2, top_p=.9), [1, 0, 0, 0]),
])
def test_exact_values(settings, expected):
  """Filters, their order, and where they cut, in any order of ids and with any constant added to the logits."""
  for shift, order in ((0, [0, 1, 2, 3]), (-50, [3, 1, 0, 2]), (80, [2, 0, 3, 1])):
    got = probs(np.log(P[order]) + shift, **settings)
    np.testing.assert_allclose(got, np.asarray(expected)[order], atol=2e-5 if shift else 2e-7)
    np.testing.assert_array_equal(got == 0, np.asarray(expected)[order] == 0)


def test_ties_are_kept():
  tied = np.log([.4, .2, .2, .2])
  np.testing.assert_allclose(probs(tied, top_k=2), [.4, .2, .2, .2], atol=1e-6)
  np.testing.assert_allclose(probs(tied, top_p=.5), [.4, .2, .2, .2], atol=1e-6)
  np.testing.assert_allclose(probs(np.zeros(8), top_k=1), np.full(8, 1 / 8), atol=1e-7)
  np.testing.assert_allclose(probs(np.zeros(8), top_p=.01), np.full(8, 1 / 8), atol=1e-7)


def test_temperature_zero_takes_the_first_of_equals():
  logits = np.array([[1, 3, 3, 2], [5, 5, 5, 5], [-np.inf, -1, -np.inf, -1], [0, -0., 0, 0]])
  np.testing.assert_array_equal(probs(logits, 0.0), np.eye(4)[[1, 0, 1, 0]])


@pytest.mark.parametrize('temperature', [1e-3, 1e-20, 1e-37, 1e-38, 1e-40, 1e-45, 1e-60])
def test_tiny_temperatures_do_not_overflow(temperature):
  got = probs([[1., 3., -2., 2.99], [-1e30, 1e30, 0, 5.]], temperature, top_k=3, top_p=.9)
  np.testing.assert_allclose(got, np.eye(4)[[1, 1]], atol=1e-4)


def test_large_temperature_is_flat():
  np.testing.assert_allclose(probs([1., 3., -2., -np.inf], 1e6), [1 / 3, 1 / 3, 1 / 3, 0], atol=1e-5)


@pytest.mark.parametrize('top_p', [1e-20, 1e-38, 1e-40, 1e-60])
def test_tiny_top_p_keeps_the_best(top_p):
  """A threshold that float32 takes for 0 once left nothing: NaN."""
  np.testing.assert_array_equal(probs(np.log(P), top_p=top_p), [1, 0, 0, 0])


@pytest.mark.parametrize('v, rows', [(5, 300), (128, 100), (32128, 3)])
def test_filters_against_a_sort(v, rows):
  """Random logits and settings, one program: each row its own. Where float32 sums cannot tell on which side of top_p a
  token falls (within 1e-5), the row is left out; few are."""
  rng = np.random.default_rng(v)
  logits = (rng.normal(size=(rows, v)) * rng.choice([.1, 1, 4], (rows, 1))).astype(np.float32)
  temperature = rng.choice([.3, 1, 1.7], rows)
  top_k = rng.integers(0, min(2 * v, 100), rows)
  top_p = np.where(rng.random(rows) < .3, 1, rng.uniform(.05, .99, rows))
  got = probs(logits, temperature.astype(np.float32), top_k.astype(np.int32), top_p.astype(np.float32))
  compared = 0
  for b in range(rows):
    expected, margin = reference(logits[b], temperature[b], top_k[b], np.float32(top_p[b]))
    if top_p[b] < 1 and margin < 1e-5:
      continue
    np.testing.assert_allclose(got[b], expected, atol=2e-6, rtol=1e-4, err_msg=f'row {b}')
    compared += 1
  assert compared > .6 * rows


def test_filters_that_are_off_change_nothing():
  """Bit for bit what the program without filters computes."""
  logits = np.random.default_rng(0).normal(size=(16, 1000)).astype(np.float32) * 5
  for temperature in (0.0, .7, 1.0):
    plain = probs(logits, temperature, filtered=False)
    for on in (probs(logits, temperature), probs(logits, temperature, top_k=1000)):
      np.testing.assert_allclose(on, plain, rtol=1e-6)


@pytest.mark.parametrize('filtered', [False, True])
@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_broken_rows_are_nan_and_others_unchanged(filtered, temperature):
  """A NaN or +inf row turned into an ordinary token."""
  good = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
  bad = good.copy()
  bad[1, 2], bad[3, 0], bad[4] = np.nan, np.inf, -np.inf
  settings = dict(top_k=2, top_p=.8) if filtered else {}
  clean, got = (probs(a, temperature, filtered=filtered, **settings) for a in (good, bad))
  assert np.isnan(got[[1, 3, 4]]).all()
  np.testing.assert_array_equal(got[[0, 2, 5]], clean[[0, 2, 5]])


def test_forbidden_tokens_stay_forbidden():
  logits = np.array([0., -np.inf, 1., -np.inf])
  for settings in (dict(), dict(temperature=0.0), dict(top_k=3), dict(top_p=.99), dict(temperature=1e-3)):
    got = probs(logits, **settings)
    assert (got[[1, 3]] == 0).all() and np.isclose(got.sum(), 1)


def test_bfloat16_logits_become_float32():
  """Softmax in the model's dtype: flat bfloat16 logits over 32,128 ids give 1 / 32128 each, others the float32 softmax
  of the very same values."""
  flat = adjust(jnp.full((1, 32128), -7.5, jnp.bfloat16), 1.0, filtered=False).probs
  assert flat.dtype == jnp.float32
  np.testing.assert_allclose(flat, 1 / 32128, rtol=1e-5)
  logits = jnp.asarray(np.random.default_rng(2).normal(size=(4, 1000)) * 4, jnp.bfloat16)
  got = adjust(logits, .7, filtered=False).probs
  np.testing.assert_allclose(got, toys.softmax(np.asarray(logits, np.float64) / .7), rtol=1e-5)


def test_soft_is_the_unadjusted_softmax_at_temperature_zero():
  logits = np.log(P)
  zero = sampling.adjust(logits, 0.0, 2, .5)
  np.testing.assert_allclose(zero.soft, P, atol=1e-6)
  one = sampling.adjust(logits, 1.0, 2, 1.0)
  np.testing.assert_array_equal(one.soft, one.probs)


def test_settings_broadcast_over_rows_and_positions():
  logits = np.broadcast_to(np.log(P), (3, 5, 4))
  got = probs(logits, jnp.array([[0.], [1.], [1.]]), jnp.array([[0], [2], [0]]), jnp.array([[1.], [1.], [.4]]))
  for row, expected in zip(got, ([1, 0, 0, 0], [.625, .375, 0, 0], [1, 0, 0, 0])):
    np.testing.assert_allclose(row, np.broadcast_to(expected, (5, 4)), atol=1e-6)


def test_first_true():
  condition = np.array([[0, 1, 1], [1, 0, 1], [0, 0, 0], [0, 0, 1]], bool)
  np.testing.assert_array_equal(sampling.first_true(condition), [1, 0, 0, 2])
