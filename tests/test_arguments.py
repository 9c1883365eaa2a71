"""What is passed by mistake: one error each, which names what was wrong, before anything is compiled."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import speculative
from speculative.decoding.config import DecodeConfig
from speculative.drafters import ngram
from speculative.drafters.chain import ChainDrafter
from speculative.drafters.copying import CopyingDrafter
from speculative.drafters.model import ModelDrafter
from speculative.measure import alpha
from speculative.models import decoder_only
from speculative.testing import check_drafter
from tests import toys

V, EOS = 5, 1
TABLE = np.random.default_rng(0).normal(size=(97, V)) * 2
TARGET = toys.history(TABLE, eos_id=EOS)
DRAFT = toys.history(TABLE + np.random.default_rng(1).normal(size=TABLE.shape) * .7, eos_id=EOS)
INPUTS = np.array([[3, 1, 2, 0], [4, 0, 0, 0]])
COUNTS = ngram.fit([[2, 3, 1], [4, 4, 2, 1]], V)
CONFIG = DecodeConfig(gamma=2, max_decode_len=6)
GENERATED = alpha.Generated(np.array([[2, 1], [3, 2]]), np.array([2, 2]))


def decode(target=TARGET, drafter=DRAFT, inputs=INPUTS, config=CONFIG, **kwargs):
  return speculative.speculative_decode(target, drafter, inputs, config, **kwargs)


def plain(target=TARGET, inputs=INPUTS, config=CONFIG, **kwargs):
  return speculative.autoregressive_decode(target, inputs, config, **kwargs)


def measure(drafter=DRAFT, inputs=INPUTS, generated=GENERATED, config=CONFIG, **kwargs):
  return alpha.measure_alpha(TARGET, drafter, inputs, generated, config, **kwargs)


@pytest.mark.parametrize('call', [
    lambda c: decode(config=c), lambda c: plain(config=c), lambda c: measure(config=c),
    lambda c: speculative.beam_decode(TARGET, INPUTS, c), lambda c: speculative.adaptive_decode(TARGET, DRAFT, INPUTS, c)])
@pytest.mark.parametrize('config', [None, 0, {'gamma': 2}, DecodeConfig])
def test_a_config_that_is_none(call, config):
  with pytest.raises(TypeError, match='config = .*: must be a DecodeConfig'):
    call(config)


@pytest.mark.parametrize('target,message', [
    (None, 'NoneType is no target: it has no params'), (toys.Toy, 'Toy is a class'),
    (ModelDrafter(DRAFT), 'ModelDrafter is a drafter, not a target'),
    (ChainDrafter(DRAFT, DRAFT), 'ChainDrafter is a drafter, not a target'),
    (ngram.unigram(COUNTS), 'NgramDrafter is a drafter, not a target')])
def test_a_target_that_is_none(target, message):
  for call in (lambda: decode(target), lambda: plain(target), lambda: speculative.beam_decode(target, INPUTS, CONFIG),
               lambda: ModelDrafter(target), lambda: ChainDrafter(target, DRAFT)):
    with pytest.raises(TypeError, match=message):
      call()


@pytest.mark.parametrize('ids,message', [
    ({'eos_id': 5}, r'eos_id = 5 of Toy: must be in \[-1, 5\)'), ({'pad_id': -1}, 'pad_id = -1'),
    ({'start_id': 9}, 'start_id = 9')])
def test_special_ids_outside_the_vocabulary(ids, message):
  with pytest.raises(ValueError, match=message):
    plain(dataclasses.replace(TARGET, **ids))


@pytest.mark.parametrize('make,kind,message', [
    (lambda: decode(drafter='small'), TypeError, 'str is no drafter'),
    (lambda: decode(drafter=CopyingDrafter), TypeError, 'CopyingDrafter is a class'),
    (lambda: ModelDrafter(DRAFT, 0), ValueError, 'refeed = 0'),
    (lambda: ChainDrafter(DRAFT, DRAFT, 2.0), ValueError, 'gamma = 2.0: must be an integer'),
    (lambda: ChainDrafter(DRAFT, DRAFT, '2'), ValueError, "gamma = '2'"),
    (lambda: ChainDrafter(DRAFT, DRAFT, refeed=1), ValueError, 'refeed = 1'),
    (lambda: CopyingDrafter(TARGET, 2.5), ValueError, 'max_ngram = 2.5'),
    (lambda: ngram.unigram(COUNTS, -1), ValueError, 'smoothing = -1'),
    (lambda: ngram.bigram(COUNTS, backoff=0), ValueError, 'backoff = 0'),
    (lambda: ngram.bigram(COUNTS, max_following=0), ValueError, 'max_following = 0'),
    (lambda: check_drafter(TARGET, DRAFT, INPUTS, rounds=0), ValueError, 'rounds = 0'),
    (lambda: check_drafter(TARGET, DRAFT, INPUTS, copies=0), ValueError, 'copies = 0'),
    (lambda: speculative.adaptive_decode(TARGET, None, INPUTS, CONFIG), TypeError, 'needs a drafter'),
    (lambda: speculative.adaptive_decode(TARGET, DRAFT, INPUTS, CONFIG, 4), TypeError, 'adaptive = 4: must be'),
    (lambda: speculative.beam_decode(TARGET, INPUTS, CONFIG, beam_size=2.0), ValueError, 'beam_size = 2.0'),
    (lambda: speculative.beam_decode(TARGET, INPUTS, CONFIG, length_penalty='a'), ValueError, "length_penalty = 'a'")])
def test_drafters_and_their_settings(make, kind, message):
  with pytest.raises(kind, match=message):
    make()


@pytest.mark.parametrize('arguments', [
    {'gammas': 3}, {'gammas': '12'}, {'gammas': (1.5,)}, {'rounds_per_choice': 1.5}, {'forget': 'a'}, {'forget': [.5, .5]}])
def test_adaptive_gamma(arguments):
  name = next(iter(arguments))
  with pytest.raises(ValueError, match=name):
    speculative.AdaptiveGamma(**arguments)


@pytest.mark.parametrize('settings', [{'temperature': 1j}, {'temperature': True}, {'temperature': [None]},
                                      {'repetition_penalty': np.array([1., 2.])}])
def test_settings_of_the_wrong_type(settings):
  with pytest.raises(ValueError, match=next(iter(settings))):
    DecodeConfig(**settings)


@pytest.mark.parametrize('stop', [5, 'ab', [[], [2]], [[2], [[3]]], [['a']], [[True]], [[2.0]], [None], {2: [3]}, [[[]]]])
def test_stop_sequences_that_are_none(stop):
  with pytest.raises(ValueError, match='stop_sequences = .*: must be a list of sequences'):
    DecodeConfig(stop_sequences=stop)


@pytest.mark.parametrize('stop,kept', [
    (None, ()), ([], ()), (jnp.array([[2, 3]]), ((2, 3),)), ([np.array([2, 3]), [np.int64(4)]], ((2, 3), (4,))),
    ((iter(s) for s in [[2], [3, 4]]), ((2,), (3, 4))), ([[[2]], []], (((2,),), ()))])
def test_stop_sequences_of_every_type(stop, kept):
  assert DecodeConfig(stop_sequences=stop).stop_sequences == kept


@pytest.mark.parametrize('call', [decode, plain])
@pytest.mark.parametrize('arguments,message', [
    ({'seed': jax.random.PRNGKey(0)}, 'seed is a JAX random key'),
    ({'seed': jax.random.key(0)}, 'seed is a JAX random key'),
    ({'row_ids': 3}, 'row_ids = 3: give one for each of the 2 rows'), ({'seed': -1}, 'seed must be in'),
    ({'inputs': [[1, 2], [3]]}, 'fill shorter rows up with pad_id')])
def test_inputs(call, arguments, message):
  with pytest.raises(ValueError, match=message):
    call(**arguments)


def test_decoding_inside_of_jit():
  with pytest.raises(TypeError, match='call it outside of jit'):
    jax.jit(lambda inputs: plain(inputs=inputs).tokens)(INPUTS)


@pytest.mark.parametrize('arguments,message', [
    ({'drafter': toys.history(TABLE[:, :4], eos_id=EOS)}, 'vocab_size 5 and 4'),
    ({'inputs': INPUTS[:1]}, r'tokens \[2, 2\] and lengths \[2\]: must be \[B, N\] and \[B\] with B = 1'),
    ({'inputs': [[7], [1]]}, '7 is no token id'), ({'seed': -1}, 'seed must be in'),
    ({'generated': alpha.Generated(GENERATED.tokens, np.array([2, 3]))}, r'must be in \[0, 2\]'),
    ({'generated': alpha.Generated(GENERATED.tokens + 3, GENERATED.lengths)}, 'ids 4 … 6'),
    ({'generated': alpha.Generated(GENERATED.tokens, np.zeros(2, int))}, 'no tokens'),
    ({'probs': np.zeros((2, 3, 5))}, r'must be \[B, N, V\] = \(2, 2, 5\)')])
def test_measuring_alpha(arguments, message):
  with pytest.raises(ValueError, match=message):
    measure(**arguments)


def test_encoder_decoder_and_decoder_only_do_not_pair():
  prompted = toys.prompted(TABLE, eos_id=EOS)
  with pytest.raises(ValueError, match='one starts anew from encoded inputs, the other continues a prompt'):
    decode(TARGET, prompted)
  with pytest.raises(ValueError, match='one continues a prompt, the other starts anew'):
    decode(prompted, DRAFT)


def test_the_start_token_counts_only_where_decoding_starts_with_it():
  other = ngram.unigram(dataclasses.replace(COUNTS, start_id=4))
  with pytest.raises(ValueError, match='start_id 0 and 4'):
    decode(drafter=other)
  prompted = toys.prompted(TABLE, eos_id=EOS)
  np.testing.assert_array_equal(decode(prompted, other).tokens, plain(prompted).tokens)


def test_a_draft_of_fewer_positions_is_refused():
  """Also inside of a chain; each row's own limit counts."""
  sizes = dict(vocab_size=V, d_model=8, d_ff=8, num_heads=1, num_layers=1)
  models = []
  for positions in (12, 6):
    config = decoder_only.GPTConfig(max_positions=positions, **sizes)
    models.append(speculative.Model(config, decoder_only.init_params(config, jax.random.key(0))))
  target, short = models
  for drafter in (short, ModelDrafter(short), ChainDrafter(target, short), ChainDrafter(short, ngram.unigram(COUNTS))):
    with pytest.raises(ValueError, match=r'inputs\[0\]: a prompt of 3 tokens and up to 6 behind it need 9 positions'):
      decode(target, drafter)
  fitting = dataclasses.replace(CONFIG, row_max_decode_len=[3, 5])
  np.testing.assert_array_equal(decode(target, short, config=fitting).lengths, plain(target, config=fitting).lengths)
  with pytest.raises(ValueError, match='13 tokens: the model has 12 positions'):
    decoder_only.DecoderOnly(target.config).apply({'params': target.params}, np.ones((1, 13), int))


def test_a_huge_top_k_is_every_token():
  config = dataclasses.replace(CONFIG, temperature=1.0)
  expected = plain(config=config)
  np.testing.assert_array_equal(plain(config=dataclasses.replace(config, top_k=2**40)).tokens, expected.tokens)


def test_an_ngram_without_smoothing_drafts_where_everything_it_knows_is_forbidden():
  """Only EOS ever followed, and EOS may not come yet: the row goes on."""
  counts = ngram.fit([[EOS], [EOS]], V)
  config = DecodeConfig(gamma=2, max_decode_len=6, min_decode_len=6, temperature=1.0)
  for drafter in (ngram.unigram(counts, 0), ngram.bigram(counts, 0)):
    result = decode(drafter=drafter, config=config)
    assert (result.finish_reason == speculative.FinishReason.LENGTH).all() and (result.lengths == 6).all()


@pytest.mark.parametrize('drafter', [
    ModelDrafter(DRAFT, 9), ChainDrafter(DRAFT, DRAFT, 3, refeed=7),
    ChainDrafter(DRAFT, ChainDrafter(DRAFT, ChainDrafter(TARGET, ngram.unigram(COUNTS)), 1))])
@pytest.mark.parametrize('limit', [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_buffers_shorter_than_what_is_fed_again(drafter, limit):
  """The toys give NaN where a slot beyond their cache is asked for."""
  config = DecodeConfig(gamma=1, max_decode_len=limit)
  np.testing.assert_array_equal(decode(drafter=drafter, config=config).tokens, plain(config=config).tokens)
  if limit:
    measured = measure(drafter, generated=alpha.Generated(*(np.asarray(a)[:, :limit] if np.ndim(a) > 1 else
                                                            np.minimum(a, limit) for a in GENERATED)))
    assert np.isfinite(measured.alpha)


def test_every_drafter_runs_without_jit():
  """To step through with a debugger."""
  config = DecodeConfig(gamma=1, max_decode_len=2)
  expected = plain(config=config)
  with jax.disable_jit():
    for drafter in (DRAFT, CopyingDrafter(TARGET)):
      np.testing.assert_array_equal(decode(drafter=drafter, config=config).tokens, expected.tokens)


@pytest.mark.slow
def test_64_bit_mode_changes_nothing(tiny, tiny_draft):
  """With jax_enable_x64, which JAX's other users set, every loop keeps its types, and every text is the same."""
  def everything():
    config = DecodeConfig(gamma=2, max_decode_len=6, temperature=[1., 0.], top_k=[3, 0], stop_sequences=[[3, 2]])
    for drafter in (CopyingDrafter(TARGET), ChainDrafter(DRAFT, ngram.bigram(COUNTS))):
      yield decode(drafter=drafter, config=config, seed=3).tokens
      yield np.float32(measure(drafter, config=config).alpha)
    yield plain(config=config, seed=3).tokens
    yield speculative.beam_decode(TARGET, INPUTS, CONFIG, drafter=DRAFT).tokens
    yield speculative.adaptive_decode(TARGET, DRAFT, INPUTS, CONFIG).tokens
    yield decode(tiny, tiny_draft, np.full((1, 4), 7), CONFIG).tokens
  expected = list(everything())
  with jax.enable_x64(True):
    for a, b in zip(everything(), expected, strict=True):
      np.testing.assert_array_equal(a, b)
