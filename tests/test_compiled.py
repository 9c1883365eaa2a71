"""The text of compiled programs: nothing large is copied inside the loops."""
import re

import jax
import numpy as np
import pytest

import speculative
from speculative.decoding import autoregressive
from speculative.decoding import inputs as decode_inputs
from speculative.decoding import speculative as loop
from speculative.decoding.targets import Target
from speculative.models import t5

# Caches and weights (all but the relative biases) have more elements than anything else in the loops.
CONFIG = t5.T5Config(vocab_size=97, d_model=48, d_ff=80, num_heads=3, d_kv=24, num_encoder_layers=1, num_decoder_layers=2,
                     eos_id=-1)
DRAFT = t5.T5Config(vocab_size=97, d_model=40, d_ff=80, num_heads=2, d_kv=40, num_encoder_layers=1, num_decoder_layers=1,
                    eos_id=-1)
LEAST = 3000


def copies(text, least):
  """Copies of at least so many elements in the computations that a loop runs, as lines of HLO."""
  computations = dict(re.findall(r'^(?:ENTRY )?(%[\w.-]+) \([^\n]*\{\n(.*?)^\}', text, re.M | re.S))
  entry = re.search(r'^ENTRY (%[\w.-]+)', text, re.M)[1]
  found = []
  for name, body in computations.items():
    if name != entry:
      for line in body.splitlines():
        shape = re.search(r'= \w+\[([\d,]*)\]\S* copy\(', line)
        if shape and np.prod([int(n) for n in shape[1].split(',') if n], dtype=int) >= least:
          found.append(line.strip()[:120])
  return found


@pytest.fixture(scope='module')
def models():
  return [speculative.Model(config, t5.init_params(config, jax.random.key(0))) for config in (CONFIG, DRAFT)]


@pytest.mark.parametrize('batch', [1, 3])
@pytest.mark.parametrize('kind', ['plain', 'speculative'])
def test_neither_cache_nor_weight_is_copied_in_the_loop(models, kind, batch):
  target, draft = models
  inputs = np.ones((batch, 7), np.int32)
  config = speculative.DecodeConfig(gamma=3, max_decode_len=64)
  if kind == 'plain':
    ids, settings, keys = decode_inputs.prepare(target, inputs, config)
    program = autoregressive.Program(Target.of(target), 64, config.filtered)
    state = autoregressive.prefill(program, target.params, ids)
    lowered = autoregressive.run.lower(program, target.params, settings, *state, keys)
  else:
    lowered = loop.run.lower(*loop.start(target, draft, inputs, config), np.int32(64))
  assert copies(lowered.compile().as_text(), LEAST) == []
