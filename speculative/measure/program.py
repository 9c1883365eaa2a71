"""What a compiled program does in its loops, read from its text (HLO): operations, and copies of large arrays."""
import math
import re

# These name or regroup what is there already.
_FREE = frozenset(['parameter', 'constant', 'get-tuple-element', 'tuple', 'bitcast', 'after-all', 'opt-barrier'])
_CALLED = re.compile(r'(?:body|condition|to_apply|calls|true_computation|false_computation|branch_computations)=\{?(%[\w.-]+(?:, %[\w.-]+)*)')


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
    parts = [sum(cost(*inner) for inner in found[name]) for name in _callees(line)]
    if operation == 'conditional':
      return 1 + max(parts)
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    return (int(trips[1]) if trips else 1) * sum(parts)

  loops = [line for operation, line in found[entry] if operation == 'while']
  return max((cost('while', re.sub('known_trip_count', '', line)) for line in loops), default=0)


def loop_copies(text, least):
  """Copies of at least `least` elements that the program's loops run, by themselves or as what a fused group makes: lines
  of HLO."""
  found, _ = computations(text)
  loops = [_callees(line) for lines in found.values() for operation, line in lines if operation == 'while']
  reached, new = set(), {name for names in loops for name in names}
  while new:
    reached |= new
    new = {name for name in new for _, line in found[name] for name in _callees(line)} - reached
  def fused_in(names):
    return {name for outer in names for _, line in found[outer] for name in re.findall(r'calls=(%[\w.-]+)', line)}
  # Groups inside of groups are how the outer one reads its operands.
  fused = fused_in(found)
  written = fused_in(reached - fused)

  def is_large(line):
    return math.prod(int(n) for n in re.search(r'\w+\[([\d,]*)\]', line)[1].split(',') if n) >= least
  return [line for name in reached for operation, line in found[name] if operation == 'copy' and is_large(line)
          and (name not in fused or name in written and line.startswith('ROOT'))]


def _callees(line):
  return [name for names in _CALLED.findall(line) for name in names.split(', ')]
