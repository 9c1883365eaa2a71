"""Builds the training data and the vocabulary from Debian's package descriptions.

Every package has an English description, and volunteers have translated many of them to German. `apt-get update`
brings both as plain text, so the data can be rebuilt on any Debian or Ubuntu from the system's own sources.

Three tasks come out of them, all split by source package, so that siblings such as `foo` and `foo-doc` stay together:

  ende       "translate English to German: " + an English paragraph  ->  its German translation
  summarize  "summarize: " + the long description                    ->  the synopsis
  describe   the first words of the long description                 ->  the rest, for decoder-only models; in training all

  python -m experiments.build_data --output_dir=data
"""

import collections
import glob
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tempfile

from absl import logging
import gin
import sentencepiece

from experiments import command


LANGUAGES = ('en', 'de')
PREFIXES = {'ende': 'translate English to German: ', 'summarize': 'summarize: '}
SPLITS = ('train', 'validation', 'test')
PROMPT_WORDS = 8  # of `describe`

# Only free software from the distribution itself, whatever else the system has in its sources.
ORIGINS = ('Debian', 'Ubuntu')
COMPONENTS = ('main', 'universe')

# The default configuration is read first, this one after it. The private directories leave the system's own package
# lists alone, and the system's hooks must not run: they would act on these, and fail without root.
APT_CONFIG = """\
Dir::State "{root}/state/";
Dir::State::lists "lists/";
Dir::Cache "{root}/cache/";
#clear Acquire::Languages;
Acquire::Languages {{ "en"; "de"; }};
Acquire::GzipIndexes "false";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""

APT_HELPER = '/usr/lib/apt/apt-helper'

Unit = collections.namedtuple('Unit', 'kind text')  # kind: 'text', 'item' (of a list) or 'verbatim'.
Description = collections.namedtuple('Description', 'synopsis paragraphs')  # paragraphs: lists of Units.
Example = collections.namedtuple('Example', 'input reference')  # The input without the task's prefix.


# Fetching.


def check_apt():
  if not shutil.which('apt-get'):
    raise SystemExit('error: apt-get not found: the data can only be built on Debian, Ubuntu or a derivative.')


def fetch_indexes(root):
  """Runs `apt-get update` in the directory `root`, returns the directory of the indexes."""
  check_apt()
  lists = os.path.join(root, 'state', 'lists')
  os.makedirs(os.path.join(lists, 'partial'))
  os.makedirs(os.path.join(root, 'cache', 'archives', 'partial'))
  config = os.path.join(root, 'apt.conf')
  with open(config, 'w') as f:
    f.write(APT_CONFIG.format(root=root))
  os.chmod(root, 0o755)  # As root, apt downloads as the user _apt, who has to get in.
  result = subprocess.run(
      ['apt-get', 'update', '-q', '-c', config], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  if result.returncode:
    reasons = [line for line in result.stdout.splitlines() if line.startswith('E:')]
    raise SystemExit('error: apt-get update failed: ' + (' '.join(reasons) or ' '.join(result.stdout.split())[-500:]))
  return lists


def read_index(path):
  """Text of an index, which apt may keep compressed."""
  if re.search(r'\.(gz|bz2|xz|lzma|lz4|zst)$', path):
    return subprocess.run([APT_HELPER, 'cat-file', path], check=True, stdout=subprocess.PIPE).stdout.decode('utf-8')
  with open(path, encoding='utf-8') as f:
    return f.read()


def find_index(prefix):
  """Path of an index, compressed or not, or None."""
  return next(iter(sorted(glob.glob(glob.escape(prefix) + '*'))), None)


def read_release(archive):
  """Fields of an archive's Release file; `archive` is the common beginning of the names of its indexes."""
  for name in ('_InRelease', '_Release'):
    if os.path.exists(archive + name):
      fields = re.findall(r'^(Origin|Suite|Codename|Version|Date): (.*)$', read_index(archive + name), re.MULTILINE)
      return {name.lower(): value.strip() for name, value in fields}
  return {}


def read_indexes(lists):
  """Reads all indexes of the distribution below `lists`.

  Args:
    lists: the directory of the indexes.

  Returns:
    descriptions: {language: {(package, md5): Description}}.
    sources: {(package, md5) or package: source package}.
    releases: list of dicts that say which archives these are.
  """
  descriptions = {language: {} for language in LANGUAGES}
  sources = {}
  releases = {}
  for path in sorted(glob.glob(os.path.join(lists, '*_i18n_Translation-en*'))):
    base = path[:path.rindex('_i18n_Translation-en')]
    archive, component = base.rsplit('_', 1)
    release = read_release(archive)
    if release.get('origin') not in ORIGINS or component not in COMPONENTS:
      continue
    releases.setdefault(archive, dict(release, components=[]))['components'].append(component)
    for language in LANGUAGES:
      index = find_index(f'{base}_i18n_Translation-{language}')
      if index:  # Updates have no translations of their own.
        descriptions[language].update(parse_descriptions(read_index(index), language))
    for index in sorted(glob.glob(glob.escape(base) + '_binary-*_Packages*')):
      sources.update(parse_sources(read_index(index)))
  for language in LANGUAGES:
    if not descriptions[language]:
      raise SystemExit(f'error: apt-get update brought no index Translation-{language} of '
                       f'{" or ".join(ORIGINS)}: do the sources of the system name such an archive?')
  if not sources:
    raise SystemExit('error: apt-get update brought no index Packages.')
  return descriptions, sources, sorted(releases.values(), key=lambda release: sorted(map(str, release.items())))


# Parsing.


def parse_stanzas(text):
  """Yields a dict for each stanza; the lines of a field keep their newlines and leading spaces."""
  stanza, name = {}, None
  for line in io.StringIO(text, newline='\n'):
    line = line.rstrip('\r\n')
    if not line.strip():
      if stanza:
        yield stanza
      stanza, name = {}, None
    elif line[0] in ' \t':
      if name:
        stanza[name] += '\n' + line
    else:
      name, _, value = line.partition(':')
      stanza[name] = value.strip()
  if stanza:
    yield stanza


def parse_sources(text):
  """Reads a Packages index: {package: source} and, more exactly, {(package, md5): source}."""
  sources = {}
  for stanza in parse_stanzas(text):
    package = stanza['Package']
    source = stanza.get('Source', package).split()[0]  # A version may follow.
    sources[package] = source
    if 'Description-md5' in stanza:
      sources[package, stanza['Description-md5']] = source
  return sources


def parse_descriptions(text, language):
  """Reads a Translation index: {(package, md5): Description}."""
  field = f'Description-{language}'
  descriptions = {}
  for stanza in parse_stanzas(text):
    if field in stanza and 'Package' in stanza and 'Description-md5' in stanza:
      synopsis, *lines = stanza[field].split('\n')
      key = stanza['Package'], stanza['Description-md5']
      descriptions[key] = Description(join_lines([synopsis]), parse_paragraphs(lines))
  return descriptions


def join_lines(lines):
  """Joins the lines of a paragraph by spaces, and leaves no other white space in it."""
  text = ''
  for line in lines:
    # Lines are also broken after the hyphen of a compound word, where no space belongs ("E-Mail-" + "Programm"),
    # unless the word is elided ("Ein-" + "und Ausgabe").
    glue = re.search(r'\w-$', text) and re.match(r'\s*(?!(und|oder|bzw|sowie|and|or|to)\b)\w', line)
    text += line.strip() if glue else ' ' + line.strip()
  return ' '.join(text.split())


BULLET = re.compile(r'([*+•·o-]|\d{1,2}[.)])\s+(?=\S)')


def parse_paragraphs(lines):
  """Splits a long description at the lines " ." into paragraphs, and these into Units.

  A paragraph that is not a list is one unit. The items of a list are units of their own, and other indented lines,
  which are shown verbatim (tables, program text), are one unit that nothing is made of but a place in the order.

  Args:
    lines: the lines with their leading space.

  Returns:
    List of paragraphs, each a nonempty list of Units.
  """
  paragraphs, units = [], []

  def append(kind, indent, line):
    units.append((kind, indent, [line]))

  for line in lines + [' .']:
    line = line[1:].expandtabs()
    body = line.strip()
    indent = len(line) - len(line.lstrip())
    if body in ('.', ''):
      if units:
        paragraphs.append([Unit(kind, join_lines(unit_lines)) for kind, _, unit_lines in units])
      units = []
      continue
    bullet = BULLET.match(body)
    last_kind, last_indent, last_lines = units[-1] if units else (None, 0, None)
    # At the margin, a line that begins with a dash or a number may as well continue a sentence.
    if bullet and (indent or last_kind != 'text' and body[0] != 'o'):
      append('item', indent, body[bullet.end():])
    elif last_kind == 'item' and indent > last_indent:
      last_lines.append(body)
    elif indent:
      if last_kind == 'verbatim':
        last_lines.append(body)
      else:
        append('verbatim', indent, body)
    elif last_kind == 'text':
      last_lines.append(body)
    else:
      append('text', 0, body)
  return paragraphs


# Examples.


def align(english, german, stats):
  """Yields the (English, German) texts of two Descriptions that correspond one to one."""
  yield english.synopsis, german.synopsis
  if len(english.paragraphs) == len(german.paragraphs):
    paragraphs = list(zip(english.paragraphs, german.paragraphs))
  else:  # Perhaps only an empty line is missing, as it often is before a list.
    paragraphs = [(sum(english.paragraphs, []), sum(german.paragraphs, []))]
  for english_units, german_units in paragraphs:
    if [unit.kind for unit in english_units] != [unit.kind for unit in german_units]:
      stats['paragraphs_not_aligned'] += 1
      continue
    for english_unit, german_unit in zip(english_units, german_units):
      if english_unit.kind == 'verbatim':
        stats['verbatim'] += 1
      else:
        yield english_unit.text, german_unit.text


ENGLISH_WORDS = frozenset('the of and is are for with to this that from it be by as or can'.split())
GERMAN_WORDS = frozenset('der die das und ist sind für mit zu dieses von es wird ein eine dem den des oder auf'.split())


def why_drop_pair(english, german):
  """Name of the filter that drops a pair of texts, or None."""
  if not (re.search(r'[^\W\d_]{2}', english) and re.search(r'[^\W\d_]{2}', german)):
    return 'no_words'
  if english.casefold() == german.casefold():
    return 'identical'
  words = re.findall(r'\w+', german.casefold())
  if sum(word in ENGLISH_WORDS for word in words) > sum(word in GERMAN_WORDS for word in words):
    return 'untranslated'
  short, long = sorted((len(english), len(german)))
  if long > 2 * short + 20:  # German compounds make a short text vary more.
    return 'length_ratio'
  return None


def why_drop_summary(text, synopsis):
  """Name of the filter that drops a description and its synopsis, or None."""
  if not (re.search(r'[^\W\d_]{2}', text) and re.search(r'[^\W\d_]{2}', synopsis)):
    return 'no_words'
  if len(text) <= len(synopsis):
    return 'no_longer_than_synopsis'
  return None


def split_of(source, held_out):
  """Split of a source package; depends on its name alone, so that it stays the same in other releases."""
  position = int.from_bytes(hashlib.sha256(source.encode('utf-8')).digest()[:8], 'big') / 2 ** 64
  return 'test' if position < held_out else 'validation' if position < 2 * held_out else 'train'


def make_examples(descriptions, sources, held_out):
  """Makes the examples of both tasks.

  Args:
    descriptions: {language: {(package, md5): Description}}.
    sources: {(package, md5) or package: source package}.
    held_out: fraction of the source packages in each of validation and test.

  Returns:
    examples: {task: {split: list of Examples}}.
    stats: {task: {name: count}}.
  """
  examples = {task: {split: [] for split in SPLITS} for task in PREFIXES}
  stats = {task: collections.Counter() for task in PREFIXES}
  seen = {(task, split): set() for task in PREFIXES for split in SPLITS}

  def add(task, split, reason, text, reference):
    stats[task]['candidates'] += 1
    if not reason and text in seen[task, split]:
      reason = 'duplicate'  # Of the input; one with several references would only teach that it is ambiguous.
    if reason:
      stats[task]['dropped_' + reason] += 1
    else:
      seen[task, split].add(text)
      examples[task][split].append(Example(text, reference))

  for key in sorted(descriptions['en']):
    english, german = descriptions['en'][key], descriptions['de'].get(key)
    split = split_of(sources.get(key) or sources.get(key[0]) or key[0], held_out)
    stats['summarize']['descriptions'] += 1
    text = ' '.join(unit for paragraph in english.paragraphs for unit in map(render_unit, paragraph))
    add('summarize', split, why_drop_summary(text, english.synopsis), text, english.synopsis)
    if german:
      stats['ende']['descriptions'] += 1
      for pair in align(english, german, stats['ende']):
        add('ende', split, why_drop_pair(*pair), *pair)
  return examples, stats


def render_unit(unit):
  return '* ' + unit.text if unit.kind == 'item' else unit.text


def leak_key(text):
  """What two texts must have in common to count as the same: the letters. gcc-12 and gcc-13 differ in digits only."""
  return re.sub(r'[\W\d_]+', '', text.casefold())


def remove_leaks(examples, stats):
  """Removes the validation and test examples that have a text in common with an earlier split, in either task.

  Args:
    examples: {task: {split: list of Examples}}, changed in place.
    stats: {task: {name: count}}, changed in place.
  """
  earlier = set()
  for split in SPLITS:
    current = set()
    for task, splits in examples.items():
      keys = [tuple(map(leak_key, example)) for example in splits[split]]
      if split != 'train':
        kept = [example for example, key in zip(splits[split], keys) if earlier.isdisjoint(key)]
        stats[task]['dropped_leak_' + split] += len(splits[split]) - len(kept)
        splits[split] = kept
      current.update(text for key in keys for text in key)
    earlier |= current


# Output.


def replace_file(path, write):
  """Calls `write` with a temporary file and renames it, so that nobody ever reads half a file."""
  with open(path + '.tmp', 'wb') as f:
    write(f)
  os.replace(path + '.tmp', path)


def write_examples(path, prefix, examples):
  lines = [f'{prefix}{example.input}\t{example.reference}\n' for example in examples]
  replace_file(path, lambda f: f.write(''.join(lines).encode('utf-8')))


def describe(text, words):
  """An Example with the first words as input, and the rest as reference."""
  parts = text.split(' ', words)
  return Example(' '.join(parts[:words]), ' '.join(parts[words:]))


def choose(texts, num_chars):
  """Takes texts in an order that is arbitrary yet always the same, until they have `num_chars`."""
  chosen, total = [], 0
  for text in sorted(texts, key=lambda text: hashlib.sha256(text.encode('utf-8')).digest()):
    if total >= num_chars:
      break
    chosen.append(text)
    total += len(text)
  return chosen


def vocabulary_texts(examples):
  """All German of the train split and as much English, half of it from each task."""
  ende, summarize = examples['ende']['train'], examples['summarize']['train']
  german = [example.reference for example in ende]
  english = [[PREFIXES['ende'] + example.input for example in ende],
             [PREFIXES['summarize'] + example.input for example in summarize] +
             [example.reference for example in summarize]]
  num_chars = sum(map(len, german)) // 2
  return german + choose(english[0], num_chars) + choose(english[1], num_chars)


def train_vocabulary(texts, vocab_size):
  """Trains a SentencePiece model, returns it serialised."""
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(texts),
      model_writer=model,
      model_type='unigram',
      vocab_size=vocab_size,
      character_coverage=0.9995,
      byte_fallback=True,  # Its 256 pieces are part of vocab_size.
      split_digits=False,
      normalization_rule_name='nmt_nfkc',
      pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
      pad_piece='<pad>', eos_piece='</s>', unk_piece='<unk>',
      max_sentence_length=1 << 16,  # In bytes; it skips longer ones, a few lists of hundreds of fonts or fields.
      num_threads=2,  # Not the number of cores: the order of floating-point sums depends on it.
      minloglevel=1)
  return model.getvalue()


@gin.configurable
def build_data(output_dir: str, vocab_size: int = 4000, held_out: float = 0.02, dry_run: bool = False):
  """Builds {ende,summarize,describe}.{train,validation,test}.tsv, stats.json and spiece.model.

  Args:
    output_dir: directory to write to, made if missing.
    vocab_size: pieces of the vocabulary, including the 3 special and the 256 byte pieces.
    held_out: fraction of the source packages in each of validation and test.
    dry_run: only say what would be done and check that apt-get exists.
  """
  if dry_run:
    check_apt()
    print(f'Would run apt-get update in a private directory (about 20 MB), and write to {output_dir}:')
    print(f'  {{{",".join(PREFIXES)},describe}}.{{{",".join(SPLITS)}}}.tsv, held out: 2 x {held_out:.1%} of the source packages')
    print(f'  spiece.model with {vocab_size} pieces, stats.json')
    return

  with tempfile.TemporaryDirectory() as root:
    descriptions, sources, releases = read_indexes(fetch_indexes(root))
  logging.info('Read %s descriptions.', {language: len(texts) for language, texts in descriptions.items()})
  examples, stats = make_examples(descriptions, sources, held_out)
  remove_leaks(examples, stats)

  os.makedirs(output_dir, exist_ok=True)
  for task, splits in examples.items():
    for split, split_examples in splits.items():
      stats[task][split] = len(split_examples)
      write_examples(os.path.join(output_dir, f'{task}.{split}.tsv'), PREFIXES[task], split_examples)
    logging.info('%s: %s', task, dict(stats[task]))
  for split, split_examples in examples['summarize'].items():
    write_examples(os.path.join(output_dir, f'describe.{split}.tsv'), '',
                   [describe(example.input, 0 if split != 'test' else PROMPT_WORDS) for example in split_examples])

  texts = vocabulary_texts(examples)
  model = train_vocabulary(texts, vocab_size)
  replace_file(os.path.join(output_dir, 'spiece.model'), lambda f: f.write(model))
  stats = {
      'releases': releases,
      'descriptions': {language: len(texts) for language, texts in descriptions.items()},
      'tasks': {task: dict(sorted(counts.items())) for task, counts in stats.items()},
      'vocabulary': {'size': vocab_size, 'texts': len(texts), 'chars': sum(map(len, texts))},
      'held_out': held_out,
  }
  replace_file(os.path.join(output_dir, 'stats.json'),
               lambda f: f.write((json.dumps(stats, indent=2, ensure_ascii=False) + '\n').encode('utf-8')))


if __name__ == '__main__':
  command.main(build_data)
