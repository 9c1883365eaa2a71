"""Can a drafter draft for a target?"""


def check_pair(target, drafter):
  """Raises ValueError unless both speak of the same tokens; the message names each difference.

  Real ids are compared, not rows of the embedding; the start token only where decoding starts with it. What a drafter
  does not have is not compared.
  """
  differences = []
  prompted = getattr(target, 'first', None) is not None
  if hasattr(drafter, 'extend') and prompted != (getattr(drafter, 'first', None) is not None):
    kinds = 'continues a prompt', 'starts anew from encoded inputs'
    differences.append(f'one {kinds[not prompted]}, the other {kinds[prompted]}')
  for name in ('vocab_size', 'pad_id', 'eos_id') + (() if prompted else ('start_id',)):
    ours, theirs = getattr(target, name, None), getattr(drafter, name, None)
    if None not in (ours, theirs) and ours != theirs:
      differences.append(f'{name} {ours} and {theirs}')
  ours, theirs = (getattr(getattr(m, 'vocabulary', None), 'fingerprint', None) for m in (target, drafter))
  if None not in (ours, theirs) and ours != theirs:
    differences.append('other pieces in the vocabulary')
  if differences:
    raise ValueError(f'target {_name(target)} and drafter {_name(drafter)} do not fit: {"; ".join(differences)}')


def _name(model):
  return getattr(model, 'name', '') or type(model).__name__
