"""Hugging Face T5, mT5, ByT5 and umT5 folders: config.json, safetensors, and the vocabulary where there is one.

`layout` is the whole mapping between the two namings; loading and saving both read it.
"""
import contextlib
import dataclasses
import functools
import os
import re
import shutil

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from speculative.checkpoints import streaming
from speculative.data import vocabulary as vocabularies
from speculative.json_files import read_json
from speculative.json_files import write_json
from speculative.models import precision
from speculative.models import t5
from speculative.models.model import Model

CONFIG, WEIGHTS, INDEX = 'config.json', 'model.safetensors', 'model.safetensors.index.json'
GENERATION = 'generation_config.json'
_SHARD = 2 << 30  # bytes of a file of weights, unless one parameter is larger

HEAD = 'lm_head.weight'
# The names of the one embedding. Files hold any of them.
EMBEDDINGS = ('shared.weight', 'encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
# Families whose defaults in Transformers are those of v1.1.
_V1_1 = 'mt5', 'umt5'
# Left over in the first released T5 files; T5 has no relative bias in cross-attention.
UNUSED = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'


# The mapping.


def layout(config):
  """The mapping: list of (path in the parameter tree, Hugging Face names, block).

  block None: one array, the same in both. Otherwise the names are matrices [out, in], and our matrix [in, all their
  outs] has `block` columns of the first, `block` of the second, …, then the next `block` of the first, and so on.
  """
  entries = [('embedding', [EMBEDDINGS[0]], None)]
  if not config.tied:
    entries.append(('head', [HEAD], config.vocab_size))
  for stack, layers in ('encoder', config.num_encoder_layers), ('decoder', config.num_decoder_layers):
    entries.append((f'{stack}/final_norm/scale', [f'{stack}.final_layer_norm.weight'], None))
    biased = [(f'{stack}/layer_{i}', i) for i in range(layers)] if config.layer_bias else [(stack, 0)]
    entries += [(f'{ours}/relative_bias', [f'{stack}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight'], None)
                for ours, i in biased]
    for i in range(layers):
      entries += [(f'{stack}/layer_{i}/{leaf}', [f'{stack}.block.{i}.layer.{name}.weight' for name in names], block)
                  for leaf, names, block in _layer_layout(config, stack == 'decoder')]
  return entries


def _layer_layout(config, decoder):
  """`layout` of one layer, without the prefixes."""
  c = config
  cross = [
      ('cross_norm/scale', ['1.layer_norm'], None),
      ('cross/q', ['1.EncDecAttention.q'], c.d_kv),
      ('cross/kv', ['1.EncDecAttention.k', '1.EncDecAttention.v'], c.d_kv),
      ('cross/out', ['1.EncDecAttention.o'], c.d_model),
  ]
  n = 2 if decoder else 1
  if c.gated:
    wi = 'mlp/wi', [f'{n}.DenseReluDense.wi_0', f'{n}.DenseReluDense.wi_1'], c.gate_block
  else:
    wi = 'mlp/wi', [f'{n}.DenseReluDense.wi'], c.d_ff
  return [
      ('attention_norm/scale', ['0.layer_norm'], None),
      ('attention/qkv', ['0.SelfAttention.q', '0.SelfAttention.k', '0.SelfAttention.v'], c.d_kv),
      ('attention/out', ['0.SelfAttention.o'], c.d_model),
      *(cross if decoder else []),
      ('mlp_norm/scale', [f'{n}.layer_norm'], None),
      wi,
      ('mlp/wo', [f'{n}.DenseReluDense.wo'], c.d_model),
  ]


def pack(config, read):
  """The parameter tree, a leaf at a time, from `read`(Hugging Face name) → array as Hugging Face has it, perhaps traced."""
  return traverse_util.unflatten_dict(
      {path: _pack([read(name) for name in group], block) for path, group, block in layout(config)}, sep='/')


def _pack(arrays, block):
  """Their arrays → ours."""
  if block is None:
    return arrays[0]
  n_in = arrays[0].shape[1]
  return jnp.stack([a.T.reshape(n_in, -1, block) for a in arrays], axis=2).reshape(n_in, -1)


def _unpack(array, n, block):
  """Our array → their n arrays."""
  if block is None:
    return [array]
  blocks = array.reshape(array.shape[0], -1, n, block)
  return [blocks[:, :, i].reshape(array.shape[0], -1).T for i in range(n)]


@functools.lru_cache
def shapes_of(init_params, config):
  """The shape of every parameter, by path."""
  tree = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
  return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(tree, sep='/').items()}


# Loading.


def load(path, dtype=None, mesh=None, vocabulary=None):
  """Reads a model of the T5 family.

  Args:
    path: the folder.
    dtype: of the parameters, 'float32' or 'bfloat16'. None: bfloat16, but float32 on
      CPUs without bfloat16 instructions.
    mesh: devices to split the parameters over, see `sharding.param_shardings`.
    vocabulary: see `speculative.data.vocabulary`. None: the folder's, if it has one: spiece.model, bytes where
      tokenizer_config.json names ByT5Tokenizer, or tokenizer.json. The number of sentinels is `extra_ids` of
      tokenizer_config.json; where that says nothing, 100 for spiece.model (Hugging Face's default) if the embedding has
      rows for them, else 0; 125 for bytes.

  Returns:
    `Model`.

  Raises:
    FileNotFoundError: the folder has no config.json or no weights.
    ValueError: a damaged file, an architecture that is no T5, or parameters other than the configuration asks for.
  """
  path = os.path.abspath(os.path.expanduser(path))
  dtype = resolve_dtype(dtype)
  settings = read_json(os.path.join(path, CONFIG))
  config = _read_config(path, settings)
  with contextlib.ExitStack() as stack:
    files = open_weights(path, stack)
    names = _rename_embedding(path, files)
    tied, scaled = _head(path, settings, files, names)
    config = dataclasses.replace(config, tied=tied, scale_tied_output=scaled)
    if tied:
      names.pop(HEAD, None)
    names.pop(UNUSED, None)
    check_names(path, [name for _, group, _ in layout(config) for name in group], names, r'(en|de)coder\.block\.\d+\.',
                f'{config.num_encoder_layers} encoder and {config.num_decoder_layers} decoder layers')
    for name, shape in shapes_by_name(config).items():  # all before the first is read
      check_parameter(path, files, names[name], shape)
    vocabulary = vocabulary_of(path, config, vocabulary)
    params = fill(config, lambda name, index: files[names[name]].get_slice(names[name])[index], dtype, mesh)
  return Model(config, params, vocabulary, name=os.path.basename(path), ignored=ignored(files, names))


def shapes_by_name(config):
  """{Hugging Face name: shape} of every parameter."""
  shapes = shapes_of(t5.init_params, config)
  return {name: shapes[leaf] if block is None else (shapes[leaf][1] // len(group), shapes[leaf][0])
          for leaf, group, block in layout(config) for name in group}


def fill(config, read, dtype, mesh=None, order=None):
  """The parameter tree, read about a MB at a time.

  Args:
    config: `T5Config`.
    read: read(Hugging Face name, index) → NumPy array, the part of Hugging Face's array at `index`, a tuple of slices.
    dtype, mesh: as for `streaming.place`.
    order: sort key of paths in the tree, for the order in which they are read; None: layer by layer.
  """
  entries = {leaf: (names, block) for leaf, names, block in layout(config)}
  if order:
    entries = {leaf: entries[leaf] for leaf in sorted(entries, key=order)}

  def part(leaf, index):
    names, block = entries[leaf]
    out = np.empty([s.stop - s.start for s in index], dtype)
    if block is None:
      for at, rows in streaming.rows_at_a_time(functools.partial(read, names[0]), index, dtype.itemsize):
        out[at:at + len(rows)] = rows
      return out
    n, block = len(names), block if len(names) > 1 else 1
    blocks = out.reshape(out.shape[0], -1, n, block)
    theirs = slice(index[1].start // n, index[1].stop // n), index[0]
    for i, name in enumerate(names):
      for at, rows in streaming.rows_at_a_time(functools.partial(read, name), theirs, dtype.itemsize, block):
        blocks[:, at // block:(at + len(rows)) // block, i] = rows.T.reshape(out.shape[0], -1, block)
    return out

  shapes = shapes_of(t5.init_params, config)
  return streaming.place(config, {leaf: shapes[leaf] for leaf in entries}, part, dtype, mesh)


def ignored(files, names):
  """The parameters of the files that none of `names` is, sorted."""
  return tuple(sorted(set(files) - set(names.values())))


def resolve_dtype(dtype=None):
  """The dtype to load parameters in: NumPy dtype float32 or bfloat16; None chooses by the device.

  Raises:
    ValueError: any other dtype.
  """
  if dtype is None:
    slow = jax.default_backend() == 'cpu' and not precision.cpu_is_fast_in_bfloat16()
    dtype = 'float32' if slow else 'bfloat16'
  try:
    name = jnp.dtype(dtype).name
  except TypeError:
    name = str(dtype)
  if name == 'float16':
    raise ValueError("dtype float16: T5's feed-forward layers overflow in it; use bfloat16")
  if name not in ('float32', 'bfloat16'):
    raise ValueError(f'dtype {name}: parameters are float32 or bfloat16')
  return jnp.dtype(name)


def read_integer(file, settings, key, default=None, least=1):
  """settings[key], or the default where it is absent or null. Raises ValueError naming file and key for anything else."""
  value = settings.get(key)
  value = default if value is None else value
  if not isinstance(value, int) or value < least:
    raise ValueError(f'{file}: {key} must be an integer ≥ {least}, not {value!r}')
  return value


def open_weights(path, stack):
  """Opens the safetensors files on the ExitStack → {parameter name: open file}."""
  index = os.path.join(path, INDEX)
  if os.path.exists(os.path.join(path, WEIGHTS)):
    shards = [WEIGHTS]
  elif os.path.exists(index):
    weight_map = read_json(index).get('weight_map')
    if not isinstance(weight_map, dict) or not all(isinstance(s, str) for s in weight_map.values()):
      raise ValueError(f'{index}: no weight_map of parameters to files')
    shards = sorted(set(weight_map.values()))
  else:
    present = set(os.listdir(path))
    if any(re.match(r'pytorch_model.*\.bin', name) for name in present):
      raise FileNotFoundError(f'{path}: no {WEIGHTS}, only PyTorch weights. Convert them: load the model in '
                              'Transformers and call save_pretrained(folder, safe_serialization=True)')
    raise FileNotFoundError(f'{path}: neither {WEIGHTS} nor {INDEX}')
  files = {}
  for shard in shards:
    file = os.path.join(path, shard)
    try:
      handle = stack.enter_context(safetensors.safe_open(file, 'numpy'))
    except FileNotFoundError:
      raise FileNotFoundError(f'{file}: no such file, but {INDEX} lists it') from None
    except (safetensors.SafetensorError, OSError) as e:
      raise ValueError(f'{file}: not a safetensors file, or a truncated or damaged one ({e})') from e
    for name in handle.keys():
      if name in files:
        raise ValueError(f'{path}: parameter {name} is in two files')
      files[name] = handle
  return files


def check_parameter(path, files, name, shape):
  """Raises ValueError unless a parameter of `open_weights` has the shape and is floating point; nothing is read."""
  tensor = files[name].get_slice(name)
  found = tuple(tensor.get_shape())
  if found != shape:
    raise ValueError(f'{path}: parameter {name} has shape {found}, config.json asks for {shape}')
  if tensor.get_dtype() not in ('F64', 'F32', 'BF16', 'F16'):
    raise ValueError(f'{path}: parameter {name} is {tensor.get_dtype()}; quantised weights are not supported')


def _rename_embedding(path, files):
  """{name in `layout`: name in the file}: the embedding may go under any of its names, or several."""
  names = {name: name for name in files}
  present = [name for name in EMBEDDINGS if name in files]
  for name in present:
    del names[name]
  if present:
    names[EMBEDDINGS[0]] = present[0]
  for name in present[1:]:
    if not equal(files, name, present[0]):
      raise ValueError(f'{path}: parameter {name} differs from {present[0]}; both must be the one embedding')
  return names


def equal(files, a, b):
  """Are two parameters of `open_weights` the same? Read about a MB at a time."""
  a, b = files[a].get_slice(a), files[b].get_slice(b)
  shape = a.get_shape()
  if shape != b.get_shape():
    return False
  index = tuple(slice(0, size) for size in shape)
  return all((rows == b[at:at + len(rows)]).all() for at, rows in streaming.rows_at_a_time(a.__getitem__, index, 4))


def _head(path, settings, files, names):
  """(is the head the embedding, is its input scaled).

  Transformers 4 says `tie_word_embeddings`: a tied head is scaled, another is not. Transformers 5 always says it is
  true and has `scale_decoder_outputs`; there, as here, the head is its own matrix if the file holds one.
  """
  tie = settings.get('tie_word_embeddings', settings.get('model_type') not in _V1_1)
  scaled = bool(settings.get('scale_decoder_outputs', tie))
  if HEAD not in names:
    if not tie:
      raise ValueError(f'{path}: parameter {HEAD} is missing, and config.json says tie_word_embeddings = false')
    return True, scaled
  if not scaled:
    return False, True
  if EMBEDDINGS[0] in names and not equal(files, HEAD, names[EMBEDDINGS[0]]):
    raise ValueError(f'{path}: parameter {HEAD} differs from {EMBEDDINGS[0]}, but config.json says they are tied')
  return True, True


def _read_config(path, settings):
  """config.json → `T5Config`, but for the head; defaults are those of Transformers."""
  file = os.path.join(path, CONFIG)
  kind = settings.get('model_type')
  if kind not in ('t5', *_V1_1):
    raise ValueError(f'{file}: model_type {kind!r} is not supported, only t5, mt5, umt5 and gpt2')
  activation = settings.get('feed_forward_proj', 'gated-gelu' if kind in _V1_1 else 'relu')
  if activation not in ('relu', 'gated-gelu'):
    raise ValueError(f'{file}: feed_forward_proj {activation!r} is not supported, only relu and gated-gelu')
  generation = os.path.join(path, GENERATION)
  if settings.get('decoder_start_token_id') is None and os.path.exists(generation):
    settings = settings | {'decoder_start_token_id': read_json(generation).get('decoder_start_token_id')}
  settings = {'eos_token_id': 1} | settings  # null: none

  integer = functools.partial(read_integer, file, settings)

  def number(key, default):
    value = settings.get(key, default)
    if not isinstance(value, (int, float)):
      raise ValueError(f'{file}: {key} must be a number, not {value!r}')
    return float(value)

  layers = integer('num_layers')
  pad = integer('pad_token_id', 0, 0)
  return t5.T5Config(
      vocab_size=integer('vocab_size'),
      d_model=integer('d_model'),
      d_ff=integer('d_ff'),
      num_heads=integer('num_heads'),
      d_kv=integer('d_kv', 64),
      num_encoder_layers=layers,
      num_decoder_layers=integer('num_decoder_layers', layers),
      gated=activation == 'gated-gelu',
      layer_bias=kind == 'umt5',
      num_buckets=integer('relative_attention_num_buckets', 32),
      max_distance=integer('relative_attention_max_distance', 128),
      norm_eps=number('layer_norm_epsilon', 1e-6),
      dropout=number('dropout_rate', 0.1),
      pad_id=pad,
      eos_id=integer('eos_token_id', -1, -1),
      start_id=integer('decoder_start_token_id', pad, 0))


def check_names(path, expected, found, layer, layers):
  """Raises ValueError unless the file holds exactly the expected parameters.

  Args:
    expected, found: parameter names.
    layer: pattern of the beginning of names in a layer.
    layers: str, what config.json asks for.
  """
  def layer_of(name):
    match = re.match(layer, name)
    return match and match[0]

  for name in expected:
    if name not in found:
      here = layer_of(name)
      if here and not any(other.startswith(here) for other in found):
        raise ValueError(f'{path}: layer {here[:-1]} is missing (first parameter {name}); config.json asks for {layers}')
      raise ValueError(f'{path}: parameter {name} is missing')
  for name in sorted(set(found) - set(expected)):
    here = layer_of(name)
    if here and not any(other.startswith(here) for other in expected):
      raise ValueError(f'{path}: layer {here[:-1]} is too many (parameter {name}); config.json asks for {layers}')
    raise ValueError(f'{path}: parameter {name} is unknown; a model as config.json describes it has none of that name')


def vocabulary_of(path, config, vocabulary=None):
  """The given `Vocabulary`, or the folder's, or None. Raises ValueError if the model cannot have been trained on it."""
  vocabulary = vocabulary or _read_vocabulary(path, config)
  if vocabulary:
    _check_vocabulary(path, vocabulary, config)
  return vocabulary


def _read_vocabulary(path, config):
  """The folder's vocabulary, or None: spiece.model before bytes before tokenizer.json."""
  def file(name):
    found = os.path.join(path, name)
    return found if os.path.exists(found) else None

  settings = read_json(file(vocabularies.TOKENIZER_CONFIG)) if file(vocabularies.TOKENIZER_CONFIG) else {}
  extra_ids = settings.get('extra_ids')
  if file(vocabularies.SPIECE):
    spiece = file(vocabularies.SPIECE)
    if extra_ids is None:
      extra_ids = 100 if vocabularies.Vocabulary(spiece).vocab_size + 100 <= config.vocab_size else 0
    return vocabularies.Vocabulary(spiece, extra_ids)
  if settings.get('tokenizer_class') == 'ByT5Tokenizer':
    return vocabularies.ByteVocabulary(125 if extra_ids is None else extra_ids)
  if file(vocabularies.TOKENIZER):
    return vocabularies.TokenizerVocabulary(file(vocabularies.TOKENIZER), config.pad_id, config.eos_id)
  return None


def _check_vocabulary(path, vocabulary, config):
  """Raises ValueError if the model cannot have been trained on the vocabulary."""
  pieces = vocabulary.vocab_size - vocabulary.extra_ids
  if pieces > config.vocab_size:
    raise ValueError(f'{path}: the vocabulary has {pieces} pieces, the embedding only {config.vocab_size} rows')
  if vocabulary.pad_id != config.pad_id:
    raise ValueError(f'{path}: padding is {vocabulary.pad_id} in the vocabulary, {config.pad_id} in config.json')


# Saving.


def save(model, path, dtype=None, overwrite=False):
  """Writes a model of the T5 family. Arguments and errors as for `checkpoints.save_model`."""
  def write(folder):
    kind = write_weights(folder, named(model, dtype))
    write_json(os.path.join(folder, CONFIG), _to_settings(model.config, kind))
    write_json(os.path.join(folder, GENERATION), _special_ids(model.config))
    if model.vocabulary:
      model.vocabulary.save(folder)

  write_folder(path, write, overwrite)


def write_folder(path, write, overwrite):
  """Has `write(folder)` fill a folder, which gets its name when it is complete. Raises FileExistsError as `save` does."""
  path = os.path.realpath(os.path.expanduser(path))
  if os.path.exists(path):
    if not overwrite:
      raise FileExistsError(f'{path} exists; pass overwrite=True to replace it')
    if not os.path.exists(os.path.join(path, CONFIG)):
      raise FileExistsError(f'{path} exists and is not a Hugging Face model; it is not overwritten')
  temporary, old = f'{path}.tmp-{os.getpid()}', f'{path}.old-{os.getpid()}'
  os.makedirs(temporary)
  try:
    write(temporary)
    if os.path.exists(path):
      os.rename(path, old)
    os.rename(temporary, path)
  except BaseException:
    shutil.rmtree(temporary, ignore_errors=True)
    if os.path.exists(old) and not os.path.exists(path):
      os.rename(old, path)
    raise
  if os.path.exists(old):
    shutil.rmtree(old)


def write_weights(folder, tensors):
  """Writes (name, NumPy array) pairs, as they come, as model.safetensors, or as several such files and their index.

  Returns:
    The dtype's name.
  """
  files, held, total = [], {}, 0

  def flush():
    files.append(list(held))
    safetensors.numpy.save_file(held, os.path.join(folder, f'{len(files)}.tmp'), metadata={'format': 'pt'})
    held.clear()

  for name, array in tensors:
    if held and sum(a.nbytes for a in held.values()) + array.nbytes > _SHARD:
      flush()
    held[name] = np.ascontiguousarray(array)
    total += array.nbytes
    dtype = array.dtype.name
  flush()
  if len(files) == 1:
    os.rename(os.path.join(folder, '1.tmp'), os.path.join(folder, WEIGHTS))
    return dtype
  weight_map = {}
  for i, names in enumerate(files, 1):
    shard = f'model-{i:05d}-of-{len(files):05d}.safetensors'
    os.rename(os.path.join(folder, f'{i}.tmp'), os.path.join(folder, shard))
    weight_map |= dict.fromkeys(names, shard)
  write_json(os.path.join(folder, INDEX), {'metadata': {'total_size': total}, 'weight_map': weight_map})
  return dtype


def leaves(model, shapes, dtype=None):
  """read(path) → NumPy array of a parameter in `dtype` (None: its own). Raises ValueError unless they have `shapes`."""
  params = traverse_util.flatten_dict(model.params, sep='/')
  check_shapes(params, shapes, 'the model')
  dtype = dtype and resolve_dtype(dtype)
  return lambda path: np.asarray(params[path]).astype(dtype or params[path].dtype, copy=False)


def check_shapes(params, shapes, holder, where=''):
  """Raises ValueError naming a parameter of {path: array} that is missing, unknown, or of another shape than {path: shape}."""
  for leaf in sorted(params.keys() | shapes.keys()):
    found = tuple(params[leaf].shape) if leaf in params else 'nothing'
    if found != shapes.get(leaf, 'nothing'):
      raise ValueError(f'{where}parameter {leaf}: {holder} holds {found}, its configuration asks for '
                       f'{shapes.get(leaf, "nothing")}')


def named(model, dtype=None):
  """(Hugging Face name, NumPy array) of every parameter, made as they are asked for. Raises ValueError as `leaves` does."""
  read = leaves(model, shapes_of(t5.init_params, model.config), dtype)
  return (pair for leaf, names, block in layout(model.config)
          for pair in zip(names, _unpack(read(leaf), len(names), block)))


def _to_settings(config, dtype):
  """`T5Config` → contents of config.json, with the keys that Transformers 4 writes."""
  c = config
  settings = {
      'architectures': ['UMT5ForConditionalGeneration' if c.layer_bias else 'T5ForConditionalGeneration'],
      'classifier_dropout': 0.0,
      'd_ff': c.d_ff,
      'd_kv': c.d_kv,
      'd_model': c.d_model,
      'dense_act_fn': 'gelu_new' if c.gated else 'relu',
      'dropout_rate': c.dropout,
      'dtype': dtype,
      'feed_forward_proj': 'gated-gelu' if c.gated else 'relu',
      'initializer_factor': 1.0,
      'is_encoder_decoder': True,
      'is_gated_act': c.gated,
      'layer_norm_epsilon': c.norm_eps,
      'model_type': 'umt5' if c.layer_bias else 't5',
      'num_decoder_layers': c.num_decoder_layers,
      'num_heads': c.num_heads,
      'num_layers': c.num_encoder_layers,
      'relative_attention_max_distance': c.max_distance,
      'relative_attention_num_buckets': c.num_buckets,
      'tie_word_embeddings': c.tied,
      'use_cache': True,
      'vocab_size': c.vocab_size,
  }
  if c.tied and not c.scale_tied_output:
    settings['scale_decoder_outputs'] = False  # Transformers 5; version 4 cannot say it
  return settings | _special_ids(c)


def _special_ids(config):
  return {'decoder_start_token_id': config.start_id, 'eos_token_id': config.eos_id if config.eos_id >= 0 else None,
          'pad_token_id': config.pad_id}
