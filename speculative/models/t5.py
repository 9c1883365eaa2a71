"""T5 1.0, v1.1 and umT5 (Raffel et al. 2020; Shazeer 2020; Chung et al. 2023) in Flax Linen: one layout for training and
decoding.

Every projection is a two-dimensional matrix. Columns are ordered so that a split over devices keeps together what
belongs together: `qkv` is [d_model, heads × (q, k, v) × d_kv], `wi` of a gated model is [d_model, blocks × (gate,
linear) × block].
"""
import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from speculative.models import attention
from speculative.models import kv_cache
from speculative.models.precision import matmul
from speculative.models.precision import take_rows


@dataclasses.dataclass(frozen=True)
class T5Config:
  """Sizes and variants. `vocab_size` counts the rows of the embedding, padding of the vocabulary included."""
  vocab_size: int
  d_model: int
  d_ff: int
  num_heads: int
  d_kv: int
  num_encoder_layers: int
  num_decoder_layers: int
  gated: bool = True  # v1.1: gelu(x·gate) ∘ (x·linear); 1.0: relu(x·wi)
  tied: bool = False  # the output head is the embedding
  scale_tied_output: bool = True  # a tied head's input is divided by √d_model
  layer_bias: bool = False  # umT5: every layer has a relative bias of its own
  num_buckets: int = 32
  max_distance: int = 128
  norm_eps: float = 1e-6
  dropout: float = 0.0
  pad_id: int = 0
  eos_id: int = 1
  start_id: int = 0

  @property
  def gate_block(self):
    """Hidden units whose gate and linear columns lie side by side in `wi`."""
    return math.gcd(self.d_ff, 128)


# T5 v1.1 (the paper's models).
SHAPES = {name: dict(vocab_size=32128, d_model=d_model, d_ff=d_ff, num_heads=heads, d_kv=64, num_encoder_layers=layers,
                     num_decoder_layers=layers)
          for name, d_model, d_ff, heads, layers in (
              ('small', 512, 1024, 6, 8), ('base', 768, 2048, 12, 12), ('large', 1024, 2816, 16, 24),
              ('xl', 2048, 5120, 32, 24), ('xxl', 4096, 10240, 64, 24))}


def _normal(std):
  return nn.initializers.normal(std)


def _relative_bias(module, config):
  return module.param('relative_bias', _normal(config.d_model ** -0.5), (config.num_buckets, config.num_heads))


class RMSNorm(nn.Module):
  """x / rms(x) × scale: no mean, no bias, in float32."""
  eps: float

  @nn.compact
  def __call__(self, x):
    scale = self.param('scale', nn.initializers.ones, (x.shape[-1],))
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps) * scale


class SelfAttention(nn.Module):
  """Multi-head self-attention over the sequence itself, or over a cache that the sequence is first written to."""
  config: T5Config
  dtype: str | None

  @nn.compact
  def __call__(self, x, bias, mask, dropout, cache=None, positions=None):
    c = self.config
    inner = c.num_heads * c.d_kv
    qkv = matmul(x, self.param('qkv', self._init_qkv, (c.d_model, 3 * inner)), self.dtype)
    qkv = qkv.reshape(*x.shape[:2], c.num_heads, 3, c.d_kv).transpose(3, 0, 2, 1, 4)  # [3, B, heads, T, d_kv]
    q, k, v = qkv[0], qkv[1].swapaxes(2, 3), qkv[2]
    if cache is not None:
      cache = k, v = kv_cache.write(cache, k, v, positions)
    y = attention.attend(q, k, v, bias, mask, dropout)
    return matmul(y, self.param('out', _normal(inner ** -0.5), (inner, c.d_model)), self.dtype), cache

  def _init_qkv(self, key, shape):
    c = self.config
    stds = jnp.array([(c.d_model * c.d_kv) ** -0.5, c.d_model ** -0.5, c.d_model ** -0.5])
    w = jax.random.normal(key, (c.d_model, c.num_heads, 3, c.d_kv)) * stds[:, None]
    return w.reshape(shape)


class CrossAttention(nn.Module):
  """Attention to the encoder's output; its keys and values are projected once (`project`)."""
  config: T5Config
  dtype: str | None

  def setup(self):
    c = self.config
    inner = c.num_heads * c.d_kv
    self.q = self.param('q', _normal((c.d_model * c.d_kv) ** -0.5), (c.d_model, inner))
    self.kv = self.param('kv', _normal(c.d_model ** -0.5), (c.d_model, 2 * inner))
    self.out = self.param('out', _normal(inner ** -0.5), (inner, c.d_model))

  def project(self, encoded):
    """encoded[B, S, d_model] → (k [B, heads, d_kv, S], v [B, heads, S, d_kv])."""
    c = self.config
    kv = matmul(encoded, self.kv, self.dtype).reshape(*encoded.shape[:2], c.num_heads, 2, c.d_kv)
    return kv[..., 0, :].transpose(0, 2, 3, 1), kv[..., 1, :].transpose(0, 2, 1, 3)

  def __call__(self, x, kv, mask, dropout):
    c = self.config
    q = matmul(x, self.q, self.dtype).reshape(*x.shape[:2], c.num_heads, c.d_kv).transpose(0, 2, 1, 3)
    return matmul(attention.attend(q, *kv, mask=mask, dropout=dropout), self.out, self.dtype)


class FeedForward(nn.Module):
  config: T5Config
  dtype: str | None

  @nn.compact
  def __call__(self, x, dropout):
    c = self.config
    wi = self.param('wi', _normal(c.d_model ** -0.5), (c.d_model, (2 if c.gated else 1) * c.d_ff))
    h = matmul(x, wi, self.dtype)
    if c.gated:
      h = h.reshape(*x.shape[:-1], -1, 2, c.gate_block)
      h = jax.nn.gelu(h[..., 0, :], approximate=True) * h[..., 1, :]
      h = h.reshape(*x.shape[:-1], c.d_ff)
    else:
      h = jax.nn.relu(h)
    return matmul(dropout(h), self.param('wo', _normal(c.d_ff ** -0.5), (c.d_ff, c.d_model)), self.dtype)


class Layer(nn.Module):
  """Self-attention, in a decoder cross-attention, then the feed-forward, each pre-normalised with a residual."""
  config: T5Config
  dtype: str | None
  decoder: bool

  def setup(self):
    c = self.config
    if c.layer_bias:
      self.relative_bias = _relative_bias(self, c)
    self.attention_norm = RMSNorm(c.norm_eps)
    self.attention = SelfAttention(c, self.dtype)
    if self.decoder:
      self.cross_norm = RMSNorm(c.norm_eps)
      self.cross = CrossAttention(c, self.dtype)
    self.mlp_norm = RMSNorm(c.norm_eps)
    self.mlp = FeedForward(c, self.dtype)

  def __call__(self, x, bias, mask, dropout, cross_kv=None, cross_mask=None, cache=None, positions=None):
    y, cache = self.attention(self.attention_norm(x), bias, mask, dropout, cache, positions)
    x += dropout(y)
    if self.decoder:
      x += dropout(self.cross(self.cross_norm(x), cross_kv, cross_mask, dropout))
    return x + dropout(self.mlp(self.mlp_norm(x), dropout)), cache


class Stack(nn.Module):
  """Encoder or decoder: layers, the relative bias (which they share, but for umT5), the final norm."""
  config: T5Config
  dtype: str | None
  decoder: bool

  def setup(self):
    c = self.config
    n = c.num_decoder_layers if self.decoder else c.num_encoder_layers
    if not c.layer_bias:
      self.relative_bias = _relative_bias(self, c)
    self.layers = [Layer(c, self.dtype, self.decoder, name=f'layer_{i}') for i in range(n)]
    self.final_norm = RMSNorm(c.norm_eps)
    self.drop = nn.Dropout(c.dropout, broadcast_dims=(-2,))  # one mask for all positions, as T5X has it

  def __call__(self, x, query_positions, key_positions, mask, cross_kv=None, cross_mask=None, caches=None,
               deterministic=True):
    """x[B, T, d_model] → (float32[B, T, d_model], caches). `mask` is broadcastable to [B, heads, T, S]."""
    dropout = functools.partial(self.drop, deterministic=deterministic)

    def bias(module):
      return attention.relative_bias(module.relative_bias, query_positions, key_positions, not self.decoder,
                                     self.config.max_distance)

    shared = None if self.config.layer_bias else bias(self)
    x = dropout(x)
    new = []
    for i, layer in enumerate(self.layers):
      x, cache = layer(x, bias(layer) if shared is None else shared, mask, dropout,
                       cross_kv[i] if cross_kv else None, cross_mask, caches[i] if caches else None,
                       query_positions[:, 0])
      new.append(cache)
    return dropout(self.final_norm(x)), tuple(new)


class T5(nn.Module):
  """The encoder-decoder. `dtype`: the operands' dtype in matrix products (None: the weights' own)."""
  config: T5Config
  dtype: str | None = None

  def setup(self):
    c = self.config
    self.embedding = self.param('embedding', _normal(1.0), (c.vocab_size, c.d_model))
    self.encoder = Stack(c, self.dtype, decoder=False)
    self.decoder = Stack(c, self.dtype, decoder=True)
    if not c.tied:
      self.head = self.param('head', _normal(c.d_model ** -0.5), (c.d_model, c.vocab_size))

  def _embed(self, tokens):
    return take_rows(self.embedding, tokens)

  def _logits(self, x):
    c = self.config
    if not c.tied:
      return matmul(x, self.head, self.dtype)
    return matmul(x * c.d_model ** -0.5 if c.scale_tied_output else x, self.embedding.T, self.dtype)

  def encode(self, inputs, deterministic=True):
    """inputs int32[B, S], padding at the end → (float32[B, S, d_model], mask bool[B, S])."""
    mask = inputs != self.config.pad_id
    positions = jnp.arange(inputs.shape[1])
    x, _ = self.encoder(self._embed(inputs), positions[None], positions, mask[:, None, None, :],
                        deterministic=deterministic)
    return x, mask

  def _cross_kv(self, encoded):
    return tuple(layer.cross.project(encoded) for layer in self.decoder.layers)

  def __call__(self, inputs, decoder_inputs, deterministic=True):
    """Full forward pass. int32[B, S], int32[B, T] (start token first) → logits float32[B, T, vocab_size]."""
    encoded, mask = self.encode(inputs, deterministic)
    positions = jnp.arange(decoder_inputs.shape[1])
    causal = positions[:, None] >= positions[None, :]
    x, _ = self.decoder(self._embed(decoder_inputs), positions[None], positions, causal[None, None],
                        self._cross_kv(encoded), mask[:, None, None, :], deterministic=deterministic)
    return self._logits(x)

  def prefill(self, inputs, max_len):
    """Encodes inputs int32[B, S] once and allocates max_len decoder slots → KVCache."""
    c = self.config
    encoded, mask = self.encode(inputs)
    dtype = kv_cache.storage_dtype(self.dtype or self.embedding.dtype)
    cross = jax.tree.map(lambda a: a.astype(dtype), self._cross_kv(encoded))
    self_kv = kv_cache.empty(inputs.shape[0], c.num_decoder_layers, c.num_heads, max_len, c.d_kv, dtype)
    return kv_cache.KVCache(self_kv, cross, mask)

  def extend(self, cache, tokens, positions):
    """Decodes tokens int32[B, T] at positions[b] … positions[b]+T−1 → (logits float32[B, T, vocab_size], KVCache)."""
    slots = cache.self_kv[0][0].shape[3]
    queries = positions[:, None] + jnp.arange(tokens.shape[1])
    keys = jnp.arange(slots)
    causal = keys[None, None, None, :] <= queries[:, None, :, None]
    x, self_kv = self.decoder(self._embed(tokens), queries, keys, causal, cache.cross_kv,
                              cache.encoder_mask[:, None, None, :], cache.self_kv)
    return self._logits(x), dataclasses.replace(cache, self_kv=self_kv)


def init_params(config, key):
  """Random parameters as T5 initialises them: a tree of float32 arrays."""
  ones = jnp.ones((1, 1), jnp.int32)
  return jax.jit(T5(config).init)(key, ones, ones)['params']
