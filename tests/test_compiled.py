"""The text of compiled programs: nothing large is copied inside the loops, and how much they do."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speculative
from speculative.decoding import autoregressive
from speculative.decoding import speculative as loop
from speculative.measure import program
from speculative.models import t5

# Caches and weights (all but the relative biases) have more elements than anything else in the loops.
CONFIG = t5.T5Config(vocab_size=97, d_model=48, d_ff=80, num_heads=3, d_kv=24, num_encoder_layers=1, num_decoder_layers=2,
                     eos_id=-1)
DRAFT = t5.T5Config(vocab_size=97, d_model=40, d_ff=80, num_heads=2, d_kv=40, num_encoder_layers=1, num_decoder_layers=1,
                    eos_id=-1)
LEAST = 3000


@pytest.fixture(scope='module')
def models():
  return [speculative.Model(config, t5.init_params(config, jax.random.key(0))) for config in (CONFIG, DRAFT)]


def text(models, kind, batch):
  """The compiled loop's."""
  target, draft = models
  inputs, config = np.ones((batch, 7), np.int32), speculative.DecodeConfig(gamma=3, max_decode_len=64)
  if kind == 'plain':
    lowered = autoregressive.run.lower(*autoregressive.start(target, inputs, config))
  else:
    lowered = loop.run.lower(*loop.start(target, draft, inputs, config), np.int32(64))
  return lowered.compile().as_text()


@pytest.mark.parametrize('batch', [1, 3])
@pytest.mark.parametrize('kind', ['plain', 'speculative'])
def test_neither_cache_nor_weight_is_copied_in_the_loop(models, kind, batch):
  assert program.loop_copies(text(models, kind, batch), LEAST) == []


@pytest.mark.parametrize('kind,most', [('plain', 150), ('speculative', 420)])
def test_operations(models, kind, most):
  """Small models' time is made of them. A random generator inside the loop adds some 180."""
  assert 50 < program.loop_operations(text(models, kind, 1)) < most


def test_counting():
  """Loops inside count as often as they run, outermost operations and what lies outside of the loop do not."""
  def outer(carry):
    i, x = carry
    x = jax.lax.fori_loop(0, 5, lambda _, x: jnp.cos(x @ x), x)
    return i + 1, jnp.sin(x @ x)
  def run(x, n):
    return jax.lax.while_loop(lambda c: c[0] < n, outer, (0, jnp.tanh(x @ x)))
  compiled = jax.jit(run).lower(jnp.ones((64, 64)), 3).compile().as_text()
  products = compiled.count(' dot(') + compiled.count('__ynn_fusion')
  assert products >= 3
  # In each pass: 6 products and 6 functions of them; loops' own counters and conditions are a few more.
  assert 12 <= program.loop_operations(compiled) <= 12 + 6 * 5
  assert program.loop_operations(jax.jit(jnp.sin).lower(1.).compile().as_text()) == 0


def test_copies_are_seen():
  text = """HloModule m

%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  %a = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %copy.1 = f32[8,16]{1,0} copy(%a)
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%i, %copy.1)
}

%always (p: (s32[], f32[8,16])) -> pred[] {
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %w = (s32[], f32[8,16]{1,0}) while(%x), condition=%always, body=%body
  ROOT %copy.2 = f32[8,16]{1,0} copy(%x)
}
"""
  assert program.loop_copies(text, 128) == ['%copy.1 = f32[8,16]{1,0} copy(%a)']
  assert program.loop_copies(text, 129) == []


def test_parts_have_names_in_a_profile(models):
  found = text(models, 'speculative', 1)
  assert all(f'while/body/{name}/' in found for name in ('draft', 'verify', 'accept', 'commit'))


@pytest.mark.slow
def test_laid_out_parameters_are_the_same(models):
  """On a CPU the best layout is the default one; nothing of the caller's changes hands."""
  target, draft = speculative.lay_out(*models, np.ones((1, 7), np.int32), speculative.DecodeConfig(gamma=2, max_decode_len=9))
  inputs, config = np.full((2, 7), 5, np.int32), speculative.DecodeConfig(gamma=2, max_decode_len=9)
  np.testing.assert_array_equal(speculative.speculative_decode(target, draft, inputs, config).tokens,
                                speculative.speculative_decode(*models, inputs, config).tokens)
  for given, made in zip(models, (target, draft)):
    jax.tree.map(np.testing.assert_array_equal, given.params, made.params)
