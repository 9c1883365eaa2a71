"""Distils a draft: it goes on learning from its target's samples and distributions; α before and after.

  python -m experiments.distill --gin_file=configs/runs/distill_small.gin --output_dir=runs/distill_small

Writes samples.npz (of the target, made once), checkpoints (a killed run goes on), the model in Hugging Face's layout, and
results.jsonl with α of the draft before and after on the zoo's texts.
"""
import json
import os
import time

import gin
import jax
import numpy as np
from rich import console
from rich import progress

from experiments import alpha as alphas
from experiments import command
from experiments import zoo as zoos
from speculative import checkpoints
from speculative.data import packaged
from speculative.models import decoder_only
from speculative.models.model import Model
from speculative.report import results
from speculative.training import distill as distillation
from speculative.training import train as training


@gin.configurable
def distill(output_dir, dry_run=False, *, draft=gin.REQUIRED, data_dir=gin.REQUIRED, tasks=gin.REQUIRED, steps=gin.REQUIRED,
            divergence='forward_kl', temperature=1.0, limit=8000, max_input_len=128, max_decode_len=128, prompt_len=12,
            alpha_tokens=4000, learning_rate=1e-3, dtype='bfloat16', seed=0, **settings):
  """Samples, trains, exports, measures.

  Args:
    draft: name of a draft of the zoo, whose target is the teacher.
    data_dir: folder with {task}.{train,validation}.tsv, as `experiments.build_data` writes it.
    tasks: {name: passes over its samples in an epoch}.
    steps: optimiser steps.
    divergence: 'forward_kl', 'reverse_kl', 'tvd' on the distributions; or 'samples': cross-entropy of the samples alone.
    temperature: of the target's samples.
    limit: inputs of each task that are sampled from.
    max_input_len, max_decode_len: tokens at most; inputs that are longer are left out.
    prompt_len: of a decoder-only target's prompts: first tokens of a training text.
    alpha_tokens: α before and after is over at least so many tokens for each task and temperature.
    settings: passed to `speculative.training.train.train`.
  """
  kinds = (*distillation.DIVERGENCES, 'samples')
  if divergence not in kinds:
    raise command.UsageError(f'distill.divergence = {divergence!r}: there are {", ".join(kinds)}')
  data_dir = os.path.expanduser(data_dir)
  for path in (os.path.join(data_dir, f'{name}.{split}.tsv') for name in tasks for split in ('train', 'validation')):
    if not os.path.exists(path):
      raise command.UsageError(f'{path} does not exist (python -m experiments.build_data makes the data)')
  loaded = zoos.zoo(dry_run=dry_run)
  if dry_run:
    return
  if draft not in loaded.drafts:
    raise command.UsageError(f'distill.draft = {draft!r}: the zoo has {", ".join(loaded.drafts)}')
  target, before = loaded.target, loaded.drafts[draft]
  os.makedirs(output_dir, exist_ok=True)

  def prompts(name, split):
    examples = training.read_examples(os.path.join(data_dir, f'{name}.{split}.tsv'), loaded.vocabulary, 2**20, 2**20)
    if isinstance(target.config, decoder_only.GPTConfig):
      texts = training.joined(examples, loaded.vocabulary.eos_id, 2**20)
      examples = [training.Example(e.targets[:prompt_len], e.targets) for e in texts if len(e.targets) > prompt_len]
    short = [e for e in examples if len(e.inputs) <= max_input_len]
    return [short[i] for i in np.random.default_rng(seed).permutation(len(short))[:limit]]

  sampled = _samples(os.path.join(output_dir, 'samples.npz'), target, {
      (name, split): prompts(name, split)[:limit if split == 'train' else 256] for name in tasks
      for split in ('train', 'validation')}, temperature, max_decode_len, seed)
  begin = time.time()

  def log(entry):
    entry = {'seconds': round(time.time() - begin, 1)} | entry
    print(json.dumps(entry), flush=True)
    with open(os.path.join(output_dir, 'log.jsonl'), 'a', encoding='utf-8') as f:
      f.write(json.dumps(entry) + '\n')

  loss, arguments = training.loss_fn, ()
  if divergence != 'samples':
    loss = distillation.loss(target.config, dtype, divergence, loaded.vocabulary.vocab_size)
    arguments = (target.params,)
  params = jax.tree.map(lambda a: a.astype('float32'), before.params)
  params = training.train(
      before.config, params, [(name, sampled[name, 'train'], passes) for name, passes in tasks.items()],
      [(name, sampled[name, 'validation'], 1) for name in tasks], output_dir=output_dir, steps=steps,
      learning_rate=learning_rate, seed=seed, dtype=dtype, log=log, vocabulary=loaded.vocabulary, loss=loss,
      loss_arguments=arguments, **settings)
  after = Model(before.config, params, loaded.vocabulary, name=before.name)
  checkpoints.save_model(after, os.path.join(output_dir, 'model'), dtype='bfloat16', overwrite=True)
  after.params = jax.tree.map(lambda new, old: new.astype(old.dtype), params, before.params)
  rows = compare(loaded, draft, before, after, alpha_tokens, divergence, seed)
  results.write_jsonl(os.path.join(output_dir, 'results.jsonl'), rows)
  for row in rows:
    print(f'{row["task"]}, T = {row["temperature"]:g}: α {row["alpha_before"]:.3f} → {row["alpha"]:.3f} '
          f'± {row["alpha_se"]:.3f}')


def compare(loaded, draft, before, after, tokens, divergence, seed=0):
  """α of both drafts on the same texts of the target: list of rows with `alpha_before` and `alpha`."""
  loaded = packaged.Zoo(loaded.target, {'before': before, 'after': after}, loaded.vocabulary, loaded.texts, {})
  rows = [row for row in alphas.measure_alphas(loaded, tokens=tokens, seed=seed) if row['experiment'] == 'alpha']
  old = {(row['task'], row['temperature']): row for row in rows if row['draft'] == 'before'}
  return [row | {'experiment': 'distill', 'draft': draft, 'divergence': divergence,
                 'alpha_before': old[row['task'], row['temperature']]['alpha'],
                 'alpha_before_se': old[row['task'], row['temperature']]['alpha_se']}
          for row in rows if row['draft'] == 'after']


def _samples(path, target, prompts, temperature, max_decode_len, seed):
  """{key: list of Example} for the {key: prompts}; made once and kept in a file."""
  if not os.path.exists(path):
    made, batches = {}, sum(-(-len(examples) // 64) for examples in prompts.values())
    with progress.Progress(console=console.Console(stderr=True), transient=True) as bar:
      step = bar.add_task('the target generates', total=batches)
      for (name, split), examples in prompts.items():
        found = distillation.sample(target, examples, temperature, max_decode_len, seed=seed, done=lambda: bar.advance(step))
        for side in ('inputs', 'targets'):
          made[f'{name}/{split}/{side}'] = np.concatenate([getattr(e, side) for e in found])
          made[f'{name}/{split}/{side}/lengths'] = np.array([len(getattr(e, side)) for e in found])
    results.replace_file(path, lambda f: np.savez_compressed(f, **made))
  with np.load(path) as stored:
    sides = {key: {side: np.split(stored[f'{"/".join(key)}/{side}'],
                                  np.cumsum(stored[f'{"/".join(key)}/{side}/lengths'])[:-1])
                   for side in ('inputs', 'targets')} for key in prompts}
  return {key: [training.Example(*pair) for pair in zip(side['inputs'], side['targets'])] for key, side in sides.items()}


if __name__ == '__main__':
  command.main(distill)
