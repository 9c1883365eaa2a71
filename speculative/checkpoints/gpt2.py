"""Hugging Face GPT-2 folders: config.json and safetensors.

`_layout` is the whole mapping between the two namings; loading and saving both read it.
"""
import contextlib
import functools
import os
import re

from speculative.checkpoints import huggingface
from speculative.checkpoints import streaming
from speculative.json_files import read_json
from speculative.json_files import write_json
from speculative.models import decoder_only
from speculative.models.model import Model

# Buffers of old files (the causal mask), and the head where it is stored though it is the embedding.
_BUFFER = re.compile(r'h\.\d+\.attn\.(masked_)?bias')
_PREFIX, _HEAD = 'transformer.', 'lm_head.weight'
_GELU = 'gelu_new', 'gelu_pytorch_tanh'
# Variants that compute something else; each must have the value given here, or be absent.
_VARIANTS = {'scale_attn_weights': True, 'scale_attn_by_inverse_layer_idx': False, 'add_cross_attention': False}


def _layout(config):
  """[(path in the parameter tree, Hugging Face name)]. Their matrices are [in, out], as ours, but for the head; see
  `_to_ours` for it and qkv."""
  entries = [('embedding', 'wte.weight'), ('positions', 'wpe.weight'), ('final_norm/scale', 'ln_f.weight'),
             ('final_norm/bias', 'ln_f.bias')] + ([] if config.tied else [('head', _HEAD)])
  for i in range(config.num_layers):
    for ours, theirs in (('attention_norm', 'ln_1'), ('mlp_norm', 'ln_2')):
      entries += [(f'layer_{i}/{ours}/{leaf}', f'h.{i}.{theirs}.{name}') for leaf, name in (('scale', 'weight'), ('bias',) * 2)]
    for ours, theirs in (('qkv', 'attn.c_attn'), ('out', 'attn.c_proj'), ('wi', 'mlp.c_fc'), ('wo', 'mlp.c_proj')):
      entries += [(f'layer_{i}/{ours}/{leaf}', f'h.{i}.{theirs}.{leaf}') for leaf in ('weight', 'bias')]
  return entries


def _to_ours(leaf, array, config, back=False):
  """The head's [out, in] → [in, out]; columns (q, k, v) × heads × d_kv → heads × (q, k, v) × d_kv; or back."""
  if leaf == 'head':
    return array.T
  if '/qkv/' not in leaf:
    return array
  groups = (config.num_heads, 3) if back else (3, config.num_heads)
  return array.reshape(*array.shape[:-1], *groups, config.d_kv).swapaxes(-3, -2).reshape(array.shape)


def load(path, dtype=None, mesh=None, vocabulary=None):
  """Reads a GPT-2 model. Arguments and errors as for `huggingface.load`."""
  path = os.path.abspath(os.path.expanduser(path))
  dtype = huggingface.resolve_dtype(dtype)
  config = _read_config(path)
  with contextlib.ExitStack() as stack:
    files = huggingface.open_weights(path, stack)
    names = {}
    for name in files:
      short = name.removeprefix(_PREFIX)
      if short in names:
        raise ValueError(f'{path}: parameter {short} is there twice, as {names[short]} and as {name}')
      if not _BUFFER.fullmatch(short):
        names[short] = name

    if config.tied and _HEAD in names:
      if not huggingface.equal(files, names[_HEAD], names.get('wte.weight', names[_HEAD])):
        raise ValueError(f'{path}: parameter {names[_HEAD]} differs from wte.weight, but config.json says they are tied')
      del names[_HEAD]
    layout = dict(_layout(config))
    huggingface.check_names(path, list(layout.values()), names, r'h\.\d+\.', f'{config.num_layers} layers')
    shapes = huggingface.shapes_of(decoder_only.init_params, config)
    for leaf, theirs in layout.items():
      shape = shapes[leaf][::-1] if leaf == 'head' else shapes[leaf]
      huggingface.check_parameter(path, files, names[theirs], shape)
    vocabulary = huggingface.vocabulary_of(path, config, vocabulary)

    def part(leaf, index):
      name = names[layout[leaf]]
      return _to_ours(leaf, files[name].get_tensor(name), config)[index].astype(dtype)

    params = streaming.place(config, {leaf: shapes[leaf] for leaf in layout}, part, dtype, mesh)
  return Model(config, params, vocabulary, name=os.path.basename(path), ignored=huggingface.ignored(files, names))


def save(model, path, dtype=None, overwrite=False):
  """Writes a folder that Transformers reads as GPT-2. Arguments and errors as for `checkpoints.save_model`."""
  def write(folder):
    read = huggingface.leaves(model, huggingface.shapes_of(decoder_only.init_params, model.config), dtype)
    kind = huggingface.write_weights(folder, ((theirs, _to_ours(leaf, read(leaf), model.config, back=True))
                                              for leaf, theirs in _layout(model.config)))
    write_json(os.path.join(folder, huggingface.CONFIG), _to_settings(model.config, kind))
    if model.vocabulary:
      model.vocabulary.save(folder)
  huggingface.write_folder(path, write, overwrite)


def _read_config(path):
  """config.json → `GPTConfig`; defaults are those of Transformers."""
  file = os.path.join(path, huggingface.CONFIG)
  settings = read_json(file)
  for name, value in _VARIANTS.items():
    if settings.get(name, value) != value:
      raise ValueError(f'{file}: {name} = {settings[name]!r} is not supported, only {value}')
  if settings.get('activation_function', _GELU[0]) not in _GELU:
    raise ValueError(f'{file}: activation_function {settings["activation_function"]!r} is not supported, only {_GELU[0]}')

  integer = functools.partial(huggingface.read_integer, file, settings)
  width, size, eos = integer('n_embd', 768), integer('vocab_size'), integer('eos_token_id', -1, -1)
  eos = eos if eos < size else -1  # Transformers writes GPT-2's own into every small model
  return decoder_only.GPTConfig(
      vocab_size=size, tied=bool(settings.get('tie_word_embeddings', True)), d_model=width,
      d_ff=integer('n_inner', 4 * width), num_heads=integer('n_head', 12), num_layers=integer('n_layer', 12),
      max_positions=integer('n_positions', 1024),
      norm_eps=float(settings.get('layer_norm_epsilon', 1e-5)), dropout=float(settings.get('resid_pdrop', 0.1)),
      # GPT-2 has no padding of its own; its users pad with EOS.
      pad_id=integer('pad_token_id', max(eos, 0), 0), eos_id=eos)


def _to_settings(config, dtype):
  c = config
  return {
      'activation_function': _GELU[0], 'architectures': ['GPT2LMHeadModel'], 'attn_pdrop': c.dropout,
      'bos_token_id': c.eos_id if c.eos_id >= 0 else None, 'dtype': dtype, 'embd_pdrop': c.dropout,
      'eos_token_id': c.eos_id if c.eos_id >= 0 else None, 'layer_norm_epsilon': c.norm_eps, 'model_type': 'gpt2',
      'n_embd': c.d_model, 'n_head': c.num_heads, 'n_inner': c.d_ff, 'n_layer': c.num_layers,
      'n_positions': c.max_positions, 'pad_token_id': c.pad_id, 'resid_pdrop': c.dropout, 'tie_word_embeddings': c.tied,
      'vocab_size': c.vocab_size}
