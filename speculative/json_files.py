"""JSON objects in files."""
import json


def read_json(file):
  """A JSON object, as a dict. Raises FileNotFoundError, or ValueError for what is none; both name the file."""
  try:
    with open(file, encoding='utf-8') as f:
      content = json.load(f)
  except FileNotFoundError:
    raise FileNotFoundError(f'{file}: no such file') from None
  except ValueError as e:
    raise ValueError(f'{file}: not valid JSON ({e})') from e
  if not isinstance(content, dict):
    raise ValueError(f'{file}: not a JSON object')
  return content


def write_json(file, content):
  with open(file, 'w', encoding='utf-8') as f:
    json.dump(content, f, indent=2, sort_keys=True)
    f.write('\n')
