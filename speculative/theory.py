"""The paper's analysis (Sections 3.1–3.5, Appendix A.5), in its own terms.

  alpha  expected acceptance rate, E[β], in [0, 1]
  gamma  tokens that the draft proposes in a round; 0 is plain decoding
  c      time of one step of the draft / time of one step of the target
  c_hat  arithmetic operations of the draft / of the target, per token
  v      time of the target on γ+1 tokens / on one; the paper takes 1

Arguments may be arrays, which broadcast. Everything is computed in float64. The acceptances β of a round are taken to
be independent, as in the paper.
"""
import numpy as np


def _check(name, value, minimum, maximum=np.inf):
  """`value` as a float64 array; ValueError for what is below, above or not a number."""
  value = np.asarray(value, np.float64)
  if not np.all((value >= minimum) & (value <= maximum)):
    limits = f'at least {minimum}' if maximum == np.inf else f'between {minimum} and {maximum}'
    raise ValueError(f'{name} must be {limits}, got {value}')
  return value


def acceptance(p, q, lenience=1.0):
  """β, the probability that the target's distribution accepts a token drawn from the draft's (Theorem 3.5, A.5).

  β = Σ_x min(q(x), p(x) / lenience); without lenience that is 1 − D_LK(p, q). Its mean over prefixes is α.

  >>> float(acceptance([.1, .6, .3], [.5, .3, .2]).round(6))
  0.6

  Args:
    p: target's distribution, float[..., V].
    q: draft's distribution, float[..., V].
    lenience: in (0, 1]; 1 is exact.

  Returns:
    float64[...].

  Raises:
    ValueError: shapes that differ in V, a negative probability or a NaN, a lenience out of range.
  """
  p, q = _check('p', p, 0), _check('q', q, 0)
  if not p.ndim or not q.ndim or p.shape[-1] != q.shape[-1]:
    raise ValueError(f'p and q must share their last axis, got the shapes {p.shape} and {q.shape}')
  if not 0 < lenience <= 1:
    raise ValueError(f'lenience must be in (0, 1], got {lenience}')
  return np.minimum(q, p / lenience).sum(-1)


def expected_tokens(alpha, gamma):
  """E[tokens a round] = (1 − α^(γ+1)) / (1 − α), between 1 and γ+1 (Equation 1); α = 1 gives γ+1.

  ValueError for alpha outside [0, 1] or gamma < 0.
  """
  alpha, gamma = _check('alpha', alpha, 0, 1), _check('gamma', gamma, 0)
  below_one = np.where(alpha < 1, alpha, 0)
  with np.errstate(divide='ignore'):  # α = 0: log is −inf, its power 0.
    # Near α = 1, the difference 1 − α^(γ+1) would have lost most of its digits.
    tokens = -np.expm1((gamma + 1) * np.log(below_one)) / (1 - below_one)
  return np.where(alpha < 1, tokens, gamma + 1)[()]


def accepted_over_drafted(alpha, gamma):
  """Expected fraction of the drafted tokens that is accepted, (E[tokens] − 1) / γ.

  It is not α: what follows a rejected token counts as drafted, too. ValueError as above, and for gamma < 1.
  """
  gamma = _check('gamma', gamma, 1)
  return alpha * expected_tokens(alpha, gamma - 1) / gamma


def speedup(alpha, gamma, c, v=1.0):
  """Expected speed-up over plain decoding, (1 − α^(γ+1)) / ((1 − α)(γc + v)) (Theorem 3.8, which has v = 1).

  ValueError for alpha outside [0, 1], gamma < 0, c < 0, or v that is not positive.
  """
  gamma, c, v = _check('gamma', gamma, 0), _check('c', c, 0), _check('v', v, 0)
  if not np.all(v > 0):
    raise ValueError(f'v must be positive, got {v}')
  return expected_tokens(alpha, gamma) / (gamma * c + v)


def guaranteed_speedup(alpha, c):
  """Speed-up that the best γ reaches at least: (1 + α) / (1 + c), if α > c; else 1, plain decoding (Corollary 3.9).

  The former is what γ = 1 gives, with v = 1. ValueError for alpha outside [0, 1] or c < 0.
  """
  alpha, c = _check('alpha', alpha, 0, 1), _check('c', c, 0)
  return np.where(alpha > c, (1 + alpha) / (1 + c), 1.0)[()]


def operations_increase(alpha, gamma, c_hat):
  """Factor by which the arithmetic operations grow, (1 − α)(γĉ + γ + 1) / (1 − α^(γ+1)) (Theorem 3.11).

  ValueError for alpha outside [0, 1], gamma < 0 or c_hat < 0.
  """
  gamma, c_hat = _check('gamma', gamma, 0), _check('c_hat', c_hat, 0)
  return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha, c, v=1.0, max_gamma=64):
  """The γ in 1 … max_gamma with the highest expected speed-up (Section 3.5), the smallest of equals.

  Never 0, because decoding needs γ ≥ 1: whether it helps at all, `speedup(alpha, gamma, c, v) > 1` tells. With c = 0
  a longer draft costs nothing, and the answer is max_gamma or where float64 sees no more gain.

  Args:
    alpha: float, or an array.
    c: float, or an array that broadcasts with alpha.
    v: a number; or a function of γ; or a sequence indexed by γ (v[0] = 1: the target on one token), which then also
      limits γ to its end.
    max_gamma: int, at least 1.

  Returns:
    int, or an array of them in the broadcast shape of alpha and c.

  Raises:
    ValueError: alpha outside [0, 1], c < 0, v not positive, max_gamma < 1 or a v without an entry for γ = 1.
  """
  if not callable(v) and np.ndim(v):
    max_gamma = min(max_gamma, len(v) - 1)
  if max_gamma < 1:
    raise ValueError(f'max_gamma and the last γ of v must be at least 1, got {max_gamma}')
  gammas = np.arange(1, max_gamma + 1)
  if callable(v):
    v = np.array([v(int(gamma)) for gamma in gammas])
  elif np.ndim(v):
    v = np.asarray(v)[gammas]
  speedups = speedup(np.asarray(alpha)[..., None], gammas, np.asarray(c)[..., None], v)
  best = gammas[np.argmax(speedups, axis=-1)]
  return best if best.ndim else int(best)
