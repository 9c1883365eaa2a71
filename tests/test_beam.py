"""Beam search: against exhaustive search, against a plain one in NumPy, and the speculative against the plain."""
import dataclasses

import numpy as np
import pytest

from speculative.decoding import beam
from speculative.decoding.autoregressive import autoregressive_decode
from speculative.decoding.beam import beam_decode
from speculative.decoding.config import DecodeConfig
from speculative.decoding.state import FinishReason
from speculative.drafters import ngram
from speculative.drafters.model import ModelDrafter
from tests import toys

V, EOS = 5, 1
TABLE = np.random.default_rng(0).normal(size=(97, V)) * 1.5
TARGET = toys.history(TABLE, eos_id=EOS)
INPUTS = np.array([[3, 1, 2, 0], [4, 0, 0, 0], [2, 2, 3, 4]])
FIELDS = 'tokens', 'lengths', 'scores', 'finish_reason', 'beams', 'beam_lengths', 'beam_scores'


def draft(scale):
  noise = np.random.default_rng(1).normal(size=TABLE.shape) * scale
  return toys.history(TABLE + noise, eos_id=EOS)


def score(log_prob, length, penalty):
  return log_prob / ((5 + length) / 6) ** penalty


def log_softmax(logits):
  return logits - np.log(np.sum(np.exp(logits)))


def next_log_probs(target, row, text, min_len=0):
  logits = toys.history_logits(target, row.sum())([0, *text]).copy()
  if len(text) < min_len:
    logits[EOS] = -np.inf
  return log_softmax(logits)


def all_texts(target, row, n, penalty):
  """[(score, text)] of every complete text, best first."""
  found, growing = [], [((), 0.0)]
  for i in range(n):
    longer = []
    for text, total in growing:
      for token, lp in enumerate(next_log_probs(target, row, text)):
        (found if token == EOS or i == n - 1 else longer).append(((*text, token), total + lp))
    growing = longer
  return sorted(((score(total, len(text), penalty), text) for text, total in found), reverse=True)


def plain_search(row, n, w, penalty, min_len=0):
  """Beam search by the book: [(score, text)], best first, at most w of them."""
  beams, done = [((), 0.0)], []
  for i in range(n):
    candidates = [((*text, token), total + lp) for text, total in beams
                  for token, lp in enumerate(next_log_probs(TARGET, row, text, min_len)) if lp > -np.inf]
    candidates = sorted(candidates, key=lambda c: -c[1])[:2 * w]
    done += [(score(total, len(text), penalty), text) for text, total in candidates if text[-1] == EOS]
    beams = [c for c in candidates if c[0][-1] != EOS][:w]
    if i == n - 1:
      done += [(score(total, len(text), penalty), text) for text, total in beams]
    done = sorted(done, reverse=True)[:w]
    if not beams or (len(done) == w and score(beams[0][1], n, penalty) <= done[-1][0]):
      break
  return done


def texts_of(result, b):
  return [tuple(tokens[:n].tolist()) for tokens, n, s in zip(
      result.beams[b], result.beam_lengths[b], result.beam_scores[b]) if s > -np.inf]


@pytest.mark.parametrize('penalty', [0.0, 0.6, 2.0])
def test_wide_enough_it_is_exhaustive(penalty):
  """With as many beams as there are prefixes, the best texts of all are found, in order."""
  v, n, w = 3, 4, 27
  target = toys.history(TABLE[:, :v], eos_id=EOS)
  for row in INPUTS:
    expected = all_texts(target, row, n, penalty)[:w]
    # More beams than the vocabulary has tokens are refused; the search itself knows no such limit.
    program = beam._Program(beam.Target.of(target), None, 0, n, w, w)
    s, *_ = beam._run(program, (target.params, ()), row[None], np.float32(penalty), np.zeros(1, np.int32))
    got = [tuple(np.asarray(t)[:k].tolist()) for t, k in zip(s.done_tokens[0], s.done_lengths[0])]
    assert got == [text for _, text in expected]
    np.testing.assert_allclose(s.done_scores[0], [value for value, _ in expected], rtol=1e-5)


@pytest.mark.parametrize('w', [1, 4])
def test_it_is_beam_search_by_the_book(w):
  """All kept texts and scores, for every limit, minimum and penalty; batch of three."""
  for n, penalty, min_len in ((0, .6, 0), (1, .6, 0), (6, 0., 1), (9, .6, 0), (9, 1.5, 3)):
    result = beam_decode(TARGET, INPUTS, DecodeConfig(max_decode_len=n, min_decode_len=min_len), w, penalty)
    assert result.tokens.shape == (3, n)
    for b, row in enumerate(INPUTS):
      expected = plain_search(row, n, w, penalty, min_len)
      if n == 0:
        assert result.lengths[b] == 0
        continue
      assert texts_of(result, b) == [text for _, text in expected]
      np.testing.assert_allclose(result.scores[b], expected[0][0], rtol=1e-5)
      assert result.finish_reason[b] == (FinishReason.EOS if expected[0][1][-1] == EOS else FinishReason.LENGTH)
      assert (result.tokens[b, result.lengths[b]:] == TARGET.pad_id).all()


def test_one_beam_without_an_end_is_greedy():
  target = dataclasses.replace(TARGET, eos_id=-1)
  result = beam_decode(target, INPUTS, DecodeConfig(max_decode_len=12), 1)
  np.testing.assert_array_equal(result.tokens, autoregressive_decode(target, INPUTS, DecodeConfig(max_decode_len=12)).tokens)


@pytest.mark.parametrize('gamma,w,u', [(1, 2, 2), (4, 3, 6), (2, 1, 1)])
def test_speculative_is_plain(gamma, w, u):
  """Whatever the draft is worth: same texts, same scores, same number of steps; fewer calls if it is worth something."""
  config = DecodeConfig(gamma=gamma, max_decode_len=14, min_decode_len=[0, 4, 14])
  plain = beam_decode(TARGET, INPUTS, config, w)
  np.testing.assert_array_equal(plain.rounds, plain.steps)
  for drafter in (draft(.3), toys.history(-TABLE, eos_id=EOS), TARGET):
    result = beam_decode(TARGET, INPUTS, config, w, drafter=drafter, draft_beam_size=u)
    for field in FIELDS:
      np.testing.assert_array_equal(getattr(result, field), getattr(plain, field), err_msg=field)
    np.testing.assert_array_equal(result.steps, plain.steps)
    assert (result.rounds >= -(-result.steps // (gamma + 1))).all()
  # The target's own drafts are always right.
  np.testing.assert_array_equal(result.rounds, -(-result.steps // (gamma + 1)))
  assert result.steps[2] == 14


def test_speculative_is_plain_in_a_t5(tiny, tiny_draft):
  inputs = np.random.default_rng(0).integers(2, 60, (2, 8))
  config = DecodeConfig(gamma=2, max_decode_len=13)
  plain = beam_decode(tiny, inputs, config, 3)
  for drafter in (tiny_draft, tiny, ModelDrafter(tiny_draft)):
    result = beam_decode(tiny, inputs, config, 3, drafter=drafter)
    np.testing.assert_array_equal(result.beams, plain.beams)
    np.testing.assert_allclose(result.beam_scores, plain.beam_scores, rtol=1e-4)
    if drafter is tiny:
      np.testing.assert_array_equal(result.rounds, -(-result.steps // 3))


def test_a_row_is_as_it_is_alone():
  config = DecodeConfig(gamma=2, max_decode_len=9)
  together = beam_decode(TARGET, INPUTS, config, 2, drafter=draft(.5))
  for b in range(3):
    alone = beam_decode(TARGET, INPUTS[b:b + 1], config, 2, drafter=draft(.5))
    for field in FIELDS:
      np.testing.assert_array_equal(getattr(alone, field)[0], getattr(together, field)[b], err_msg=field)


def test_other_settings_do_not_compile_anew():
  beam_decode(TARGET, INPUTS, DecodeConfig(max_decode_len=7), 2)
  before = beam._run._cache_size()
  beam_decode(TARGET, INPUTS[::-1], DecodeConfig(max_decode_len=7, min_decode_len=3), 2, 1.5)
  assert beam._run._cache_size() == before


def test_padding_of_the_vocabulary_is_never_emitted():
  table = np.concatenate([TABLE, np.full((97, 3), 50.)], axis=1)
  result = beam_decode(toys.history(table, vocab_size=V, eos_id=EOS), INPUTS, DecodeConfig(max_decode_len=6), 4)
  assert result.beams.max() < V
  np.testing.assert_array_equal(result.beams, beam_decode(TARGET, INPUTS, DecodeConfig(max_decode_len=6), 4).beams)


@pytest.mark.parametrize('drafted', [False, True])
def test_a_broken_row_is_flagged_and_alone(drafted):
  """NaN in row 0, known by its input: it ends with `error`, the other rows are as they are without it."""
  states = 97
  table = TABLE.copy()
  start = [toys.state([0], states, row.sum()) for row in INPUTS]
  assert len(set(start)) == 3
  table[start[0]] = np.nan
  broken = toys.history(table, eos_id=EOS)
  config = DecodeConfig(gamma=2, max_decode_len=3, min_decode_len=3)
  result = beam_decode(broken, INPUTS, config, 2, drafter=draft(.3) if drafted else None)
  expected = beam_decode(TARGET, INPUTS, config, 2)
  assert result.finish_reason[0] == FinishReason.ERROR and result.lengths[0] == 0
  for b in (1, 2):
    if start[0] not in _states_seen(expected, b):
      np.testing.assert_array_equal(result.beams[b], expected.beams[b])


def _states_seen(result, b):
  return {toys.state([0, *text[:i]], 97, INPUTS[b].sum()) for text in texts_of(result, b) for i in range(len(text))}


@pytest.mark.parametrize('arguments,error,message', [
    ({'beam_size': 0}, ValueError, 'beam_size = 0'), ({'beam_size': 6}, ValueError, 'number of tokens, 5'),
    ({'length_penalty': -1.0}, ValueError, 'length_penalty'), ({'length_penalty': np.nan}, ValueError, 'length_penalty'),
    ({'config': DecodeConfig(temperature=1.0)}, ValueError, 'temperature = 1.0: beam search'),
    ({'config': DecodeConfig(top_k=3)}, ValueError, 'top_k'), ({'config': DecodeConfig(lenience=.5)}, ValueError, 'lenience'),
    ({'config': DecodeConfig(stop_sequences=[[2]])}, ValueError, 'stop_sequences'),
    ({'drafter': ngram.unigram(ngram.fit([[2, 1]], V))}, TypeError, 'needs a model'),
    ({'drafter': TARGET, 'draft_beam_size': 2}, ValueError, 'draft_beam_size = 2'),
    ({'drafter': dataclasses.replace(TARGET, eos_id=2)}, ValueError, 'do not fit: eos_id'),
    ({'inputs': np.array([[9]])}, ValueError, 'no token id')])
def test_bad_input(arguments, error, message):
  with pytest.raises(error, match=message):
    beam_decode(TARGET, **{'inputs': INPUTS} | arguments)
