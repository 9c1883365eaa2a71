"""Checkpoints of other libraries, read into one parameter layout."""
import os
import re

from speculative.checkpoints import gpt2
from speculative.checkpoints import huggingface
from speculative.checkpoints import orbax
from speculative.checkpoints import t5x
from speculative.checkpoints.pairs import check_pair
from speculative.json_files import read_json
from speculative.models.decoder_only import GPTConfig

__all__ = ['check_pair', 'load_model', 'save_model']

_HUB_NAME = re.compile(r'[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*')
_HUB_FILES = ['*.json', '*.safetensors', 'spiece.model']


def load_model(path, dtype=None, mesh=None, vocabulary=None):
  """Loads a model, whatever wrote it.

  Args:
    path: a folder: Hugging Face's of a T5, mT5, ByT5, umT5 or GPT-2; T5X's of a step, or of its steps (the latest is
      taken); what our own training writes, likewise. `~` is the home directory. Or a name on the Hugging Face Hub, as
      'google/flan-t5-small', where there is no such folder: from the local cache, or downloaded. Or the URL of a T5X
      checkpoint, as gs://….
    dtype: of the parameters, 'float32' or 'bfloat16'. None: bfloat16, but float32 on CPUs without bfloat16 instructions.
    mesh: `jax.sharding.Mesh` with an axis `model` over which parameters are split (`speculative.sharding`); every
      process reads only what its own devices hold. None: the default device.
    vocabulary: `Vocabulary`. None: the folder's own; T5X folders have none.

  Returns:
    `Model`, named after the folder.

  Raises:
    FileNotFoundError: no such folder.
    ValueError: not a checkpoint, one that is not supported, or a damaged one; the message names the file or parameter.
  """
  name = os.fspath(path)
  if t5x.is_remote(name):
    return t5x.load(name, dtype, mesh, vocabulary)
  path = os.path.abspath(os.path.expanduser(name))
  if not os.path.exists(path):
    if not _HUB_NAME.fullmatch(name):
      raise FileNotFoundError(f'{path}: no such folder')
    model = load_model(_from_hub(name), dtype, mesh, vocabulary)
    model.name = os.path.basename(name)
    return model
  if not os.path.isdir(path):
    raise ValueError(f'{path}: a file; load_model takes the folder of a checkpoint')
  names = sorted(os.listdir(path))
  if huggingface.CONFIG in names:
    kind = read_json(os.path.join(path, huggingface.CONFIG)).get('model_type')
    return (gpt2 if kind == 'gpt2' else huggingface).load(path, dtype, mesh, vocabulary)
  if t5x.find(path):
    return t5x.load(path, dtype, mesh, vocabulary)
  if orbax.find(path):
    return orbax.load(path, dtype, mesh, vocabulary)
  found = ', '.join(names[:8]) + (', …' if len(names) > 8 else '') if names else 'nothing'
  raise ValueError(f'{path}: not a checkpoint of a known format. Hugging Face: a folder with config.json. '
                   'T5X: a folder checkpoint_N. Orbax: a folder of steps that our training wrote. '
                   f'This one holds {found}')


def is_elsewhere(name):
  """Whether a name is a URL that `load_model` takes, or could be one of the Hugging Face Hub."""
  return t5x.is_remote(name) or bool(_HUB_NAME.fullmatch(name))


def _from_hub(name):
  """The local folder of a model on the Hugging Face Hub: what the cache holds, or else a download."""
  import huggingface_hub
  for offline in (True, False):
    try:
      folder = huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=offline)
      if any(file.endswith('.safetensors') for file in os.listdir(folder)):
        return folder
    except Exception as e:  # the library's, requests' and the system's own
      error = e
    else:
      error = 'it has no safetensors'
  raise FileNotFoundError(f'{name}: no such folder here, and not to be had from the Hugging Face Hub '
                          f'({str(error).splitlines()[0]})')


def save_model(model, path, dtype=None, overwrite=False):
  """Writes a model as a folder that Transformers reads, T5 or GPT-2. The folder appears only when it is complete.

  Args:
    model: `Model`.
    path: the folder to write.
    dtype: of the saved parameters, 'float32' or 'bfloat16'. None: each parameter's own.
    overwrite: replace a model folder that is there already.

  Raises:
    FileExistsError: something is there, and it is not to be, or too precious to be, overwritten.
    ValueError: the parameters are not those of the configuration.
  """
  (gpt2 if isinstance(model.config, GPTConfig) else huggingface).save(model, path, dtype, overwrite)
