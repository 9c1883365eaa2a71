"""Orbax checkpoints, as `training.train` writes them: a folder of steps beside the model's configuration.

Only parameters are read, straight onto this process' devices, however many devices wrote them.
"""
import dataclasses
import math
import os

from flax import traverse_util
import jax
import orbax.checkpoint as ocp

from speculative import sharding
from speculative.checkpoints import huggingface
from speculative.json_files import read_json
from speculative.json_files import write_json
from speculative.models import decoder_only
from speculative.models import t5
from speculative.models.model import Model

CONFIG, ITEM = 'model_config.json', 'default'
_ARCHITECTURES = {'t5': (t5.T5Config, t5.init_params), 'gpt': (decoder_only.GPTConfig, decoder_only.init_params)}


def write_config(folder, config, vocabulary=None):
  """Writes what `load` must know besides the parameters; the configuration appears last, and whole."""
  os.makedirs(folder, exist_ok=True)
  architecture = next(name for name, (kind, _) in _ARCHITECTURES.items() if isinstance(config, kind))
  temporary = os.path.join(folder, f'{CONFIG}.tmp')
  write_json(temporary, {'architecture': architecture} | dataclasses.asdict(config))
  if vocabulary:
    vocabulary.save(folder)
  os.replace(temporary, os.path.join(folder, CONFIG))


def find(path):
  """(folder with the configuration, folder of the step) of a step or of its parent (latest step); None: none."""
  path = os.path.normpath(path)
  name = os.path.basename(path)
  if os.path.isdir(os.path.join(path, ITEM)) and name.isdigit():
    return os.path.dirname(path), path
  # A step that is being written has another name until it is complete.
  steps = [name for name in os.listdir(path) if name.isdigit() and os.path.isdir(os.path.join(path, name, ITEM))]
  return (path, os.path.join(path, max(steps, key=int))) if steps else None


def load(path, dtype=None, mesh=None, vocabulary=None):
  """Reads the parameters of a checkpoint of ours.

  Args:
    path: folder of a step, or of steps, of which the latest is taken.
    dtype, mesh: as for `huggingface.load`.
    vocabulary: None: the one beside the steps, if there is one.

  Returns:
    `Model`.

  Raises:
    FileNotFoundError: no checkpoint, or no configuration beside it.
    ValueError: a damaged one, or parameters other than the configuration asks for.
  """
  path = os.path.abspath(os.path.expanduser(path))
  dtype = huggingface.resolve_dtype(dtype)
  found = find(path)
  if found is None:
    raise FileNotFoundError(f'{path}: no Orbax checkpoint: neither a step with {ITEM}, nor folders of steps')
  folder, step = found
  config, init_params = _read_config(os.path.join(folder, CONFIG))
  shapes = huggingface.shapes_of(init_params, config)
  shardings = sharding.param_shardings(config, shapes, mesh) if mesh is not None else dict.fromkeys(
      shapes, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
  sharding.check_fits(config, shapes, dtype.itemsize, mesh)
  params = traverse_util.unflatten_dict(
      {leaf: jax.ShapeDtypeStruct(shape, dtype, sharding=shardings[leaf]) for leaf, shape in shapes.items()}, sep='/')
  # Of float32 as it is on disk; one parameter must fit.
  in_flight = -(-max(4 * math.prod(shape) for shape in shapes.values()) // 10**9)
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=in_flight)) as checkpointer:
    item = os.path.join(step, ITEM)
    try:
      saved = checkpointer.metadata(item).item_metadata['params']
    except Exception as e:  # Orbax raises one of many kinds
      raise ValueError(f'{item}: not a checkpoint with params, or a damaged one ({e})') from e
    huggingface.check_shapes(traverse_util.flatten_dict(saved, sep='/'), shapes, 'the checkpoint', f'{item}: ')
    try:
      restored = checkpointer.restore(item, args=ocp.args.PyTreeRestore(
          item={'params': params}, partial_restore=True,
          restore_args=ocp.checkpoint_utils.construct_restore_args({'params': params})))
    except Exception as e:
      raise ValueError(f'{item}: cannot be read ({e})') from e
  return Model(config, restored['params'], huggingface.vocabulary_of(folder, config, vocabulary),
               name=os.path.basename(path))


def _read_config(file):
  """(configuration, init_params) of what `write_config` wrote."""
  settings = read_json(file)
  kind, init_params = _ARCHITECTURES.get(settings.pop('architecture', None), (None, None))
  if kind is None:
    raise ValueError(f'{file}: architecture must be one of {", ".join(_ARCHITECTURES)}')
  try:
    return kind(**settings), init_params
  except TypeError as e:
    raise ValueError(f'{file}: not the configuration of a model ({e})') from e
