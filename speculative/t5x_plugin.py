"""Speculative decoding inside of T5X: a model for its `infer`, `eval` and `train`.

With configs/t5x/infer_speculative.gin, `python -m t5x.infer` decodes speculatively; nothing of T5X changes.
"""
import dataclasses
import functools
import os
import types

import jax
import jax.numpy as jnp
import numpy as np

from speculative import checkpoints
from speculative.checkpoints import pairs
from speculative.checkpoints import t5x as t5x_checkpoints
from speculative.data import vocabulary as vocabularies
from speculative.decoding import config as decode_config_lib
from speculative.decoding import speculative as loop
from speculative.decoding.config import DecodeConfig
from speculative.decoding.state import FinishReason
from speculative.decoding.targets import Drafter
from speculative.decoding.targets import Target
from speculative.drafters.base import as_drafter
from speculative.models.model import Model

try:
  from t5x import models
except ImportError as e:
  raise ImportError(f'speculative.t5x_plugin needs T5X ({e}). It is not on PyPI: clone github.com/google-research/t5x '
                    'and follow its README (pip install -e .)') from e

_ACTIVATIONS = ('relu',), ('gelu', 'linear')  # of T5 1.0 and v1.1


class SpeculativeEncoderDecoderModel(models.EncoderDecoderModel):
  """T5X's `EncoderDecoderModel`, whose predictions are decoded speculatively; training and scoring are T5X's own.

  The parameters are T5X's: the tree of `t5x.examples.t5` or `scalable_t5`, scanned or not. They are laid out anew, in
  the dtype of the module's configuration, at the beginning of every batch, inside of the program that T5X compiles.

  The draft's parameters are constants of that program. By default JAX writes them into it as literals (60 M float32
  numbers: 4 s of compiling and 0.7 GB of memory, on a CPU). In a process started with the environment variable
  JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS=1 they are hidden arguments instead, and the program is small (JAX 0.10.2). On a
  mesh they are replicated; they must not be committed to one device.

  Attributes:
    drafter: see `speculative.drafters.base`.
    decode_config: `speculative.DecodeConfig`.
  """

  def __init__(self, module, input_vocabulary, output_vocabulary, optimizer_def, draft, decode_config=DecodeConfig(),
               **kwargs):
    """Args, beside T5X's:

      draft: a checkpoint's path (`speculative.load_model`), a `speculative.Model`, or a drafter. A model without a
        vocabulary is taken to have `output_vocabulary`.
      decode_config: `DecodeConfig`. A text has at most max_decode_len tokens, and no more than the task's targets have
        room for, which is T5X's own limit.

    Raises:
      ValueError: a module that is no T5; a draft of another vocabulary; `decode_fn`, which would not be used.
      TypeError: `draft` is no drafter, `decode_config` no `DecodeConfig`.
    """
    decode_config_lib.check_config(decode_config)
    if 'decode_fn' in kwargs:
      raise ValueError('decode_fn is not used by speculative decoding: set temperature, top_k, top_p in decode_config')
    _check_module(module)
    super().__init__(module, input_vocabulary, output_vocabulary, optimizer_def, **kwargs)
    self.decode_config = decode_config
    self._vocabulary = _Vocabulary(output_vocabulary)
    if isinstance(draft, (str, os.PathLike)):
      draft = checkpoints.load_model(draft)
    if isinstance(draft, Model) and draft.vocabulary is None:
      draft = dataclasses.replace(draft, vocabulary=self._vocabulary)
    self.drafter = as_drafter(draft)
    v = self._vocabulary
    pairs.check_pair(types.SimpleNamespace(
        name=f"with T5X's {type(output_vocabulary).__name__}", vocab_size=min(v.vocab_size, module.config.vocab_size),
        pad_id=v.pad_id, eos_id=v.eos_id, start_id=v.pad_id, vocabulary=v), self.drafter)

  def predict_batch_with_aux(self, params, batch, rng=None, decoder_params=None, return_all_decodes=None,
                             num_decodes=None, prompt_with_targets=False):
    """Decodes a batch; may be traced.

    Args:
      params: T5X's tree.
      batch: 'encoder_input_tokens' int32[B, S]; 'decoder_input_tokens' [B, L], of which only L is used.
      rng: key, or None: that of seed 0. Row b, decode k draws with the id b × num_decodes + k.
      decoder_params: may hold 'decode_rng' in rng's stead, and 'eos_id' in the vocabulary's; nothing else.
      return_all_decodes: all decodes instead of the most probable.
      num_decodes: decodes of each input, D, independent samples; at temperature 0 they are equal.
      prompt_with_targets: not supported.

    Returns:
      (int32[B, L] or [B, D, L], padded with 0; {'scores': float32[B] or [B, D]}). A score is the sum of the log-probs
      of the tokens, EOS counted, in the distribution sampled from (at temperature 0: the unadjusted log-softmax); −inf
      where logits were not finite. Decodes are sorted, the most probable last.

    Raises:
      ValueError: what is not supported; parameters that are no T5's; a setting that does not fit L.
    """
    if prompt_with_targets:
      raise ValueError('prompt_with_targets is not supported: a T5 target starts from its start token')
    options = dict(decoder_params or {})
    decode_rng = options.pop('decode_rng', None)
    if rng is not None and decode_rng is not None:
      raise ValueError("both rng and decoder_params['decode_rng'] are given")
    rng = decode_rng if rng is None else rng
    eos_id = options.pop('eos_id', self._vocabulary.eos_id)
    if options:
      raise ValueError(f'decoder_params {sorted(options)} are not supported, only decode_rng and eos_id: set '
                       'temperature, top_k and top_p in decode_config')
    default = self._default_decoder_params
    num_decodes = default.num_decodes if num_decodes is None else num_decodes
    return_all_decodes = default.return_all_decodes if return_all_decodes is None else return_all_decodes

    length = batch['decoder_input_tokens'].shape[1]
    n = min(length, self.decode_config.max_decode_len)
    config = dataclasses.replace(self.decode_config, max_decode_len=n)
    inputs = jnp.repeat(jnp.asarray(batch['encoder_input_tokens'], jnp.int32), num_decodes, axis=0)
    target = self._target(params, eos_id)
    program = loop.Program(Target.of(target), Drafter.of(self.drafter), config.gamma, n, config.filtered)
    both, settings = (target.params, self.drafter.params), config.rows(target, len(inputs))
    state = loop.prefill(program, both, settings, inputs, _row_keys(rng, len(inputs)))
    state = loop.run(program, both, settings, state, np.int32(n))

    tokens = jnp.pad(state.tokens[:, 1:n + 1], ((0, 0), (0, length - n)), constant_values=target.pad_id)
    broken = state.finish_reason == FinishReason.ERROR
    scores = jnp.where(broken, -jnp.inf, jnp.sum(state.log_probs[:, 1:n + 1], axis=1)).reshape(-1, num_decodes)
    order = jnp.argsort(scores, axis=1)
    scores = jnp.take_along_axis(scores, order, axis=1)
    tokens = jnp.take_along_axis(tokens.reshape(-1, num_decodes, length), order[..., None], axis=1)
    if return_all_decodes:
      return tokens, {'scores': scores}
    return tokens[:, -1], {'scores': scores[:, -1]}

  def _target(self, params, eos_id):
    """The `Model` of T5X's parameters."""
    c = self.module.config
    model = t5x_checkpoints.from_params(params, c.dtype, self._vocabulary)
    if model.config.gated != (len(c.mlp_activations) == 2):
      raise ValueError(f'T5X parameters: mlp_activations = {c.mlp_activations} of the module do not fit them')
    return dataclasses.replace(model, config=dataclasses.replace(model.config, eos_id=eos_id))


def _check_module(module):
  """Raises ValueError for a module that `speculative.models.t5` cannot express."""
  config = getattr(module, 'config', None)
  for name in ('mlp_activations', 'dtype', 'vocab_size'):
    if not hasattr(config, name):
      raise ValueError(f'{type(module).__name__} has no config.{name}: only the networks of t5x.examples.t5 and '
                       'scalable_t5 are supported')
  if tuple(config.mlp_activations) not in _ACTIVATIONS:
    raise ValueError(f'mlp_activations = {config.mlp_activations}: only {" and ".join(map(str, _ACTIVATIONS))} are '
                     'supported')
  if getattr(config, 'scan_layers', False) and config.param_scan_axis != 1:
    raise ValueError(f'param_scan_axis = {config.param_scan_axis}: only 1 is supported')


def _row_keys(rng, rows):
  """PRNG keys [rows], as `decoding.inputs.prepare` makes them of a seed, which is drawn from `rng`."""
  impl = 'threefry2x32'
  key = jax.random.key(0, impl=impl) if rng is None else jax.random.wrap_key_data(
      jax.random.bits(rng, (2,), jnp.uint32), impl=impl)
  return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(rows))


class _Vocabulary(vocabularies.Pieces):
  """What of a seqio vocabulary a `Model` and `check_pair` look at.

  Attributes:
    vocab_size: real ids; the embedding may have more rows.
    pad_id: 0, as T5X has it; eos_id: 1 where the vocabulary has none, as in T5X.
    fingerprint: as `Pieces` has it; None where pieces are not known, which is then not compared.
    pieces: all pieces, by id.
  """
  pad_id = 0

  def __init__(self, vocabulary):
    self.vocab_size, self.eos_id = vocabulary.vocab_size, vocabulary.eos_id or 1
    if hasattr(vocabulary, 'tokenizer'):  # SentencePiece
      self.pieces = [vocabulary.tokenizer.IdToPiece(i) for i in range(self.vocab_size)]
    else:
      self.fingerprint = None
