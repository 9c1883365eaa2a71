"""Algorithm 1 of the paper, as pure functions of p, q, x and uniform random numbers.

One round: the draft model has drawn x_1 … x_γ from q_1 … q_γ; the target has given p_1 … p_{γ+1} for the γ + 1
prefixes. `verify` says how many drafts stand and from what the next token is drawn; `draw` draws it. Whatever was done
to the logits (temperature, top-k, argmax) is already in p and q (section 2.2, "standardized sampling").

Shapes: B rows, γ drafts, V tokens; everything is float32.
"""
from jax import lax
import jax.numpy as jnp


def verify(p, q, x, r, lenience=1.0):
  """The accept–reject half of Algorithm 1.

  Args:
    p: [B, γ+1, V], the target's distributions p_1 … p_{γ+1}.
    q: [B, γ, V], the distributions that the drafts were drawn from.
    x: int32[B, γ], the drafts.
    r: [B, γ], uniform in [0, 1), independent of the drafts.
    lenience: l in (0, 1], number or [B]; 1 is exact (appendix A.5).

  Returns:
    n: int32[B], the number of accepted drafts.
    weights: [B, V], not normalised: the next token's distribution, p_{n+1} − q_{n+1} where positive after a
      rejection and p_{γ+1} after none.

  Example: p = [.1, .6, .3] and q = [.5, .3, .2]: token 0 is accepted with probability .2, tokens 1 and 2 always; a
  rejection, always of token 0, is replaced from [0, .3, .1], so that token 1 has probability .3 + .4 · .75 = .6.
  """
  n = accepted_length(accept(p, q, x, r, lenience))
  return n, replacement(p, q, n)


def accept(p, q, x, r, lenience=1.0):
  """bool[B, γ]: r · l · q(x) < p(x). Strict, so that a token with p = 0 never passes."""
  p_x = jnp.take_along_axis(p[:, :-1], x[..., None], axis=-1)[..., 0]
  q_x = jnp.take_along_axis(q, x[..., None], axis=-1)[..., 0]
  return r * jnp.reshape(lenience, (-1, 1)) * q_x < p_x


def accepted_length(accepted):
  """bool[B, γ] → n int32[B], the length of the accepted prefix."""
  return jnp.sum(jnp.cumprod(accepted, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def replacement(p, q, n):
  """[B, V], not normalised: what the token after n accepted drafts is drawn from."""
  q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))  # q_{γ+1} = 0: nothing was drafted there, the residual is p itself
  p_n = jnp.take_along_axis(p, n[:, None, None], axis=1)[:, 0]
  q_n = jnp.take_along_axis(q, n[:, None, None], axis=1)[:, 0]
  residual = jnp.maximum(p_n - q_n, 0.0)
  # p = q leaves nothing to draw from, and then a rejection can only be rounding: follow p.
  total = jnp.sum(residual, axis=-1, keepdims=True)
  return jnp.where(total == 0, p_n, residual)


def draw(weights, u):
  """Draws from a distribution by inverting its cumulative sum, in two levels: a block of tokens, then a token.

  Two uniforms of 23 bits each resolve probabilities far below what one could, and no random number is spent a token.
  A token of weight 0 is never drawn.

  Args:
    weights: [..., V], ≥ 0, not normalised.
    u: [..., 2], uniform in [0, 1).

  Returns:
    int32[...].
  """
  size = weights.shape[-1]
  block = 1 << max(0, (size - 1).bit_length() + 1) // 2  # about √V
  padding = -size % block
  weights = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, padding)])
  blocks = weights.reshape(*weights.shape[:-1], -1, block)
  i = _invert(jnp.sum(blocks, axis=-1), u[..., 0])
  j = _invert(jnp.take_along_axis(blocks, i[..., None, None], axis=-2)[..., 0, :], u[..., 1])
  return i * block + j


def _invert(weights, u):
  """The first index of positive weight at which the cumulative sum passes u · total: int32[...] of weights[..., K]."""
  size = weights.shape[-1]
  index = jnp.arange(size, dtype=jnp.int32)
  cumulative = jnp.dot(weights, jnp.triu(jnp.ones((size, size), weights.dtype)), precision=lax.Precision.HIGHEST)
  passed = (weights > 0) & (cumulative > u[..., None] * cumulative[..., -1:])
  # Rounding may carry u · total up to the total itself: then nothing passes, and the last of positive weight is drawn.
  last = jnp.max(jnp.where(weights > 0, index, 0), axis=-1)
  return jnp.min(jnp.where(passed, index, last[..., None]), axis=-1)
