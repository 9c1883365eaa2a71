"""Programs compiled ahead of time for TPUs that need not be there: memory, operations, and what the roofline makes of them.

libtpu (`pip install -e '.[tpu]'`) compiles on any Linux machine. Nothing is run: times are bounds, bytes over bandwidth or
operations over peak, whichever takes longer, without what launching and collectives cost. Bytes are those of the weights
and caches that a step must read. XLA's own count of bytes is no measure: what is fetched to the chip's inner memory before
it is used counts three times.
"""
import dataclasses
import functools
import math
import os
import time
from typing import Any, NamedTuple

from flax import traverse_util
import jax
from jax.experimental import topologies
import jax.numpy as jnp
import numpy as np

from speculative import sharding
from speculative.checkpoints import huggingface
from speculative.decoding import inputs as decode_inputs
from speculative.decoding import speculative as loop
from speculative.decoding.config import DecodeConfig
from speculative.decoding.targets import Drafter
from speculative.decoding.targets import Target
from speculative.drafters.base import NoDrafter
from speculative.drafters.base import as_drafter
from speculative.measure import program as programs
from speculative.measure import walltime
from speculative.models import precision
from speculative.models import t5
from speculative.models.model import Model


class Chip(NamedTuple):
  """Published figures of one chip (Google Cloud's TPU pages): bytes/s, bfloat16 operations/s, bytes."""
  bandwidth: float
  peak: float
  memory: float


CHIPS = {
    'v4': Chip(1228e9, 275e12, 32 * 2**30),
    'v5e': Chip(819e9, 197e12, 16 * 2**30),
    'v5p': Chip(2765e9, 459e12, 95 * 2**30),
    'v6e': Chip(1640e9, 918e12, 32 * 2**30),
}


class Topology(NamedTuple):
  """Devices to compile for, and what one of them has (a v4 or v5p chip may be two devices).

  Attributes:
    name: 'v4:2x2x1': generation and chips.
    devices: tuple of devices.
    chips: how many these are.
    chip: `Chip`, a device's share of one.
  """
  name: str
  devices: tuple
  chips: int
  chip: Chip


def topology(name):
  """The devices of 'v4:2x2x1'. ValueError for another form or generation; RuntimeError without libtpu."""
  kind, _, shape = name.partition(':')
  if kind not in CHIPS or not shape.replace('x', '').isdigit():
    raise ValueError(f'topology {name!r}: write GENERATION:CHIPS, as v4:2x2x1; generations are {", ".join(CHIPS)}')
  chips = math.prod(int(n) for n in shape.split('x'))
  for key, value in (('TPU_SKIP_MDS_QUERY', '1'), ('TPU_WORKER_HOSTNAMES', 'localhost'), ('TPU_ACCELERATOR_TYPE', 'v4-8'),
                     ('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')):
    os.environ.setdefault(key, value)  # no metadata server is asked
  one = {'chips_per_host_bounds': (1, 1, 1)} if chips == 1 else {}
  try:
    devices = topologies.get_topology_desc(platform='tpu', topology_name=name, **one).devices
  except Exception as e:  # JAX has a kind of its own for each cause
    raise RuntimeError(f"no TPU compiler for {name} ({str(e).splitlines()[0]}): pip install -e '.[tpu]'") from e
  share = chips / len(devices)
  return Topology(name, tuple(devices), chips, Chip(*(share * figure for figure in CHIPS[kind])))


@dataclasses.dataclass(frozen=True)
class Cost:
  """What a compiled program takes on each device.

  Attributes:
    compile_seconds: tracing apart.
    arguments, temporaries: bytes; of the outputs only what is not written into arguments.
    aliased: bytes of outputs that are.
    bytes: of the arguments; of a single model's but the embedding, of which rows are read.
    flops: by XLA's count (a loop's body once).
    loop_copies: copies of 64 K elements or more inside loops.
    host_transfers: infeeds, outfeeds, sends and receives.
    formats: how the parameters should be laid out (`jax.experimental.layout.Format`).
  """
  compile_seconds: float
  arguments: int
  temporaries: int
  aliased: int
  bytes: float
  flops: float
  loop_copies: list
  host_transfers: int
  formats: Any

  def seconds(self, chip):
    """The roofline's bound."""
    return max(self.bytes / chip.bandwidth, self.flops / chip.peak)


def abstract_model(config, mesh, dtype=jnp.bfloat16):
  """A `Model` whose parameters are shapes with shardings (`sharding.param_shardings`), no arrays."""
  shapes = huggingface.shapes_of(t5.init_params, config)
  where = sharding.param_shardings(config, shapes, mesh)
  leaves = {path: jax.ShapeDtypeStruct(shape, dtype, sharding=where[path]) for path, shape in shapes.items()}
  return Model(config, traverse_util.unflatten_dict(leaves, sep='/'))


def device_bytes(tree):
  """Bytes on one device of arrays or shapes with shardings."""
  return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
             if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def compile_for_tpu(function, static, params, *arguments, donate=None):
  """Compiles with parameters in the layout that XLA likes best: then nothing is laid out anew when it is called.

  Args:
    function: of (*static, params, *arguments).
    params: shapes with shardings, or a tuple of such trees.
    arguments: shapes with shardings.
    donate: which of the arguments (0: params) is donated.

  Returns:
    `Cost`.
  """
  n = len(static)
  jitted = jax.jit(getattr(function, '__wrapped__', function), static_argnums=tuple(range(n)),
                   in_shardings=(sharding.best_layouts(params), *[None] * len(arguments)), donate_argnums=() if donate is None else n + donate)
  with precision.compiling_for('tpu'):
    lowered = jitted.lower(*static, params, *arguments)
  start = time.perf_counter()
  compiled = lowered.compile()
  seconds = time.perf_counter() - start
  memory, text = compiled.memory_analysis(), compiled.as_text()
  rows_only = 0 if isinstance(params, tuple) else device_bytes(params['embedding'])
  return Cost(
      seconds, memory.argument_size_in_bytes,
      memory.temp_size_in_bytes + max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes),
      memory.alias_size_in_bytes, memory.argument_size_in_bytes - rows_only, compiled.cost_analysis()['flops'],
      programs.loop_copies(text, 1 << 16), sum(text.count(f' {name}(') for name in ('infeed', 'outfeed', 'send', 'recv')),
      compiled.input_formats[0][0])


def plain_step(model, mesh, length, batch=1):
  """`Cost` of one step of plain decoding behind an input, in a cache, of `length` tokens each."""
  return Decoding(model, None, mesh, DecodeConfig(max_decode_len=length), length, batch).verification(0)


class Decoding:
  """Prefill, the speculative loop and its single steps, compiled for a mesh.

  Args:
    target, draft: of `abstract_model`, on the same devices.
    mesh: the target's.
    config: `DecodeConfig`.
    input_len, batch: of the inputs.
  """

  def __init__(self, target, draft, mesh, config=DecodeConfig(), input_len=128, batch=1):
    self._replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    drafter = NoDrafter if draft is None else as_drafter(draft)
    self.params = target.params, drafter.params
    layout = sharding.Layout(mesh, (_is_split(target.params), _is_split(drafter.params)))
    self.program = loop.Program(Target.of(target), Drafter.of(drafter), 0 if draft is None else config.gamma,
                                config.max_decode_len, config.filtered, layout)
    inputs, settings, keys = decode_inputs.prepare(target, np.ones((batch, input_len), np.int32), config, 0, None, drafter)
    self._settings, *self._prefilled = self._abstract((settings, inputs, keys))
    with precision.compiling_for('tpu'):
      state = jax.eval_shape(functools.partial(loop.prefill, self.program), self.params, self._settings, *self._prefilled)
    self.state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state,
                              self.program.shardings(state))

  def _abstract(self, tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._replicated), tree)

  def prefill(self):
    """`Cost` of both encoders and of the caches."""
    return compile_for_tpu(loop.prefill, (self.program,), self.params, self._settings, *self._prefilled)

  def loop(self):
    """`Cost` of the whole loop."""
    return compile_for_tpu(loop.run, (self.program,), self.params, self._settings, self.state, np.int32(0), donate=2)

  def verification(self, gamma):
    """`Cost` of one step of plain decoding (γ = 0), or of one round without drafts."""
    batch = self.state.tokens.shape[0]
    block, lengths, u = self._abstract((np.zeros((batch, gamma + 1), np.int32), np.ones(batch, np.int32),
                                        np.zeros((batch, gamma + 2), np.float32)))
    return compile_for_tpu(walltime.verify_step, (self.program.target, gamma, self.program.filtered), self.params[0],
                         self._settings, self.state.cache, block, lengths, u, donate=2)

  def draft(self):
    """`Cost` of one draft."""
    batch = self.state.tokens.shape[0]
    lengths, u = self._abstract((np.ones(batch, np.int32), np.zeros((batch, 2), np.float32)))
    return compile_for_tpu(walltime.draft_step, (self.program.target, self.program.drafter, 1, self.program.filtered),
                         self.params[1], self._settings, self.state.draft_state, self.state.tokens, lengths, u,
                         self.state.row_keys, donate=2)


def _is_split(params):
  return not all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))
