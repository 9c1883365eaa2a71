"""T5X checkpoints: a folder of zarr arrays for each step.

Their matrices are [in, out]; those of Hugging Face are [out, in]. Each name of `huggingface.layout` has one here
(`_their_name`), so that nothing else is mapped. Layers may be unrolled (`layers_0`, …) or scanned, as in `scalable_t5`:
then one array holds all layers, along its second axis. `scalable_t5` has kernels of attention in three dimensions.
Indices are T5X's own (msgpack) or Orbax's (JSON); arrays are folders, or in one OCDBT store. Optimizer state is not read.
"""
import functools
import json
import math
import os
import re
from urllib import parse

from flax import serialization
from flax import traverse_util
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from speculative.checkpoints import huggingface
from speculative.models import t5
from speculative.models.model import Model

INDEX, STATE = 'checkpoint', 'state'
_METADATA, _OCDBT, _DONE, _PARAMETERS = '_METADATA', 'manifest.ocdbt', 'commit_success.txt', 'target.'
_STEP = re.compile(r'checkpoint_(\d+)')  # an unfinished folder has more behind the number
_BIAS = 'relpos_bias.rel_embedding'
_PARTS = {'SelfAttention': 'self_attention', 'EncDecAttention': 'encoder_decoder_attention', 'DenseReluDense': 'mlp'}
_MATRICES = {'q': 'query', 'k': 'key', 'v': 'value', 'o': 'out'}


def is_remote(path):
  return '://' in path


def find(path):
  """The folder of arrays of a checkpoint: `path`, its `state`, or those of its latest step; None: there is none."""
  def arrays_of(step):
    return next((folder for folder in (step, f'{step}/{STATE}') if _is_checkpoint(folder)), None)

  path = path.rstrip('/')
  here = arrays_of(path)
  if here:
    return here
  steps = {int(match[1]): f'{path}/{match[0]}' for match in map(_STEP.fullmatch, _children(path)) if match}
  for n in sorted(steps, reverse=True):
    # In a bucket there is no renaming, so newer versions mark what is complete.
    if not is_remote(path) or _read(steps[n], INDEX) or _read(steps[n], _DONE):
      return arrays_of(steps[n])
  return None


def load(path, dtype=None, mesh=None, vocabulary=None):
  """Reads a T5 of T5X; its sizes are read off the arrays.

  What the arrays do not tell is taken as in T5X's own configurations: gated layers use GELU, relative distances end at
  128, padding and start are 0, EOS is 1.

  Args:
    path: folder of a step, or of steps, of which the latest is taken; or a URL that TensorStore knows, as gs://….
    dtype, mesh: as for `huggingface.load`.
    vocabulary: `Vocabulary`, or None: the checkpoint has none.

  Returns:
    `Model`.

  Raises:
    FileNotFoundError: no checkpoint.
    ValueError: a damaged one, or parameters that no T5 has, or lacks; the message names the parameter.
  """
  path = os.fspath(path)
  path = path if is_remote(path) else os.path.abspath(os.path.expanduser(path))
  dtype = huggingface.resolve_dtype(dtype)
  folder = find(path)
  if folder is None:
    raise FileNotFoundError(f'{path}: no T5X checkpoint: neither {INDEX} nor {STATE}/{INDEX} nor {STATE}/{_METADATA}, '
                            'nor folders checkpoint_N')
  arrays, ignored = _open(folder)
  config, names = _match(folder, arrays)
  if vocabulary or not is_remote(folder):
    vocabulary = huggingface.vocabulary_of(folder, config, vocabulary)

  def read(name, index):
    array = arrays.read(names[name], index[::-1] if _transposed(name) else index)
    return array.T if _transposed(name) else array

  # Scanned arrays are read a layer at a time: one kind of parameter behind the other, so that each is decoded once.
  params = huggingface.fill(config, read, dtype, mesh, order=lambda path: re.sub(r'/layer_\d+', '', path))
  return Model(config, params, vocabulary, name=os.path.basename(path.rstrip('/')), ignored=ignored)


def from_params(params, dtype='float32', vocabulary=None):
  """A `Model` of T5X's parameters, the tree that its network takes, unrolled or scanned; a leaf is made at a time.

  Other arguments, and errors, as for `load`. The arrays may be traced.
  """
  dtype = huggingface.resolve_dtype(dtype)
  arrays = _Arrays('T5X parameters', {'.'.join(path): a for path, a in traverse_util.flatten_dict(params).items()})
  config, names = _match('T5X parameters', arrays)

  def read(name):
    array = jnp.asarray(arrays.read(names[name]), dtype)
    return array.T if _transposed(name) else array

  return Model(config, huggingface.pack(config, read), vocabulary)


def to_params(model):
  """The parameters of a `Model` of the T5 family as T5X's network takes them, unrolled: tree of NumPy arrays.

  That network is `t5`, but for umT5, with a bias in every layer, `scalable_t5`.
  """
  config, tree = model.config, {}
  for name, array in huggingface.named(model):
    stack, *rest = _their_name(name).split('.')
    if rest[1:] == _BIAS.split('.') and not config.layer_bias:
      rest = rest[1:]
    array = array.T if _transposed(name) else array
    if config.layer_bias and 'Attention.' in name and rest[-1] == 'kernel':
      heads = config.num_heads, config.d_kv
      array = array.reshape(*heads, -1) if rest[-2] == 'out' else array.reshape(-1, *heads)
    tree[(stack, *rest)] = array
  return traverse_util.unflatten_dict(tree)


def _match(folder, arrays):
  """(`T5Config`, {Hugging Face's name: T5X's}) of `_Arrays`, which are then as the configuration asks."""
  config = _config(folder, arrays)
  names = {name: _their_name(name) for _, group, _ in huggingface.layout(config) for name in group}
  huggingface.check_names(folder, list(names.values()), arrays, r'(en|de)coder\.layers_\d+\.',
                          f'the first layers for {config.num_encoder_layers} in the encoder and '
                          f'{config.num_decoder_layers} in the decoder')
  for name, shape in huggingface.shapes_by_name(config).items():  # all before the first is read
    found = arrays.shape(names[name])
    expected = shape[::-1] if _transposed(name) else shape
    if found != expected:
      raise ValueError(f'{folder}: parameter {names[name]} has shape {found}, the others ask for {expected}')
  return config, names


def _their_name(name):
  """Hugging Face's name → T5X's, of unrolled layers."""
  if name == huggingface.EMBEDDINGS[0]:
    return 'token_embedder.embedding'
  if name == huggingface.HEAD:
    return 'decoder.logits_dense.kernel'
  stack, *rest = name.split('.')
  if rest[0] == 'final_layer_norm':
    return f'{stack}.{stack}_norm.scale'
  layer, kind, *leaf = rest[1], rest[4], *rest[5:]
  if kind == 'layer_norm':
    places = ['attention', 'mlp'] if stack == 'encoder' else ['self_attention', 'cross_attention', 'mlp']
    return f'{stack}.layers_{layer}.pre_{places[int(rest[3])]}_layer_norm.scale'
  if leaf[0] == 'relative_attention_bias':
    return f'{stack}.layers_{layer}.{_BIAS}'
  part = 'attention' if (stack, kind) == ('encoder', 'SelfAttention') else _PARTS[kind]
  return f'{stack}.layers_{layer}.{part}.{_MATRICES.get(leaf[0], leaf[0])}.kernel'


def _transposed(name):
  """Is T5X's array Hugging Face's transposed? Norms and the embedding are alike."""
  return name != huggingface.EMBEDDINGS[0] and 'layer_norm' not in name


class _Arrays:
  """{name of unrolled layers: array} of {T5X name: array or TensorStore}, matrices in two dimensions, read when asked for.

  A bias that all layers of a stack share is known as the first layer's. Layers of a scanned array are cut out when read.
  """

  def __init__(self, folder, arrays):
    self._folder, self._arrays = folder, {}
    for name, array in arrays.items():
      if array.dtype.name not in ('float32', 'bfloat16', 'float16'):
        raise ValueError(f'{folder}: parameter {name} is {array.dtype.name}; only floating point is supported')
      stack, *rest = name.split('.')
      if _is_scanned(name):
        for i in range(array.shape[1]):
          self._arrays['.'.join([stack, f'layers_{i}', *rest[1:]])] = array, i
      elif '.'.join(rest) == _BIAS:
        self._arrays[f'{stack}.layers_0.{_BIAS}'] = array, None
      else:
        self._arrays[name] = array, None

  def __iter__(self):
    return iter(self._arrays)

  def __contains__(self, name):
    return name in self._arrays

  def shape(self, name):
    """Raises ValueError naming the parameter if it is missing."""
    if name not in self._arrays:
      raise ValueError(f'{self._folder}: parameter {name} is missing')
    array, layer = self._arrays[name]
    shape = tuple(array.shape) if layer is None else (array.shape[0], *array.shape[2:])
    if len(shape) == 3:  # `scalable_t5` keeps heads and head size apart
      a, b, c = shape
      return (a * b, c) if self._heads_first(name) else (a, b * c)
    return shape

  def read(self, name, index=None):
    """The array, or its part at `index`, a tuple of slices with start and stop."""
    array, layer = self._arrays[name]
    array = array if layer is None else array[:, layer]
    shape = self.shape(name)
    index = index or tuple(slice(0, size) for size in shape)
    if len(array.shape) == 3:
      # Whole heads are read, and what is too much is cut off.
      axis = 0 if self._heads_first(name) else 1
      size, part = array.shape[axis + 1], index[axis]
      heads = slice(part.start // size, -(-part.stop // size))
      array = array[(heads, slice(None), index[1])] if axis == 0 else array[index[0], heads]
      cut = slice(part.start - heads.start * size, part.stop - heads.start * size)
      rows = (heads.stop - heads.start) * size
      shape = (rows, array.shape[2]) if axis == 0 else (array.shape[0], rows)
      index = (cut, slice(None)) if axis == 0 else (slice(None), cut)
    elif isinstance(array, ts.TensorStore):
      array, shape, index = array[index], None, ...
    if isinstance(array, ts.TensorStore):
      try:
        array = array.read().result()
      except ValueError as e:
        raise ValueError(f'{self._folder}: parameter {name} cannot be read ({e})') from e
    return array.reshape(shape or array.shape)[index]

  @staticmethod
  def _heads_first(name):
    """[heads, d_kv, d_model], or [d_model, heads, d_kv]?"""
    return name.endswith('.out.kernel')


def _is_scanned(name):
  stack, *rest = name.split('.')
  return rest[0] == stack and len(rest) > 1


# Files, here or in a bucket.


@functools.lru_cache
def _store(folder):
  """The KvStore of a folder. Raises ValueError for what TensorStore knows no way to."""
  url = folder if is_remote(folder) else 'file://' + parse.quote(folder)
  try:
    return ts.KvStore.open(url.rstrip('/') + '/').result()
  except (ValueError, NotImplementedError) as e:
    raise ValueError(f'{folder}: cannot be opened ({e})') from e


def _read(folder, name):
  """A file's bytes, or None."""
  try:
    found = _store(folder).read(name).result()
  except ValueError as e:
    raise ValueError(f'{folder}/{name}: cannot be read ({str(e).splitlines()[0]})') from e
  return found.value if found.state == 'value' else None


def _children(path):
  """Names in a folder; in a bucket, only those that may be steps."""
  if not is_remote(path):
    return os.listdir(path)
  try:
    keys = _store(path).list(ts.KvStore.KeyRange('checkpoint_', 'checkpoint`')).result()
  except ValueError as e:
    raise ValueError(f'{path}: cannot be listed ({str(e).splitlines()[0]})') from e
  return {key.decode().split('/')[0] for key in keys}


def _is_checkpoint(folder):
  for name in (INDEX, _METADATA) if os.path.basename(folder) == STATE else (INDEX,):
    if os.path.isfile(f'{folder}/{name}') if not is_remote(folder) else _read(folder, name):
      return True
  return False


def _open(folder):
  """(`_Arrays` of the parameters, names of what else the checkpoint holds)."""
  store = _store(folder)
  if _read(folder, _OCDBT):  # all arrays in one key-value store
    store = ts.KvStore.open({'driver': 'ocdbt', 'base': store.url}).result()
  index = _index(folder)
  parameters = {name.removeprefix(_PARAMETERS): leaf for name, leaf in index.items() if name.startswith(_PARAMETERS)}
  arrays = {name: leaf for name, leaf in parameters.items() if isinstance(leaf, np.ndarray)}
  names = parameters.keys() - arrays.keys()
  arrays |= _open_arrays(folder, store, names, 1 << 30)
  scanned = [name for name in names if _is_scanned(name)]
  if scanned:  # queries, keys and values of all layers are needed together: of v1.1's, 1.2 of the largest array
    largest = max(math.prod(arrays[name].shape) * arrays[name].dtype.numpy_dtype.itemsize for name in scanned)
    arrays |= _open_arrays(folder, store, scanned, int(1.2 * largest))
  return _Arrays(folder, arrays), tuple(sorted(set(index) - {_PARAMETERS + name for name in parameters}))


def _open_arrays(folder, store, names, cache):
  """{name: TensorStore}, with a common cache of so many bytes, so that a chunk which is read in parts is decoded once."""
  context = ts.Context({'cache_pool': {'total_bytes_limit': cache}})
  opened = {name: ts.open({'driver': 'zarr', 'kvstore': (store / f'{_PARAMETERS}{name}/').spec().to_json()}, open=True,
                          read=True, context=context) for name in names}
  for name, array in opened.items():
    try:
      opened[name] = array.result()
    except ValueError as e:
      if 'NOT_FOUND' in str(e):
        raise ValueError(f'{folder}: parameter {name} is missing: the index lists it, but there is no array '
                         f'{_PARAMETERS}{name}') from e
      raise ValueError(f'{folder}: parameter {name} cannot be opened ({e})') from e
  return opened


def _index(folder):
  """{name: what the index says of it} of all arrays; small ones may be in the index itself."""
  content = _read(folder, INDEX)
  try:
    if content is None:  # Orbax's
      entries = json.loads(_read(folder, _METADATA))['tree_metadata'].values()
      return {'.'.join(key['key'] for key in entry['key_metadata']): None for entry in entries}
    tree = serialization.msgpack_restore(content)
    tree = tree.get('optimizer', tree)
    if not isinstance(tree['target'], dict):
      raise KeyError('target')
  except Exception as e:  # msgpack raises one of many kinds
    raise ValueError(f'{folder}/{_METADATA if content is None else INDEX}: not the index of a T5X checkpoint, or a damaged '
                     f'one ({e!r})') from e
  # An array is {'driver', 'kvstore', …}; where its kvstore points may be where it was written, not where it is.
  leaves = traverse_util.flatten_dict(tree, is_leaf=lambda _, node: 'driver' in node)
  return {'.'.join(path): leaf for path, leaf in leaves.items()}


def _config(folder, arrays):
  """`T5Config` of the arrays' shapes."""
  def layers(stack):
    return 1 + max((int(match[1]) for match in map(re.compile(rf'{stack}\.layers_(\d+)\.').match, arrays) if match),
                   default=-1)

  rows, d_model = arrays.shape('token_embedder.embedding')
  bias = f'encoder.layers_0.{_BIAS}'
  num_heads, num_buckets = arrays.shape(bias)
  inner = arrays.shape('encoder.layers_0.attention.query.kernel')[1]
  gated = 'encoder.layers_0.mlp.wi_0.kernel' in arrays
  if inner % num_heads:
    raise ValueError(f'{folder}: {inner} columns of attention are no multiple of {num_heads} heads ({bias})')
  return t5.T5Config(
      vocab_size=rows, d_model=d_model, d_ff=arrays.shape(f'encoder.layers_0.mlp.wi{"_0" * gated}.kernel')[-1],
      num_heads=num_heads, d_kv=inner // num_heads, num_encoder_layers=layers('encoder'),
      num_decoder_layers=layers('decoder'), gated=gated, tied='decoder.logits_dense.kernel' not in arrays,
      layer_bias=f'encoder.layers_1.{_BIAS}' in arrays, num_buckets=num_buckets)
