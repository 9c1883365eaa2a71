"""Tests of speculative.theory against what the paper prints, and against enumeration and search."""
import doctest
import itertools

import numpy as np
import pytest

from speculative import theory
from speculative.report import tables

PAPER = tables.paper()


def enumerate_round(alpha, gamma):
  """Expected tokens of a round, by all outcomes of its γ tests: what is emitted, times how likely that is."""
  tokens = 0
  for accepted in itertools.product([True, False], repeat=gamma):
    probability = np.prod([alpha if a else 1 - alpha for a in accepted])
    n = (list(accepted) + [False]).index(False)
    tokens += probability * (n + 1)  # And the corrected or the bonus token.
  return tokens


@pytest.mark.parametrize('alpha', [0, 0.03, 0.5, 0.8, 0.99, 1])
@pytest.mark.parametrize('gamma', [0, 1, 2, 5, 8])
def test_expected_tokens_is_the_mean_over_all_outcomes(alpha, gamma):
  assert theory.expected_tokens(alpha, gamma) == pytest.approx(enumerate_round(alpha, gamma), rel=1e-12)


@pytest.mark.parametrize('below', [1e-3, 1e-8, 1e-12, 2.0 ** -53])
def test_expected_tokens_keeps_its_digits_near_one(below):
  alpha = 1 - below
  exact = sum(alpha ** i for i in range(8))  # No difference in it.
  assert theory.expected_tokens(alpha, 7) == pytest.approx(exact, rel=1e-14)


def test_arrays_broadcast_and_scalars_stay_scalars():
  alphas, gammas = np.array([[0.0], [0.8], [1.0]]), np.array([1, 5])
  tokens = theory.expected_tokens(alphas, gammas)
  np.testing.assert_allclose(tokens, [[1, 1], [1.8, 3.68928], [2, 6]])
  assert isinstance(theory.expected_tokens(0.8, 5), float)
  assert theory.best_gamma(alphas, np.array([0.1, 0.2])).shape == (3, 2)
  assert isinstance(theory.best_gamma(0.8, 0.1), int)


def test_a_round_at_alpha_08_gamma_5():
  assert theory.expected_tokens(0.8, 5) == pytest.approx(3.689, abs=5e-4)
  assert theory.accepted_over_drafted(0.8, 5) == pytest.approx(0.538, abs=5e-4)
  assert theory.speedup(0.8, 5, 0.05) == pytest.approx(2.951, abs=5e-4)


@pytest.mark.parametrize('alpha', [0, 0.4, 0.9, 1])
def test_accepted_over_drafted_is_what_is_left_of_the_tokens(alpha):
  assert theory.accepted_over_drafted(alpha, 7) == pytest.approx((enumerate_round(alpha, 7) - 1) / 7)


@pytest.mark.parametrize('row', PAPER['table1_operations_and_speed_at_c_0'])
def test_table_1(row):
  alpha, gamma = row['alpha'], row['gamma']
  assert theory.speedup(alpha, gamma, c=0) == pytest.approx(row['speed'], abs=0.00501)
  assert theory.operations_increase(alpha, gamma, c_hat=0) == pytest.approx(row['operations'], abs=0.00501)


def test_table_4():
  """The expectation that the paper prints (rounded), and that its measurements are near, if not equal."""
  c = PAPER['table4_cost_coefficient_c']
  assert theory.speedup(0.75, 7, c['T5-small']) == pytest.approx(3.2, abs=0.0501)
  for row in PAPER['table2_walltime_t5_xxl']:
    assert 0.6 < row['speed'] / theory.speedup(row['alpha'], row['gamma'], c[row['draft']]) < 1.35, row


def test_bigram_speedup():
  row, = PAPER['bigram_speed_at_c_0']
  assert theory.speedup(row['alpha'], row['gamma'], c=0) == pytest.approx(row['speed'], abs=0.00501)


def test_lenience_speedups():
  """Theorem 3.8 at the best γ with Table 5's α; the text of A.5 says about 2.5, 3.1, 3.6 and 5."""
  alphas = np.array(PAPER['table5_lenience_ende_t1']['T5-small'])
  speedups = theory.speedup(alphas, theory.best_gamma(alphas, 0.015), 0.015)
  np.testing.assert_allclose(speedups, [2.3, 2.9, 3.4, 4.8], atol=0.0501)


def test_speedup_with_measured_v():
  assert theory.speedup(0.8, 5, 0.05, v=1.75) == pytest.approx(theory.speedup(0.8, 5, 0.05) * 1.25 / 2)
  assert theory.speedup(0.8, 0, 0.05) == 1


def test_operations_count_the_draft():
  assert theory.operations_increase(0.8, 5, c_hat=0.1) == pytest.approx(6.5 / enumerate_round(0.8, 5))
  assert theory.operations_increase(1, 5, c_hat=0) == 1


@pytest.mark.parametrize('alpha', [0, 0.2, 0.62, 0.8, 0.95])
@pytest.mark.parametrize('c', [0.01, 0.1, 0.5, 2])
@pytest.mark.parametrize('v', [1.0, lambda gamma: 1 + 0.1 * gamma, 1 + 0.02 * np.arange(41) ** 2],
                         ids=['one', 'function', 'array'])
def test_best_gamma_by_search(alpha, c, v):
  def speed(gamma):
    cost = v(gamma) if callable(v) else v[gamma] if np.ndim(v) else v
    return enumerated[gamma] / (gamma * c + cost)

  enumerated = [sum(alpha ** i for i in range(gamma + 1)) for gamma in range(41)]
  best = theory.best_gamma(alpha, c, v, max_gamma=40)
  assert 1 <= best <= 40
  assert speed(best) == pytest.approx(max(speed(gamma) for gamma in range(1, 41)), rel=1e-12)


def test_best_gamma_at_its_limits():
  assert theory.best_gamma(0.99, c=0, max_gamma=10) == 10
  assert theory.best_gamma(1, c=0.5) == 64
  assert theory.best_gamma(0, c=0) == 1
  assert theory.best_gamma(0.05, c=0.5) == 1 and theory.speedup(0.05, 1, 0.5) < 1
  assert theory.best_gamma(0.99, c=0, v=[1, 1, 1]) == 2  # No v is known beyond.


def test_guaranteed_speedup():
  alphas, cs = np.meshgrid(np.linspace(0, 1, 21), np.linspace(0, 1.5, 16))
  best = theory.speedup(alphas, theory.best_gamma(alphas, cs), cs)
  guaranteed = theory.guaranteed_speedup(alphas, cs)
  assert np.all(np.where(alphas > cs, best, 1) >= guaranteed - 1e-12)
  assert np.all(best[alphas <= cs] <= 1 + 1e-12)  # Without α > c, none is to be had.
  assert theory.guaranteed_speedup(0.8, 0.2) == pytest.approx(1.5)
  assert theory.guaranteed_speedup(0.2, 0.2) == 1


def test_acceptance():
  p, q = np.array([[.1, .6, .3], [0, 0, 1]]), np.array([[.5, .3, .2], [.5, .5, 0]])
  np.testing.assert_allclose(theory.acceptance(p, q), [0.6, 0])
  np.testing.assert_allclose(theory.acceptance(p, q), 1 - np.abs(p - q).sum(-1) / 2)  # 1 − D_LK.
  np.testing.assert_allclose(theory.acceptance(p, q, lenience=0.5), [0.7, 0])
  assert theory.acceptance(p[0], p[0]) == pytest.approx(1)


@pytest.mark.parametrize('alpha', [-0.01, 1.01, np.nan, [0.5, 2]])
def test_refuses_alpha(alpha):
  for call in (lambda: theory.expected_tokens(alpha, 3), lambda: theory.speedup(alpha, 3, 0.1),
               lambda: theory.operations_increase(alpha, 3, 0.1), lambda: theory.best_gamma(alpha, 0.1),
               lambda: theory.accepted_over_drafted(alpha, 3), lambda: theory.guaranteed_speedup(alpha, 0.1)):
    with pytest.raises(ValueError, match='alpha'):
      call()


@pytest.mark.parametrize('call', [
    lambda: theory.expected_tokens(0.5, -1),
    lambda: theory.accepted_over_drafted(0.5, 0),
    lambda: theory.speedup(0.5, 3, -0.1),
    lambda: theory.speedup(0.5, 3, 0.1, v=0),
    lambda: theory.operations_increase(0.5, 3, -0.1),
    lambda: theory.guaranteed_speedup(0.5, -0.1),
    lambda: theory.best_gamma(0.5, -0.1),
    lambda: theory.best_gamma(0.5, 0.1, max_gamma=0),
    lambda: theory.best_gamma(0.5, 0.1, v=[1]),
    lambda: theory.acceptance([0.5, 0.5], [1.0]),
    lambda: theory.acceptance([0.5, np.nan], [0.5, 0.5]),
    lambda: theory.acceptance([1.0], [1.0], lenience=0),
])
def test_refuses_what_is_out_of_range(call):
  with pytest.raises(ValueError):
    call()


def test_docstrings():
  failed, attempted = doctest.testmod(theory)
  assert attempted and not failed
