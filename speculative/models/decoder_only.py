"""The paper's GPT-like architecture, in GPT-2's form (Radford et al. 2019), in Flax Linen: learned positions, layers that
are normalised before, GELU, the embedding as head.

Parameters are laid out as in `t5`: two-dimensional matrices, `qkv` is [d_model, heads × (q, k, v) × d_kv].
"""
import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from speculative.models import attention
from speculative.models import kv_cache
from speculative.models.precision import matmul
from speculative.models.precision import take_rows


@dataclasses.dataclass(frozen=True)
class GPTConfig:
  """Sizes. `vocab_size` counts the rows of the embedding, padding of the vocabulary included.

  `start_id` means nothing here (decoding starts from the prompt's last token); it is one value for all, so that every
  pair agrees on it.
  """
  vocab_size: int
  d_model: int
  d_ff: int
  num_heads: int
  num_layers: int
  max_positions: int
  norm_eps: float = 1e-5
  dropout: float = 0.1
  pad_id: int = 0
  eos_id: int = 1
  start_id: int = 0
  tied: bool = True  # the embedding is the head

  def __post_init__(self):
    if self.d_model % self.num_heads:
      raise ValueError(f'd_model {self.d_model} is not a multiple of num_heads {self.num_heads}')

  @property
  def d_kv(self):
    return self.d_model // self.num_heads

  def first(self, inputs):
    """Each row's last prompt token int32[B] and its position int32[B]: where decoding starts."""
    last = prompt_lengths(inputs, self.pad_id) - 1
    return jnp.take_along_axis(inputs, last[:, None], axis=1)[:, 0], last.astype(jnp.int32)

  def check_inputs(self, inputs, lengths):
    """Raises ValueError for a prompt of no tokens, or one that with the lengths int[B] behind it needs more positions."""
    prompts = prompt_lengths(inputs, self.pad_id)
    if (prompts == 0).any():
      raise ValueError(f'inputs[{int(np.argmin(prompts))}] is all padding: a decoder-only target needs a prompt')
    b = int(np.argmax(prompts + lengths))
    if prompts[b] + lengths[b] > self.max_positions:
      raise ValueError(f'inputs[{b}]: a prompt of {prompts[b]} tokens and up to {lengths[b]} behind it need '
                       f'{prompts[b] + lengths[b]} positions, the model has {self.max_positions}: shorten the prompt or '
                       'lower max_decode_len')


# The paper's pair (section 4.1, lm1b with an 8k vocabulary).
SHAPES = {
    '97m': dict(d_model=768, d_ff=3072, num_heads=12, num_layers=12),
    '6m': dict(d_model=256, d_ff=1024, num_heads=4, num_layers=2),
}


def prompt_lengths(inputs, pad_id):
  """int[B]: tokens up to the last that is no padding, of inputs[B, S] (NumPy or JAX)."""
  return ((inputs != pad_id) * (np.arange(inputs.shape[1]) + 1)).max(axis=1)


class LayerNorm(nn.Module):
  """In float32, whatever the weights are stored in."""
  eps: float

  @nn.compact
  def __call__(self, x):
    scale = self.param('scale', nn.initializers.ones, (x.shape[-1],))
    bias = self.param('bias', nn.initializers.zeros, (x.shape[-1],))
    x -= jnp.mean(x, axis=-1, keepdims=True)
    x *= jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
    return x * scale.astype(jnp.float32) + bias.astype(jnp.float32)


class Dense(nn.Module):
  """x · weight + bias, in float32."""
  features: int
  std: float
  dtype: str | None

  @nn.compact
  def __call__(self, x):
    weight = self.param('weight', nn.initializers.normal(self.std), (x.shape[-1], self.features))
    bias = self.param('bias', nn.initializers.zeros, (self.features,))
    return matmul(x, weight, self.dtype) + bias.astype(jnp.float32)


class Layer(nn.Module):
  """Self-attention, then the feed-forward, each with a residual."""
  config: GPTConfig
  dtype: str | None

  def setup(self):
    c = self.config
    out_std = 0.02 / (2 * c.num_layers) ** 0.5  # as GPT-2 initialises what writes to the residual
    self.attention_norm, self.mlp_norm = LayerNorm(c.norm_eps), LayerNorm(c.norm_eps)
    self.qkv, self.out = Dense(3 * c.d_model, 0.02, self.dtype), Dense(c.d_model, out_std, self.dtype)
    self.wi, self.wo = Dense(c.d_ff, 0.02, self.dtype), Dense(c.d_model, out_std, self.dtype)

  def __call__(self, x, mask, dropout, cache=None, positions=None):
    c = self.config
    qkv = self.qkv(self.attention_norm(x)).reshape(*x.shape[:2], c.num_heads, 3, c.d_kv).transpose(3, 0, 2, 1, 4)
    q, k, v = qkv[0] * c.d_kv ** -0.5, qkv[1].swapaxes(2, 3), qkv[2]
    if cache is not None:
      cache = k, v = kv_cache.write(cache, k, v, positions)
    x += dropout(self.out(attention.attend(q, k, v, mask=mask, dropout=dropout)))
    return x + dropout(self.wo(jax.nn.gelu(self.wi(self.mlp_norm(x)), approximate=True))), cache


class DecoderOnly(nn.Module):
  """The language model. `dtype`: the operands' dtype in matrix products (None: the weights' own)."""
  config: GPTConfig
  dtype: str | None = None

  def setup(self):
    c = self.config
    self.embedding = self.param('embedding', nn.initializers.normal(0.02), (c.vocab_size, c.d_model))
    if not c.tied:
      self.head = self.param('head', nn.initializers.normal(0.02), (c.d_model, c.vocab_size))
    self.positions = self.param('positions', nn.initializers.normal(0.01), (c.max_positions, c.d_model))
    self.layers = [Layer(c, self.dtype, name=f'layer_{i}') for i in range(c.num_layers)]
    self.final_norm = LayerNorm(c.norm_eps)
    self.drop = nn.Dropout(c.dropout)

  def _forward(self, tokens, queries, mask, caches=None, deterministic=True):
    """Logits and caches of tokens int32[B, T] at positions `queries` int32[B or 1, T]."""
    dropout = functools.partial(self.drop, deterministic=deterministic)
    # A draft may lie beyond the last position; nothing that is kept does (`GPTConfig.check_inputs`).
    at = jnp.minimum(queries, self.config.max_positions - 1)
    x = dropout(take_rows(self.embedding, tokens) + take_rows(self.positions, at))
    new = []
    for i, layer in enumerate(self.layers):
      x, cache = layer(x, mask, dropout, caches[i] if caches else None, queries[:, 0])
      new.append(cache)
    head = self.embedding.T if self.config.tied else self.head
    return matmul(self.final_norm(x), head, self.dtype), tuple(new)

  def __call__(self, tokens, deterministic=True):
    """Full forward pass: int32[B, T] → logits float32[B, T, vocab_size]."""
    if tokens.shape[1] > self.config.max_positions:
      raise ValueError(f'{tokens.shape[1]} tokens: the model has {self.config.max_positions} positions')
    positions = jnp.arange(tokens.shape[1])
    return self._forward(tokens, positions[None], (positions[:, None] >= positions)[None, None],
                         deterministic=deterministic)[0]

  def prefill(self, inputs, max_len):
    """Prompts int32[B, S], padding at the end → KVCache of S + max_len slots that holds them.

    What padding leaves in a shorter row's cache is overwritten before it can be seen.
    """
    c = self.config
    batch, width = inputs.shape
    dtype = kv_cache.storage_dtype(self.dtype or self.embedding.dtype)
    cache = kv_cache.KVCache(kv_cache.empty(batch, c.num_layers, c.num_heads, width + max_len, c.d_kv, dtype))
    return self.extend(cache, inputs, jnp.zeros(batch, jnp.int32))[1]

  def extend(self, cache, tokens, positions):
    """tokens int32[B, T] at positions[b] … positions[b]+T−1 → (logits float32[B, T, vocab_size], KVCache)."""
    queries = positions[:, None] + jnp.arange(tokens.shape[1])
    keys = jnp.arange(cache.self_kv[0][0].shape[3])
    logits, self_kv = self._forward(tokens, queries, keys <= queries[:, None, :, None], cache.self_kv)
    return logits, dataclasses.replace(cache, self_kv=self_kv)


def init_params(config, key):
  """Random parameters as GPT-2 initialises them: a tree of float32 arrays."""
  return jax.jit(DecoderOnly(config).init)(key, jnp.ones((1, 1), jnp.int32))['params']
