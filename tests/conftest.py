"""Fixtures that several test files share."""
import gc

import jax
import pytest

from speculative.models import model
from speculative.models import t5

TINY = t5.T5Config(vocab_size=64, d_model=32, d_ff=48, num_heads=2, d_kv=8, num_encoder_layers=1, num_decoder_layers=2,
                   eos_id=-1)


@pytest.fixture(scope='session')
def tiny():
  """A random T5 without an EOS."""
  return model.Model(TINY, t5.init_params(TINY, jax.random.key(0)))


@pytest.fixture(scope='session')
def tiny_draft(tiny):
  """The same with noise on every weight: it is often, not always, of the target's opinion."""
  leaves, tree = jax.tree.flatten(tiny.params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  noisy = [a + .25 * jax.numpy.std(a) * jax.random.normal(k, a.shape) for a, k in zip(leaves, keys)]
  return model.Model(TINY, jax.tree.unflatten(tree, noisy))


# Here compiling takes longer than running what was compiled.
QUICKLY_COMPILED = (
    'test_arguments', 'test_beam', 'test_decoder_only', 'test_decoding', 'test_drafters', 'test_settings',
    'test_streaming', 'test_t5x', 'test_t5x_plugin', 'test_text', 'test_training')


@pytest.fixture(scope='module', autouse=True)
def compile_quickly(request):
  """Small models are compiled without XLA's costly optimisations, which halves the time of these files.

  What a file compiled is dropped behind it: each program takes memory maps, of which a process has 65,530.
  """
  jax.config.update('jax_disable_most_optimizations', request.module.__name__.split('.')[-1] in QUICKLY_COMPILED)
  yield
  jax.config.update('jax_disable_most_optimizations', False)
  jax.clear_caches()
  gc.collect()
