"""Every configuration is parsed against its experiment; those that can run here are checked by a dry run."""
import glob
import itertools
import os
import re
import shutil
import subprocess
import sys

import pytest

from experiments import package
from speculative.data import packaged

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RUNS = sorted(os.path.relpath(path, ROOT) for path in glob.glob(os.path.join(ROOT, 'configs', 'runs', '*.gin')))
COMMON = [path for path in RUNS if 'Not a run by itself' in open(os.path.join(ROOT, path), encoding='utf-8').read()]
MODELS = sorted(os.path.relpath(path, ROOT) for path in glob.glob(os.path.join(ROOT, 'configs', '[mt][oa][ds]*', '*.gin')))

# A program that parses each file as its experiment would, without running it.
PARSE = '''
import importlib, sys
import gin
from experiments import train  # the configurables of models
for path, module in (argument.split('=') for argument in sys.argv[1:]):
  gin.clear_config()  # unlocks it, too: an imported module adds its configurables
  importlib.import_module(module)
  gin.parse_config_file(path)
  gin.finalize()
'''


def head(path):
  with open(os.path.join(ROOT, path), encoding='utf-8') as f:
    return [line[2:].rstrip('\n') for line in f if line.startswith('# ')]


def experiment(path):
  """The module that the first line of a run file's head names."""
  if 'device_check' in path:
    return 'experiments.benchmark'
  return re.match(r'python -m (experiments\.\w+) --gin_file=(\S+)', head(path)[0])[1]


@pytest.mark.parametrize('path', [path for path in RUNS if path not in COMMON])
def test_a_run_opens_with_its_command(path):
  if 'device_check' in path:
    assert head(path)[0].startswith('experiments/device_check.sh')
    return
  assert f'--gin_file={path}' in head(path)[0]
  assert os.path.exists(os.path.join(ROOT, *experiment(path).split('.')) + '.py')


def test_every_configuration_is_parsed():
  files = [f'{path}={experiment(path)}' for path in RUNS if path not in COMMON]
  files += [f'{path}=experiments.benchmark' for path in MODELS]
  result = subprocess.run([sys.executable, '-c', PARSE, *files], cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {'JAX_PLATFORMS': 'cpu'})
  assert result.returncode == 0, result.stderr[-2000:]


def test_every_row_of_the_paper_has_a_run():
  names = {os.path.basename(path) for path in RUNS}
  assert {'table_1.gin', 'table_2_ende.gin', 'table_2_cnndm.gin', 'table_3_ende.gin', 'table_3_cnndm.gin', 'table_3_lm1b.gin',
          'table_4_ende.gin', 'table_5_ende.gin', 'figure_1.gin'} <= names


@pytest.mark.slow
@pytest.mark.parametrize('path', [path for path in RUNS if re.search('packaged|report|table_1|reproduce|widened', path)])
def test_dry_run(path, tmp_path):
  result = subprocess.run([sys.executable, '-m', experiment(path), f'--gin_file={path}', '--dry_run',
                           f'--output_dir={tmp_path}/out'], cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {'JAX_PLATFORMS': 'cpu'})
  assert result.returncode == 0, result.stderr
  assert not os.path.exists(tmp_path / 'out')


@pytest.fixture(scope='module')
def workspace(tmp_path_factory):
  """A folder as the runs expect it, with data and trained models: the packaged models and their held-out texts stand for
  those."""
  folder = tmp_path_factory.mktemp('workspace')
  (folder / 'configs').symlink_to(os.path.join(ROOT, 'configs'))
  (folder / 'data').mkdir()
  vocabulary = os.path.join(packaged.FOLDER, 'spiece.model')
  shutil.copy(vocabulary, folder / 'data')
  for task in (*packaged.TASKS, packaged.GPT_TASK):
    with open(os.path.join(packaged.FOLDER, 'texts', f'{task}.tsv'), encoding='utf-8') as f:
      lines = ''.join(itertools.islice(f, 120))
    for split in ('train', 'validation', 'test'):
      (folder / 'data' / f'{task}.{split}.tsv').write_text(lines, encoding='utf-8')
  for name, run in [*package.RUNS.items(), *((name, name) for name in package.RUNS)]:
    model = folder / 'runs' / run / 'model'
    if not model.exists():
      shutil.copytree(os.path.join(packaged.FOLDER, name), model)
      shutil.copy(vocabulary, model)
  return folder


# Bindings that make a run small enough for a test, and what it must leave.
WALLTIME = {'walltime_settings.prompts': 1, 'walltime_settings.passes': 1, 'walltime_settings.gammas': (1,)}
GAMMAS = {'gamma_settings.prompts': 1, 'gamma_settings.passes': 1, 'gamma_settings.gammas': (1,)}
LENIENCE = {'lenience_settings.tokens': 100, 'lenience_settings.prompts': 1, 'lenience_settings.passes': 1,
            'lenience_settings.gammas': (1,), 'lenience_settings.values': (1.0,)}
ACCEPTANCE = {'acceptance_settings.tokens': 100, 'acceptance_settings.temperatures': (1.0,), 'acceptance_settings.texts': 8}
BENCHMARK = {'benchmark.shapes': (), 'benchmark.prompts': 1, 'benchmark.passes': 1, 'benchmark.assisted': (),
             'benchmark.pairs': ('base',), 'benchmark.temperatures': (0.0,)}
TRAIN = {'train.steps': 2, 'train.limit': 100, 'train.tokens_per_batch': 256}
DISTILL = {'distill.steps': 2, 'distill.limit': 16, 'distill.tokens_per_batch': 256, 'distill.alpha_tokens': 50}
SMALL = {
    'table_1': ({}, 'results.jsonl'),
    'table_2_packaged': (WALLTIME | {'walltime.alpha_tokens': 100}, 'results.jsonl'),
    'table_3_packaged': ({'alpha_settings.tokens': 100}, 'results.jsonl'),
    'table_3_packaged_gpt': ({'alpha_settings.tokens': 100}, 'results.jsonl'),
    'table_4_packaged': (GAMMAS | {'gammas.alpha_tokens': 100}, 'results.jsonl'),
    'table_5_packaged': (LENIENCE, 'results.jsonl'),
    'acceptance_packaged': (ACCEPTANCE, 'results.jsonl'),
    **{f'widened_{shape}': (BENCHMARK, 'results.jsonl') for shape in ('large', 'xl')},
    **{f'train_{name}': (TRAIN, 'model/model.safetensors')
       for name in ('target', 'target_longer', 'draft_base', 'draft_small', 'gpt_target', 'gpt_draft')},
    **{f'distill_{name}': (DISTILL, 'results.jsonl') for name in ('small', 'base', 'gpt')},
}
# What needs other hardware or data, or has a test of its own.
ELSEWHERE = '^(device_check|finetune|report|reproduce|figure_1$)|_(ende|cnndm|lm1b|lm1b_6m|lm1b_97m)$'


def test_every_run_that_can_be_tried_is():
  names = {os.path.splitext(os.path.basename(path))[0] for path in RUNS if path not in COMMON}
  assert {name for name in names if not re.search(ELSEWHERE, name)} == set(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize('name', sorted(SMALL))
def test_a_run_at_a_small_setting(name, workspace, tmp_path):
  path = f'configs/runs/{name}.gin'
  bindings, left = SMALL[name]
  result = subprocess.run([sys.executable, '-m', experiment(path), f'--gin_file={path}', f'--output_dir={tmp_path}/out',
                           *(f'--gin.{key}={value!r}' for key, value in bindings.items())], cwd=workspace,
                          capture_output=True, text=True, check=False,
                          env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': ROOT})
  assert result.returncode == 0, result.stderr[-2000:]
  assert (tmp_path / 'out' / left).stat().st_size > 0
