"""Checks of plain arguments; each error names the argument, what it is, and what it may be."""
import numpy as np


def check_integer(name, value, least):
  """Raises ValueError unless `value` is an integer (Python's or NumPy's, no bool) of at least `least`."""
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
    raise ValueError(f'{name} = {value!r}: must be an integer of at least {least}')


def check_number(name, value, valid, what):
  """Raises ValueError unless `value` is a single real number, and `valid`."""
  if np.ndim(value):
    raise ValueError(f'{name} = {value!r}: must be a number {what}')
  check_numbers(name, value, valid, what)


def check_numbers(name, value, valid, what, integers=False):
  """Raises ValueError unless `value` is a real number or an array of them, all of them `valid`(NumPy array)."""
  try:
    a = np.asarray(value)
    kind = np.issubdtype(a.dtype, np.integer) or (not integers and np.issubdtype(a.dtype, np.floating))
    good = kind and np.all(valid(a))
  except (TypeError, ValueError):
    good = False
  if not good:
    kind = 'an integer' if integers else 'a number'
    raise ValueError(f'{name} = {value!r}: must be {kind}, or an array of them, {what}')
