"""Drafters: chains, copying from the input, a user's own, and the checker that finds a wrong q."""
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import testing
from speculative.decoding.autoregressive import autoregressive_decode
from speculative.decoding.config import DecodeConfig
from speculative.decoding.speculative import speculative_decode
from speculative.drafters import ngram
from speculative.drafters.chain import ChainDrafter
from speculative.drafters.copying import CopyingDrafter
from tests import toys

V = 7
INPUTS = np.array([[3, 1, 2, 0], [5, 0, 0, 0], [2, 2, 6, 4]])
FIELDS = 'tokens', 'rounds', 'tested', 'accepted', 'accepted_per_round'


def noisy(seed, scale):
  table = np.random.default_rng(0).normal(size=(97, V)) * 2
  return toys.history(table + np.random.default_rng(seed).normal(size=table.shape) * scale)


@pytest.fixture(scope='module')
def models():
  """Target, larger draft, smaller draft."""
  return noisy(0, 0.), noisy(1, .8), noisy(2, 1.)


def unigram():
  return ngram.unigram(ngram.fit([[2, 3, 1], [4, 5, 6, 0]], V, eos_id=-1))


@dataclasses.dataclass(frozen=True)
class Repeating:
  """A user's own drafter, the smallest that does something: the last token again, or else any other."""
  params: Any = ()
  repeat: float = 3.0

  def prefill(self, params, inputs, max_len):
    return ()

  def draft(self, params, state, tokens, lengths, gamma, sample):
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    drawn = []
    for i in range(gamma):
      x, q = sample(jnp.where(jnp.arange(V) == last, self.repeat, 0.0), i)
      drawn.append((x, q))
      last = x[:, None]
    x, q = zip(*drawn)
    return jnp.stack(x, axis=1), jnp.stack(q, axis=1), state


@pytest.mark.parametrize('gamma,inner', [(1, 1), (4, 3)])
def test_a_chain_drafts_what_its_model_drafts(models, gamma, inner):
  """At T = 0 the chain's drafts are its model's own, whatever sped them up: every round is the same."""
  target, larger, smaller = models
  config = DecodeConfig(gamma=gamma, max_decode_len=30)
  expected = speculative_decode(target, larger, INPUTS, config)
  for drafter in (smaller, ChainDrafter(smaller, unigram(), 2)):
    result = speculative_decode(target, ChainDrafter(larger, drafter, inner), INPUTS, config)
    for field in FIELDS:
      np.testing.assert_array_equal(getattr(result, field), getattr(expected, field), err_msg=field)


@pytest.mark.parametrize('gamma,inner', [(1, 1), (5, 2)])
def test_caches_in_a_chain_are_never_behind(tiny, gamma, inner):
  """Draft cache out of step after full acceptance, in three models at once: all of them the target itself."""
  n = 23
  inputs = np.random.default_rng(0).integers(2, 60, (2, 8))
  counted = _Counting(tiny)
  result = speculative_decode(tiny, ChainDrafter(tiny, ChainDrafter(counted, tiny, inner), inner), inputs,
                              DecodeConfig(gamma=gamma, max_decode_len=n))
  assert (result.accepted == result.tested).all() and (result.rounds == -(-n // (gamma + 1))).all()
  np.testing.assert_array_equal(result.tokens, autoregressive_decode(tiny, inputs, DecodeConfig(max_decode_len=n)).tokens)
  # Calls of the middle model in the worst case of nothing accepted: γ + 1 a token. With everything accepted, far fewer.
  per_round = -(-gamma // (inner + 1))  # of the outer chain's model; each asks its own drafter once
  assert counted.calls <= (int(result.rounds[0]) + 1) * per_round * -(-inner // (inner + 1))


class _Counting:
  """A target that counts how often its `extend` runs."""

  def __init__(self, target):
    self.target, self.calls = target, 0

    def extend(params, cache, tokens, positions):
      jax.debug.callback(self._count)
      return target.extend(params, cache, tokens, positions)
    self.extend = extend

  def _count(self):
    self.calls += 1

  def __getattr__(self, name):
    if name == 'target':
      raise AttributeError(name)
    return getattr(self.target, name)


@pytest.mark.parametrize('inside', ['chain', 'copying'])
def test_a_row_is_as_it_is_alone_in_a_deep_chain(models, inside):
  """Rows make other numbers of inner rounds; none feels another's."""
  target, larger, smaller = models
  inner = ChainDrafter(smaller, unigram(), 3) if inside == 'chain' else CopyingDrafter(target)
  drafter = ChainDrafter(larger, inner, 2)
  config = DecodeConfig(gamma=4, max_decode_len=24, temperature=1.0)
  together = speculative_decode(target, drafter, INPUTS, config, 5)
  for b in range(3):
    alone = speculative_decode(target, drafter, INPUTS[b:b + 1], config, 5, [b])
    for name in FIELDS:
      np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[b])


def test_a_chain_that_does_not_fit(models):
  with pytest.raises(ValueError, match='do not fit: vocab_size 7 and 6'):
    ChainDrafter(models[1], dataclasses.replace(models[2], vocab_size=6))
  with pytest.raises(ValueError, match='gamma = 0'):
    ChainDrafter(models[1], models[2], 0)


def test_a_broken_model_in_a_chain_is_flagged(models):
  """A NaN of the smallest model would spoil what the larger one seems to draw: the row ends with `error`."""
  target, larger, smaller = models
  broken = dataclasses.replace(smaller, params=smaller.params.at[5].set(jnp.nan))
  config = DecodeConfig(gamma=3, max_decode_len=40, temperature=1.0)
  result = speculative_decode(target, ChainDrafter(larger, broken, 2), np.tile(INPUTS, (20, 1)), config)
  assert (result.finish_reason == 4).any()
  assert (result.tokens < V).all() and np.isfinite(result.log_probs).all()


def test_copying_finds_the_longest_match():
  """What follows the last tokens in the input is drafted; every step compared with a search in plain Python."""
  inputs = np.array([[4, 5, 6, 2, 5, 6, 3, 1, 0, 0], [2, 3, 2, 3, 4, 2, 1, 0, 0, 0]])
  committed = [[0, 5, 6], [0, 3, 4]], [[0, 2, 5, 6], [0, 3, 2, 3]], [[0, 6, 3], [0, 1, 2]], [[0], [0]]
  drafter = CopyingDrafter(noisy(0, 0.))
  for rows in committed:
    length = [len(row) for row in rows]
    tokens = np.zeros((2, 9), int)
    for b, row in enumerate(rows):
      tokens[b, :len(row)] = row
    drawn = []

    def sample(logits, i):
      drawn.append(np.asarray(logits))
      return jnp.argmax(logits, axis=-1), jax.nn.softmax(logits)
    _, q, _ = drafter.draft((), jnp.asarray(inputs), jnp.asarray(tokens), jnp.asarray(length), 3, sample)
    for b, row in enumerate(rows):
      following = _look_up(inputs[b].tolist(), row[1:])
      for i in range(3):
        token = following[i] if i < len(following) else 0
        expected = np.eye(V)[token] if token else np.full(V, 1 / V)
        np.testing.assert_allclose(q[b, i], expected, atol=1e-6)


def _look_up(text, committed, max_ngram=3):
  for n in range(min(max_ngram, len(committed)), 0, -1):
    for s in range(len(text) - n + 1):
      if text[s:s + n] == committed[-n:]:
        return text[s + n:]
  return []


def test_copying_speeds_up_a_target_that_copies():
  """A target that repeats its input token by token: after the first, every round is accepted whole."""
  v = 20
  table = np.full((v, v), -9.)
  table[np.arange(v), (np.arange(v) + 1) % v] = 9
  target = toys.markov(table)
  inputs = np.arange(v)[None]
  result = speculative_decode(target, CopyingDrafter(target), inputs, DecodeConfig(gamma=4, max_decode_len=15))
  assert result.tokens.tolist() == [list(range(1, 16))]
  assert result.accepted_per_round[0, 1:3].tolist() == [4, 4]


def test_copying_is_compiled_once(models):
  """Two drafters of equal settings are one program."""
  a, b = CopyingDrafter(models[0]), CopyingDrafter(models[0])
  assert a.draft == b.draft and hash(a.draft) == hash(b.draft) and a.draft != CopyingDrafter(models[0], 2).draft
  with pytest.raises(ValueError, match='max_ngram = 0'):
    CopyingDrafter(models[0], 0)


@pytest.mark.parametrize('make', [
    lambda m: m[1], lambda m: unigram(), lambda m: ChainDrafter(m[1], m[2], 2),
    lambda m: ChainDrafter(m[1], ChainDrafter(m[2], unigram(), 1), 3), lambda m: CopyingDrafter(m[0]),
    lambda m: Repeating()], ids=['model', 'unigram', 'chain', 'long chain', 'copying', "user's"])
def test_the_checker_passes_what_is_right(models, make):
  config = DecodeConfig(gamma=3, max_decode_len=30, temperature=1.0, top_p=np.repeat([1., .8, 1.], 256))
  checked = testing.check_drafter(models[0], make(models), INPUTS, config)
  assert checked['drafts'] > 10000


class Wrong(Repeating):
  """Draws from one distribution and returns another: the kinds of mistake that users make."""

  def __init__(self, kind):
    super().__init__()
    object.__setattr__(self, 'kind', kind)

  def draft(self, params, state, tokens, lengths, gamma, sample):
    x, q, state = super().draft(params, state, tokens, lengths, gamma, sample)
    if self.kind == 'greedy':
      x = jnp.argmax(q, axis=-1)
    elif self.kind == 'warm':
      q = q ** .8 / jnp.sum(q ** .8, axis=-1, keepdims=True)
    elif self.kind == 'shifted':
      q = jnp.roll(q, 1, axis=1)
    elif self.kind == 'negative':
      q = q.at[..., 0].add(-1.)
    elif self.kind == 'unnormalised':
      q = q * 2
    elif self.kind == 'flat':
      x = x[:, :1]
    elif self.kind == 'reads ahead':
      x = jnp.where(tokens[:, -1:] == 0, x, 1)
    elif self.kind == 'same numbers':
      x = jnp.repeat(x[:, :1], gamma, axis=1)
    return x, q, state

  def __hash__(self):
    return hash(self.kind)

  def __eq__(self, other):
    return isinstance(other, Wrong) and self.kind == other.kind


@pytest.mark.parametrize('kind,message', [
    ('greedy', 'not drawn from the q'), ('warm', 'not drawn from the q'), ('shifted', 'not drawn from the q'),
    ('negative', 'q is negative'), ('unnormalised', 'does not sum to 1'), ('flat', 'x has shape'),
    ('reads ahead', 'beyond the committed'), ('same numbers', 'not drawn from the q')])
def test_the_checker_finds_what_is_wrong(models, kind, message):
  with pytest.raises(AssertionError, match=message):
    testing.check_drafter(models[0], Wrong(kind), INPUTS, DecodeConfig(gamma=3, max_decode_len=30, temperature=1.0))


def test_the_checker_finds_functions_that_are_new_every_time(models):
  class Fresh:
    params = ()
    prefill = staticmethod(lambda params, inputs, max_len: ())

    @property
    def draft(self):
      return lambda *arguments: Repeating().draft(*arguments)
  with pytest.raises(AssertionError, match='draft does not equal itself'):
    testing.check_drafter(models[0], Fresh(), INPUTS)
