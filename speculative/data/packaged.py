"""The models, vocabulary, held-out texts and n-gram counts that come with the package."""
import dataclasses
import os
from typing import Callable

from speculative.checkpoints import load_model
from speculative.data.vocabulary import Vocabulary
from speculative.drafters import ngram
from speculative.drafters.chain import ChainDrafter
from speculative.drafters.copying import CopyingDrafter
from speculative.models.model import Model

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'pretrained')
DRAFTS = ('small', 'base')
TASKS = ('ende', 'summarize')
GPT_TASK = 'describe'
# Family → folders of the target and of the drafts by name, smallest first; tasks.
FAMILIES = {
    't5': ('target', {name: f'draft_{name}' for name in DRAFTS}, TASKS),
    'gpt': ('gpt_target', {'gpt-small': 'gpt_draft'}, (GPT_TASK,)),
}

MORE = {'copying': lambda zoo: CopyingDrafter(zoo.target),
        'chain': lambda zoo: ChainDrafter(*list(zoo.drafts.values())[:-3:-1])}


@dataclasses.dataclass
class Zoo:
  """A target with what may draft for it, and texts to try them on.

  Attributes:
    target: `Model`.
    drafts: {name: `Model`}, smallest first.
    vocabulary: `Vocabulary`, shared by all.
    texts: {task: [(input, reference), …]}, held out from training; the input starts with the task's prefix.
    counts: {task: `ngram.Counts`} of the task's training targets.
    scores: {task: function of outputs (list of token ids) and references → {metric: number}}, where a task has its own;
      inputs in `texts` are then token ids, and references what that function takes.
    more: names of further drafters: 'copying' (from the input), 'chain' (the largest draft, sped up by the one before).
  """
  target: Model
  drafts: dict[str, Model]
  vocabulary: Vocabulary
  texts: dict[str, list[tuple[str, str]]]
  counts: dict[str, ngram.Counts]
  scores: dict[str, Callable] = dataclasses.field(default_factory=dict)
  more: tuple = ()

  def drafters(self, task):
    """{name: drafter} for a task: unigram and bigram of its counts (if any), the models, and `more`."""
    counts = self.counts.get(task)
    ngrams = {'unigram': ngram.unigram(counts), 'bigram': ngram.bigram(counts)} if counts else {}
    return ngrams | self.drafts | {name: MORE[name](self) for name in self.more}


def load_pretrained(dtype=None, family='t5'):
  """Loads the packaged target, its drafts and their texts.

  Args:
    dtype: as for `load_model`.
    family: 't5', the trio; or 'gpt', the decoder-only pair, whose texts are first words of English descriptions, and the rest.

  Returns:
    `Zoo`.

  Raises:
    FileNotFoundError: the package is incomplete; the message names the file.
    ValueError: unknown family.
  """
  if family not in FAMILIES:
    raise ValueError(f'family = {family!r}: there are {", ".join(FAMILIES)}')
  target, drafts, tasks = FAMILIES[family]

  def file(*parts):
    path = os.path.join(FOLDER, *parts)
    if not os.path.exists(path):
      raise FileNotFoundError(f'{path}: no such file; this installation lacks the packaged models')
    return path

  vocabulary = Vocabulary(file('spiece.model'))

  def model(name):
    file(name, 'config.json')
    return load_model(file(name), dtype, vocabulary=vocabulary)

  return Zoo(model(target), {name: model(folder) for name, folder in drafts.items()}, vocabulary,
             {task: read_texts(file('texts', f'{task}.tsv')) for task in tasks},
             {task: ngram.load(file('ngrams', f'{task}.npz')) for task in tasks})


def read_texts(path):
  """Lines `input TAB reference` → list of pairs. Raises ValueError naming a line of another form."""
  with open(path, encoding='utf-8', newline='\n') as f:
    pairs = [tuple(line.rstrip('\n').split('\t')) for line in f]
  for i, pair in enumerate(pairs):
    if len(pair) != 2:
      raise ValueError(f'{path}, line {i + 1}: {len(pair)} fields, not an input and its reference')
  return pairs
