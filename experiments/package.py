"""Makes speculative/pretrained from trained models and data: weights, vocabulary, held-out texts,
n-gram counts, and α of the drafts before and after distillation.

  python -m experiments.package --gin.package.data_dir="'data'" --gin.package.runs_dir="'runs'"
"""
import filecmp
import os
import shutil

import gin

from experiments import command
from speculative import checkpoints
from speculative.checkpoints import huggingface
from speculative.data import batching
from speculative.data import packaged
from speculative.data.vocabulary import Vocabulary
from speculative.drafters import ngram
from speculative.report import results

# Packaged folder → the run that made it.
RUNS = {'target': 'target_longer', 'draft_small': 'distill_small', 'draft_base': 'distill_base',
        'gpt_target': 'gpt_target', 'gpt_draft': 'distill_gpt'}


@gin.configurable
def package(output_dir, dry_run=False, *, data_dir=gin.REQUIRED, runs_dir=gin.REQUIRED, counted=60000):
  """Replaces the packaged files (not DATA.md).

  Args:
    data_dir: as `experiments.build_data` writes it.
    runs_dir: holds the folders of RUNS, as `experiments.train` and `experiments.distill` write them.
    counted: training texts of each task whose unigrams and bigrams are counted, at most.
  """
  del output_dir
  sources = {name: os.path.join(runs_dir, run) for name, run in RUNS.items()}
  distilled = [os.path.join(path, 'results.jsonl') for name, path in sources.items() if RUNS[name].startswith('distill')]
  # Data that were built anew, from other indexes, may have another vocabulary than the models learned.
  vocabularies = [os.path.join(folder, 'spiece.model')
                  for folder in (data_dir, *(os.path.join(path, 'model') for path in sources.values()))]
  for path in [*vocabularies, *distilled]:
    if not os.path.exists(path):
      raise command.UsageError(f'{path} does not exist')
  for path in vocabularies[1:]:
    if not filecmp.cmp(vocabularies[0], path, shallow=False):
      raise command.UsageError(f'{path} is not the vocabulary of {vocabularies[0]}: the model was trained on other data')
  if dry_run:
    return
  for folder in ('texts', 'ngrams'):
    os.makedirs(os.path.join(packaged.FOLDER, folder), exist_ok=True)
  vocabulary_path = os.path.join(packaged.FOLDER, 'spiece.model')
  shutil.copyfile(vocabularies[0], vocabulary_path)
  vocabulary = Vocabulary(vocabulary_path)
  for name, path in sources.items():
    model = checkpoints.load_model(os.path.join(path, 'model'), 'bfloat16')
    model.vocabulary = None  # one file serves all
    checkpoints.save_model(model, os.path.join(packaged.FOLDER, name), overwrite=True)
  for task in (*packaged.TASKS, packaged.GPT_TASK):
    pairs = packaged.read_texts(os.path.join(data_dir, f'{task}.test.tsv'))
    with open(os.path.join(packaged.FOLDER, 'texts', f'{task}.tsv'), 'w', encoding='utf-8') as f:
      for pair in pairs:
        if pair[1] and len(vocabulary.encode(pair[0])) < batching.BUCKETS[-1]:
          f.write('\t'.join(pair) + '\n')
    references = [reference for _, reference in packaged.read_texts(os.path.join(data_dir, f'{task}.train.tsv'))]
    ngram.save(ngram.fit_texts(references[:counted], vocabulary), os.path.join(packaged.FOLDER, 'ngrams', f'{task}.npz'))
  # The rows name the target by its folder in runs_dir.
  results.write_jsonl(os.path.join(packaged.FOLDER, 'distillation.jsonl'),
                      [row | {'target': 'gpt_target' if row['task'] == packaged.GPT_TASK else 'target'}
                       for path in distilled for row in results.read_jsonl(path)])
  size = sum(os.path.getsize(os.path.join(packaged.FOLDER, name, huggingface.WEIGHTS)) for name in sources)
  print(f'weights: {size / 1e6:.1f} MB in all')


if __name__ == '__main__':
  command.main(package)
