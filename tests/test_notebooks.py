"""The notebooks: saved as they ran, and they run."""
import ast
import json
import pathlib
import re
import socket
import time

import pytest

ROOT = pathlib.Path(__file__).parent.parent
NAMES = 'reproduce_tables', 'speculative_decoding', 'your_own_models'
SHOWING = {'print', 'display', 'show', 'dry_run'}  # functions whose calls leave an output
PATHS = re.compile(r'(?<![\w.:/~])/(work|root|tmp|home|Users|usr|var|opt|mnt|content|private)\b')
SECONDS = 300


def read(name):
  return json.loads((ROOT / 'notebooks' / f'{name}.ipynb').read_text(encoding='utf-8'))


def code_cells(notebook):
  return [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']


def source(cell):
  return ''.join(cell['source'])


def texts(cell):
  """What a reader sees of a cell's outputs, pictures left out."""
  found = []
  for output in cell['outputs']:
    parts = [output['text']] if 'text' in output else [
        data for kind, data in output.get('data', {}).items() if not kind.startswith('image/')]
    found += [''.join(part) for part in parts]
  return '\n'.join(found)


def shows(cell):
  """Whether a cell calls, outside of functions and classes, something that prints."""
  lines = [re.sub(r'^(\s*)[%!].*', r'\1pass', line) for line in source(cell).splitlines()]
  body = ast.parse('\n'.join(lines)).body
  statements = [node for node in body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
  return any(isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SHOWING
             for statement in statements for node in ast.walk(statement))


def check_outputs(cells):
  """No error, no progress bar or colour code, and nothing of the machine that they ran on."""
  host = socket.gethostname()
  for cell in cells:
    assert all(output['output_type'] != 'error' for output in cell['outputs']), source(cell)
    shown = texts(cell)
    assert not shows(cell) or cell['outputs'], f'printed nothing: {source(cell)}'
    assert not re.search('[\x1b\r━]', shown), f'a progress bar or colour codes below: {source(cell)}'
    assert not PATHS.search(shown), f'an absolute path below: {source(cell)}'
    assert host.isalpha() or host not in shown, f'a host name below: {source(cell)}'


def test_there_are_no_others():
  assert sorted(path.stem for path in (ROOT / 'notebooks').iterdir() if path.suffix == '.ipynb') == sorted(NAMES)


@pytest.mark.parametrize('name', NAMES)
def test_a_notebook_is_saved_as_it_ran(name):
  notebook = read(name)
  assert (notebook['nbformat'], notebook['nbformat_minor']) == (4, 5)
  assert notebook['metadata']['kernelspec']['name'] == 'python3'
  assert notebook['metadata']['language_info'] == {'name': 'python'}  # no version of the machine that it ran on
  ids = [cell['id'] for cell in notebook['cells']]
  assert len(set(ids)) == len(ids)
  cells = code_cells(notebook)
  assert [cell['execution_count'] for cell in cells] == list(range(1, len(cells) + 1))
  check_outputs(cells)
  for cell in notebook['cells']:
    assert not PATHS.search(source(cell)), source(cell)


@pytest.mark.parametrize('name', NAMES)
def test_a_notebook_is_valid(name):
  nbformat = pytest.importorskip('nbformat')
  nbformat.validate(nbformat.read(ROOT / 'notebooks' / f'{name}.ipynb', as_version=nbformat.NO_CONVERT))


def test_the_first_cell_installs():
  """The same in all: nothing to fill in where the repository is at hand, and no address invented where it is not."""
  first = {source(code_cells(read(name))[0]) for name in NAMES}
  assert len(first) == 1
  assert '%pip install' in (setup := first.pop()) and re.search(r"^REPOSITORY = ''", setup, re.MULTILINE)


def test_without_a_repository_the_first_cell_says_what_to_do(tmp_path, monkeypatch):
  setup = source(code_cells(read(NAMES[0]))[0])
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(RuntimeError, match='set REPOSITORY'):
    exec(setup.partition('os.chdir')[0], {})


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_a_notebook_runs(name, tmp_path, monkeypatch):
  """From the notebooks' folder, as Jupyter has it, on a CPU, in under five minutes."""
  nbclient, nbformat = pytest.importorskip('nbclient'), pytest.importorskip('nbformat')
  pytest.importorskip('ipykernel')
  from jupyter_client import kernelspec
  from jupyter_client import manager
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  monkeypatch.setenv('IPYTHONDIR', str(tmp_path))
  # Installed kernels, of whatever interpreter, are not looked for: what is left is this interpreter's own.
  specs = kernelspec.KernelSpecManager(kernel_dirs=[])
  kernel = manager.AsyncKernelManager(kernel_name='python3', kernel_spec_manager=specs)
  notebook = nbformat.read(ROOT / 'notebooks' / f'{name}.ipynb', as_version=4)
  start = time.monotonic()
  nbclient.NotebookClient(notebook, timeout=SECONDS, km=kernel,
                          resources={'metadata': {'path': str(ROOT / 'notebooks')}}).execute()
  assert time.monotonic() - start < SECONDS
  check_outputs(code_cells(notebook))
