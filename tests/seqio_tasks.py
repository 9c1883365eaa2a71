"""Tasks that test_tasks registers with seqio: T5's preprocessors on two texts, with the vocabulary of tests/data."""
import functools
import os

import seqio
from t5.data import postprocessors
from t5.data import preprocessors
from t5.evaluation import metrics
import tensorflow as tf

VOCABULARY = seqio.SentencePieceVocabulary(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data', 'vocabulary', 'spiece.model'), 8)
TEXTS = {'article': ['the cat sat. ' * 30, 'dogs bark'], 'highlights': ['the cat', 'DOGS']}


def add(name, output_features, splits=('test',), **kwargs):
  def texts(split, shuffle_files):
    del split, shuffle_files
    return tf.data.Dataset.from_tensor_slices(TEXTS)

  return seqio.TaskRegistry.add(
      name, source=seqio.FunctionDataSource(texts, splits), output_features=output_features,
      preprocessors=[functools.partial(preprocessors.summarize, article_key='article', summary_key='highlights'),
                     seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder(),
                     seqio.preprocessors.append_eos_after_trim], **kwargs)


def features(inputs, targets=None, **kwargs):
  return {'inputs': seqio.Feature(inputs, **kwargs), 'targets': seqio.Feature(targets or inputs)}


def count(targets, predictions):
  return {'texts': seqio.metrics.Scalar(len(targets)), 'first': seqio.metrics.Text(predictions[0])}


def likelihood(targets, scores):
  raise AssertionError('there are no scores')


add('toy_rouge', features(VOCABULARY), metric_fns=[metrics.rouge, count])
add('toy_scores', features(VOCABULARY), metric_fns=[likelihood])
add('toy_lower', features(VOCABULARY, add_eos=False), ('test', 'validation'), postprocess_fn=postprocessors.lower_text,
    metric_fns=[metrics.accuracy, count])
add('toy_bytes', features(seqio.ByteVocabulary(125)), metric_fns=[metrics.accuracy])
add('toy_ids', features(seqio.PassThroughVocabulary(100)))
add('toy_sentinels', features(seqio.SentencePieceVocabulary(VOCABULARY.sentencepiece_model_file, 8,
                                                            reverse_extra_ids=False)))
add('toy_gone', features(seqio.SentencePieceVocabulary('toy_gone.model')))
add('toy_two', features(VOCABULARY, seqio.ByteVocabulary()))
add('toy_targets', {'targets': seqio.Feature(VOCABULARY)})
seqio.MixtureRegistry.add('toy_mixture', [('toy_rouge', 3), ('toy_lower', 1)])
