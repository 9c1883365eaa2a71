"""The page of rounds (Figure 1) and the time-line (Figure 5)."""
import html.parser
import os
import re

import numpy as np
import pytest

from speculative.data.vocabulary import Vocabulary
from speculative.decoding.config import DecodeConfig
from speculative.decoding.state import DecodeResult
from speculative.measure import trace
from speculative.measure import walltime
from speculative.report import figures
from speculative.report import html as report
from tests import toys

STEPS = walltime.StepTimes(target=.010, draft=.001, verify={3: .012, 7: .015})
VOID = {'meta', 'img'}


@pytest.fixture(scope='module', name='vocabulary')
def packaged_vocabulary():
  return Vocabulary(os.path.join(os.path.dirname(report.__file__), '..', 'pretrained', 'spiece.model'))


class Page(html.parser.HTMLParser):
  """Reads a page; asserts that its tags are balanced.

  Attributes:
    elements: [(tag, attributes)].
    parts: [(class of the innermost element, text)].
  """

  def __init__(self, text):
    super().__init__()
    self.open, self.elements, self.parts = [], [], []
    self.feed(text)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    if tag not in VOID:
      self.open.append((tag, dict(attrs).get('class')))

  def handle_endtag(self, tag):
    assert self.open.pop()[0] == tag

  def handle_data(self, data):
    self.parts.append((self.open[-1][1] if self.open else None, data))


def by_hand(rounds, finish_reason=1):
  """`DecodeResult` of one text's rounds."""
  tokens = [t for r in rounds for t in r.accepted + r.last]
  accepted = [len(r.accepted) for r in rounds]
  return DecodeResult(
      np.array([tokens]), np.array([len(tokens)]), None, np.array([finish_reason]), np.array([len(rounds)]), None,
      np.array([sum(accepted) + sum(bool(r.rejected) for r in rounds)]), np.array([sum(accepted)]),
      np.array([accepted]))


def test_page_of_a_decode(vocabulary):
  """Every round is there; what it keeps makes up the decoded text, blanks included."""
  rng = np.random.default_rng(0)
  logits = 2 * rng.normal(size=(97, 60))
  target, draft = (toys.history(a, eos_id=1) for a in (logits, logits + .5 * rng.normal(size=logits.shape)))
  inputs = np.array([[3, 1, 2, 0], [5, 0, 0, 0]])
  result, rows = trace.record(target, draft, inputs, DecodeConfig(gamma=3, max_decode_len=25))
  page = Page(report.trace_page(['one', 'two'], rows, result, vocabulary, 3, {'draft': 'small'}))
  kept = ''.join(text for kind, text in page.parts if kind in (trace.ACCEPTED, trace.REPLACED, trace.BONUS))
  outputs = [vocabulary.decode(row[:n]) for row, n in zip(result.tokens, result.lengths)]
  # The legend's three words come first.
  assert kept == 'acceptedreplacedbonus' + ''.join(outputs)
  assert all(('text', output) in page.parts for output in outputs)
  rejected = [text for kind, text in page.parts if kind == trace.REJECTED]
  assert len(rejected) == 1 + sum(bool(r.rejected) for rounds in rows for r in rounds)
  numbers = [text for kind, text in page.parts if kind == 'number']
  shown = iter(numbers)
  for rounds in rows:
    for i, r in enumerate(rounds, start=1):
      assert str(i) in shown and f'{len(r.accepted)} of 3' in shown  # In this order.
  totals = (f'{result.rounds.sum()} rounds, {result.lengths.sum()} tokens, '
            f'{result.lengths.sum() / result.rounds.sum():.2f} tokens a round; '
            f'{result.accepted.sum()} of {result.tested.sum()} tested drafts accepted')
  assert any(totals in text for _, text in page.parts)


def test_page_needs_no_other_file_and_escapes(vocabulary):
  evil = '<script>alert("x")</script> & <img src=x>'
  rounds = [trace.Round(vocabulary.encode('<b>a</b> &amp; "q"'), vocabulary.encode('<i>'), vocabulary.encode('<u>')),
            trace.Round([vocabulary.eos_id], [], [])]
  text = report.trace_page([evil], [rounds], by_hand(rounds), vocabulary, 5, {'draft': evil},
                           figures.timeline({3: [2, 1]}, 3, STEPS))
  page = Page(text)
  assert ('text', evil) in page.parts and 'alert' in text
  tags = [tag for tag, _ in page.elements]
  assert not {'script', 'link', 'iframe', 'b', 'i', 'u'} & set(tags) and tags.count('img') == 1
  assert all(attributes[key].startswith('data:') for _, attributes in page.elements
             for key in ('src', 'href', 'srcset', 'action') if key in attributes)
  assert not re.search(r'https?:|url\(|@import', text)
  assert [text for kind, text in page.parts if kind == 'end'] == ['end of text']


def test_page_tells_kinds_apart_without_colour(vocabulary):
  rounds = [trace.Round([], [], [vocabulary.eos_id])]
  text = report.trace_page(['x'], [rounds], by_hand(rounds), vocabulary, 2, {})
  page = Page(text)
  for kind in trace.STYLES:
    assert (kind, kind) in page.parts  # The legend.
  for kind, style in ((trace.REJECTED, 'line-through'), (trace.REPLACED, 'underline;'), (trace.BONUS, 'dotted')):
    assert re.search(rf'\n\.{kind} {{[^}}]*text-decoration: [a-z ]*{style}', text)
  assert 'prefers-color-scheme: dark' in text and 'pre-wrap' in text


def test_page_without_rounds(vocabulary):
  text = report.trace_page(['x'], [[]], by_hand([], finish_reason=2), vocabulary, 2, {},
                           figures.timeline({3: []}, 0, STEPS))
  assert '0 rounds, 0 tokens' in text and '–' in text
  Page(text)


def test_timeline_adds_up_to_the_step_times():
  rounds = {7: [8, 2, 5], 3: [4, 1, 4, 3, 3]}
  figure = figures.timeline(rounds, 15, STEPS)
  axes, = figure.axes
  lines = [[bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2, 6) == y] for y in range(3)]
  milliseconds = [sum(bar.get_width() for bar in line) for line in lines]
  np.testing.assert_allclose(milliseconds, [3 * (7 * 1 + 15), 5 * (3 * 1 + 12), 15 * 10])
  for line, end in zip(lines, milliseconds):  # One after the other, without gaps.
    line = sorted(line, key=lambda bar: bar.get_x())
    starts = np.cumsum([0] + [bar.get_width() for bar in line])
    np.testing.assert_allclose([bar.get_x() for bar in line], starts[:-1], atol=1e-9)
  target = figures.to_rgb(figures.COLORS[0])
  assert [sum(bar.get_facecolor()[:3] == target for bar in line) for line in lines] == [3, 5, 15]
  assert [len(line) for line in lines] == [3 * 8, 5 * 4, 15]
  labels = [label.get_text() for label in axes.get_yticklabels()]
  assert [label.split('\n')[0] for label in labels] == ['γ = 7', 'γ = 3', 'plain']
  assert '15 tokens, 66.0 ms' in labels[0]
  assert [text.get_text() for text in axes.texts] == ['8', '2', '5', '4', '1', '4', '3', '3']
  assert 'measured steps, encoder left out' in axes.get_title('left') and 'Milliseconds' in axes.get_xlabel()
  assert [text.get_text() for text in figure.legends[0].get_texts()] == ['draft call', 'target call']


def test_timeline_of_a_long_text_has_no_numbers_on_top_of_each_other():
  axes, = figures.timeline({3: [1] * 300}, 300, STEPS).axes
  assert not axes.texts and 'numbers' not in axes.get_title('left')
