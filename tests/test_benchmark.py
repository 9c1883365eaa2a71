"""The benchmark: what it refuses, what it counts, its widened models and its tables. Times are not asserted."""
import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import benchmark
from experiments import command
import speculative
from speculative.models import t5
from speculative.report import figures
from speculative.report import tables

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.mark.parametrize('settings,message', [
    ({'shapes': ('tiny',)}, "shape 'tiny': there are small, base, large, xl, xxl"),
    ({'pairs': ('huge',)}, "shape 'huge'"),
    ({'others': ('vllm',)}, 'vllm: there are t5x, transformers, ctranslate2')])
def test_mistakes(settings, message, tmp_path):
  with pytest.raises(command.UsageError, match=message):
    benchmark.benchmark(str(tmp_path), **settings)


def test_a_machine_too_small(monkeypatch, tmp_path):
  """Said before anything is allocated."""
  pages = {'SC_PAGE_SIZE': 4096, 'SC_PHYS_PAGES': 2 * 10**9 // 4096}
  monkeypatch.setattr(os, 'sysconf', pages.get)
  with pytest.raises(command.UsageError, match=r'the weights of T5-large in float32 take 3.1 GB, .* the device has 2.0 GB'):
    benchmark.benchmark(str(tmp_path), shapes=(), pairs=('large',))


def test_step_bytes():
  """What a step reads: all of the decoder but the projections of the encoder's output, and the head."""
  config = t5.T5Config(vocab_size=64, d_model=32, d_ff=48, num_heads=2, d_kv=8, num_encoder_layers=1, num_decoder_layers=2)
  layer = 32 * 3 * 16 + 16 * 32 + 32 * 16 + 16 * 32 + 32 * 96 + 48 * 32 + 3 * 32
  expected = 4 * (2 * layer + 32 * 64 + 32 + 32 * 2)  # and the last norm and the biases
  assert benchmark.step_bytes(t5.init_params(config, jax.random.key(0))) == expected


@pytest.mark.slow
def test_widened_models_decode_the_same(monkeypatch):
  """A packaged model in a larger shape: its tokens, by itself and as a draft."""
  monkeypatch.setitem(t5.SHAPES, 'wide', dict(vocab_size=4200, d_model=320, d_ff=896, num_heads=9, d_kv=40,
                                              num_encoder_layers=4, num_decoder_layers=5))
  zoo = speculative.load_pretrained('float32')
  wide = benchmark.widened(zoo.target, 'wide', jnp.float32)
  assert wide.config.d_model == 320 and wide.vocab_size == zoo.target.vocab_size
  texts = [text for text, _ in zoo.texts['ende'][:8]]
  inputs = speculative.text.encode(zoo.target, texts)
  config = speculative.DecodeConfig(gamma=3, max_decode_len=24)
  plain = speculative.autoregressive_decode(zoo.target, inputs, config)
  np.testing.assert_array_equal(speculative.autoregressive_decode(wide, inputs, config).tokens, plain.tokens)
  np.testing.assert_array_equal(speculative.speculative_decode(wide, zoo.drafts['small'], inputs, config).tokens,
                                plain.tokens)
  with pytest.raises(command.UsageError, match='target does not fit into T5-small'):
    benchmark.widened(dataclasses.replace(zoo.target, name='target'), 'small', jnp.float32)


def test_tables_and_figure(tmp_path):
  common = {'experiment': 'benchmark', 'system': 'speculative', 'temperature': 0.0, 'gamma': None, 'dtype': 'float32',
            'draft': None, 'label': 'measured'}
  plain = [common | {'target': 't5-base', 'task': 'random', 'ms_per_token': ms, 'ratio': ms / 13, 'system': system,
                     'share_of_bandwidth': 12 / ms, 'ms_to_first_token': 80., 'compile_seconds': None}
           for system, ms in (('speculative', 13.), ('t5x', 17.))]
  pair = common | {'label': 'widened', 'target': 't5-large', 'draft': 't5-small', 'task': 'ende', 'gamma': 4, 'c': .1,
                   'v': 1.2, 'tokens_per_round': 3., 'speedup_expected_v': 1.8, 'speedup_measured': 1.9, 'of_rounds': .98, 'speedup_decoding': 2.,
                   'ms_per_token': 22.}
  batch = [common | {'target': 'packaged', 'task': 'batch', 'batch': n, 'draft': 'base', 'gamma': 3, 'ms_per_token': 1.,
                     'tokens_per_second': 600. * n, 'speedup_measured': 1.2 / n} for n in (1, 2)]
  rows = [*plain, pair, *batch]
  found = tables.benchmark_tables(rows)
  assert [len(table.rows) for table in found] == [2, 1, 2]
  assert '1.31' in found[0].to_text() and '[widened]' in found[1].title and '0.98' in found[1].to_text()
  figures.save(figures.benchmark(rows), tmp_path / 'benchmark.png')
  assert (tmp_path / 'benchmark.png').stat().st_size > 1000


@pytest.mark.slow
def test_a_small_run(tmp_path):
  """Everything but the pairs, on the smallest shape; with the others where they are installed."""
  result = subprocess.run(
      [sys.executable, '-m', 'experiments.benchmark', "--gin.benchmark.shapes=('small',)", '--gin.benchmark.pairs=()',
       '--gin.benchmark.passes=1', '--gin.benchmark.batches=(1, 4)', '--gin.benchmark.slots=(32, 64)',
       f'--output_dir={tmp_path}'], cwd=ROOT, capture_output=True, text=True, check=False,
      env=os.environ | {'JAX_PLATFORMS': 'cpu'})
  assert result.returncode == 0, result.stderr
  rows = [json.loads(line) for line in (tmp_path / 'results.jsonl').read_text().splitlines()]
  assert [row['task'] for row in rows if row['system'] == 'speculative'] == ['random', 'slots', 'slots'] + ['finished'] * 4 + ['batch'] * 4
  assert rows[0]['target'] == 't5-small' and rows[0]['draft'] is None and rows[0]['ms_per_token'] > 0
  assert (tmp_path / 'benchmark.md').read_text().count('## ') == 4
