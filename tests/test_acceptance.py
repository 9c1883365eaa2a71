"""What Theorem 3.8 leaves out, and lenience: measures against enumeration, experiments on the packaged trio."""
import dataclasses
import itertools

import numpy as np
import pytest

import speculative
from experiments import acceptance
from experiments import alpha as alphas
from experiments import lenience
from experiments import walltime
from speculative import theory
from speculative.decoding.autoregressive import autoregressive_decode
from speculative.decoding.config import DecodeConfig
from speculative.measure import alpha
from tests import toys
from tests.test_alpha import INPUTS
from tests.test_alpha import pair


def test_tokens_per_round_by_enumeration():
  """All outcomes of the drafts of a text of 4 tokens: each place's draft is accepted or not, whatever round tests it."""
  beta, gamma = np.array([.9, .2, .6, .4]), 2
  rounds = 0.0
  for accepted in itertools.product((False, True), repeat=4):
    chance = np.prod(np.where(accepted, beta, 1 - beta))
    at = count = 0
    while at < 4:
      count += 1
      run = 0
      while run < gamma and at + run < 4 and accepted[at + run]:
        run += 1
      at += run + 1
    rounds += chance * count
  assert alpha.tokens_per_round(np.array([[*beta, np.nan]]), gamma) == pytest.approx(4 / rounds)


def test_tokens_per_round_of_one_beta_is_equation_1():
  beta = np.full((1, 20000), .7)
  assert alpha.tokens_per_round(beta, 3) == pytest.approx(theory.expected_tokens(.7, 3), rel=1e-3)
  # Stretches of easy and hard tokens: rounds gather in the hard ones, so that the rates' harmonic mean counts.
  mixed = np.where(np.arange(20000) % 1000 < 500, .95, .45)[None]
  harmonic = 2 / (1 / theory.expected_tokens(.95, 7) + 1 / theory.expected_tokens(.45, 7))
  assert alpha.tokens_per_round(mixed, 7) == pytest.approx(harmonic, rel=.01)
  assert harmonic < theory.expected_tokens(.7, 7)


def test_by_position():
  beta = np.array([[.2, .4, .6], [.4, np.nan, np.nan]])
  first, rest, none = alpha.by_position(beta, (0, 1, 3, 8))
  assert (first.alpha, first.tokens) == (pytest.approx(.3), 2) and (rest.alpha, rest.tokens) == (pytest.approx(.5), 2)
  assert none is None


def test_alpha_with_lenience_is_that_of_appendix_a5():
  """Σ min(q, p / l) at every prefix, by NumPy."""
  target, draft = pair(eos_id=3)
  config = DecodeConfig(max_decode_len=12, temperature=1.3, lenience=.3)
  texts = autoregressive_decode(target, INPUTS, config, seed=4)
  betas = [theory.acceptance(*(toys.softmax(toys.history_logits(m, row.sum())([0, *text[:i]]) / 1.3) for m in (target, draft)),
                             lenience=.3) for row, text in zip(INPUTS, toys.texts_of(texts)) for i in range(len(text))]
  np.testing.assert_allclose(alpha.measure_alpha(target, draft, INPUTS, texts, config).alpha, np.mean(betas), rtol=1e-5)


def test_alpha_with_lenience_at_temperature_0_is_refused():
  target, draft = pair()
  config = DecodeConfig(max_decode_len=4, lenience=.3)
  texts = autoregressive_decode(target, INPUTS, config)
  with pytest.raises(ValueError, match='temperature 0'):
    alpha.measure_alpha(target, draft, INPUTS, texts, config)


@pytest.fixture(scope='module')
def zoo():
  loaded = speculative.load_pretrained('float32')
  return dataclasses.replace(loaded, drafts={'small': loaded.drafts['small']}, texts={'ende': loaded.texts['ende']}, counts={})


@pytest.mark.slow
def test_lenience_rows(zoo):
  rows = lenience.measure_lenience(zoo, values=(1.0, 0.3), tokens=300, prompts=2, passes=1, gammas=(1, 3), max_gamma=3,
                                   max_decode_len=48, loop_steps=4)
  assert [row['lenience'] for row in rows] == [1.0, 0.3] and rows[0]['alpha'] < rows[1]['alpha'] <= 1.001
  assert all(row['speedup_measured'] > 0 and 1 <= row['gamma'] <= 3 and row['label'] == 'measured' for row in rows)
  exact = next(row for row in alphas.measure_alphas(zoo, tokens=300, temperatures=(1.0,), max_input_len=64, max_decode_len=48)
               if row['experiment'] == 'alpha')
  assert rows[0]['alpha'] == pytest.approx(exact['alpha'], rel=1e-5)


@pytest.mark.slow
def test_acceptance_rows(zoo):
  rows = acceptance.measure_acceptance(zoo, tokens=300, temperatures=(0.0, 1.0, 2.0), at=(0.0, 1.0), gamma=3, texts=8, max_decode_len=48)
  kinds = {kind: [row for row in rows if row['experiment'] == kind] for kind in ('temperature', 'position', 'accepted')}
  assert [row['temperature'] for row in kinds['temperature']] == [0.0, 1.0, 2.0]
  for of_all in kinds['temperature'][:2]:
    parts = [row for row in kinds['position'] if row['temperature'] == of_all['temperature']]
    assert sum(row['tokens'] for row in parts) == of_all['tokens']
    assert sum(row['tokens'] * row['alpha'] for row in parts) / of_all['tokens'] == pytest.approx(of_all['alpha'], rel=1e-5)
  for row in kinds['accepted']:
    assert len(row['counts']) == len(row['by_position']) + 1 == 4 and row['cut'] == 8
    assert row['tokens_per_round_iid'] == pytest.approx(theory.expected_tokens(row['alpha'], 3))
    assert 1 < row['tokens_per_round'] < 4 and 1 < row['tokens_per_round_beta'] < 4
  # Greedy rounds hold no chance: where β is 0 or 1, the rounds along the target's text are those of the decode.
  greedy = kinds['accepted'][0]
  assert greedy['tokens_per_round'] == pytest.approx(greedy['tokens_per_round_beta'], rel=1e-6)


@pytest.mark.slow
def test_gamma_rows(zoo):
  found = [{'experiment': 'alpha', 'task': 'ende', 'temperature': 0.0, 'draft': 'small', 'alpha': 0.6}]
  rows = walltime.measure_gammas(zoo, found, gammas=(1, 3), prompts=2, passes=1, temperatures=(0.0,), max_decode_len=32,
                                 loop_steps=4)
  assert [row['gamma'] for row in rows] == [1, 3] and len({row['c'] for row in rows}) == 1
  for row in rows:
    assert row['speedup_expected_v'] == pytest.approx(theory.speedup(0.6, row['gamma'], row['c'], row['v']))
    assert row['speedup_measured'] > 0 and 1 <= row['tokens_per_round'] <= row['gamma'] + 1


@pytest.mark.slow
def test_quality_rows(zoo):
  """Greedy outputs in float32 are equal; their scores therefore too."""
  plain, fast = alphas.measure_quality(zoo, texts=16, temperatures=(0.0,), max_decode_len=48)
  assert (plain['draft'], fast['draft']) == (None, 'small') and fast['equal'] == 1.0
  assert plain['bleu'] == fast['bleu'] and plain['bleu_low'] <= plain['bleu'] <= plain['bleu_high']
