"""Plain decoding, one token a target call: the oracle of the tests and the baseline of every speed-up."""
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speculative import algorithm
from speculative import sharding
from speculative.decoding import inputs as decode_inputs
from speculative.decoding import state as loop
from speculative.decoding.config import DecodeConfig
from speculative.decoding.state import FinishReason
from speculative.decoding.targets import Target


class Program(NamedTuple):
  """Everything static."""
  target: Target
  max_decode_len: int
  filtered: bool
  layout: sharding.Layout | None = None


def autoregressive_decode(target, inputs, config=DecodeConfig(), seed=0, row_ids=None):
  """Decodes one token at a time.

  Arguments, result and errors as for `speculative_decode`; `config.gamma` and `config.lenience` are not used. The
  result has no drafts: `rounds` counts target calls.
  """
  return finish(*start(target, inputs, config, seed, row_ids))


def start(target, inputs, config, seed=0, row_ids=None):
  """Checks everything, then prefills: (program, params, settings, cache, token, position, row_keys), which `run` takes."""
  static = Target.of(target)
  inputs, settings, row_keys = decode_inputs.prepare(target, inputs, config, seed, row_ids)
  layout = sharding.layout_of(target.params)
  if layout:
    inputs, settings, row_keys = layout.replicated((inputs, settings, row_keys))
  program = Program(static, config.max_decode_len, config.filtered, layout)
  return program, target.params, settings, *prefill(program, target.params, inputs), row_keys


def finish(program, *started):
  """What `start` returned → `DecodeResult`."""
  out = run(program, *started)
  tokens, log_probs, lengths, finish_reason = jax.device_get(program.layout.replicated(out) if program.layout else out)
  none = np.zeros_like(lengths)
  return loop.DecodeResult(tokens, lengths, log_probs, finish_reason, rounds=lengths, drafted=none, tested=none,
                           accepted=none, accepted_per_round=np.full(tokens.shape, -1, np.int32))


@functools.partial(jax.jit, static_argnums=0)
def prefill(program, params, inputs):
  """inputs int32[B, S] → (cache, first token int32[B], its position int32[B])."""
  state = (program.target.prefill(params, inputs, program.max_decode_len + 1), *program.target.start(inputs))
  return program.layout.constrain(state, program.layout.split[0]) if program.layout else state


@functools.partial(jax.jit, static_argnums=0)
def run(program, params, settings, cache, token, position, row_keys):
  """(tokens int32[B, N], log_probs float32[B, N], lengths int32[B], finish_reason int32[B])."""
  target, n = program.target, program.max_decode_len
  batch = token.shape[0]
  uniforms = loop.uniforms(row_keys, n, 2)

  def step(carry):
    i, token, tokens, log_probs, lengths, finish, cache = carry
    logits, cache = target.extend(params, cache, token[:, None], position + i)
    p, soft = settings.adjust(target, program.filtered, logits[:, 0], jnp.full(batch, i))
    token = algorithm.draw(p, uniforms[:, i])
    broken = jnp.isnan(p[:, 0])  # a distribution that is not finite is NaN in every entry
    running = finish == FinishReason.RUNNING
    keep = running & ~broken
    lengths += keep
    tokens = tokens.at[:, i].set(jnp.where(keep, token, target.pad_id))
    stop = settings.completes_stop(tokens, jnp.full((batch, 1), i))[:, 0]
    now = jnp.where(broken, FinishReason.ERROR, jnp.where(token == target.eos_id, FinishReason.EOS, jnp.where(
        stop, FinishReason.STOP, jnp.where(lengths == settings.max_decode_len, FinishReason.LENGTH,
                                           FinishReason.RUNNING))))
    log_probs = log_probs.at[:, i].set(jnp.where(keep, jnp.log(loop.take_token(soft, token)), 0.0))
    carry = token, tokens, log_probs, lengths, jnp.where(running, now, finish).astype(jnp.int32), cache
    return i + 1, *(program.layout.constrain(carry, program.layout.split[0]) if program.layout else carry)

  finish = jnp.where(settings.max_decode_len > 0, FinishReason.RUNNING, FinishReason.LENGTH).astype(jnp.int32)
  carry = (jnp.int32(0), token, jnp.full((batch, n), target.pad_id, jnp.int32), jnp.zeros((batch, n), jnp.float32),
           jnp.zeros(batch, jnp.int32), finish, cache)
  if n == 0:
    return carry[2:6]
  return jax.lax.while_loop(lambda c: jnp.any(c[5] == FinishReason.RUNNING), step, carry)[2:6]
