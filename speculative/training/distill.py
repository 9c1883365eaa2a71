"""Distillation of a draft from its target (after DistillSpec, Zhou et al. 2023): on the target's own samples, and on its
distributions at every token.

The acceptance rate is α = E[1 − TV(p, q)] (Corollary 3.6), so total variation is what counts; its gradient is weak where
p and q share little, which is why the divergences are offered side by side.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np

from speculative.data import batching
from speculative.decoding.autoregressive import autoregressive_decode
from speculative.decoding.config import DecodeConfig
from speculative.models import decoder_only
from speculative.models.model import MODULES
from speculative.training import train


def divergence(p_logits, q_logits, kind):
  """Of the target's distribution p and the draft's q at each token.

  Args:
    p_logits, q_logits: float32[..., V].
    kind: 'forward_kl' Σ p log(p/q), 'reverse_kl' Σ q log(q/p), or 'tvd' ½ Σ |p − q| = 1 − β.

  Returns:
    float32[...], in nats; of 'tvd' between 0 and 1.

  Raises:
    ValueError: unknown kind.
  """
  log_p, log_q = jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits)
  if kind == 'forward_kl':
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
  if kind == 'reverse_kl':
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)
  if kind == 'tvd':
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1)
  raise ValueError(f'divergence {kind!r} is unknown: {", ".join(DIVERGENCES)}')


DIVERGENCES = 'forward_kl', 'reverse_kl', 'tvd'


@functools.lru_cache(maxsize=None)
def loss(config, dtype, kind, vocab_size):
  """The loss of `train.train`, with the target's parameters as its `loss_arguments`.

  Args:
    config: the target's.
    dtype: operands' dtype in the target's matrix products.
    kind: as for `divergence`.
    vocab_size: real ids; rows beyond are never drawn.
  """
  teacher = MODULES[type(config)](config, dtype)

  def mean_divergence(params, module, inputs, targets, dropout_key, target_params):
    q, labels = train.logits_and_labels(params, module, inputs, targets, dropout_key)
    p, _ = train.logits_and_labels(target_params, teacher, inputs, targets)
    at = divergence(jax.lax.stop_gradient(p[..., :vocab_size]), q[..., :vocab_size], kind)
    weights = (labels != config.pad_id).astype(jnp.float32)
    total, count = jnp.sum(weights * at), jnp.sum(weights)
    return total / jnp.maximum(count, 1.0), (total, count)

  return mean_divergence


def sample(target, examples, temperature=1.0, max_decode_len=128, batch=64, seed=0, done=lambda: None):
  """The target's own outputs for inputs, to train on.

  Args:
    target: `Model`.
    examples: list of `train.Example`, of which the inputs count; for a decoder-only target they are prompts.
    temperature: sampled at; 0: the most likely tokens.
    max_decode_len: tokens at most. What did not end by then is used as far as it goes.
    done: called after every batch.

  Returns:
    list of `train.Example`, shortest inputs first; a decoder-only target's are prompt and continuation in one.
  """
  order = sorted(range(len(examples)), key=lambda i: len(examples[i].inputs))
  config = DecodeConfig(max_decode_len=max_decode_len, temperature=temperature)
  made = []
  for first in range(0, len(order), batch):
    picked = order[first:first + batch]
    filled = picked + [picked[0]] * (batch - len(picked))  # one batch size: one program for each length
    width = train.bucket(len(examples[picked[-1]].inputs), batching.BUCKETS)
    inputs = np.full((batch, width), target.pad_id, np.int32)
    for row, i in zip(inputs, filled):
      row[:len(examples[i].inputs)] = examples[i].inputs
    result = autoregressive_decode(target, inputs, config, seed, row_ids=np.array(filled))
    for b, i in enumerate(picked):
      ids, prompt = np.asarray(result.tokens[b, :result.lengths[b]], np.int32), examples[i].inputs
      if isinstance(target.config, decoder_only.GPTConfig):
        prompt, ids = prompt[:0], np.concatenate([prompt, ids])
      made.append(train.Example(prompt, ids))
    done()
  return made
