"""Other libraries' decoding of the same shapes, for `experiments.benchmark`; each is used where it is installed.

A peer is a function of (config, inputs int[1, S], dtype) → make, where make(n) is a callable that decodes exactly n tokens
greedily with random weights in dtype ('float32', 'bfloat16'), all work done on return; on a GPU where it finds one.
ImportError: it is not installed.
"""
import functools
import os
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np


def t5x(config, inputs, dtype):
  """T5X's own network and sampler (github.com/google-research/t5x on PYTHONPATH)."""
  from t5x import decoding
  from t5x.examples.t5 import network
  c = config
  module = network.Transformer(network.T5Config(
      vocab_size=c.vocab_size, emb_dim=c.d_model, num_heads=c.num_heads, num_encoder_layers=c.num_encoder_layers,
      num_decoder_layers=c.num_decoder_layers, head_dim=c.d_kv, mlp_dim=c.d_ff, mlp_activations=('gelu', 'linear'),
      dropout_rate=0.0, dtype=dtype))
  two = jnp.ones((1, 2), jnp.int32)
  # Its own initialisation as one program takes minutes to compile.
  shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.asarray(inputs), two, two)['params']
  params = jax.tree.map(lambda leaf: (0.02 * jax.random.normal(jax.random.key(0), leaf.shape)).astype(dtype), shapes)

  def make(n):
    ones = jnp.ones((1, n), jnp.int32)

    @jax.jit
    def generate(params, inputs):
      apply = functools.partial(module.apply, enable_dropout=False)
      _, made = apply({'params': params}, jnp.ones_like(inputs), ones, ones, decode=True, mutable=['cache'])
      encoded = apply({'params': params}, inputs, method=module.encode)

      def tokens_to_logits(state):
        logits, new = apply({'params': params, 'cache': state.cache}, encoded, inputs, state.cur_token, state.cur_token,
                            decode=True, max_decode_length=n, mutable=['cache'], method=module.decode)
        return jnp.squeeze(logits, 1), new['cache']

      return decoding.temperature_sample(
          inputs=jnp.zeros((1, n), jnp.int32), cache=made['cache'], tokens_to_logits=tokens_to_logits, eos_id=-5,
          decode_rng=jax.random.key(0), topk=1, temperature=0.0)[0]

    return lambda: generate(params, jnp.asarray(inputs)).block_until_ready()

  return make


def _torch_device():
  import torch
  torch.set_num_threads(os.cpu_count())
  return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def _transformers_model(config, device, dtype):
  import torch
  import transformers
  torch.manual_seed(0)
  c = config
  with device:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=c.vocab_size, d_model=c.d_model, d_kv=c.d_kv, d_ff=c.d_ff, num_layers=c.num_encoder_layers,
        num_decoder_layers=c.num_decoder_layers, num_heads=c.num_heads, feed_forward_proj='gated-gelu',
        tie_word_embeddings=False, decoder_start_token_id=0)).to(getattr(torch, dtype)).eval()


def transformers(config, inputs, dtype):
  """Hugging Face Transformers' `generate` on PyTorch."""
  import torch
  device = _torch_device()
  model = _transformers_model(config, device, dtype)
  x = torch.tensor(np.asarray(inputs), device=device).long()

  def make(n):
    def run():
      with torch.inference_mode():
        model.generate(x, max_new_tokens=n, min_new_tokens=n, do_sample=False).cpu()
    return run

  return make


def ctranslate2(config, inputs, dtype):
  """CTranslate2, its model converted from Transformers'."""
  import ctranslate2 as library
  from ctranslate2.converters import transformers as converters

  class Tokenizer:
    """What the converter asks of one."""
    pad_token, eos_token, unk_token, bos_token, additional_special_tokens = '<pad>', '</s>', '<unk>', '<pad>', []
    names = ['<pad>', '</s>', '<unk>'] + [f't{i}' for i in range(3, config.vocab_size)]

    def get_vocab(self):
      return {name: i for i, name in enumerate(self.names)}

    def convert_ids_to_tokens(self, i):
      return self.names[i]

    def convert_tokens_to_ids(self, name):
      return self.names.index(name)

  loader, tokenizer = converters.T5Loader(), Tokenizer()
  device = _torch_device()
  model = _transformers_model(config, device, 'float32').cpu()
  spec = loader.get_model_spec(model)
  loader.set_config(spec.config, model, tokenizer)
  loader.set_vocabulary(spec, tokenizer.names)
  spec.validate()
  spec.optimize(quantization=None)
  folder = tempfile.mkdtemp()
  try:
    spec.save(folder)
    del model, spec
    translator = library.Translator(folder, device=device.type, intra_threads=os.cpu_count(), compute_type=dtype)
  finally:
    shutil.rmtree(folder)
  source = [[f't{i}' for i in np.asarray(inputs)[0]]]
  return lambda n: lambda: translator.translate_batch(
      source, beam_size=1, max_decoding_length=n, min_decoding_length=n, return_end_token=True)


PLAIN = {'t5x': t5x, 'transformers': transformers, 'ctranslate2': ctranslate2}


def assisted(target, draft, prompts, max_new_tokens, dtype):
  """Transformers' assisted generation.

  Args:
    target, draft: folders in Hugging Face's layout.
    prompts: list of int[S].
    max_new_tokens: a text at most.
    dtype: 'float32' or 'bfloat16'.

  Returns:
    run(temperature, draft_tokens): decodes all prompts one at a time and returns the tokens made. Temperature 0 is
    greedy; draft_tokens None: without the draft.
  """
  import torch
  import transformers as library
  device = _torch_device()
  model, assistant = (library.T5ForConditionalGeneration.from_pretrained(path, dtype=getattr(torch, dtype)).to(device).eval()
                      for path in (target, draft))
  inputs = [torch.tensor(np.asarray(p)[None], device=device).long() for p in prompts]

  def run(temperature, draft_tokens):
    kwargs = {'do_sample': True, 'temperature': temperature, 'top_k': 0} if temperature else {'do_sample': False}
    if draft_tokens:
      kwargs['assistant_model'] = assistant
      g = assistant.generation_config
      g.num_assistant_tokens, g.num_assistant_tokens_schedule, g.assistant_confidence_threshold = draft_tokens, 'constant', 0.0
    torch.manual_seed(0)
    with torch.inference_mode():
      return sum(model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=max_new_tokens, **kwargs).shape[1] - 1
                 for x in inputs)

  return run
