"""Tests of experiments.build_data on made-up indexes; no network, no apt."""

import collections
import json
import os
import tempfile
import textwrap
from unittest import mock

from absl.testing import absltest
import sentencepiece

from experiments import build_data


TRANSLATION_EN = """\
Package: frob
Description-md5: 1
Description-en: frobnicates files
 Frob frobnicates the files of
 a directory.
 .
 It can:
  * read text
    files
  * write them

Package: frob-doc
Description-md5: 2
Description-en: frobnicates files (documentation)
 This package contains the documentation.

Package: untranslated
Description-md5: 3
Description-en: has no translation
 Nobody has translated this one.
"""

TRANSLATION_DE = """\
Package: frob
Description-md5: 1
Description-de: frobniziert Dateien
 Frob frobniziert die Dateien eines
 Verzeichnisses.
 .
 Es kann:
  * Textdateien lesen
  * diese schreiben

Package: frob-doc
Description-md5: outdated
Description-de: veraltet
 Die englische Beschreibung hat sich inzwischen geändert.
"""

PACKAGES = """\
Package: frob
Version: 1
Description-md5: 1

Package: frob-doc
Source: frob (1.0)
Version: 1+b1
Description-md5: 2
"""

RELEASE = """\
-----BEGIN PGP SIGNED MESSAGE-----
Hash: SHA256

Origin: {origin}
Label: {origin}
Suite: stable
Version: 1.2
Codename: bookend
Date: Sat, 01 Jan 2022 00:00:00 UTC
SHA256:
 0 0 main/binary-amd64/Packages
"""

# A source package of each split: test, validation, train.
SOURCES = ['package173', 'package156', 'frob']


def description(text):
  return build_data.parse_descriptions('Package: a\nDescription-md5: 0\nDescription-en: ' + text, 'en')['a', '0']


def units(text):
  return [[tuple(unit) for unit in paragraph] for paragraph in description(text).paragraphs]


def align(english, german):
  stats = collections.Counter()
  return list(build_data.align(description(english), description(german), stats)), stats


class ParseTest(absltest.TestCase):

  def test_sources(self):
    self.assertEqual(build_data.parse_sources(PACKAGES),
                     {'frob': 'frob', ('frob', '1'): 'frob', 'frob-doc': 'frob', ('frob-doc', '2'): 'frob'})

  def test_descriptions(self):
    descriptions = build_data.parse_descriptions(TRANSLATION_EN, 'en')
    self.assertEqual(list(descriptions), [('frob', '1'), ('frob-doc', '2'), ('untranslated', '3')])
    frob = descriptions['frob', '1']
    self.assertEqual(frob.synopsis, 'frobnicates files')
    self.assertEqual(frob.paragraphs, [
        [('text', 'Frob frobnicates the files of a directory.')],
        [('text', 'It can:'), ('item', 'read text files'), ('item', 'write them')]])

  def test_other_language_is_ignored(self):
    self.assertEmpty(build_data.parse_descriptions(TRANSLATION_EN, 'de'))

  def test_synopsis_alone(self):
    self.assertEqual(description('short'), ('short', []))

  def test_verbatim(self):
    self.assertEqual(units('x\n Example:\n  $ frob\n  $ frob -v\n Done.'),
                     [[('text', 'Example:'), ('verbatim', '$ frob $ frob -v'), ('text', 'Done.')]])

  def test_items(self):
    self.assertEqual(units('x\n * one\n   more\n * two'), [[('item', 'one more'), ('item', 'two')]])
    self.assertEqual(units('x\n  1. one\n  2) two\n  - three'),
                     [[('item', 'one'), ('item', 'two'), ('item', 'three')]])
    self.assertEqual(units('x\n  * one\n    - nested\n  * two'),
                     [[('item', 'one'), ('item', 'nested'), ('item', 'two')]])

  def test_dash_within_a_sentence(self):
    self.assertEqual(units('x\n A frob\n - or two -\n is here.'), [[('text', 'A frob - or two - is here.')]])

  def test_white_space(self):
    self.assertEqual(units('x\n Two\tor\u00a0 more\u2028spaces. \n .\n .\n Next.'),
                     [[('text', 'Two or more spaces.')], [('text', 'Next.')]])

  def test_hyphens_at_the_end_of_a_line(self):
    self.assertEqual(build_data.join_lines(['das E-Mail-', 'Programm']), 'das E-Mail-Programm')
    self.assertEqual(build_data.join_lines(['die Ein-', 'und Ausgabe']), 'die Ein- und Ausgabe')
    self.assertEqual(build_data.join_lines(['frob -', 'a tool']), 'frob - a tool')


class AlignTest(absltest.TestCase):

  def test_paragraphs_and_items(self):
    pairs, stats = align('a\n One.\n .\n Two:\n  * x\n  * y', 'A\n Eins.\n .\n Zwei:\n  * X\n  * Y')
    self.assertEqual(pairs, [('a', 'A'), ('One.', 'Eins.'), ('Two:', 'Zwei:'), ('x', 'X'), ('y', 'Y')])
    self.assertEmpty(stats)

  def test_different_number_of_paragraphs(self):
    pairs, stats = align('a\n One.\n .\n Two.', 'A\n Eins. Zwei.')
    self.assertEqual(pairs, [('a', 'A')])
    self.assertEqual(stats['paragraphs_not_aligned'], 1)

  def test_missing_line_before_list(self):
    pairs, _ = align('a\n Two:\n .\n  * x\n  * y', 'A\n Zwei:\n  * X\n  * Y')
    self.assertEqual(pairs, [('a', 'A'), ('Two:', 'Zwei:'), ('x', 'X'), ('y', 'Y')])

  def test_one_paragraph_differs(self):
    pairs, stats = align('a\n One.\n .\n  * x\n  * y', 'A\n Eins.\n .\n  * X')
    self.assertEqual(pairs, [('a', 'A'), ('One.', 'Eins.')])
    self.assertEqual(stats['paragraphs_not_aligned'], 1)

  def test_verbatim_is_dropped(self):
    pairs, stats = align('a\n One:\n  $ frob\n Two.', 'A\n Eins:\n  $ frob\n Zwei.')
    self.assertEqual(pairs, [('a', 'A'), ('One:', 'Eins:'), ('Two.', 'Zwei.')])
    self.assertEqual(stats['verbatim'], 1)


class FilterTest(absltest.TestCase):

  def test_pairs(self):
    for english, german, reason in [
        ('This is a tool.', 'Dies ist ein Werkzeug.', None),
        ('zile', 'Zile', 'identical'),
        ('1.0', '1,0', 'no_words'),
        ('A tool for the files of this system', 'Tool for the files of this system', 'untranslated'),
        ('This is the tool.', 'Dies ist das Werkzeug. ' * 5, 'length_ratio'),
        ('Pie', 'Kuchen', None)]:
      with self.subTest(english):
        self.assertEqual(build_data.why_drop_pair(english, german), reason)

  def test_summaries(self):
    self.assertIsNone(build_data.why_drop_summary('A tool that frobnicates files.', 'frobnicates files'))
    self.assertEqual(build_data.why_drop_summary('See frob.', 'frobnicates files'), 'no_longer_than_synopsis')
    self.assertEqual(build_data.why_drop_summary('', 'frobnicates files'), 'no_words')


class SplitTest(absltest.TestCase):

  def test_fractions(self):
    splits = collections.Counter(build_data.split_of(f'package{i}', 0.1) for i in range(2000))
    self.assertBetween(splits['test'], 150, 250)
    self.assertBetween(splits['validation'], 150, 250)
    self.assertEqual(sum(splits.values()), 2000)

  def test_does_not_change(self):
    # Published scores are only comparable as long as these stay where they are.
    self.assertEqual([build_data.split_of(source, 0.02) for source in SOURCES], ['test', 'validation', 'train'])

  def test_by_source_package(self):
    descriptions = {'en': build_data.parse_descriptions(TRANSLATION_EN, 'en'),
                    'de': build_data.parse_descriptions(TRANSLATION_DE, 'de')}
    # The names of the binary packages are made to fall into other splits than that of their source.
    sources = dict.fromkeys(['frob', 'frob-doc', 'untranslated'], SOURCES[0])
    examples, stats = build_data.make_examples(descriptions, sources, 0.02)
    self.assertEqual({split: len(texts) for split, texts in examples['summarize'].items()},
                     {'train': 0, 'validation': 0, 'test': 3})
    self.assertEqual(examples['summarize']['test'][0],
                     ('Frob frobnicates the files of a directory. It can: * read text files * write them',
                      'frobnicates files'))
    self.assertEqual(examples['ende']['test'][1],
                     ('Frob frobnicates the files of a directory.',
                      'Frob frobniziert die Dateien eines Verzeichnisses.'))
    self.assertLen(examples['ende']['test'], 5)
    self.assertEqual(stats['ende']['descriptions'], 1)  # The md5 of the other translation is that of an older text.

  def test_duplicates(self):
    text = description('frobnicates files\n Frob frobnicates the files.')
    descriptions = {'en': {('a', '1'): text, ('b', '2'): text, ('c', '3'): text}, 'de': {}}
    sources = {'a': SOURCES[2], 'b': SOURCES[2], 'c': SOURCES[0]}
    examples, stats = build_data.make_examples(descriptions, sources, 0.02)
    self.assertEqual(stats['summarize']['dropped_duplicate'], 1)
    self.assertLen(examples['summarize']['train'], 1)
    self.assertLen(examples['summarize']['test'], 1)
    build_data.remove_leaks(examples, stats)
    self.assertEqual(stats['summarize']['dropped_leak_test'], 1)
    self.assertEmpty(examples['summarize']['test'])


class LeakTest(absltest.TestCase):

  def remove(self, ende, summarize=None):
    examples = {
        task: {split: [build_data.Example(*pair) for pair in splits.get(split, [])] for split in build_data.SPLITS}
        for task, splits in [('ende', ende), ('summarize', summarize or {})]}
    stats = {'ende': collections.Counter(), 'summarize': collections.Counter()}
    build_data.remove_leaks(examples, stats)
    return examples, stats

  def test_input_or_reference(self):
    examples, stats = self.remove({
        'train': [('one', 'eins'), ('two', 'zwei')],
        'validation': [('One.', 'Eines'), ('three', 'drei')],
        'test': [('a pair', 'zwei'), ('three', 'DREI!'), ('four', 'vier')]})
    self.assertEqual(examples['ende']['train'], [('one', 'eins'), ('two', 'zwei')])
    self.assertEqual(examples['ende']['validation'], [('three', 'drei')])
    self.assertEqual(examples['ende']['test'], [('four', 'vier')])
    self.assertEqual(stats['ende'], {'dropped_leak_validation': 1, 'dropped_leak_test': 2})

  def test_versions_differ_in_digits_only(self):
    examples, _ = self.remove({'train': [('gcc-12 tools', 'Werkzeuge von gcc-12')],
                               'test': [('gcc-13 tools', 'Werkzeuge für gcc-13')]})
    self.assertEmpty(examples['ende']['test'])

  def test_across_tasks(self):
    examples, _ = self.remove({'train': [('frobnicates files', 'frobniziert Dateien')]},
                              {'test': [('Frob frobnicates the files.', 'frobnicates files')]})
    self.assertEmpty(examples['summarize']['test'])


class BuildDataTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.root = self.enter_context(tempfile.TemporaryDirectory())
    self.output_dir = os.path.join(self.root, 'data')

  def fake_apt_get(self, indexes, status=0):
    """Puts a script first in PATH that copies `indexes` to where apt-get would put what it downloads."""
    for directory in ('bin', 'indexes'):
      os.mkdir(os.path.join(self.root, directory))
    for name, text in indexes.items():
      with open(os.path.join(self.root, 'indexes', name), 'w', encoding='utf-8') as f:
        f.write(text)
    script = os.path.join(self.root, 'bin', 'apt-get')
    with open(script, 'w') as f:
      f.write(textwrap.dedent(f"""\
          #!/bin/sh
          test "$1 $2 $3" = "update -q -c" || exit 1
          echo "E: what apt-get says"
          cp "{self.root}/indexes/"* "$(dirname "$4")/state/lists"
          exit {status}
          """))
    os.chmod(script, 0o755)
    path = os.path.dirname(script) + os.pathsep + os.environ['PATH']
    self.enter_context(mock.patch.dict(os.environ, PATH=path))

  def test_end_to_end(self):
    # Words of their own for every package, or they would be duplicates and leaks.
    words = [a + b + c for a in 'bdfgklm' for b in 'aeiou' for c in ('bra', 'dro', 'fli')]
    english, german, packages = [], [], []
    for i, word in enumerate(words):
      key = f'Package: {word}\nDescription-md5: {i}\n'
      english.append(key + f'Description-en: reads {word} files\n Tool to read the files of the {word} system.\n')
      german.append(key + f'Description-de: liest {word}-Dateien\n Werkzeug, um {word}-Dateien »über« zu lesen.\n')
      packages.append(key)
    archive = 'mirror_debian_dists_bookend'
    other = 'elsewhere_dists_bookend'
    self.fake_apt_get({
        archive + '_InRelease': RELEASE.format(origin='Debian'),
        archive + '_main_binary-amd64_Packages': '\n'.join(packages),
        archive + '_main_i18n_Translation-en': '\n'.join(english),
        archive + '_main_i18n_Translation-de': '\n'.join(german),
        archive + '_non-free_i18n_Translation-en': TRANSLATION_EN,
        other + '_InRelease': RELEASE.format(origin='Elsewhere'),
        other + '_main_i18n_Translation-en': TRANSLATION_EN})
    build_data.build_data(self.output_dir, vocab_size=340, held_out=0.1)

    self.assertCountEqual(
        os.listdir(self.output_dir),
        [f'{task}.{split}.tsv' for task in (*build_data.PREFIXES, 'describe') for split in build_data.SPLITS] +
        ['spiece.model', 'stats.json'])
    with open(os.path.join(self.output_dir, 'stats.json')) as f:
      text = f.read()
    self.assertNotIn('mirror', text)
    stats = json.loads(text)
    self.assertEqual(stats['releases'], [{
        'origin': 'Debian', 'suite': 'stable', 'version': '1.2', 'codename': 'bookend',
        'date': 'Sat, 01 Jan 2022 00:00:00 UTC', 'components': ['main']}])
    self.assertEqual(stats['descriptions'], {'en': len(words), 'de': len(words)})
    for task, prefix in build_data.PREFIXES.items():
      for split in build_data.SPLITS:
        with open(os.path.join(self.output_dir, f'{task}.{split}.tsv'), encoding='utf-8') as f:
          lines = f.read().splitlines()
        self.assertLen(lines, stats['tasks'][task][split])
        self.assertNotEmpty(lines)
        for line in lines:
          text, reference = line.split('\t')
          self.assertStartsWith(text, prefix)
          self.assertNotEmpty(reference)

    # The long descriptions again: whole in training, split after the first words in the test.
    for split in build_data.SPLITS:
      with open(os.path.join(self.output_dir, f'describe.{split}.tsv'), encoding='utf-8') as f:
        pairs = [line.rstrip('\n').split('\t') for line in f]
      self.assertLen(pairs, stats['tasks']['summarize'][split])
      for text, reference in pairs:
        whole = f'{text} {reference}'.strip()
        self.assertRegex(whole, 'Tool to read the files of the')
        self.assertLen(text.split(), build_data.PROMPT_WORDS if split == 'test' else 0)

    vocabulary = sentencepiece.SentencePieceProcessor(model_file=os.path.join(self.output_dir, 'spiece.model'))
    self.assertEqual(vocabulary.get_piece_size(), 340)
    self.assertEqual((vocabulary.pad_id(), vocabulary.eos_id(), vocabulary.unk_id(), vocabulary.bos_id()),
                     (0, 1, 2, -1))
    self.assertEqual([vocabulary.id_to_piece(i) for i in range(3)], ['<pad>', '</s>', '<unk>'])
    text = 'Łódź »über« 日本'  # Bytes make up for what the training texts lack.
    self.assertNotIn(2, vocabulary.encode(text))
    self.assertEqual(vocabulary.decode(vocabulary.encode(text)), text)

  def test_missing_index(self):
    archive = 'mirror_debian_dists_bookend'
    self.fake_apt_get({archive + '_InRelease': RELEASE.format(origin='Debian'),
                       archive + '_main_binary-amd64_Packages': PACKAGES,
                       archive + '_main_i18n_Translation-en': TRANSLATION_EN})
    with self.assertRaisesRegex(SystemExit, 'no index Translation-de'):
      build_data.build_data(self.output_dir)
    self.assertFalse(os.path.exists(self.output_dir))

  def test_apt_get_fails(self):
    self.fake_apt_get({'lock': ''}, status=100)
    with self.assertRaisesRegex(SystemExit, 'E: what apt-get says'):
      build_data.build_data(self.output_dir)

  def test_no_apt_get(self):
    with mock.patch.dict(os.environ, PATH=self.root):
      for dry_run in (False, True):
        with self.assertRaisesRegex(SystemExit, 'apt-get not found'):
          build_data.build_data(self.output_dir, dry_run=dry_run)

  def test_dry_run(self):
    self.fake_apt_get({'lock': ''}, status=100)
    build_data.build_data(self.output_dir, dry_run=True)
    self.assertFalse(os.path.exists(self.output_dir))


if __name__ == '__main__':
  absltest.main()
