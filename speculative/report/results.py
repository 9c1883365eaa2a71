"""What a run measured, as JSON Lines, and the machine it ran on."""
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
