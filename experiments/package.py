"""Makes speculative/pretrained from trained models and data: weights, vocabulary, held-out texts, n-gram counts.

  python -m experiments.package --gin.package.data_dir="'data'" --gin.package.runs_dir="'runs'"
"""
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


@gin.configurable
def package(output_dir, dry_run=False, *, data_dir=gin.REQUIRED, runs_dir=gin.REQUIRED, counted=60000):
  """Replaces the packaged files (not DATA.md).

  Args:
    data_dir: as `experiments.build_data` writes it.
    runs_dir: holds {target, draft_small, draft_base, gpt_target, gpt_draft}/model, as `experiments.train` and
      `experiments.distill` write them.
    counted: training texts of each task whose unigrams and bigrams are counted, at most.
  """
  del output_dir
  names = [name for target, drafts, _ in packaged.FAMILIES.values() for name in (target, *drafts.values())]
  for path in [data_dir, *(os.path.join(runs_dir, name, 'model') for name in names)]:
    if not os.path.exists(path):
      raise command.UsageError(f'{path} does not exist')
  if dry_run:
    return
  for folder in ('texts', 'ngrams'):
    os.makedirs(os.path.join(packaged.FOLDER, folder), exist_ok=True)
  vocabulary_path = os.path.join(packaged.FOLDER, 'spiece.model')
  shutil.copyfile(os.path.join(data_dir, 'spiece.model'), vocabulary_path)
  vocabulary = Vocabulary(vocabulary_path)
  for name in names:
    model = checkpoints.load_model(os.path.join(runs_dir, name, 'model'), 'bfloat16')
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
  size = sum(os.path.getsize(os.path.join(packaged.FOLDER, name, huggingface.WEIGHTS)) for name in names)
  print(f'weights: {size / 1e6:.1f} MB in all')


if __name__ == '__main__':
  command.main(package)
