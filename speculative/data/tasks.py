"""seqio's tasks and mixtures: their texts, vocabularies and metrics. Importing this takes the `seqio` extra.

The packaged texts are registered as `speculative_ende`, `speculative_summarize` and `speculative_describe`, split `test`;
One Billion Words (Chelba et al. 2013, TFDS) as `speculative_lm1b`. Other tasks are registered by the modules that define
them, such as `t5.data.mixtures`.
"""
import collections
import contextlib
import dataclasses
import difflib
import functools
import os

import numpy as np
from sentencepiece import sentencepiece_model_pb2

from speculative.data import packaged
from speculative.data.vocabulary import ByteVocabulary
from speculative.data.vocabulary import Vocabulary
from speculative.measure import quality


@contextlib.contextmanager
def _silenced():
  """Nothing reaches standard error. TensorFlow greets there, whatever its log level is."""
  kept = os.dup(2)
  with open(os.devnull, 'wb') as nowhere:
    os.dup2(nowhere.fileno(), 2)
  try:
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)


os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # what is an error is raised, too
try:
  with _silenced():
    import seqio
    import tensorflow as tf
except ImportError as e:
  raise ImportError(f"tasks of seqio take seqio and TensorFlow (pip install -e '.[seqio]'): {e}") from e
with contextlib.suppress(RuntimeError), _silenced():  # unless TensorFlow is in use already
  tf.config.set_visible_devices([], 'GPU')  # their memory is JAX's

FEATURES = 'inputs', 'targets'


def register():
  """Registers the packaged texts, where that is not done yet; importing this module does it."""
  vocabulary = seqio.SentencePieceVocabulary(os.path.join(packaged.FOLDER, 'spiece.model'))
  def add(name, source, preprocessors, prompts, metrics):
    if name not in seqio.TaskRegistry.names():
      seqio.TaskRegistry.add(
          name, source=source, metric_fns=metrics,
          preprocessors=[*preprocessors, seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder(),
                         seqio.preprocessors.append_eos_after_trim],
          output_features={'inputs': seqio.Feature(vocabulary, add_eos=not prompts), 'targets': seqio.Feature(vocabulary)})

  for task, metrics in {'ende': [_bleu], 'summarize': [_rouge], packaged.GPT_TASK: []}.items():
    source = seqio.FunctionDataSource(functools.partial(_packaged_texts, task), splits=('test',))
    add(f'speculative_{task}', source, [], task == packaged.GPT_TASK, metrics)
  # Its test split serves for both, as it has no other.
  add('speculative_lm1b', seqio.TfdsDataSource('lm1b:1.1.0', splits={'train': 'train', 'validation': 'test', 'test': 'test'}),
      [_first_words], True, [])


def _first_words(dataset, count=8):
  """A sentence's first words as inputs, the rest as targets."""
  def split(example):
    words = tf.strings.split(example['text'], ' ')
    return {'inputs': tf.strings.reduce_join(words[:count], separator=' '),
            'targets': tf.strings.reduce_join(words[count:], separator=' ')}
  return dataset.map(split, num_parallel_calls=tf.data.AUTOTUNE)


def _packaged_texts(task, split, shuffle_files, seed=None):
  del split, shuffle_files, seed  # there is one split, and one file
  pairs = packaged.read_texts(os.path.join(packaged.FOLDER, 'texts', f'{task}.tsv'))
  return tf.data.Dataset.from_tensor_slices(dict(zip(FEATURES, map(list, zip(*pairs)))))


def _bleu(targets, predictions):
  return quality.bleu(predictions, targets, samples=200)


def _rouge(targets, predictions):
  return quality.rouge(predictions, targets, samples=200)


@dataclasses.dataclass(frozen=True)
class Example:
  """What an output is scored by.

  Attributes:
    task: the `seqio.Task` that it is from.
    features: {name: array} as the task gives it, its target among them.
  """
  task: seqio.Task
  features: dict


@dataclasses.dataclass(frozen=True)
class Source:
  """A task, or the tasks of a mixture, that can be read.

  Attributes:
    tasks: list of `seqio.Task`, those that have the split.
    split: its name.
    vocabulary: `Vocabulary` or `ByteVocabulary`, the tasks' own.
  """
  tasks: list
  split: str
  vocabulary: Vocabulary | ByteVocabulary

  def read(self, feature_lengths, limit=None):
    """Reads the texts.

    Args:
      feature_lengths: {'inputs': tokens at most, 'targets': likewise}; seqio cuts what is longer.
      limit: examples of each task at most; None: all.

    Returns:
      list of (token ids, `Example`), the ids as seqio makes them, with EOS where the task adds one. A mixture's tasks
      come one after the other, as seqio evaluates them: its rates are for training.

    Raises:
      ValueError: the data cannot be read, or an example has no inputs.
    """
    texts = []
    with _silenced():  # TensorFlow's SentencePiece tells how it normalizes
      for task in self.tasks:
        data = task.get_dataset(feature_lengths, self.split, use_cached=task.requires_caching, shuffle=False)
        if 'inputs' not in data.element_spec:
          raise ValueError(f'examples of {task.name} have no inputs; they have {_list(data.element_spec)}')
        try:
          texts += [(features['inputs'].tolist(), Example(task, features))
                    for features in data.take(limit or -1).as_numpy_iterator()]
        except tf.errors.OpError as e:
          raise ValueError(f'{task.name}, split {self.split}, cannot be read: {_line(e)}') from e
    return texts


def find(name, split, spiece=None):
  """Looks up a task or mixture, and whether all that it needs is here. No data are read.

  Args:
    name: under which it is registered.
    split: name of a split.
    spiece: SentencePiece file to use in place of the task's own: a local copy of it. Sentinels stay the task's.

  Returns:
    `Source`.

  Raises:
    LookupError: there is no task or mixture of this name; the message has similar names.
    ValueError: TFDS data or a vocabulary must be prepared first (the message says how), or there is no such split; or
      no model here could read the task: no inputs or targets, vocabularies of other kinds.
  """
  registered = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
  if name not in registered:
    raise LookupError(f'no task or mixture {name!r}; similar names: '
                      f'{", ".join(difflib.get_close_matches(name, registered, cutoff=.5)) or "none"}')
  tasks = seqio.get_subtasks(seqio.get_mixture_or_task(name))
  for task in tasks:
    if not set(FEATURES) <= set(task.output_features):
      raise ValueError(f'{task.name} has the features {_list(task.output_features)}; inputs and targets are needed')
  if spiece is not None:
    Vocabulary(spiece)  # a clearer error than seqio's
    tasks = [_with_vocabulary(task, spiece) for task in tasks]
  missing, vocabularies = [], {}
  data = [task.source.tfds_dataset.name for task in tasks if not _has_data(task)]
  if data:
    missing.append(f'TFDS has not prepared {", ".join(data)} (where there is a network, '
                   f'tensorflow_datasets.load({data[0]!r}) does, or set TFDS_DATA_DIR to the folder that has it)')
  for vocabulary in [task.output_features[name].vocabulary for task in tasks for name in FEATURES]:
    try:
      ours = _vocabulary(vocabulary)
      vocabularies[ours.fingerprint] = ours
    except (tf.errors.OpError, OSError) as e:
      missing.append(f'its vocabulary {vocabulary.sentencepiece_model_file} cannot be read: {_line(e)} '
                     '(set zoo.vocabulary to a copy of it)')
  if missing:
    raise ValueError('; '.join(dict.fromkeys(missing)))
  if len(vocabularies) > 1:
    raise ValueError('it has several vocabularies; the inputs and targets of our models share one')
  having = [task for task in tasks if split in task.splits]
  if not having:
    raise ValueError(f'it has no split {split!r}; zoo.split may be {_list(s for task in tasks for s in task.splits)}')
  return Source(having, split, ours)


def score(predictions, examples):
  """The tasks' own postprocessing and metrics.

  Args:
    predictions: list of token ids; seqio's vocabulary decodes them.
    examples: list of `Example`.

  Returns:
    {metric: number}; of several tasks the mean over those that have the metric. Metrics of other things than outputs
    (scores of targets), and results that are no numbers, are left out.
  """
  scores = collections.defaultdict(list)
  for task in dict.fromkeys(example.task for example in examples):
    rows = [(ids, example.features) for ids, example in zip(predictions, examples) if example.task is task]
    padded = np.zeros((len(rows), max(len(ids) for ids, _ in rows)), np.int32)
    for row, (ids, _) in zip(padded, rows):
      row[:len(ids)] = ids
    features = [features for _, features in rows]
    for metric in task.metric_objs:
      if metric.model_output_type == seqio.metrics.ModelOutputType.PREDICTION:
        result = metric.from_model_output(features, padded, task.output_features)
        values = (result.actual_compute(features, task.output_features)[0]
                  if isinstance(result, seqio.metrics.CollectingMetric) else result.compute())
        for key, value in values.items():
          value = getattr(value, 'value', value)
          if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number):
            scores[key].append(float(value))
  return {key: float(np.mean(values)) for key, values in scores.items()}


def _vocabulary(theirs):
  """seqio's vocabulary as ours, equal in every id. Raises ValueError if there is none like it."""
  if isinstance(theirs, seqio.ByteVocabulary):
    return ByteVocabulary(theirs.extra_ids)
  if not isinstance(theirs, seqio.SentencePieceVocabulary):
    raise ValueError(f'a {type(theirs).__name__} of seqio has no counterpart here; '
                     'SentencePieceVocabulary and ByteVocabulary have')
  with _silenced():  # TensorFlow tells how it looks for credentials
    proto = sentencepiece_model_pb2.ModelProto.FromString(theirs.sp_model)
  del proto.pieces[len(proto.pieces) - theirs.extra_ids:]  # ours adds them itself
  ours = Vocabulary(theirs.sentencepiece_model_file, theirs.extra_ids, proto.SerializeToString())
  if ours.pieces != theirs.tokenizer.id_to_piece(list(range(theirs.vocab_size))):
    raise ValueError(f'{theirs.sentencepiece_model_file}: <extra_id_0> must be the last of the sentinels')
  return ours


def _with_vocabulary(task, spiece):
  """The task with a SentencePiece file in place of its own."""
  features = {name: dataclasses.replace(feature, vocabulary=seqio.SentencePieceVocabulary(
      spiece, feature.vocabulary.extra_ids)) for name, feature in task.output_features.items()}
  return task.replace(output_features=features)


def _has_data(task):
  """False where TFDS must prepare the task's data first. seqio would do that by itself, whatever the size."""
  loader = getattr(task.source, 'tfds_dataset', None)
  if loader is None or loader.tfds_splits:  # no TFDS; or several data sets, which are for seqio to find
    return True
  try:
    with _silenced():  # TFDS warns of what is not there
      return loader.builder.is_prepared()
  except Exception:  # TFDS has many, for names and versions that it does not know
    return False


def _line(error):
  return str(error).split('\n')[0]


def _list(names):
  return ', '.join(sorted(set(names)))


register()
