"""Trains a T5 on text pairs, from scratch or grown from a smaller model.

  python -m experiments.train --gin_file=configs/runs/train_draft_small.gin --gin.train.data_dir="'data'"

Writes checkpoints (a killed run goes on where it stopped), log.jsonl, and the model in Hugging Face's layout.
"""
import json
import os
import time

import gin
import jax

from experiments import command
from speculative import checkpoints
from speculative.data.vocabulary import Vocabulary
from speculative.models import t5
from speculative.models.model import Model
from speculative.training import grow
from speculative.training import train as training

gin.external_configurable(t5.T5Config, 'T5Config')


@gin.configurable
def train(output_dir, dry_run=False, *, config=gin.REQUIRED, data_dir=gin.REQUIRED, tasks=gin.REQUIRED,
          steps=gin.REQUIRED, learning_rate=gin.REQUIRED, grow_from=None, max_input_len=256, max_target_len=128,
          seed=0, **settings):
  """Trains and exports.

  Args:
    config: `t5.T5Config`.
    data_dir: folder with spiece.model and {task}.{train,validation}.tsv, as `experiments.build_data` writes it.
    tasks: {name: passes over its training set in an epoch}.
    steps: total optimiser steps.
    learning_rate: the schedule's constant part.
    grow_from: folder of a trained model to grow from (`speculative.training.grow`), or None.
    max_input_len, max_target_len: in tokens; longer texts are cut.
    settings: passed to `speculative.training.train.train`.
  """
  data_dir = os.path.expanduser(data_dir)
  files = [os.path.join(data_dir, f'{name}.{split}.tsv') for name in tasks for split in ('train', 'validation')]
  for path in files + [os.path.join(data_dir, 'spiece.model')] + ([grow_from] if grow_from else []):
    if not os.path.exists(path):
      raise command.UsageError(f'{path} does not exist (python -m experiments.build_data makes the data)')
  if dry_run:
    return
  vocabulary = Vocabulary(os.path.join(data_dir, 'spiece.model'))
  if vocabulary.vocab_size > config.vocab_size:
    raise command.UsageError(f'config.vocab_size {config.vocab_size} is under the vocabulary\'s {vocabulary.vocab_size}')

  def examples(split):
    return [(name, training.read_examples(os.path.join(data_dir, f'{name}.{split}.tsv'), vocabulary, max_input_len,
                                          max_target_len), passes) for name, passes in tasks.items()]

  key = jax.random.key(seed)
  if grow_from:
    small = checkpoints.load_model(grow_from, dtype='float32')
    params = grow.grow(small.params, small.config, config, key)
  else:
    params = training.initial_params(config, key)
  print(f'{sum(p.size for p in jax.tree.leaves(params)) / 1e6:.2f} M parameters')
  os.makedirs(output_dir, exist_ok=True)

  def log(entry):
    entry = {'seconds': round(time.time() - start, 1)} | entry
    print(json.dumps(entry), flush=True)
    with open(os.path.join(output_dir, 'log.jsonl'), 'a', encoding='utf-8') as f:
      f.write(json.dumps(entry) + '\n')

  start = time.time()
  params = training.train(config, params, examples('train'), examples('validation'), output_dir=output_dir,
                          steps=steps, learning_rate=learning_rate, seed=seed, log=log, vocabulary=vocabulary,
                          **settings)
  checkpoints.save_model(Model(config, params, vocabulary), os.path.join(output_dir, 'model'), dtype='bfloat16',
                         overwrite=True)


if __name__ == '__main__':
  command.main(train)
