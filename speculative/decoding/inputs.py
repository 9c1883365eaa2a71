"""Checks of what a caller passes, before anything is compiled."""
import jax
import jax.numpy as jnp
import numpy as np

from speculative.decoding.config import check_config


def prepare(target, inputs, config, seed=0, row_ids=None, drafter=None):
  """Checks a token batch, and makes the rows' settings and keys.

  Args:
    target: with vocab_size and pad_id, and perhaps check_inputs(inputs, lengths), which may refuse inputs [B, S] that
      up to lengths [B] tokens follow.
    inputs: int[B, S].
    config: `DecodeConfig`.
    seed: int in [0, 2³²), or [B].
    row_ids: int[B] in [0, 2³²), or None for 0 … B − 1.
    drafter: its check_inputs is asked too.

  Returns:
    (inputs int32[B, S], `RowSettings`, PRNG keys [B]: threefry whatever JAX's default is, so that rows are independent
    under vmap).

  Raises:
    TypeError: `config` is none; inputs of a function that JAX is tracing.
    ValueError: a wrong shape or type, an id outside the vocabulary, a seed or row id out of range.
  """
  check_config(config)
  if isinstance(inputs, jax.core.Tracer):
    raise TypeError('inputs are traced: decoding checks its inputs and compiles by itself; call it outside of jit')
  try:
    inputs = np.asarray(inputs)
  except ValueError:  # NumPy's for rows of several lengths
    raise ValueError('inputs must be an integer array [B, S]: fill shorter rows up with pad_id '
                     f'({target.pad_id}) at the end') from None
  if inputs.ndim != 2 or 0 in inputs.shape or not np.issubdtype(inputs.dtype, np.integer):
    raise ValueError(f'inputs must be a non-empty integer array [B, S]; got {inputs.dtype}{list(inputs.shape)}')
  bad = (inputs < 0) | (inputs >= target.vocab_size)
  if bad.any():
    b, i = np.argwhere(bad)[0]
    raise ValueError(f'inputs[{b}, {i}] = {inputs[b, i]} is no token id: the vocabulary has {target.vocab_size}')
  batch = inputs.shape[0]
  settings = config.rows(target, batch)
  for model in (target, drafter):
    if hasattr(model, 'check_inputs'):
      model.check_inputs(inputs, settings.max_decode_len)
  row_ids = np.arange(batch) if row_ids is None else row_ids
  if np.ndim(row_ids) == 0:
    raise ValueError(f'row_ids = {row_ids!r}: give one for each of the {batch} rows; equal ids draw equal numbers')
  row_keys = _row_keys(_unsigned('seed', seed, batch), _unsigned('row_ids', row_ids, batch))
  return jnp.asarray(inputs, jnp.int32), settings, row_keys


@jax.jit
def _row_keys(seeds, row_ids):
  return jax.vmap(lambda seed, row: jax.random.fold_in(jax.random.key(seed, impl='threefry2x32'), row))(seeds, row_ids)


def _unsigned(name, value, batch):
  # A key that jax.random.PRNGKey made would pass as two seeds.
  if isinstance(value, jax.Array) and (
      jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) or (value.dtype, value.shape) == (jnp.uint32, (2,))):
    raise ValueError(f'{name} is a JAX random key: give an integer, or one for each of the {batch} rows (as NumPy array)')
  value = np.asarray(value)
  if value.shape not in ((), (batch,)) or not np.issubdtype(value.dtype, np.integer):
    raise ValueError(f'{name} must be an integer, or one for each of the {batch} rows; got {value.dtype}'
                     f'{list(value.shape)}')
  if (value < 0).any() or (value >= 2**32).any():
    raise ValueError(f'{name} must be in [0, 2**32)')
  return np.broadcast_to(value, (batch,)).astype(np.uint32)
