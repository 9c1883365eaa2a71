"""The decoding loops: exactness, stops, rows, caches, compilations, bad input."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.decoding import speculative as loop
from speculative.decoding.autoregressive import autoregressive_decode
from speculative.decoding.config import DecodeConfig
from speculative.decoding.speculative import speculative_decode
from speculative.decoding.state import FinishReason
from speculative.models import attention
from speculative.models import t5
from tests import toys

V, STATES = 7, 97
INPUTS = np.array([[3, 1, 2, 0], [5, 0, 0, 0], [2, 2, 6, 4]])


def table(seed, scale=2.0, v=V, states=STATES):
  return np.random.default_rng(seed).normal(size=(states, v)) * scale


@pytest.fixture(scope='module')
def pair():
  """A target and a draft that agree often; both feel every slip of cache, position and row."""
  logits = table(0)
  return toys.history(logits), toys.history(logits + table(1, .7))


def greedy_rows(target, inputs, n, eos_id=-1, min_len=0):
  return [toys.greedy(toys.history_logits(target, row.sum()), n, eos_id=eos_id, min_len=min_len) for row in inputs]


@pytest.mark.parametrize('gamma', [1, 3, 7])
def test_greedy_tokens_are_the_target_s(pair, gamma):
  """Invariant 9, against a NumPy oracle; also for a draft that is always wrong and one that is always right."""
  target, draft = pair
  config = DecodeConfig(gamma=gamma, max_decode_len=30)
  expected = greedy_rows(target, INPUTS, 30)
  wrong = toys.history(-np.asarray(target.params))
  for drafter in (draft, wrong, target):
    assert speculative_decode(target, drafter, INPUTS, config).tokens.tolist() == expected
  assert autoregressive_decode(target, INPUTS, config).tokens.tolist() == expected


@pytest.mark.parametrize('gamma', [1, 2, 4, 7])
def test_target_as_draft_accepts_everything(tiny, gamma):
  """Draft cache out of step after full acceptance: ⌈N / (γ + 1)⌉ target calls, all drafts accepted (invariant 4)."""
  n = 29
  inputs = np.random.default_rng(0).integers(2, 60, (2, 8))
  result = speculative_decode(tiny, tiny, inputs, DecodeConfig(gamma=gamma, max_decode_len=n))
  rounds = -(-n // (gamma + 1))
  assert (result.rounds == rounds).all()
  assert (result.accepted_per_round[:, :rounds - 1] == gamma).all()
  assert (result.accepted_per_round[:, rounds:] == -1).all()
  assert (result.accepted == result.tested).all()
  assert (result.drafted == gamma * rounds).all()


@pytest.mark.parametrize('gamma', [pytest.param(1, marks=pytest.mark.slow), 3])
def test_lengths_are_counted_in_tokens(pair, gamma):
  """Limits counted in rounds: N = 0 … 2γ + 3, exactly N tokens, never one more (invariant 6)."""
  target, draft = pair
  for n in range(2 * gamma + 4):
    result = speculative_decode(target, draft, INPUTS, DecodeConfig(gamma=gamma, max_decode_len=n))
    assert result.tokens.shape == (3, n)
    assert result.tokens.tolist() == greedy_rows(target, INPUTS, n)
    assert (result.lengths == n).all() and (result.finish_reason == FinishReason.LENGTH).all()


def test_each_greedy_token_in_turn_as_eos(pair):
  """EOS accepted in mid-block unnoticed, or taken though only proposed."""
  target, draft = pair
  for eos in range(V):
    target_eos, draft_eos = (dataclasses.replace(m, eos_id=eos) for m in pair)
    result = speculative_decode(target_eos, draft_eos, INPUTS, DecodeConfig(gamma=4, max_decode_len=20))
    expected = greedy_rows(target, INPUTS, 20, eos)
    assert toys.texts_of(result) == [tuple(row) for row in expected]
    for row, n, reason, ids in zip(expected, result.lengths, result.finish_reason, result.tokens):
      assert reason == (FinishReason.EOS if row[-1] == eos else FinishReason.LENGTH)
      assert (ids[n:] == target.pad_id).all()


@pytest.mark.parametrize('min_len', [0, 1, 5, 12])
def test_min_decode_len(pair, min_len):
  target, draft = (dataclasses.replace(m, eos_id=2) for m in pair)
  config = DecodeConfig(gamma=3, max_decode_len=12, min_decode_len=min_len)
  expected = [tuple(row) for row in greedy_rows(target, INPUTS, 12, 2, min_len)]
  assert toys.texts_of(speculative_decode(target, draft, INPUTS, config)) == expected
  assert toys.texts_of(autoregressive_decode(target, INPUTS, config)) == expected


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_rows_do_not_feel_their_neighbours(pair, temperature):
  """Rows cut to the shortest acceptance, or mixed up: every row equals its B = 1 run under the same row id, and
  permuting rows with their ids permutes results (invariants 2, 5)."""
  target, draft = (dataclasses.replace(m, eos_id=1) for m in pair)
  rng = np.random.default_rng(0)
  inputs, ids = rng.integers(1, V, (9, 4)), rng.permutation(100)[:9]
  config = DecodeConfig(gamma=3, max_decode_len=16, temperature=temperature)
  alone = [speculative_decode(target, draft, inputs[b:b + 1], config, 5, ids[b:b + 1]) for b in range(9)]
  for batch in ([0, 1], [4, 2, 7], [8, 1, 3, 5, 0], list(range(8)), [8, 7, 6, 5, 4, 3, 2, 1, 0]):
    together = speculative_decode(target, draft, inputs[batch], config, 5, ids[batch])
    for i, b in enumerate(batch):
      for field in ('tokens', 'lengths', 'finish_reason', 'rounds', 'tested', 'accepted', 'accepted_per_round'):
        np.testing.assert_array_equal(getattr(together, field)[i], getattr(alone[b], field)[0], err_msg=field)


def test_nothing_is_left_over_from_an_earlier_call(pair):
  target, draft = pair
  config = DecodeConfig(gamma=2, max_decode_len=12, temperature=1.0)
  first = speculative_decode(target, draft, INPUTS, config, seed=1)
  speculative_decode(target, draft, INPUTS[::-1], config, seed=2)
  again = speculative_decode(target, draft, INPUTS, config, seed=1)
  jax.tree.map(np.testing.assert_array_equal, dataclasses.asdict(first), dataclasses.asdict(again))


def test_one_compilation_serves_all_settings(pair):
  """Recompilation by seed, temperature, threshold, or by the kind of a scalar (invariant 8)."""
  target, draft = pair

  def decode(seed=0, **settings):
    return speculative_decode(target, draft, INPUTS, DecodeConfig(gamma=2, max_decode_len=9, **settings), seed)
  decode(top_k=3)
  before = loop.run._cache_size(), loop.prefill._cache_size()
  decode(seed=7, top_k=2, temperature=0.3, lenience=0.5)
  decode(seed=np.int64(3), top_p=0.5, temperature=np.float64(1), min_decode_len=2)
  decode(seed=np.array([1, 2, 3]), top_k=np.array([0, 2, 3]), temperature=jnp.float32(1.5))
  decode(seed=[1, 2, 3], top_k=2, temperature=[0, .5, 1.], min_decode_len=[0, 1, 2])
  assert (loop.run._cache_size(), loop.prefill._cache_size()) == before
  decode(temperature=1)  # without filters: the other program, once
  decode()
  assert loop.run._cache_size() == before[0] + 1


def test_a_model_of_equal_configuration_is_not_compiled_again(tiny):
  config = DecodeConfig(gamma=2, max_decode_len=4)
  decode = lambda model: speculative_decode(model, model, INPUTS, config)
  decode(tiny)
  before = loop.run._cache_size()
  decode(dataclasses.replace(tiny, params=jax.tree.map(lambda a: a + 1, tiny.params)))
  assert loop.run._cache_size() == before


def test_settings_are_per_row(pair):
  target, draft = pair
  config = DecodeConfig(gamma=3, max_decode_len=10, temperature=np.array([0., 1., 0.]), top_k=np.array([0, 1, 0]))
  assert speculative_decode(target, draft, INPUTS, config).tokens.tolist() == greedy_rows(target, INPUTS, 10)


def test_log_probs_are_those_of_a_full_pass(tiny, tiny_draft):
  inputs = np.random.default_rng(1).integers(2, 60, (3, 8))
  forward = jax.jit(t5.T5(tiny.config).apply)
  for config in (DecodeConfig(gamma=3, max_decode_len=12), DecodeConfig(gamma=3, max_decode_len=12, temperature=.7)):
    for result in (speculative_decode(tiny, tiny_draft, inputs, config), autoregressive_decode(tiny, inputs, config)):
      decoder_inputs = np.pad(result.tokens[:, :-1], ((0, 0), (1, 0)))
      logits = forward({'params': tiny.params}, inputs, decoder_inputs)
      expected = jax.nn.log_softmax(logits / (config.temperature or 1.0))
      expected = np.take_along_axis(np.asarray(expected), result.tokens[..., None], -1)[..., 0]
      np.testing.assert_allclose(result.log_probs, expected, atol=1e-4)


@pytest.mark.parametrize('side', ['target', 'draft'])
@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_a_broken_row_is_flagged_and_alone(side, bad):
  """A NaN or +inf row turned into an ordinary token: that row ends with `error`, the others are unchanged."""
  logits = table(6, states=40)
  target, draft = toys.clock(logits), toys.clock(logits + table(7, .5, states=40))

  def extend(params, cache, tokens, positions):
    slots = positions[:, None] + jnp.arange(tokens.shape[1])
    hit = (cache['offset'][:, None] == 11) & (slots >= 5)  # the row whose input sums to 11, from the sixth token on
    return jnp.where(hit[..., None], bad, params[slots]), cache

  inputs = np.array([[3, 3], [5, 6], [4, 4]])
  config = DecodeConfig(gamma=3, max_decode_len=12)
  clean = speculative_decode(target, draft, inputs, config)
  broken = [dataclasses.replace(m, extend=extend) if name == side else m
            for name, m in (('target', target), ('draft', draft))]
  result = speculative_decode(*broken, inputs, config)
  assert result.finish_reason.tolist() == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
  for b, n in enumerate((12, result.lengths[1], 12)):
    np.testing.assert_array_equal(result.tokens[b, :n], clean.tokens[b, :n])
  assert result.lengths[1] == 5
  assert (result.tokens[1, 5:] == 0).all()


def test_lenience_at_temperature_0(pair):
  """Appendix A.5 before the argmax: every token has p ≥ l · max p at its place; l = 1 is bit-identical to plain."""
  target, draft = pair
  strict = speculative_decode(target, draft, INPUTS, DecodeConfig(gamma=3, max_decode_len=20))
  assert strict.tokens.tolist() == greedy_rows(target, INPUTS, 20)
  lenient = speculative_decode(target, draft, INPUTS, DecodeConfig(gamma=3, max_decode_len=20, lenience=0.3))
  assert lenient.accepted.sum() > strict.accepted.sum()
  for row, text in zip(INPUTS, lenient.tokens):
    logits = toys.history_logits(target, row.sum())
    for i, token in enumerate(text):
      p = toys.softmax(logits([0, *text[:i]]))
      assert p[token] >= 0.3 * p.max() - 1e-6


def test_decoder_only_targets_start_at_their_prompts():
  """`first`: each row begins at its own last prompt token, in target and draft."""
  logits = table(8)
  target, draft = toys.prompted(logits), toys.prompted(logits + table(9, .7))
  result = speculative_decode(target, draft, INPUTS, DecodeConfig(gamma=3, max_decode_len=10))
  for row, text in zip(INPUTS, result.tokens):
    prompt = row[row != 0].tolist()
    # Slots of the prompt's padding are overwritten by what is decoded.
    assert text.tolist() == toys.greedy(toys.history_logits(target), 10, start=prompt)


# The model's cache and positions.


def test_blocks_equal_the_full_pass(tiny):
  """Bias, mask or position as if a block began at 0: blocks of 1, γ + 1 and random sizes over 200 positions."""
  rng = np.random.default_rng(0)
  inputs, tokens = rng.integers(2, 60, (2, 20)), rng.integers(2, 60, (2, 200))
  full = jax.jit(t5.T5(tiny.config).apply)({'params': tiny.params}, inputs, tokens)
  prefill, extend = jax.jit(tiny.prefill, static_argnums=2), jax.jit(tiny.extend)
  for sizes in ([4] * 50, [1] * 8 + [7, 2, 30, 3] * 4 + [24], [200]):
    cache, at, out = prefill(tiny.params, inputs, 200), 0, []
    for size in sizes:
      logits, cache = extend(tiny.params, cache, tokens[:, at:at + size], jnp.full(2, at))
      out.append(logits)
      at += size
    assert at == 200
    np.testing.assert_allclose(np.concatenate(out, axis=1), full, atol=1e-5 * np.ptp(full))


def test_blocks_equal_the_full_pass_in_bfloat16(tiny):
  """One token (on CPUs a path of its own) and blocks, to bfloat16's rounding; sums and caches lose no more than that."""
  model = dataclasses.replace(tiny, params=jax.tree.map(lambda a: a.astype(jnp.bfloat16), tiny.params))
  rng = np.random.default_rng(0)
  inputs, tokens = rng.integers(2, 60, (1, 20)), rng.integers(2, 60, (1, 12))
  full = jax.jit(t5.T5(model.config).apply)({'params': jax.tree.map(lambda a: a.astype(jnp.float32), model.params)},
                                            inputs, tokens)
  prefill, extend = jax.jit(model.prefill, static_argnums=2), jax.jit(model.extend)
  for sizes in [1] * 12, [5, 1, 6]:
    cache, at, out = prefill(model.params, inputs, 12), 0, []
    for size in sizes:
      logits, cache = extend(model.params, cache, tokens[:, at:at + size], np.array([at]))
      out.append(logits)
      at += size
    np.testing.assert_allclose(np.concatenate(out, axis=1), full, atol=0.02 * np.ptp(full))


def test_cache_beyond_the_length_never_matters(tiny):
  """Invariant 3: slots beyond hold 1e30, and nothing changes; rows at lengths of their own."""
  rng = np.random.default_rng(1)
  inputs, tokens = rng.integers(2, 60, (2, 6)), rng.integers(2, 60, (2, 5))
  extend = jax.jit(tiny.extend)
  cache = jax.jit(tiny.prefill, static_argnums=2)(tiny.params, inputs, 24)
  _, cache = extend(tiny.params, cache, rng.integers(2, 60, (2, 12)), jnp.zeros(2, jnp.int32))
  positions = jnp.array([7, 3])
  seen = (jnp.arange(cache.self_kv[0][0].shape[3]) < positions[:, None])[:, None]
  dirty = dataclasses.replace(cache, self_kv=[(jnp.where(seen[:, :, None], k, 1e30), jnp.where(seen[..., None], v, 1e30))
                                              for k, v in cache.self_kv])
  clean, _ = extend(tiny.params, cache, tokens, positions)
  np.testing.assert_array_equal(clean, extend(tiny.params, dirty, tokens, positions)[0])


@pytest.mark.parametrize('bidirectional,distance,bucket', [
    (False, [-15, -16, -18, -19, -24, -32, -64, -112, -113, -1000, 0, 3], [15, 16, 16, 17, 19, 21, 26, 30, 31, 31, 0, 0]),
    (True, [-7, -8, -12, -16, -64, -90, -91], [7, 8, 9, 10, 14, 14, 15]),
    (True, [1, 8, 12, 91], [17, 24, 25, 31])])
def test_relative_buckets(bidirectional, distance, bucket):
  assert attention.relative_buckets(jnp.array(distance), bidirectional).tolist() == bucket


def test_encoder_padding_is_not_attended_to(tiny):
  """The same input padded to 9, 16, 64, 512, alone or beside a long row; an all-padding row gives no NaN."""
  rng = np.random.default_rng(2)
  row, tokens = rng.integers(2, 60, 9), rng.integers(2, 60, (1, 6))
  forward = jax.jit(t5.T5(tiny.config).apply)
  expected = forward({'params': tiny.params}, row[None], tokens)
  for width in (16, 64, 512):
    inputs = np.stack([np.pad(row, (0, width - 9)), rng.integers(2, 60, width), np.zeros(width, int)])
    logits = forward({'params': tiny.params}, inputs, np.repeat(tokens, 3, axis=0))
    np.testing.assert_allclose(logits[0], expected[0], atol=1e-5 * np.ptp(expected))
    assert np.isfinite(logits).all()


# Bad input: refused before anything is computed.


@pytest.mark.parametrize('settings,message', [
    ({'gamma': 0}, 'gamma = 0'), ({'gamma': 2.0}, 'gamma'), ({'max_decode_len': -1}, 'max_decode_len'),
    ({'temperature': -0.1}, 'temperature'), ({'temperature': np.nan}, 'temperature'), ({'top_k': -1}, 'top_k'),
    ({'top_k': 1.5}, 'top_k'), ({'top_p': 0.0}, 'top_p'), ({'top_p': 1.1}, 'top_p'), ({'lenience': 0.0}, 'lenience'),
    ({'min_decode_len': 200}, 'min_decode_len')])
def test_settings_out_of_range(settings, message):
  with pytest.raises(ValueError, match=message):
    DecodeConfig(**settings)


@pytest.mark.parametrize('inputs,arguments,message', [
    (np.zeros((0, 3), int), {}, r'\[B, S\]'), (np.zeros(3, int), {}, r'\[B, S\]'), (np.zeros((2, 3)), {}, 'integer'),
    ([[1, 99]], {}, r'inputs\[0, 1\] = 99'), ([[1, -2]], {}, 'no token id'), (INPUTS, {'seed': -1}, 'seed'),
    (INPUTS, {'seed': 0.5}, 'seed'), (INPUTS, {'row_ids': [1, 2]}, 'row_ids'),
    (INPUTS, {'config': DecodeConfig(temperature=np.ones(2))}, r'temperature has shape \(2,\)')])
def test_bad_arguments(pair, inputs, arguments, message):
  for decode in (lambda *a, **k: speculative_decode(*pair, *a, **k), lambda *a, **k: autoregressive_decode(pair[0], *a, **k)):
    with pytest.raises(ValueError, match=message):
      decode(inputs, **arguments)


@pytest.mark.parametrize('change', [{'vocab_size': 6}, {'eos_id': 3}, {'pad_id': 4}, {'start_id': 2}])
def test_pairs_that_do_not_fit(pair, change):
  name = next(iter(change))
  with pytest.raises(ValueError, match=f'do not fit: {name}'):
    speculative_decode(pair[0], dataclasses.replace(pair[1], **change), INPUTS)


def test_something_that_is_no_drafter(pair):
  with pytest.raises(TypeError, match='is no drafter'):
    speculative_decode(pair[0], object(), INPUTS)
