"""Which models, drafts and texts an experiment runs on: the packaged ones, or the caller's own."""
import dataclasses
import importlib
import os

import gin
import jax
import numpy as np

from experiments import command
import speculative
from speculative import checkpoints
from speculative.checks import check_integer
from speculative.checkpoints import huggingface
from speculative.data import batching
from speculative.data import packaged
from speculative.drafters import ngram


LENGTHS = {'inputs': 512, 'targets': 512}


@gin.configurable
def zoo(target=None, drafts=None, texts=None, ngrams=None, dtype=None, more=(), modules=('t5.data.mixtures',),
        split='test', feature_lengths=None, limit=None, vocabulary=None, family='t5', dry_run=False):
  """Loads what the experiments compare.

  Args:
    target: a checkpoint folder; None: the packaged models of `family`.
    drafts: {name: checkpoint folder}.
    texts: {task: TSV file of input and reference, or name of a seqio task or mixture}; None: the packaged texts.
    ngrams: {task: file of counts, as `ngram.save` writes it}; None: no n-gram drafts.
    dtype: of the parameters; None: bfloat16, but float32 on CPUs without bfloat16 instructions.
    more: further drafters, of 'copying' (from the input) and 'chain' (the last of `drafts`, sped up by the one before).
    modules: Python modules to import first, for the seqio tasks that they register.
    split: of seqio tasks.
    feature_lengths: {'inputs': tokens at most, 'targets': likewise} of seqio tasks, which cut what is longer; 512 where
      not given.
    limit: examples of each seqio task at most; None: all.
    vocabulary: SentencePiece file in place of the seqio tasks' own, a copy where that is out of reach.
    family: of the packaged models, 't5' (the trio) or 'gpt' (the decoder-only pair).
    dry_run: only check that everything named exists.

  Returns:
    `packaged.Zoo`, or None in a dry run.
  """
  unknown = set(more) - set(packaged.MORE)
  if unknown:
    raise command.UsageError(f'zoo.more: {", ".join(sorted(unknown))}: there are {", ".join(packaged.MORE)}')
  if family not in packaged.FAMILIES:
    raise command.UsageError(f'zoo.family = {family!r}: there are {", ".join(packaged.FAMILIES)}')
  drafts, texts, ngrams, more = drafts or {}, texts or {}, ngrams or {}, tuple(more)
  if target is None and (drafts or ngrams):
    raise command.UsageError('zoo.drafts and zoo.ngrams go with zoo.target')
  if target is not None and not (drafts and texts):
    raise command.UsageError('with zoo.target give zoo.drafts = {name: folder} and zoo.texts = '
                             '{task: TSV file or seqio task}')
  if target is not None and 'chain' in more and len(drafts) < 2:
    raise command.UsageError("zoo.more: 'chain' needs two drafts, the smaller first")
  paths = {'zoo.target': target, 'zoo.vocabulary': vocabulary}
  paths |= {f'zoo.drafts[{name!r}]': path for name, path in drafts.items()}
  paths |= {f'zoo.ngrams[{name!r}]': path for name, path in ngrams.items()}
  for binding, path in paths.items():
    if path is not None and not os.path.exists(os.path.expanduser(path)) and not checkpoints.is_elsewhere(path):
      raise command.UsageError(f'{binding} = {path!r} does not exist')
  lengths = _checked(feature_lengths, limit)
  sources = {task: source(f'zoo.texts[{task!r}] = {name!r}', name, modules, split, vocabulary)
             for task, name in texts.items() if not os.path.isfile(os.path.expanduser(name))}
  if dry_run:
    return None
  pieces = shared_vocabulary(sources)
  texts = {task: (sources[task].read(lengths, limit) if task in sources else
                  packaged.read_texts(os.path.expanduser(name))) for task, name in texts.items()}

  def load(path):
    model = speculative.load_model(path, dtype)
    if model.vocabulary is None and pieces:
      model.vocabulary = huggingface.vocabulary_of(path, model.config, pieces)
    return model

  if target is None:
    loaded = speculative.load_pretrained(dtype, family)
    loaded = dataclasses.replace(loaded, texts=texts or loaded.texts, more=more)
  else:
    target = load(target)
    if target.vocabulary is None:
      raise command.UsageError('zoo.target: the checkpoint has no spiece.model beside it, so texts cannot be encoded')
    loaded = packaged.Zoo(target, {name: load(path) for name, path in drafts.items()}, target.vocabulary, texts,
                          {task: ngram.load(path) for task, path in ngrams.items()}, more=more)
  if sources:
    if pieces.fingerprint != loaded.vocabulary.fingerprint:
      raise command.UsageError(f'zoo.texts: {", ".join(sources)} and the target {loaded.target.name} have different '
                               f'vocabularies, of {pieces.vocab_size} and {loaded.vocabulary.vocab_size} pieces')
    from speculative.data import tasks
    loaded.scores = dict.fromkeys(sources, tasks.score)
  if jax.default_backend() == 'tpu':
    lay_out(loaded)
  return loaded


def lay_out(loaded):
  """Lays the parameters of all models out as compiled loops like them (`speculative.lay_out`), the target's for the first
  draft, as for all."""
  inputs = np.ones((1, 64), np.int32)
  for i, (name, draft) in enumerate(loaded.drafts.items()):
    target, loaded.drafts[name] = speculative.lay_out(loaded.target, draft, inputs)
    if i == 0:
      loaded.target = target


def _checked(feature_lengths, limit):
  """zoo.feature_lengths in full."""
  lengths = LENGTHS | (feature_lengths or {})
  for name, length in lengths.items():
    check_integer(f'zoo.feature_lengths[{name!r}]', length, 1)
  if lengths['inputs'] > max(batching.BUCKETS):
    raise command.UsageError(f"zoo.feature_lengths['inputs'] = {lengths['inputs']}: at most {max(batching.BUCKETS)}")
  if limit is not None:
    check_integer('zoo.limit', limit, 1)
  return lengths


def source(binding, name, modules, split, vocabulary):
  """The seqio task or mixture that a binding names: `tasks.Source`. Raises UsageError unless it can be read."""
  try:
    from speculative.data import tasks  # here, as most runs do without seqio
  except ImportError as e:
    raise command.UsageError(f'{binding}: no such file; {e}') from e
  for module in [modules] if isinstance(modules, str) else modules:
    try:
      with gin.unlock_config():  # T5's modules have configurables
        importlib.import_module(module)
    except ImportError as e:
      raise command.UsageError(f'zoo.modules: {module} cannot be imported: {e}') from e
  try:
    return tasks.find(name, split, vocabulary and os.path.expanduser(vocabulary))
  except LookupError as e:
    raise command.UsageError(f'{binding}: no such file, and {e} (registered by zoo.modules = {modules!r})') from e
  except ValueError as e:
    raise command.UsageError(f'{binding}: {e}') from e


def shared_vocabulary(sources):
  """The one vocabulary of the seqio tasks; None: there are no tasks."""
  found = {source.vocabulary.fingerprint: source.vocabulary for source in sources.values()}
  if len(found) > 1:
    raise command.UsageError(f'zoo.texts: {", ".join(sources)} have different vocabularies')
  return next(iter(found.values()), None)


def row(experiment, task, loaded, draft, temperature, **values):
  """A line of results.jsonl with what every line has."""
  config = loaded.target.params['embedding'].dtype
  return {'experiment': experiment, 'label': 'measured', 'task': task, 'target': loaded.target.name or 'target',
          'draft': draft, 'temperature': temperature, 'device': jax.devices()[0].device_kind,
          'dtype': str(config)} | values
