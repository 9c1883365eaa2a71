"""Writes a checkpoint of T5X, or of our own training, as a folder that Hugging Face's Transformers reads.

  python -m experiments.convert --gin.convert.source="'t5x/checkpoint_1000'" --gin.convert.vocabulary="'spiece.model'" \
    --output_dir=my_model
"""
import os

import gin

from experiments import command
from speculative import checkpoints
from speculative.data.vocabulary import Vocabulary


@gin.configurable
def convert(output_dir, dry_run=False, *, source=gin.REQUIRED, vocabulary=None, extra_ids=100, dtype='float32',
            overwrite=False):
  """Loads and saves.

  Args:
    source: what `speculative.load_model` takes.
    vocabulary: SentencePiece file, where the source has none; None: as the source has it.
    extra_ids: sentinels of that file (T5: 100).
    dtype: of the parameters, 'float32' or 'bfloat16'.
    overwrite: replace a model that is there already.
  """
  if vocabulary and not os.path.exists(vocabulary):
    raise command.UsageError(f'{vocabulary} does not exist')
  pieces = Vocabulary(vocabulary, extra_ids) if vocabulary else None
  if dry_run:
    return
  model = checkpoints.load_model(source, dtype, vocabulary=pieces)
  checkpoints.save_model(model, output_dir, overwrite=overwrite)
  print(f'{output_dir}: {model.config}')


if __name__ == '__main__':
  command.main(convert)
