"""Every configuration is parsed against its experiment; those that can run here are checked by a dry run."""
import glob
import os
import re
import subprocess
import sys

import pytest

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
