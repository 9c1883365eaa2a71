"""Settings of a row: limits, stop sequences, seeds; random number generators; property tests against NumPy oracles."""
import dataclasses

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.decoding import speculative as loop
from speculative.decoding.adaptive import AdaptiveGamma
from speculative.decoding.adaptive import adaptive_decode
from speculative.decoding.autoregressive import autoregressive_decode
from speculative.decoding.config import DecodeConfig
from speculative.decoding.speculative import speculative_decode
from speculative.decoding.state import FinishReason
from tests import toys

V, EOS = 5, 1
TABLE = np.random.default_rng(0).normal(size=(97, V)) * 2
TARGET = toys.history(TABLE, eos_id=EOS)
DRAFT = toys.history(TABLE + np.random.default_rng(1).normal(size=TABLE.shape) * .7, eos_id=EOS)
INPUTS = np.array([[3, 1, 2, 0], [4, 0, 0, 0], [2, 2, 3, 4]])


def oracle(row, n, min_len=0, stops=()):
  """Greedy tokens and finish reason, from the definition."""
  tokens = toys.greedy(toys.history_logits(TARGET, row.sum()), n, eos_id=EOS, min_len=min_len)
  for i in range(len(tokens)):
    if tokens[i] == EOS:
      return tokens[:i + 1], FinishReason.EOS
    if any(tuple(tokens[max(0, i + 1 - len(stop)):i + 1]) == tuple(stop) for stop in stops):
      return tokens[:i + 1], FinishReason.STOP
  return tokens, FinishReason.LENGTH


def same(result, expected):
  assert toys.texts_of(result) == [tuple(tokens) for tokens, _ in expected]
  assert result.finish_reason.tolist() == [reason for _, reason in expected]
  for row, n in zip(result.tokens, result.lengths):
    assert (row[n:] == TARGET.pad_id).all()


sequences = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=4), max_size=3)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_rows_end_where_they_should(data):
  """Any batch of inputs, limits, minima and stop sequences, each row its own: as greedy decoding by the definition."""
  batch = data.draw(st.sampled_from([1, 3]))
  gamma = data.draw(st.sampled_from([1, 4]))
  limit = st.integers(0, 12)
  inputs = np.array(data.draw(st.lists(st.lists(st.integers(0, V - 1), min_size=3, max_size=3),
                                       min_size=batch, max_size=batch)))
  rows = [(data.draw(limit), data.draw(limit), data.draw(sequences)) for _ in range(batch)]
  config = DecodeConfig(gamma=gamma, max_decode_len=12, row_max_decode_len=[n for n, _, _ in rows],
                        min_decode_len=[least for _, least, _ in rows], stop_sequences=[stops for *_, stops in rows])
  expected = [oracle(row, *settings) for row, settings in zip(inputs, rows)]
  same(speculative_decode(TARGET, DRAFT, inputs, config), expected)
  same(autoregressive_decode(TARGET, inputs, config), expected)


def test_a_stop_inside_a_block_is_seen_there():
  """Every two tokens in a row of a greedy text in turn, in one program; shared and per-row lists alike."""
  config = DecodeConfig(gamma=4, max_decode_len=20, min_decode_len=20)
  inputs = np.tile(INPUTS[2:], (12, 1))
  tokens, _ = oracle(INPUTS[2], 20, 20)
  stops = [[tokens[i:i + 2]] for i in range(12)]
  expected = [oracle(row, 20, 20, stop) for row, stop in zip(inputs, stops)]
  assert len({len(t) for t, _ in expected}) > 4
  same(speculative_decode(TARGET, DRAFT, inputs, dataclasses.replace(config, stop_sequences=stops)), expected)
  for stop in stops[::5]:
    result = speculative_decode(TARGET, DRAFT, inputs[:1], dataclasses.replace(config, stop_sequences=stop))
    same(result, [oracle(inputs[0], 20, 20, stop)])


def test_limits_and_stops_do_not_compile_anew():
  """Invariant 8; numbers of sequences and tokens are rounded up, to few programs."""
  def decode(**settings):
    speculative_decode(TARGET, DRAFT, INPUTS, DecodeConfig(gamma=2, max_decode_len=9, **settings))
  decode(stop_sequences=[[2, 3, 2]])
  before = loop.run._cache_size()
  decode(stop_sequences=[[2, 2, 2, 4]], row_max_decode_len=3)
  decode(stop_sequences=[[[4, 4, 4]], [], []], row_max_decode_len=np.array([0, 9, 4]), min_decode_len=[0, 1, 2])
  assert loop.run._cache_size() == before


@pytest.mark.parametrize('settings,message', [
    ({'stop_sequences': [[]]}, 'is for 1 rows'), ({'stop_sequences': [[5]]}, '5 is no token id: the vocabulary has 5'),
    ({'stop_sequences': [[[1]], []]}, 'is for 2 rows'),
    ({'row_max_decode_len': [1, 2]}, r'row_max_decode_len has shape \(2,\)')])
def test_rows_that_do_not_fit(settings, message):
  config = DecodeConfig(max_decode_len=9, **settings)
  for decode in (lambda: speculative_decode(TARGET, DRAFT, INPUTS, config),
                 lambda: autoregressive_decode(TARGET, INPUTS, config)):
    with pytest.raises(ValueError, match=message):
      decode()


@pytest.mark.parametrize('settings,message', [
    ({'stop_sequences': [3, 4]}, 'stop_sequences = '), ({'stop_sequences': [[-1]]}, 'stop_sequences = '),
    ({'stop_sequences': [[1.5]]}, 'stop_sequences = '),
    ({'row_max_decode_len': 10}, 'between 0 and max_decode_len'), ({'row_max_decode_len': -1}, 'between 0'),
    ({'repetition_penalty': 1.2}, 'repetition_penalty = 1.2: not supported'),
    ({'no_repeat_ngram_size': 2}, 'no_repeat_ngram_size = 2: not supported')])
def test_bad_settings(settings, message):
  with pytest.raises(ValueError, match=message):
    DecodeConfig(max_decode_len=9, **settings)


@pytest.mark.parametrize('implementation', ['threefry2x32', 'rbg', 'unsafe_rbg'])
def test_rows_are_independent_under_every_generator(implementation):
  """JAX's default generator is not used: rbg draws one number for a whole vmapped batch, so that rows would hang
  together. The same seed gives the same text whatever the default."""
  config = DecodeConfig(gamma=3, max_decode_len=12, temperature=1.0)
  expected = speculative_decode(TARGET, DRAFT, INPUTS, config, 3)
  jax.clear_caches()  # a program that was traced under another generator would be found again
  with jax.default_prng_impl(implementation):
    together = speculative_decode(TARGET, DRAFT, INPUTS, config, 3)
    np.testing.assert_array_equal(together.tokens, expected.tokens)
    for b in range(3):
      alone = speculative_decode(TARGET, DRAFT, INPUTS[b:b + 1], config, 3, [b])
      np.testing.assert_array_equal(alone.tokens[0], together.tokens[b])


def test_debug_nans_passes_over_the_whole_loop(tiny, tiny_draft):
  """No 0/0 and no ∞ − ∞ on the way, with every filter, at T = 0 and above, in toys and in a T5."""
  inputs = np.random.default_rng(1).integers(2, 60, (3, 8))
  config = DecodeConfig(gamma=2, max_decode_len=6, temperature=[0., 1e-3, 1.], top_k=[0, 3, 0], top_p=[1., 1., .5],
                        min_decode_len=[0, 2, 0], lenience=[1., 1., .5])
  with jax.debug_nans(True):
    for target, draft, rows in ((TARGET, DRAFT, INPUTS), (tiny, tiny_draft, inputs)):
      result = speculative_decode(target, draft, rows, config)
      assert (result.finish_reason != FinishReason.ERROR).all()


def test_the_caller_s_arrays_stay_his():
  """Nothing that was passed is donated away: it can be used again, and holds what it held."""
  inputs, seeds, temperature = jnp.asarray(INPUTS), jnp.array([1, 2, 3]), jnp.array([0., 1., 1.])
  config = DecodeConfig(gamma=2, max_decode_len=9, temperature=temperature)
  first = speculative_decode(TARGET, DRAFT, inputs, config, seeds)
  again = speculative_decode(TARGET, DRAFT, inputs, config, seeds)
  np.testing.assert_array_equal(first.tokens, again.tokens)
  for array in (inputs, seeds, temperature, TARGET.params, DRAFT.params):
    assert not array.is_deleted()
  np.testing.assert_array_equal(TARGET.params, np.asarray(TABLE, np.float32))


# γ that adapts.


def test_adaptive_decoding_is_exact():
  """Greedy tokens are the target's through every change of γ, and each γ is compiled once."""
  adaptive = AdaptiveGamma((1, 3, 6), rounds_per_choice=1)
  config = DecodeConfig(max_decode_len=40, min_decode_len=40)
  expected = autoregressive_decode(TARGET, INPUTS, config)
  result = adaptive_decode(TARGET, DRAFT, INPUTS, config, adaptive)
  np.testing.assert_array_equal(result.tokens, expected.tokens)
  assert all(adaptive.rounds[gamma] for gamma in (1, 3, 6))
  before = loop.run._cache_size()
  result = adaptive_decode(TARGET, DRAFT, INPUTS[::-1], config, adaptive, seed=4)
  np.testing.assert_array_equal(result.tokens, expected.tokens[::-1])
  assert loop.run._cache_size() == before
  assert result.rounds.sum() <= sum(adaptive.rounds.values())
  assert result.drafted.sum() <= sum(gamma * n for gamma, n in adaptive.rounds.items())


def test_adaptive_texts_have_the_target_s_distribution():
  """Every round of another γ, chosen by what rounds before accepted: 20 K texts, chi-square, false alarm 1e-5."""
  class Turns(AdaptiveGamma):
    """Chooses by what was accepted only: a fixed seed gives fixed texts."""
    def choose(self):
      return self.gammas[sum(self.accepted.values()) % 3]
  table = np.random.default_rng(4).normal(size=(11, 4))
  target = toys.history(table, eos_id=EOS)
  draft = toys.history(table + np.random.default_rng(5).normal(size=table.shape), eos_id=EOS)
  result = adaptive_decode(target, draft, np.full((20_000, 1), 2), DecodeConfig(max_decode_len=3, temperature=1.0),
                           Turns((1, 2, 4), rounds_per_choice=1))
  logits = toys.history_logits(target, 2)
  expected = toys.distribution(lambda prefix: toys.softmax(logits(prefix)), 3, eos_id=EOS)
  assert toys.texts_chi_square(toys.texts_of(result), expected) > toys.FALSE_ALARM


def test_adaptive_gamma_follows_acceptance_and_cost():
  """Long drafts where they are accepted, short ones where they are not, and short ones where long ones cost too much."""
  def settled(alpha, cost):
    adaptive = AdaptiveGamma((1, 4, 8), rounds_per_choice=4)
    for _ in range(30):
      gamma = adaptive.choose()
      adaptive.update(gamma, 4, 4 * cost(gamma), 4, 100, round(100 * alpha))
    return adaptive.choose()
  assert settled(.95, lambda gamma: 1 + .05 * gamma) == 8
  assert settled(.1, lambda gamma: 1 + .05 * gamma) == 1
  assert settled(.95, lambda gamma: 1 + gamma) == 1
  assert settled(.7, lambda gamma: 1 + .1 * gamma) == 4


def test_adaptive_gamma_remembers_only_what_it_is_given():
  config = DecodeConfig(max_decode_len=20)
  kept = AdaptiveGamma((1, 2))
  adaptive_decode(TARGET, DRAFT, INPUTS, config)
  assert sum(kept.rounds.values()) == 0 and kept.alpha == .5
  adaptive_decode(TARGET, DRAFT, INPUTS, config, kept)
  rounds = sum(kept.rounds.values())
  adaptive_decode(TARGET, DRAFT, INPUTS, config, kept)
  assert sum(kept.rounds.values()) > rounds > 0


@pytest.mark.parametrize('arguments', [
    {'gammas': ()}, {'gammas': (0, 2)}, {'rounds_per_choice': 0}, {'forget': 0.0}, {'forget': 1.5}])
def test_bad_adaptive_settings(arguments):
  with pytest.raises(ValueError):
    AdaptiveGamma(**arguments)
