"""Checks of what a caller passes, before anything is compiled."""
import jax
import jax.numpy as jnp
import numpy as np


def prepare(target, inputs, max_decode_len, seed, row_ids):
  """Checks a token batch and makes the rows' keys.

  Args:
    target: with vocab_size and pad_id, and perhaps check_inputs(inputs, max_decode_len), which may refuse them.
    inputs: int[B, S].
    max_decode_len: int.
    seed: int in [0, 2³²), or [B].
    row_ids: int[B] in [0, 2³²), or None for 0 … B − 1.

  Returns:
    (inputs int32[B, S], PRNG keys [B]: threefry whatever JAX's default is, so that rows are independent under vmap).

  Raises:
    ValueError: a wrong shape or type, an id outside the vocabulary, a seed or row id out of range.
  """
  inputs = np.asarray(inputs)
  if inputs.ndim != 2 or 0 in inputs.shape or not np.issubdtype(inputs.dtype, np.integer):
    raise ValueError(f'inputs must be a non-empty integer array [B, S]; got {inputs.dtype}{list(inputs.shape)}')
  bad = (inputs < 0) | (inputs >= target.vocab_size)
  if bad.any():
    b, i = np.argwhere(bad)[0]
    raise ValueError(f'inputs[{b}, {i}] = {inputs[b, i]} is no token id: the vocabulary has {target.vocab_size}')
  if hasattr(target, 'check_inputs'):
    target.check_inputs(inputs, max_decode_len)
  batch = inputs.shape[0]
  seeds = _unsigned('seed', seed, batch)
  row_ids = _unsigned('row_ids', np.arange(batch) if row_ids is None else row_ids, batch)
  return jnp.asarray(inputs, jnp.int32), _row_keys(seeds, row_ids)


@jax.jit
def _row_keys(seeds, row_ids):
  return jax.vmap(lambda seed, row: jax.random.fold_in(jax.random.key(seed, impl='threefry2x32'), row))(seeds, row_ids)


def _unsigned(name, value, batch):
  value = np.asarray(value)
  if value.shape not in ((), (batch,)) or not np.issubdtype(value.dtype, np.integer):
    raise ValueError(f'{name} must be an integer, or one for each of the {batch} rows; got {value.dtype}'
                     f'{list(value.shape)}')
  if (value < 0).any() or (value >= 2**32).any():
    raise ValueError(f'{name} must be in [0, 2**32)')
  return np.broadcast_to(value, (batch,)).astype(np.uint32)
