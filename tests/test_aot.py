"""Programs compiled for TPUs: what their text and their memory say, and the tables made of it. Without libtpu skipped."""
import importlib.util

import numpy as np
import pytest

from experiments import command
from experiments import tpu_compile
import speculative
from speculative import sharding
from speculative.measure import aot
from speculative.models import t5
from speculative.report import figures
from speculative.report import tables

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')

# T5-XXL's and T5-small's widths with few layers. Six heads divide by no number of devices: the draft is copied to each.
TARGET, DRAFT = (t5.T5Config(**t5.SHAPES[shape] | {'num_encoder_layers': 1, 'num_decoder_layers': layers})
                 for shape, layers in (('xxl', 2), ('small', 2)))
CONFIG = speculative.DecodeConfig(gamma=3, max_decode_len=200)


def decoding(name, batch=1):
  topology = aot.topology(name)
  meshes = [sharding.make_mesh(n, list(topology.devices)) for n in (None, 1)]
  target, draft = (aot.abstract_model(config, mesh) for config, mesh in zip((TARGET, DRAFT), meshes))
  return aot.Decoding(target, draft, meshes[0], CONFIG, input_len=32, batch=batch), len(topology.devices)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize('name', ['v4:1x1x1', 'v4:2x2x1', 'v5e:1x1', 'v5e:2x2'])
def test_the_loop_is_good(name):
  """Nothing large is copied in it, nothing leaves for the host, caches are written in place, little is needed besides."""
  made, devices = decoding(name)
  cost = made.loop()
  assert cost.loop_copies == []
  assert cost.host_transfers == 0
  caches = aot.device_bytes((made.state.cache, made.state.draft_state))
  # The target's halves over the devices, the draft's does not.
  heads, slots = TARGET.num_heads * TARGET.d_kv / devices, CONFIG.max_decode_len + CONFIG.gamma + 2
  draft_heads = DRAFT.num_heads * DRAFT.d_kv
  at_least = 2 * 2 * (slots + 32) * (TARGET.num_decoder_layers * heads + DRAFT.num_decoder_layers * draft_heads)
  assert at_least <= caches <= 1.1 * at_least
  assert cost.aliased >= caches
  assert cost.temporaries <= .05 * aot.device_bytes(made.params)


@needs_libtpu
@pytest.mark.slow
def test_single_steps():
  """Bytes are those of the weights that a step reads and of the caches, operations those of 8 rows."""
  made, _ = decoding('v5e:1x1')
  decoder, head = made.params[0]['decoder'], made.params[0]['head']
  projections = [decoder[f'layer_{i}']['cross']['kv'] for i in range(TARGET.num_decoder_layers)]  # used once an input
  weights = aot.device_bytes((decoder, head)) - aot.device_bytes(projections)
  plain, block = made.verification(0), made.verification(3)
  for cost in (plain, block):
    np.testing.assert_allclose(cost.bytes, weights + aot.device_bytes(made.state.cache), rtol=.02)
  # Two operations for each weight of two bytes, for each of the 8 rows that a TPU computes at least.
  np.testing.assert_allclose([plain.flops / 8, block.flops / 8], weights, rtol=.1)
  chip = aot.topology('v5e:1x1').chip
  assert plain.seconds(chip) == plain.bytes / chip.bandwidth


@needs_libtpu
def test_mistakes(tmp_path):
  with pytest.raises(ValueError, match="topology 'v9:1x1': write GENERATION:CHIPS"):
    aot.topology('v9:1x1')
  with pytest.raises(command.UsageError, match='v5e:2x2: a mesh with 4 devices .* does not divide the 6 attention heads'):
    tpu_compile.tpu_compile(str(tmp_path), topologies=('v5e:2x2',), target='small', sizes=())
  with pytest.raises(command.UsageError, match="shape 'huge'"):
    tpu_compile.tpu_compile(str(tmp_path), target='huge')


@needs_libtpu
def test_a_model_that_does_not_fit():
  """Said before anything is compiled, and what would do."""
  rows = list(tpu_compile.topology_rows(aot.topology('v5e:1x1'), 'xxl', ('small', 'base'), CONFIG, 128, 1))
  assert [row['fits'] for row in rows] == [False, False]
  elements = 11.3e9
  np.testing.assert_allclose(rows[0]['needed'], 2 * elements, rtol=.02)
  text = tables.tpu_tables(rows)[0].to_text()
  assert 'GiB too much: 2 such devices would hold the weights' in text


def test_tables_and_figure(tmp_path):
  common = {'experiment': 'tpu_compile', 'label': 'predicted', 'target': 't5-xxl', 'draft': 't5-small', 'device': 'v4:1x1x1'}
  memory = common | {'kind': 'memory', 'fits': True, 'weights': 2**33, 'state': 2**20, 'temporaries': 2**24,
                     'needed': 2**33 + 2**24, 'memory': 2**34, 'compile_seconds': 20.}
  step = common | {'kind': 'step', 'step': 'plain step', 'bytes': 5e9, 'flops': 5e9, 'seconds': 4e-3, 'bound': 'bytes',
                   'compile_seconds': 5.}
  row = common | {'kind': 'table 2', 'task': 'EnDe', 'temperature': 0, 'gamma': 7, 'alpha': .75, 'c': .01, 'v': 1.,
                  'speedup_expected_v': 3.4, 'best_gamma': 7, 'speedup_best': 3.4, 'paper_c': .02, 'paper_speed': 3.4,
                  'speedup_paper_c': 3.2}
  size = common | {'kind': 'size', 'chips': 1, 'batch': 8, 'length': 128, 'seconds': 4e-3}
  found = tables.tpu_tables([memory, step, row, size])
  assert [len(table.rows) for table in found] == [1, 1, 1, 1]
  assert 'yes' in found[0].to_text() and '8.00' in found[0].to_text() and '0.500' in found[3].to_text()
  figures.save(figures.tpu([memory, step, row, size]), tmp_path / 'tpu.png')
  assert (tmp_path / 'tpu.png').stat().st_size > 1000
