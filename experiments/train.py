"""Trains a model on text pairs: from scratch, grown from a smaller one, or fine-tuned from a checkpoint.

  python -m experiments.train --gin_file=configs/runs/train_draft_small.gin --gin.train.data_dir="'data'"
  python -m experiments.train --gin_file=configs/runs/finetune_ende.gin --gin.train.model="'google/t5-v1_1-small'"

Writes checkpoints (a killed run goes on where it stopped, with the same bits), log.jsonl, and the model in Hugging Face's
layout.
"""
import json
import os
import time

import gin
import jax
import numpy as np

from experiments import command
from experiments import zoo as zoos
from speculative import checkpoints
from speculative import sharding
from speculative import text as decoding
from speculative.data.vocabulary import Vocabulary
from speculative.decoding.autoregressive import autoregressive_decode
from speculative.decoding.config import DecodeConfig
from speculative.models import decoder_only
from speculative.models import t5
from speculative.models.model import Model
from speculative.training import grow
from speculative.training import train as training

gin.external_configurable(t5.T5Config, 'T5Config')
gin.external_configurable(decoder_only.GPTConfig, 'GPTConfig')


@gin.configurable
def train(output_dir, dry_run=False, *, tasks=gin.REQUIRED, steps=gin.REQUIRED, config=None, model=None, grow_from=None,
          data_dir=None, max_input_len=256, max_target_len=128, limit=None, modules=('t5.data.mixtures',),
          vocabulary=None, scored_texts=0, model_devices=1, seed=0, **settings):
  """Trains and exports.

  Args:
    tasks: {name: passes over its training set in an epoch}; {data_dir}/{name}.train.tsv and …validation.tsv, as
      `experiments.build_data` writes them; or seqio tasks, whose splits of these names are read into memory.
    steps: total optimiser steps.
    config: `t5.T5Config` or `decoder_only.GPTConfig` to train from scratch; or
    model: checkpoint to fine-tune, whatever `speculative.load_model` reads; or, with `config`,
    grow_from: folder of a trained T5 to grow from (`speculative.training.grow`).
    data_dir: folder with the files and their spiece.model; None: the tasks are seqio's.
    max_input_len, max_target_len: in tokens; longer texts are cut.
    limit: examples of each task and split at most; None: all.
    modules, vocabulary: of seqio tasks, as for the zoo.
    scored_texts: validation texts of each seqio task that are decoded and scored with the task's metrics at each evaluation.
    model_devices: that share one copy of the parameters; the batch is split over the others.
    settings: passed to `speculative.training.train.train`.
  """
  if (config is None) == (model is None) or (grow_from and model):
    raise command.UsageError('train: give train.config to train from scratch (with train.grow_from to grow), or train.model '
                             'to fine-tune')
  if scored_texts and data_dir:
    raise command.UsageError('train.scored_texts: seqio tasks have metrics, files (train.data_dir) have not')
  sources = {}
  if data_dir:
    data_dir = os.path.expanduser(data_dir)
    files = [os.path.join(data_dir, f'{name}.{split}.tsv') for name in tasks for split in ('train', 'validation')]
    for path in files + [os.path.join(data_dir, 'spiece.model')] + ([grow_from] if grow_from else []):
      if not os.path.exists(path):
        raise command.UsageError(f'{path} does not exist (python -m experiments.build_data makes the data)')
  else:
    sources = {(name, split): zoos.source(f'train.tasks: {name!r}', name, modules, split, vocabulary)
               for name in tasks for split in ('train', 'validation')}
  if len(jax.devices()) % model_devices:
    raise command.UsageError(f'train.model_devices = {model_devices} does not divide the {len(jax.devices())} devices')
  if dry_run:
    return
  pieces = (Vocabulary(os.path.join(data_dir, 'spiece.model')) if data_dir else
            zoos.shared_vocabulary({name: source for (name, _), source in sources.items()}))
  key = jax.random.key(seed)
  if model:
    start = checkpoints.load_model(model, dtype='float32', vocabulary=None if data_dir else pieces)
    config, params = start.config, start.params
    if start.vocabulary and start.vocabulary.fingerprint != pieces.fingerprint:
      raise command.UsageError(f'train.model = {model!r} has another vocabulary than the tasks')
  elif grow_from:
    small = checkpoints.load_model(grow_from, dtype='float32')
    params = grow.grow(small.params, small.config, config, key)
  else:
    params = training.initial_params(config, key)
  if pieces.vocab_size > config.vocab_size:
    raise command.UsageError(f'config.vocab_size {config.vocab_size} is under the vocabulary\'s {pieces.vocab_size}')

  scored = {}

  def examples(split):
    found = []
    for name, passes in tasks.items():
      if data_dir:
        read = training.read_examples(os.path.join(data_dir, f'{name}.{split}.tsv'), pieces, max_input_len,
                                      max_target_len)[:limit]
      else:
        pairs = sources[name, split].read({'inputs': max_input_len, 'targets': max_target_len}, limit)
        read = [training.Example(np.array(ids, np.int32), example.features['targets']) for ids, example in pairs]
        if split == 'validation':
          scored[name] = pairs[:scored_texts]
      if isinstance(config, decoder_only.GPTConfig):
        read = training.joined(read, pieces.eos_id, max_target_len)
      found.append((name, read, passes))
    return found

  def metrics(params):
    """The tasks' own metrics of greedy outputs."""
    from speculative.data import tasks as seqio_tasks
    model, values = Model(config, params, pieces), {}
    for name, pairs in scored.items():
      outputs = []
      for first in range(0, len(pairs), 32):
        inputs = decoding.encode(model, [ids for ids, _ in pairs[first:first + 32]])
        result = autoregressive_decode(model, inputs, DecodeConfig(max_decode_len=max_target_len))
        outputs += [row[:n] for row, n in zip(result.tokens, result.lengths)]
      scores = seqio_tasks.score(outputs, [example for _, example in pairs])
      values |= {f'{name} {metric}': round(value, 2) for metric, value in scores.items()}
    return values

  print(f'{sum(p.size for p in jax.tree.leaves(params)) / 1e6:.2f} M parameters')
  os.makedirs(output_dir, exist_ok=True)
  begin = time.time()

  def log(entry):
    entry = {'seconds': round(time.time() - begin, 1)} | entry
    print(json.dumps(entry), flush=True)
    with open(os.path.join(output_dir, 'log.jsonl'), 'a', encoding='utf-8') as f:
      f.write(json.dumps(entry) + '\n')

  mesh = sharding.make_mesh(model_devices) if len(jax.devices()) > 1 else None
  params = training.train(config, params, examples('train'), examples('validation'), output_dir=output_dir,
                          steps=steps, seed=seed, log=log, vocabulary=pieces, mesh=mesh,
                          metrics=metrics if scored_texts else None, **settings)
  checkpoints.save_model(Model(config, params, pieces), os.path.join(output_dir, 'model'), dtype='bfloat16',
                         overwrite=True)


if __name__ == '__main__':
  command.main(train)
