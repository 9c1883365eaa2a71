"""What a run measured, as JSON Lines, and the machine it ran on; runs of several parts, and several runs together."""
import hashlib
import importlib.metadata
import json
import os
import platform
import warnings


def replace_file(path, write):
  """Calls `write` with a temporary binary file, then gives it the name `path`: nobody ever reads half a file."""
  temporary = f'{path}.tmp'
  try:
    with open(temporary, 'wb') as f:
      write(f)
    os.replace(temporary, path)
  finally:
    if os.path.exists(temporary):
      os.remove(temporary)


def _encode(row):
  if not isinstance(row, dict):
    raise TypeError(f'a row must be a dict, got {type(row).__name__}')
  try:
    line = json.dumps(row, allow_nan=False, ensure_ascii=False, default=lambda x: x.item())  # NumPy and JAX scalars.
  except AttributeError as e:
    raise TypeError(f'row with a value that JSON cannot hold: {e}') from e
  except ValueError as e:
    raise ValueError(f'row with NaN, infinity or an array: {row}') from e
  return line.encode() + b'\n'


def _decode(line):
  def refuse(name):
    raise ValueError(f'{name} is not allowed')

  row = json.loads(line.decode(), parse_constant=refuse)
  if not isinstance(row, dict):
    raise ValueError('not a JSON object')
  return row


def append_jsonl(path, row):
  """Appends one row as a line; what an interrupted run left of its last line is removed, with a warning.

  Raises:
    TypeError: a row that is no dict, or a value in it that JSON does not know.
    ValueError: NaN, infinity or an array in it. The file is then left alone.
  """
  data = _encode(row)
  with open(path, 'a+b') as f:
    f.seek(0)
    old = f.read()
    tail = old[old.rfind(b'\n') + 1:]
    if tail:
      try:
        _decode(tail)
        data = b'\n' + data  # A whole row, only its newline is missing.
      except ValueError:
        warnings.warn(f'{path}: removed the half-written last line of an interrupted run')
        f.truncate(len(old) - len(tail))
    f.write(data)


def write_jsonl(path, rows):
  """Writes all rows at once, in place of what was there. Errors as for append_jsonl."""
  data = b''.join(map(_encode, rows))
  replace_file(path, lambda f: f.write(data))


def read_jsonl(path):
  """Reads the rows, list of dicts; a half-written last line is left out, with a warning.

  Raises:
    ValueError: any other line that is not a JSON object, with its number.
  """
  with open(path, 'rb') as f:
    *lines, tail = f.read().split(b'\n')
  rows = []
  for number, line in enumerate(lines, start=1):
    if line.strip():
      try:
        rows.append(_decode(line))
      except ValueError as e:
        raise ValueError(f'{path}, line {number}: {e}') from e
  if tail.strip():
    try:
      rows.append(_decode(tail))
    except ValueError:
      warnings.warn(f'{path}: left out the half-written last line of an interrupted run')
  return rows


def _cpu_name():
  try:
    with open('/proc/cpuinfo') as f:
      for line in f:
        name, _, value = line.partition(':')
        if name.strip() == 'model name':
          return value.strip()
  except OSError:
    pass  # Not Linux.
  return platform.processor() or platform.machine()


def _version(package):
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def environment():
  """Describes the machine and the versions, for the report: a dict of strings and numbers (None: not installed).

  It names neither the host nor any path.
  """
  import jax  # Only here: reading results and drawing needs no JAX.

  devices = jax.devices()
  cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
  return {
      'device': devices[0].device_kind,
      'devices': len(devices),
      'backend': jax.default_backend(),
      'platform': f'{platform.system()} {platform.machine()}',
      'cpu': _cpu_name(),
      'cores': cores,
      'python': platform.python_version(),
      **{package: _version(package) for package in ('jax', 'jaxlib', 'flax', 'numpy')},
  }


class Store:
  """The results.jsonl of a run of several parts: whole parts survive an interruption, and are not measured again.

  Its first line describes the run (experiment 'run'); every other has the `run` and the `part` that it is of, and each part
  ends with a line of its own (experiment 'part').
  """

  def __init__(self, path, run):
    """Opens the file or begins one.

    Args:
      path: of the file.
      run: {'command': str, 'config': str, 'environment': dict, 'models': {name: fingerprint}}. Configuration and models tell
        runs apart.

    Raises:
      ValueError: the file holds another run.
    """
    self.path = path
    self._run = hashlib.sha256(json.dumps([run['config'], run['models']], sort_keys=True).encode()).hexdigest()[:12]
    lines = read_jsonl(path) if os.path.exists(path) else []
    if any(line.get('run') != self._run for line in lines):
      raise ValueError(f'{path} holds results of another configuration or of other models: give another --output_dir, or '
                       'remove the file')
    self._parts = {line['part'] for line in lines if line['experiment'] == 'part'}
    self._lines = [line for line in lines if line['experiment'] == 'run' or line.get('part') in self._parts]
    if not self._lines:
      self._lines = [{'experiment': 'run', 'label': 'measured', 'run': self._run} | run]
    write_jsonl(path, self._lines)  # without what an interrupted part left

  def part(self, name, make):
    """The rows of a part: those that the file has, or those that `make()` returns, which are then written."""
    if name not in self._parts:
      added = [row | {'part': name, 'run': self._run} for row in make()]
      added.append({'experiment': 'part', 'label': 'measured', 'part': name, 'run': self._run})
      with open(self.path, 'ab') as f:
        f.write(b''.join(map(_encode, added)))
      self._lines += added
      self._parts.add(name)
    return [line for line in self._lines if line.get('part') == name and line['experiment'] != 'part']

  @property
  def rows(self):
    """All rows, without the lines that only describe."""
    return [line for line in self._lines if line['experiment'] not in ('run', 'part')]


def merge(paths):
  """Reads several results.jsonl.

  Returns:
    rows: of all files, each once.
    headers: what describes the runs, in the order of the files; files of single experiments have none.

  Raises:
    ValueError: two different models under one name.
  """
  rows, headers, models = {}, {}, {}
  for path in paths:
    for line in read_jsonl(path):
      if line.get('experiment') == 'run':
        headers[line['run']] = line
        for name, fingerprint in line['models'].items():
          other, first = models.setdefault(name, (fingerprint, path))
          if other != fingerprint:
            raise ValueError(f'{name}: two different models under one name, in {first} ({other}) and in {path} ({fingerprint})')
      elif line.get('experiment') != 'part':
        rows[json.dumps(line, sort_keys=True)] = line
  return list(rows.values()), list(headers.values())
