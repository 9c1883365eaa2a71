"""T5's attention: relative-position bias by absolute position, and attention over keys of any origin."""
import math

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

MASKED = -1e30  # finite: a row with nothing to see becomes uniform, not NaN


def relative_buckets(distance, bidirectional, num_buckets=32, max_distance=128):
  """Bucket of each relative position (Raffel et al. 2020, section 2.1).

  Args:
    distance: int32[...], key position − query position.
    bidirectional: encoder (True): half of the buckets for keys ahead; decoder (False): keys ahead share bucket 0.

  Returns:
    int32[...] in [0, num_buckets).
  """
  if bidirectional:
    num_buckets //= 2
    offset = jnp.where(distance > 0, num_buckets, 0)
    distance = jnp.abs(distance)
  else:
    offset = 0
    distance = jnp.maximum(-distance, 0)
  # Small distances have a bucket each; larger ones share logarithmic buckets. The edges are found once, with
  # integers compared, so that no device's logarithm can move them.
  exact = num_buckets // 2
  edges = _log_bucket_edges(num_buckets, exact, max_distance)
  far = exact + jnp.sum(distance[..., None] >= edges, axis=-1, dtype=jnp.int32)
  return offset + jnp.where(distance < exact, distance, far)


def _log_bucket_edges(num_buckets, exact, max_distance):
  """int32[num_buckets − exact − 1]: the smallest distance of each logarithmic bucket but the first."""
  d = np.arange(1, max_distance + 1, dtype=np.float32)
  scale = np.float32(math.log(max_distance / exact))
  bucket = exact + (np.log(d / np.float32(exact)) / scale * np.float32(num_buckets - exact)).astype(np.int32)
  bucket = np.minimum(bucket, num_buckets - 1)
  return np.array([d[bucket >= b][0] for b in range(exact + 1, num_buckets)], np.int32)


def relative_bias(table, query_positions, key_positions, bidirectional, max_distance=128):
  """Additive attention bias.

  Args:
    table: [num_buckets, heads].
    query_positions: int32[B, T] (B may be 1).
    key_positions: int32[S].

  Returns:
    float32[B, heads, T, S].
  """
  distance = key_positions[None, None, :] - query_positions[:, :, None]
  buckets = relative_buckets(distance, bidirectional, table.shape[0], max_distance)
  return jnp.moveaxis(table.astype(jnp.float32)[buckets], -1, 1)


def attend(q, k, v, bias=None, mask=None, dropout=None):
  """softmax(q k + bias) v, without T5's absent 1/√head_size. Softmax in float32.

  Args:
    q: [B, heads, T, head_size].
    k: [B, heads, head_size, S]: the layout in which the product needs no transposition.
    v: [B, heads, S, head_size].
    bias: float32, broadcastable to [B, heads, T, S], or None.
    mask: bool, broadcastable to [B, heads, T, S], True where a key may be seen; or None.
    dropout: function applied to the attention weights, or None.

  Returns:
    float32[B, T, heads × head_size].
  """
  precision = lax.Precision.HIGHEST if k.dtype == jnp.float32 else None
  scores = jnp.einsum('bhtd,bhds->bhts', q.astype(k.dtype), k, precision=precision,
                      preferred_element_type=jnp.float32)
  if bias is not None:
    scores += bias
  if mask is not None:
    scores = jnp.where(mask, scores, MASKED)
  weights = jax.nn.softmax(scores, axis=-1)
  if dropout is not None:
    weights = dropout(weights)
  # Transposed afterwards: as one einsum XLA:CPU takes a path that is three times as slow for a few queries.
  out = jnp.einsum('bhts,bhsd->bhtd', weights.astype(v.dtype), v, precision=precision,
                   preferred_element_type=jnp.float32).swapaxes(1, 2)
  return out.reshape(*out.shape[:2], -1)
