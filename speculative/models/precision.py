"""Matrix products: operands in the weights' (or a chosen) dtype, sums in float32."""
import contextlib
import functools

import jax
from jax import lax
from jax.experimental import layout
import jax.numpy as jnp


_compiled_for = None


@contextlib.contextmanager
def compiling_for(name):
  """What is traced inside is for another platform ('tpu') than this process's. JAX keeps traces: one platform a process."""
  global _compiled_for
  _compiled_for = name
  try:
    yield
  finally:
    _compiled_for = None


def platform():
  """Where what is traced now will run: 'cpu', 'gpu' or 'tpu'."""
  return _compiled_for or jax.default_backend()


def matmul(x, weight, dtype=None):
  """x[..., K] @ weight[K, N] → float32[..., N].

  Operands are rounded to `dtype` (default: the weight's own), products are summed in float32, in the backward pass
  too. In float32 the product is a true float32 one on every device (TPUs and GPUs would otherwise round).
  """
  dtype = jnp.dtype(dtype or weight.dtype)
  if dtype == jnp.float32:
    return jnp.dot(x, weight.astype(dtype), precision=lax.Precision.HIGHEST)
  rows = x.reshape(-1, x.shape[-1])
  # XLA:CPU would convert all weights to float32 for a single row; two rows take native instructions. On a TPU eight rows
  # cost what one costs, but XLA wants the weights of one, of two and of eight laid out differently, and lays them out
  # anew in every round where the draft loop has both.
  multiple = {'cpu': 2 if len(rows) == 1 else 1, 'tpu': 8}.get(platform(), 1)
  padded = jnp.pad(rows, ((0, -len(rows) % multiple), (0, 0)))
  y = _mixed(padded, weight, dtype)
  if len(padded) > len(rows):
    y = lax.optimization_barrier(y)[:len(rows)]  # or XLA would leave the padding out
  return y.reshape(*x.shape[:-1], weight.shape[-1])


def take_rows(table, ids):
  """table[ids] in float32: [..., D] of table[N, D], int32[...]."""
  rows = _take_bits(table, ids) if table.dtype == jnp.bfloat16 and platform() == 'cpu' else table[ids]
  return rows.astype(jnp.float32)


@jax.custom_jvp
def _take_bits(table, ids):
  """table[ids] by way of integers: XLA:CPU would convert the whole bfloat16 table to float32 for every gather."""
  return lax.bitcast_convert_type(lax.bitcast_convert_type(table, jnp.uint16)[ids], table.dtype)


@_take_bits.defjvp
def _take_bits_jvp(primals, tangents):
  return _take_bits(*primals), tangents[0][primals[1]]


def cpu_is_fast_in_bfloat16():
  """Whether this machine's CPU multiplies bfloat16 natively; without, float32 is many times as fast."""
  try:
    with open('/proc/cpuinfo') as f:
      return not {'avx512_bf16', 'amx_bf16'}.isdisjoint(f.read().split())
  except OSError:
    return False


# JAX's own derivative multiplies a float32 cotangent with a rounded operand, which no matrix unit does natively.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _mixed(x, weight, dtype):
  return _mixed_forward(x, weight, dtype)[0]


def _mixed_forward(x, weight, dtype):
  low = x.astype(dtype), weight.astype(dtype)
  # Two empty arrays carry the dtypes that the cotangents must have.
  return jnp.dot(*low, preferred_element_type=jnp.float32), (*low, jnp.zeros(0, x.dtype), jnp.zeros(0, weight.dtype))


def _mixed_backward(dtype, residuals, g):
  x, weight, like_x, like_weight = residuals
  g = g.astype(dtype)
  dx = lax.dot_general(g, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
  # Really transposed, not by a layout: XLA:CPU's fast low-precision product wants x's contracted axis last in memory
  # (7 times as fast, measured with AMX).
  transposed = layout.with_layout_constraint(x.T, layout.Layout(major_to_minor=(0, 1)))
  dweight = jnp.dot(transposed, g, preferred_element_type=jnp.float32)
  return dx.astype(like_x.dtype), dweight.astype(like_weight.dtype)


_mixed.defvjp(_mixed_forward, _mixed_backward)
