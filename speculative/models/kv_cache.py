"""The key/value cache: one pair of arrays a layer, batch first, written in place at per-row positions."""
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from speculative.models import precision


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """What a decoder keeps between calls.

  Slots at or beyond a row's length may hold anything: no query sees them. Rolling back is using a smaller position.

  Attributes:
    self_kv: for each decoder layer (k, v): [B, heads, head_size, max_len] and [B, heads, max_len, head_size].
    cross_kv: for each decoder layer (k, v) of the encoder's output, likewise with S slots; () without encoder.
    encoder_mask: bool[B, S], False at padding; None without encoder.
  """
  self_kv: tuple
  cross_kv: tuple = ()
  encoder_mask: jax.Array | None = None


def storage_dtype(dtype):
  """What keys and values of a model in `dtype` are kept in: float32 on CPUs, where XLA would convert a whole bfloat16
  cache at every step; `dtype` itself elsewhere."""
  return jnp.dtype(jnp.float32 if precision.platform() == 'cpu' else dtype)


def empty(batch, layers, heads, max_len, head_size, dtype):
  """`layers` pairs of zero arrays, shaped as `KVCache.self_kv` has them; one slot more, see `write`."""
  slots = max_len + 1
  shapes = (batch, heads, head_size, slots), (batch, heads, slots, head_size)
  return tuple(tuple(jnp.zeros(shape, dtype) for shape in shapes) for _ in range(layers))


def write(cache, k, v, positions):
  """Writes new keys and values at slots positions[b] … positions[b] + T − 1.

  Args:
    cache: one layer's (k, v).
    k: [B, heads, head_size, T].
    v: [B, heads, T, head_size].
    positions: int32[B]; positions[b] + T must be ≤ max_len (the caller's buffers have room, nothing is clamped).

  Returns:
    (k, v), all slots.

  A single token is written twice, at its slot and at the next, which is beyond the row's length. Otherwise XLA:CPU fuses
  the update into its users, once for each, and copies the whole cache for every one of them at every step.
  """
  if k.shape[3] == 1:
    k, v = jnp.concatenate([k, k], axis=3), jnp.concatenate([v, v], axis=2)
  return _write(cache[0], k, positions, 3), _write(cache[1], v, positions, 2)


def _write(cache, new, positions, axis):
  new = new.astype(cache.dtype)
  if cache.shape[0] == 1:  # a plain slice update; the batched one becomes a scatter
    return lax.dynamic_update_slice_in_dim(cache, new, positions[0], axis)
  return jax.vmap(lambda c, n, p: lax.dynamic_update_slice_in_dim(c, n, p, axis - 1))(cache, new, positions)
