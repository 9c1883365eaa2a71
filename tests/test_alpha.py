"""α and wall time: the estimators against hand computations and Theorem 3.8's assumptions."""
import numpy as np

from speculative import theory
from speculative.decoding.autoregressive import autoregressive_decode
from speculative.decoding.config import DecodeConfig
from speculative.decoding.speculative import speculative_decode
from speculative.decoding.state import DecodeResult
from speculative.measure import alpha
from speculative.measure import trace
from speculative.measure import walltime
from tests import toys

INPUTS = np.array([[3, 1, 2, 0], [5, 0, 0, 0], [2, 2, 6, 4]])


def pair(eos_id=-1):
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(97, 7)) * 2
  return (toys.history(logits, eos_id=eos_id), toys.history(logits + .7 * rng.normal(size=(97, 7)), eos_id=eos_id))


def test_alpha_is_the_mean_overlap_along_the_target_s_texts():
  """Σ min(p, q) at every prefix of its own texts, EOS included and nothing behind it, by NumPy."""
  target, draft = pair(eos_id=3)
  config = DecodeConfig(max_decode_len=12, temperature=1.3)
  texts = autoregressive_decode(target, INPUTS, config, seed=4)
  measured = alpha.measure_alpha(target, draft, INPUTS, texts, config)
  betas = []
  for row, text in zip(INPUTS, toys.texts_of(texts)):
    for i in range(len(text)):
      p, q = (toys.softmax(toys.history_logits(m, row.sum())([0, *text[:i]]) / 1.3) for m in (target, draft))
      betas.append(np.minimum(p, q).sum())
  assert measured.tokens == len(betas)
  np.testing.assert_allclose(measured.alpha, np.mean(betas), rtol=1e-5)


def test_standard_error_counts_texts_not_tokens():
  """Tokens of a text that are all alike carry one text's information: the error is that of the mean of 4 texts."""
  beta = np.repeat(np.array([[.2], [.4], [.6], [.8]]), 10, axis=1)
  pooled = alpha.pool([beta[:2], np.pad(beta[2:], ((0, 1), (0, 3)), constant_values=np.nan)])
  assert pooled.tokens == 40
  np.testing.assert_allclose(pooled.alpha, .5)
  np.testing.assert_allclose(pooled.standard_error, np.std([.2, .4, .6, .8], ddof=1) / 2, rtol=1e-6)


def test_the_loop_accepts_as_often_as_alpha_says():
  """α is not accepted/drafted. With p and q the same everywhere (i.i.d.): accepted/tested = α, accepted/drafted and
  tokens a round by the formulas, each within 4 standard errors (false alarm 1e-4)."""
  p, q, gamma = np.array([.1, .6, .3]), np.array([.5, .3, .2]), 5
  target, draft = (toys.markov(np.log(np.tile(a, (3, 1)))) for a in (p, q))
  config = DecodeConfig(gamma=gamma, max_decode_len=300, temperature=1.0)
  result = speculative_decode(target, draft, np.ones((64, 1), int), config, seed=1)
  a = theory.acceptance(p, q)
  assert abs(a - .6) < 1e-9
  whole = [row[:rounds - 1] for row, rounds in zip(result.accepted_per_round, result.rounds)]  # the last may be cut
  accepted = np.concatenate(whole)
  tested = accepted + (accepted < gamma)
  rounds = len(accepted)
  error = accepted.std() / np.sqrt(rounds)
  assert abs(accepted.mean() + 1 - theory.expected_tokens(a, gamma)) < 4 * error
  assert abs(accepted.sum() / tested.sum() - a) < 4 * np.sqrt(a * (1 - a) / tested.sum())
  assert abs(accepted.sum() / (gamma * rounds) - theory.accepted_over_drafted(a, gamma)) < 4 * error / gamma


def made_up(gamma, rows):
  """A `DecodeResult` of [(accepted in each round, whether the last one rejected)]; other fields are empty."""
  counts = np.full((len(rows), 5), -1)
  for b, (accepted, _) in enumerate(rows):
    counts[b, :len(accepted)] = accepted
  accepted = np.where(counts < 0, 0, counts).sum(axis=1)
  rejected = np.array([sum(a < gamma for a in accepted[:-1]) + last for accepted, last in rows])
  return DecodeResult(None, None, None, None, np.array([len(a) for a, _ in rows]), None, accepted + rejected, accepted,
                      counts)


def test_acceptance_by_position():
  rows = [([2, 0, 3], False),  # position 1 rejected once, 3 once
          ([1, 1], True),      # position 2 rejected twice
          ([1, 1], False),     # once, then cut
          ([], False)]
  # Position 1 accepted in rounds 2, 3, 1, 1, 1, 1, rejected in one; and so on.
  np.testing.assert_allclose(alpha.acceptance_by_position(made_up(3, rows), 3), [6 / 7, 2 / 5, 1 / 2])
  unknown = alpha.acceptance_by_position(made_up(3, [([0, 0], True)]), 3)
  np.testing.assert_array_equal(unknown, [0, np.nan, np.nan])


def test_acceptance_by_position_of_a_decode():
  """Against the recorded rounds, and all positions together against `tested` and `accepted`."""
  target, draft = pair(eos_id=3)
  config = DecodeConfig(gamma=3, max_decode_len=15, temperature=1.0)
  result, rows = trace.record(target, draft, INPUTS, config)
  passed, tested = np.zeros(3), np.zeros(3)
  for r in sum(rows, []):
    passed[:len(r.accepted)] += 1
    tested[:len(r.accepted) + bool(r.rejected)] += 1
  assert passed.sum() == result.accepted.sum() and tested.sum() == result.tested.sum()
  np.testing.assert_allclose(alpha.acceptance_by_position(result, 3), passed / tested)


def test_trace_tells_the_same_decode():
  """Round by round with the same program: the tokens of the rounds are those of the one-call result."""
  target, draft = pair(eos_id=3)
  config = DecodeConfig(gamma=3, max_decode_len=15)
  whole = speculative_decode(target, draft, INPUTS, config)
  result, rows = trace.record(target, draft, INPUTS, config)
  assert toys.texts_of(result) == toys.texts_of(whole)
  for b, rounds in enumerate(rows):
    assert tuple(token for r in rounds for token in r.accepted + r.last) == toys.texts_of(whole)[b]
    assert [len(r.accepted) for r in rounds] == whole.accepted_per_round[b, :whole.rounds[b]].tolist()
    assert all(len(r.accepted) + len(r.rejected) == 3 for r in rounds[:-1])


def test_side_by_side_times_leave_the_compiling_call_out():
  calls = []

  def run(name, tokens):
    calls.append(name)
    return tokens
  times = walltime.time_side_by_side({'a': lambda: run('a', 3), 'b': lambda: run('b', 5)}, passes=2)
  assert calls == ['a', 'b'] * 3
  assert times['a'][1] == 3 and times['b'][1] == 5
  assert all(seconds > 0 for seconds, _ in times.values())


def test_step_times(tiny, tiny_draft):
  """c and v come from real steps: finite, positive, v interpolated between the γ that were timed, v(0) = 1."""
  times = walltime.step_times(tiny, {'draft': tiny_draft}, np.full((1, 8), 5), DecodeConfig(max_decode_len=32), (1, 3),
                              8, 3)['draft']
  v = times.v(3)
  assert v[0] == 1 and len(v) == 4
  np.testing.assert_allclose(v[2], (v[1] + v[3]) / 2)
  assert times.c == times.draft / times.target
