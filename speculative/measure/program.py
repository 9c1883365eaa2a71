"""What a compiled program does in its loops, read from its text (HLO): operations, and copies of large arrays."""
import math
import re

# These name or regroup what is there already.
_FREE = frozenset(['parameter', 'constant', 'get-tuple-element', 'tuple', 'bitcast', 'after-all', 'opt-barrier'])
_CALLED = re.compile(r'(?:body|condition|to_apply|true_computation|false_computation|branch_computations)=\{?(%[\w.-]+(?:, %[\w.-]+)*)')


def computations(text):
  """{name: list of (operation, its line)} of the text that `compiled.as_text()` gives, and the name of the entry."""
  found, entry = {}, None
  for head, name, body in re.findall(r'^(ENTRY )?(%[\w.-]+) \([^\n]*\{\n(.*?)^\}', text, re.M | re.S):
    lines = [line.strip() for line in body.splitlines()]
    found[name] = [(re.search(r' = .*? ([\w-]+)\(', line)[1], line) for line in lines if ' = ' in line]
    if head:
      entry = name
  return found, entry


def loop_operations(text):
  """How many operations one pass of the program's loop runs (the costliest, if there are several side by side).

  A fused group is one operation; a loop inside counts as often as it is known to run (once, if that is not known), its
  condition with it.
  """
  found, entry = computations(text)

  def cost(operation, line):
    if operation in _FREE:
      return 0
    if operation not in ('while', 'call', 'conditional'):
      return 1
    parts = [sum(cost(*inner) for inner in found[name]) for names in _CALLED.findall(line) for name in names.split(', ')]
    if operation == 'conditional':
      return 1 + max(parts)
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    return (int(trips[1]) if trips else 1) * sum(parts)

  loops = [line for operation, line in found[entry] if operation == 'while']
  return max((cost('while', re.sub('known_trip_count', '', line)) for line in loops), default=0)


def loop_copies(text, least):
  """Copies of at least `least` elements in what the program's loops run: lines of HLO."""
  found, entry = computations(text)
  copied = []
  for name, lines in found.items():
    if name != entry:
      for operation, line in lines:
        shape = re.search(r'\w+\[([\d,]*)\]', line)
        if operation == 'copy' and math.prod(int(n) for n in shape[1].split(',') if n) >= least:
          copied.append(line)
  return copied
