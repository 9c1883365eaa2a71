"""Algorithm 1 on vocabularies small enough to write every probability down. Reference values: the paper's formulas."""
import itertools

import jax
import numpy as np
import pytest

from speculative import algorithm
from speculative import theory
import toys

P, Q = np.array([.1, .6, .3]), np.array([.5, .3, .2])
verify = jax.jit(algorithm.verify)
draw = jax.jit(algorithm.draw)


def repeat(a, rows):
  return np.broadcast_to(np.asarray(a, np.float32), (rows, *np.shape(a)))


def one_hot(i, v):
  return np.eye(v, dtype=np.float32)[i]


def first_tokens(rng, p, q, rows, lenience=1.0):
  """Tokens that one round with γ = 1 emits first: int[rows]. The random numbers are NumPy's."""
  x = rng.choice(len(q), (rows, 1), p=q).astype(np.int32)
  n, weights = verify(repeat([p, p], rows), repeat([q], rows), x, rng.random((rows, 1), np.float32), lenience)
  t = draw(weights, rng.random((rows, 2), np.float32))
  return np.where(np.asarray(n) == 1, x[:, 0], t)


def exact_output(p, q, lenience=1.0):
  """Probability of every first token, by enumeration of the drafts: float64[V]."""
  accepts = np.minimum(1, p / (lenience * np.where(q > 0, q, 1)))
  residual = np.maximum(p - q, 0)
  return q * accepts + np.sum(q * (1 - accepts)) * residual / max(residual.sum(), 1e-300)


def test_a_round_emits_the_target_distribution():
  """q used ≠ q sampled from: p = [.1, .6, .3] must come out; a fault gives [.2, .6, .2]. False alarm 1e-5."""
  tokens = first_tokens(np.random.default_rng(0), P, Q, 200_000)
  assert toys.chi_square(np.bincount(tokens, minlength=3), P) > toys.FALSE_ALARM


def test_acceptance_probability_is_the_ratio():
  """Every pair of draft and r on a fine grid: the share of accepted r is min(1, p / q)."""
  r = (np.arange(1000) + .5) / 1000
  for x in range(3):
    accepted = algorithm.accept(repeat([P, P], 1000), repeat([Q], 1000), np.full((1000, 1), x), r[:, None])
    assert abs(np.mean(accepted) - min(1, P[x] / Q[x])) < 1e-3


@pytest.mark.parametrize('v', [2, 3, 5])
def test_residual_makes_up_for_what_acceptance_takes(v):
  """No randomness: Σ_x q(x) [accepted x, or rejected and replaced from the weights] is p, for 200 random pairs."""
  rng = np.random.default_rng(v)
  p, q = rng.dirichlet(np.full(v, .5), (2, 200))
  q[:20] *= (rng.random(q[:20].shape) < .6) | (q[:20] == q[:20].max(axis=1, keepdims=True))  # zeros, never all
  q /= q.sum(axis=1, keepdims=True)
  # r just under 1 rejects wherever anything does.
  x = np.argmax(q / p, axis=1)[:, None].astype(np.int32)
  n, weights = verify(np.stack([p, p], 1).astype(np.float32), q[:, None].astype(np.float32), x,
                      np.full((200, 1), 1 - 2**-23, np.float32))
  assert (np.asarray(n) == 0).all()
  weights = np.asarray(weights, np.float64)
  replaced = weights / weights.sum(axis=1, keepdims=True)
  accepted = np.minimum(p, q)
  np.testing.assert_allclose(accepted + (1 - accepted.sum(axis=1, keepdims=True)) * replaced, p, atol=1e-5)


@pytest.mark.parametrize('gamma', [1, 2, 3])
def test_joint_distribution_of_length_and_last_token(gamma):
  """Each (n, t) of a block against its exact probability: β's multiply, rows of p and q do not shift. γ = 3 has 16
  outcomes, 100 K trials; false alarm 1e-5."""
  v, rows = 4, 100_000
  rng = np.random.default_rng(gamma)
  p, q = rng.dirichlet(np.ones(v), gamma + 1), rng.dirichlet(np.ones(v), gamma)
  x = np.stack([rng.choice(v, rows, p=q_i) for q_i in q], axis=1).astype(np.int32)
  n, weights = verify(repeat(p, rows), repeat(q, rows), x, rng.random((rows, gamma), np.float32))
  t = np.asarray(draw(weights, rng.random((rows, 2), np.float32)))
  expected, reach = np.zeros((gamma + 1, v)), 1.0
  for i in range(gamma):
    expected[i] = reach * np.maximum(p[i] - q[i], 0)  # (1 − β) · residual / Σ residual, and Σ residual = 1 − β
    reach *= np.minimum(p[i], q[i]).sum()
  expected[gamma] = reach * p[gamma]
  counts = np.bincount(np.asarray(n) * v + t, minlength=expected.size)
  assert toys.chi_square(counts, expected) > toys.FALSE_ALARM


def test_draft_and_replacement_are_jointly_as_computed():
  """Joint outcomes (draft, what was emitted), 300 K trials: q(x) a(x) where they agree, q(x) (1 − a(x)) · residual
  where they do not. False alarm 1e-5."""
  rng, rows = np.random.default_rng(5), 300_000
  x = rng.choice(3, (rows, 1), p=Q).astype(np.int32)
  n, weights = verify(repeat([P, P], rows), repeat([Q], rows), x, rng.random((rows, 1), np.float32))
  out = np.where(np.asarray(n) == 1, x[:, 0], draw(weights, rng.random((rows, 2), np.float32)))
  # The docstring's example: token 0 passes with .2, the others always; the residual is [0, .3, .1].
  expected = np.diag(Q * [.2, 1, 1]) + np.outer(Q * [.8, 0, 0], [0, .75, .25])
  assert toys.chi_square(np.bincount(x[:, 0] * 3 + out, minlength=9), expected) > toys.FALSE_ALARM


@pytest.mark.parametrize('p', [[.2, .5, .3], [.2 - 1e-7, .5 - 1e-7, .3 - 1e-7]])
def test_an_empty_residual_follows_p(p):
  """Residual zero through rounding (p = q, forced rejection): p itself, no NaN."""
  weights = algorithm.replacement(repeat([p, [0, 0, 1]], 2), repeat([[.2, .5, .3]], 2), np.array([0, 1]))
  np.testing.assert_allclose(weights, [p, [0, 0, 1]], rtol=1e-6)


def test_identical_distributions_accept_everything():
  p = np.random.default_rng(0).dirichlet(np.ones(7), 64).astype(np.float32)
  for x in range(7):
    n, weights = verify(np.stack([p, p], 1), p[:, None], np.full((64, 1), x, np.int32),
                        np.full((64, 1), 1 - 2**-23, np.float32))
    assert (np.asarray(n) == 1).all()
    np.testing.assert_array_equal(weights, p)


@pytest.mark.parametrize('lenience', [1.0, .1])
def test_impossible_token_is_never_accepted(lenience):
  """Token with p = 0 accepted when r = 0 (also where q = 0, or nearly)."""
  for q_x in (1., .5, 1e-30, 0.):
    q = [q_x, 1 - q_x, 0]
    n, _ = verify(repeat([[0, .5, .5]] * 2, 1), repeat([q], 1), np.zeros((1, 1), np.int32),
                  np.zeros((1, 1), np.float32), lenience)
    assert n[0] == 0


def test_one_hot_distributions_accept_exactly_the_argmax():
  """T = 0 by the ratio of raw softmaxes: with one-hot p and q nothing is left to chance, whatever r is."""
  for r in (0, .5, 1 - 2**-23):
    for i, x in itertools.product(range(4), range(4)):
      n, weights = verify(one_hot([[i, 3]], 4), one_hot([[x]], 4), np.array([[x]]), np.full((1, 1), r, np.float32))
      assert n[0] == (i == x)
      np.testing.assert_array_equal(weights[0], one_hot(3 if i == x else i, 4))


@pytest.mark.parametrize('gamma', [1, 2, 5])
def test_next_token_is_of_the_right_row(gamma):
  """Wrong row of the verification logits: row i puts all mass on token 10 + i; drafts are right up to k."""
  v = 10 + gamma + 1
  for k in range(gamma + 1):
    x = 10 + np.arange(gamma)
    x[k:] = 3
    n, weights = verify(one_hot(10 + np.arange(gamma + 1), v)[None], one_hot(x, v)[None], x[None],
                        np.full((1, gamma), .5, np.float32))
    assert n[0] == k
    assert draw(weights, np.array([[.5, .5]], np.float32))[0] == 10 + k


def test_accepted_length_is_the_prefix():
  accepted = np.array(list(itertools.product([False, True], repeat=4)))
  expected = [next((i for i, a in enumerate(row) if not a), 4) for row in accepted]
  np.testing.assert_array_equal(algorithm.accepted_length(accepted), expected)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
@pytest.mark.parametrize('where', ['p', 'q'])
def test_a_broken_row_has_no_finite_weights(bad, where):
  """A NaN or +inf row turned into an ordinary token: its weights show it, the other row is unchanged."""
  p, q = np.array(repeat([P, P], 2)), np.array(repeat([Q], 2))
  (p if where == 'p' else q)[0] = bad if where == 'q' or np.isnan(bad) else [bad, np.nan, np.nan]
  x, r = np.zeros((2, 1), np.int32), np.full((2, 1), .9, np.float32)
  if np.isinf(bad):  # `sampling.adjust` makes NaN of an infinite logit
    p[0], q[0] = (np.nan if where == name else a[0] for name, a in (('p', p), ('q', q)))
  n, weights = verify(p, q, x, r)
  assert n[0] == 0 and not np.isfinite(np.sum(weights[0]))
  np.testing.assert_allclose(weights[1], [0, .3, .1], atol=1e-6)


def test_draw_inverts_the_cumulative_sum():
  """Every pair of uniforms on a fine grid, for sizes around its blocks: the share of each token is its weight."""
  grid = (np.arange(500) + .5) / 500
  u = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2).astype(np.float32)
  one = jax.jit(jax.vmap(algorithm.draw, in_axes=(None, 0)))
  for v in (1, 2, 3, 4, 5, 9, 17):
    weights = np.random.default_rng(v).dirichlet(np.ones(v)) * 3  # not normalised
    share = np.bincount(one(weights.astype(np.float32), u), minlength=v) / len(u)
    np.testing.assert_allclose(share, weights / 3, atol=8e-3)


@pytest.mark.parametrize('v', [3, 64, 1000])
def test_draw_never_gives_a_token_of_weight_zero(v):
  """Random sparse weights with u at 0, at the largest float below 1, and next to every step of the cumulative sum."""
  rng = np.random.default_rng(v)
  weights = rng.exponential(size=(2000, v)) ** 4 * (rng.random((2000, v)) < rng.random((2000, 1)))
  weights[np.arange(2000), rng.integers(0, v, 2000)] += 1e-3
  weights = weights.astype(np.float32)
  cumulative = np.cumsum(weights, axis=1, dtype=np.float64) / weights.sum(axis=1, keepdims=True, dtype=np.float64)
  at_step = cumulative[np.arange(2000), rng.integers(0, v, 2000)]
  last = 1 - 2**-23
  for u0 in (0, last, *(at_step + i * 2**-23 for i in range(-2, 3))):
    for u1 in (0, last, rng.random(2000)):
      u = np.stack(np.broadcast_arrays(np.clip(u0, 0, last), u1, np.zeros(2000))[:2], axis=-1).astype(np.float32)
      token = np.asarray(draw(weights, u))
      assert (weights[np.arange(2000), token] > 0).all()


def test_draw_from_one_token_of_many():
  """The last and the first id, and tiny totals: nothing is normalised."""
  for i in (0, 1, 32126, 32127):
    weights = np.zeros((3, 32128), np.float32)
    weights[:, i] = [1, 1e-30, 1e30]
    for u in (0, 1 - 2**-23):
      assert (np.asarray(draw(weights, np.full((3, 2), u, np.float32))) == i).all()


def test_flat_weights_are_drawn_flat():
  """Half-precision noise: 200 K draws of 32,128 equal weights. The mean id is within 5 standard errors of the middle
  (false alarm 6e-7), and 251 bins are equally full (1e-5)."""
  rng, rows, v = np.random.default_rng(9), 200_000, 32128
  u = (rng.integers(0, 2**23, (rows, 2)) / 2**23).astype(np.float32)
  ids = np.asarray(jax.jit(jax.vmap(algorithm.draw, in_axes=(None, 0)))(np.full(v, 1 / v, np.float32), u))
  assert abs(ids.mean() - (v - 1) / 2) < 5 * v / np.sqrt(12 * rows)
  assert toys.chi_square(np.bincount(ids // 128, minlength=251), np.full(251, 1 / 251)) > toys.FALSE_ALARM


@pytest.mark.parametrize('lenience', [.3, .7, 1.0])
def test_lenience_never_lifts_a_token_above_its_bound(lenience):
  """Appendix A.5: no token becomes more than 1 / l times as probable, and the acceptance rate is Σ min(q, p / l).
  200 K trials against the enumerated distribution; false alarm 1e-5."""
  rng = np.random.default_rng(3)
  for p, q in rng.dirichlet(np.ones(5), (100, 2)):
    assert (exact_output(p, q, lenience) <= p / lenience + 1e-12).all()
  expected = exact_output(P, Q, lenience)
  tokens = first_tokens(rng, P, Q, 200_000, lenience)
  assert toys.chi_square(np.bincount(tokens, minlength=3), expected) > toys.FALSE_ALARM
  r = ((np.arange(2000) + .5) / 2000)[:, None]
  rates = [np.mean(algorithm.accept(repeat([P, P], 2000), repeat([Q], 2000), np.full((2000, 1), x), r, lenience))
           for x in range(3)]
  assert abs(Q @ rates - theory.acceptance(P, Q, lenience)) < 1e-3


def test_lenience_may_differ_by_row():
  n, _ = verify(repeat([P, P], 2), repeat([Q], 2), np.zeros((2, 1), np.int32), np.full((2, 1), .5, np.float32),
                np.array([1., .3], np.float32))
  np.testing.assert_array_equal(n, [0, 1])  # .5 · 1 · .5 > .1 > .5 · .3 · .5
