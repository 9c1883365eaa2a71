"""seqio's tasks: ids, vocabularies and metrics are seqio's; what is missing is said; experiments run on them."""
import importlib
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from speculative.data import packaged
from speculative.data.vocabulary import Vocabulary
from speculative.measure import quality

HERE = os.path.dirname(os.path.abspath(__file__))
SPIECE = os.path.join(packaged.FOLDER, 'spiece.model')
LENGTHS = {'inputs': 40, 'targets': 20}
WITHOUT = ('import sys; sys.modules["seqio"] = None; import runpy; '
           'runpy.run_module("{}", run_name="__main__", alter_sys=True)')


def run(command, *arguments):
  return subprocess.run([sys.executable, *command, *arguments], cwd=os.path.dirname(HERE), capture_output=True,
                        text=True, env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': HERE}, check=False)


def failure(result, *named):
  """Asserts an error of one line that names all of these."""
  assert result.returncode == 1
  assert result.stderr.startswith('error: ') and len(result.stderr.strip().splitlines()) == 1, result.stderr
  for name in named:
    assert name in result.stderr


def test_without_seqio_an_error_says_what_to_install(tmp_path):
  (tmp_path / 'my.gin').write_text("# texts\nzoo.texts = {'ende': 'wmt_t2t_ende_v003'}\n")
  for more in [], ['--dry_run']:
    failure(run(['-c', WITHOUT.format('experiments.alpha')], f'--gin_file={tmp_path}/my.gin', *more),
            f"{tmp_path}/my.gin, line 2: zoo.texts['ende'] = 'wmt_t2t_ende_v003': no such file",
            "pip install -e '.[seqio]'")


def test_nothing_else_imports_tensorflow():
  result = run(['-c', 'import sys, speculative, experiments.reproduce\n'
                      'assert not {"seqio", "tensorflow"} & set(sys.modules)'])
  assert result.returncode == 0, result.stderr


@pytest.fixture(scope='module')
def tasks():
  """The module under test, with T5's tasks and those of seqio_tasks registered."""
  pytest.importorskip('t5')
  from speculative.data import tasks
  for module in 't5.data.mixtures', 'seqio_tasks':
    importlib.import_module(module)
  return tasks


@pytest.mark.slow
@pytest.mark.parametrize('task,metric', [('ende', quality.bleu), ('summarize', quality.rouge)])
def test_packaged_texts(tasks, task, metric):
  tasks.register()  # once more
  texts = tasks.find(f'speculative_{task}', 'test').read({'inputs': 512, 'targets': 512})
  pairs = packaged.read_texts(os.path.join(packaged.FOLDER, 'texts', f'{task}.tsv'))
  vocabulary = Vocabulary(SPIECE)
  encoded = [vocabulary.encode(text) + [vocabulary.eos_id] for text, _ in pairs]
  assert [vocabulary.decode(ids) for ids, _ in texts] == list(map(vocabulary.decode, encoded))
  # TensorFlow's SentencePiece settles a few ties otherwise: 0 00 for 00 0.
  assert sum(ids != expected for (ids, _), expected in zip(texts, encoded)) < 5
  outputs = [vocabulary.encode(reference)[:9] for _, reference in pairs[:20]]
  references = [reference for _, reference in pairs[:20]]
  expected = metric([vocabulary.decode(ids) for ids in outputs], references, samples=200)
  assert tasks.score(outputs, [example for _, example in texts[:20]]) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['toy_rouge', 'toy_lower', 'toy_bytes'])
def test_ids_are_those_that_seqio_gives_a_model(tasks, name):
  import seqio
  expected = [features['encoder_input_tokens'] for features in seqio.get_dataset(
      name, LENGTHS, seqio.EncDecFeatureConverter(pack=False), 'test').as_numpy_iterator()]
  texts = tasks.find(name, 'test').read(LENGTHS)
  rows = np.zeros((2, LENGTHS['inputs']), int)
  for row, (ids, _) in zip(rows, texts, strict=True):
    row[:len(ids)] = ids
  np.testing.assert_array_equal(rows, expected)
  assert len(texts[0][0]) == LENGTHS['inputs'] and (texts[0][0][-1] == 1) == (name != 'toy_lower')
  assert len(tasks.find(name, 'test').read(LENGTHS, limit=1)) == 1


@pytest.mark.slow
def test_metrics_are_those_of_seqio_s_evaluator(tasks):
  import seqio
  evaluator = seqio.Evaluator('toy_mixture', seqio.EncDecFeatureConverter(pack=False), 'test', seed=None,
                              sequence_length=LENGTHS)
  vocabulary = tasks.find('toy_mixture', 'test').vocabulary
  outputs = [vocabulary.encode('the cat') + [1, 30], vocabulary.encode('a dog')]
  width = max(map(len, outputs))
  rows = [row + [0] * (width - len(row)) for row in outputs]
  np.random.seed(0)  # T5's ROUGE is the median of a bootstrap
  metrics, _ = evaluator.evaluate(compute_metrics=True, predict_fn=lambda data: list(enumerate(rows)))
  expected = metrics.result()
  assert expected['toy_lower']['accuracy'] == 50 and expected['toy_rouge']['rouge1'] > 0

  def scores(name):
    np.random.seed(0)
    texts = tasks.find(name, 'test').read(LENGTHS)
    return tasks.score(outputs * (len(texts) // 2), [example for _, example in texts])

  assert scores('toy_lower') == {'accuracy': 50, 'texts': 2}
  rouge = {name: value for name, value in expected['toy_rouge'].items() if name.startswith('rouge')}
  assert scores('toy_rouge') == rouge | {'texts': 2}
  assert scores('toy_mixture') == rouge | {'accuracy': 50, 'texts': 2}
  assert scores('toy_scores') == {}


@pytest.mark.slow
def test_vocabularies_are_seqio_s(tasks):
  theirs = tasks.seqio.get_mixture_or_task('toy_rouge').output_features['inputs'].vocabulary
  ours = tasks.find('toy_rouge', 'test').vocabulary
  assert (ours.vocab_size, ours.extra_ids, ours.eos_id) == (theirs.vocab_size, 8, theirs.eos_id)
  assert ours.fingerprint == Vocabulary(theirs.sentencepiece_model_file, 8).fingerprint
  for text in 'the cat', 'a <extra_id_0> dog', 'Äpfel':
    ids = theirs.encode(text)
    assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids)
  theirs = tasks.seqio.get_mixture_or_task('toy_bytes').output_features['inputs'].vocabulary
  ours = tasks.find('toy_bytes', 'test').vocabulary
  assert ours.vocab_size == theirs.vocab_size and ours.encode('Äpfel') == theirs.encode('Äpfel')
  ours = tasks.find('toy_rouge', 'test', SPIECE).vocabulary
  assert ours.fingerprint == Vocabulary(SPIECE, 8).fingerprint


@pytest.mark.slow
def test_a_mixture_is_its_tasks(tasks):
  read = [tasks.find(name, 'test').read(LENGTHS) for name in ('toy_mixture', 'toy_lower', 'toy_rouge')]
  assert [ids for ids, _ in read[0]] == [ids for ids, _ in read[1] + read[2]]
  assert [example.task.name for _, example in read[0]] == ['toy_lower'] * 2 + ['toy_rouge'] * 2
  assert [task.name for task in tasks.find('toy_mixture', 'validation').tasks] == ['toy_lower']


@pytest.mark.slow
@pytest.mark.parametrize('name,split,spiece,error', [
    ('toy_roug', 'test', None, "no task or mixture 'toy_roug'; similar names: toy_rouge"),
    ('toy_lower', 'train', None, "no split 'train'; zoo.split may be test, validation"),
    ('toy_targets', 'test', None, 'toy_targets has the features targets; inputs and targets are needed'),
    ('toy_ids', 'test', None, 'PassThroughVocabulary'), ('toy_two', 'test', None, 'several vocabularies'),
    ('toy_sentinels', 'test', None, 'last of the sentinels'), ('toy_rouge', 'test', 'missing.model', 'missing.model'),
    ('toy_rouge', 'test', __file__, 'not a SentencePiece model'),
    ('wmt_t2t_ende_v003', 'test', SPIECE, "load('wmt_t2t_translate/de-en:1.0.0') does, or")])
def test_what_cannot_be_read(tasks, name, split, spiece, error):
  with pytest.raises((ValueError, LookupError, FileNotFoundError), match=re.escape(error)):
    tasks.find(name, split, spiece)


@pytest.mark.slow
def test_a_vocabulary_out_of_reach(tasks):
  with pytest.raises(ValueError, match=r'toy_gone.model cannot be read: .*set zoo.vocabulary to a copy'):
    tasks.find('toy_gone', 'test')


@pytest.mark.slow
@pytest.mark.parametrize('name,data,config,example,text', [
    ('cnn_dailymail_v002', 'cnn_dailymail:3.4.0', None, {'article': 'An article. ' * 99, 'highlights': 'a', 'id': '1'},
     'summarize: ' + 'An article. ' * 99),
    ('wmt_t2t_ende_v003', 'wmt_t2t_translate:1.0.0', 'de-en', {'en': 'A cat', 'de': 'Eine Katze'},
     'translate English to German: A cat')])
def test_t5_s_own_tasks(tasks, tmp_path, monkeypatch, name, data, config, example, text):
  """On TFDS data of one example, in place of the real ones."""
  tfds = pytest.importorskip('tensorflow_datasets')
  monkeypatch.setattr(tasks.seqio.utils, '_TFDS_DATA_DIR_OVERRIDE', str(tmp_path))
  with pytest.raises(ValueError, match='TFDS has not prepared ' + data.split(':')[0]):
    tasks.find(name, 'test', SPIECE)
  features = (tfds.features.Translation(['de', 'en']) if config else
              tfds.features.FeaturesDict({key: tfds.features.Text() for key in example}))
  data, version = data.split(':')
  config = config and tfds.core.BuilderConfig(name=config, version=version)
  examples = tasks.tf.data.Dataset.from_tensors(example)
  tfds.dataset_builders.store_as_tfds_dataset(data, version, features, {'test': examples}, config, tmp_path)
  tasks.seqio.utils.LazyTfdsLoader._MEMOIZED_BUILDERS.clear()
  (ids, _), = tasks.find(name, 'test', SPIECE).read(LENGTHS)
  assert ids == Vocabulary(SPIECE).encode(text)[:LENGTHS['inputs'] - 1] + [1]


T5X = [f"--gin.zoo.{name}={value}" for name, value in {
    'target': "'tests/data/t5x/t5_v1_1'", 'drafts': "{'small': 'tests/data/t5x/t5_v1_0'}", 'modules': "'seqio_tasks'",
    'feature_lengths': LENGTHS}.items()]
QUICK = ['--gin.alpha_settings.tokens=20', '--gin.alpha_settings.temperatures=(0.0,)',
         '--gin.alpha_settings.max_decode_len=16']


@pytest.mark.slow
def test_alpha_of_t5x_checkpoints_on_a_mixture(tasks, tmp_path):
  """They have no vocabulary of their own."""
  result = run(['-m', 'experiments.alpha'], *T5X, *QUICK, "--gin.zoo.texts={'x': 'toy_mixture'}",
               f'--output_dir={tmp_path}')
  assert result.returncode == 0, result.stderr
  rows = [json.loads(line) for line in (tmp_path / 'results.jsonl').read_text().splitlines()]
  quality_row, = (row for row in rows if row['experiment'] == 'quality')
  assert (quality_row['texts'], quality_row['metric texts']) == (4, 2) and 'rouge2' in quality_row
  assert 'accuracy' in result.stdout and 'rougeLsum' in result.stdout


@pytest.mark.slow
def test_alpha_of_the_packaged_models(tasks, tmp_path):
  result = run(['-m', 'experiments.alpha'], "--gin.zoo.texts={'summarize': 'speculative_summarize'}", *QUICK,
               f'--output_dir={tmp_path}')
  assert result.returncode == 0, result.stderr
  rows = [json.loads(line) for line in (tmp_path / 'results.jsonl').read_text().splitlines()]
  assert [row['draft'] for row in rows] == [None, 'unigram', 'bigram', 'small', 'base']
  assert rows[0]['texts'] == 32 and rows[0]['rougeL'] > 20


@pytest.mark.slow
@pytest.mark.parametrize('texts,more,named', [
    ("{'x': 'toy_roug'}", T5X, ["zoo.texts['x'] = 'toy_roug'", 'toy_rouge', "zoo.modules = 'seqio_tasks'"]),
    ("{'x': 'toy_rouge', 'y': 'toy_bytes'}", T5X, ['x, y have different vocabularies']),
    ("{'x': 'toy_rouge'}", T5X[2:3], ['x and the target', 'different vocabularies', '128 and 4000']),
    ("{'x': 'toy_rouge'}", T5X + ['--gin.alpha_settings.max_input_len=9'], ['none has at most max_input_len = 9']),
    ("{'x': 'toy_rouge'}", T5X[:2] + ["--gin.zoo.modules='no_module'"], ['zoo.modules: no_module']),
    ("{'x': 'cnn_dailymail_v002'}", ['--dry_run', f"--gin.zoo.vocabulary='{SPIECE}'"],
     ["tensorflow_datasets.load('cnn_dailymail:3.4.0')", 'TFDS_DATA_DIR']),
    ("{'x': 'speculative_ende'}", ["--gin.zoo.feature_lengths={'inputs': 600}"],
     ["zoo.feature_lengths['inputs'] = 600"]),
    ("{'x': 'speculative_ende'}", ['--gin.zoo.limit=0'], ['zoo.limit = 0'])])
def test_experiments_refuse_what_does_not_fit(tasks, texts, more, named):
  failure(run(['-m', 'experiments.alpha'], f'--gin.zoo.texts={texts}', *more), *named)
