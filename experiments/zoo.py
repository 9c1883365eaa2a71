"""Which models, drafts and texts an experiment runs on: the packaged ones, or the caller's own."""
import dataclasses
import os

import gin

from experiments import command
import speculative
from speculative.data import packaged
from speculative.drafters import ngram


@gin.configurable
def zoo(target=None, drafts=None, texts=None, ngrams=None, dtype=None, more=(), dry_run=False):
  """Loads what the experiments compare.

  Args:
    target: a checkpoint folder; None: the packaged trio with its texts.
    drafts: {name: checkpoint folder}.
    texts: {task: TSV file of input and reference}.
    ngrams: {task: file of counts, as `ngram.save` writes it}; None: no n-gram drafts.
    dtype: of the parameters; None: bfloat16, but float32 on CPUs without bfloat16 instructions.
    more: further drafters, of 'copying' (from the input) and 'chain' (the last of `drafts`, sped up by the one before).
    dry_run: only check that every path exists.

  Returns:
    `packaged.Zoo`, or None in a dry run.
  """
  unknown = set(more) - set(packaged.MORE)
  if unknown:
    raise command.UsageError(f'zoo.more: {", ".join(sorted(unknown))}: there are {", ".join(packaged.MORE)}')
  if target is None:
    if drafts or texts or ngrams:
      raise command.UsageError('zoo.drafts, zoo.texts and zoo.ngrams go with zoo.target')
    return None if dry_run else dataclasses.replace(speculative.load_pretrained(dtype), more=tuple(more))
  if not drafts or not texts:
    raise command.UsageError('with zoo.target give zoo.drafts = {name: folder} and zoo.texts = {task: TSV file}')
  if 'chain' in more and len(drafts) < 2:
    raise command.UsageError("zoo.more: 'chain' needs two drafts, the smaller first")
  for path in (target, *drafts.values(), *texts.values(), *(ngrams or {}).values()):
    if not os.path.exists(os.path.expanduser(path)):
      raise command.UsageError(f'{path} does not exist')
  if dry_run:
    return None
  target = speculative.load_model(target, dtype)
  if target.vocabulary is None:
    raise command.UsageError('zoo.target: the checkpoint has no spiece.model beside it, so texts cannot be encoded')
  return packaged.Zoo(target, {name: speculative.load_model(path, dtype) for name, path in drafts.items()},
                      target.vocabulary, {task: packaged.read_texts(path) for task, path in texts.items()},
                      {task: ngram.load(path) for task, path in (ngrams or {}).items()}, tuple(more))


def row(experiment, task, loaded, draft, temperature, **values):
  """A line of results.jsonl with what every line has."""
  import jax
  config = loaded.target.params['embedding'].dtype
  return {'experiment': experiment, 'label': 'measured', 'task': task, 'target': loaded.target.name or 'target',
          'draft': draft, 'temperature': temperature, 'device': jax.devices()[0].device_kind,
          'dtype': str(config)} | values
