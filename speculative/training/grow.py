"""Function-preserving growth of a T5 v1.1 model into a larger shape (after Net2Net, Chen et al. 2016)."""
import dataclasses
import functools
import math
import zlib

import jax
import jax.numpy as jnp

from speculative.models import t5


def grow(params, config, larger, key=None, dtype='float32'):
  """Embeds a model in a larger shape without changing what it computes.

  Old weights sit in the leading rows and columns. Everything new that could reach the output is multiplied by a new
  zero: new units, heads and layers write nothing, new width carries nothing. What a zero guards is random when `key`
  is given (so that training can use it) and zero otherwise. RMS norm averages over the width, so embeddings and
  residual-writing matrices are multiplied by √(D/d) and the norms' scales divided by it.

  Args:
    params: parameters of `config`, as `t5.init_params` lays them out.
    config: `t5.T5Config` of the given model, untied.
    larger: `t5.T5Config`, no smaller in any dimension, alike in everything else.
    key: PRNG key for what is new, or None for zeros.
    dtype: of the result. Layers are made one at a time, so that little more than the result is held.

  Returns:
    Parameters of `larger`.

  Raises:
    ValueError: if `larger` is smaller somewhere, or differs in kind.
  """
  sizes = ('vocab_size', 'd_model', 'd_ff', 'num_heads', 'd_kv', 'num_encoder_layers', 'num_decoder_layers')
  for f in dataclasses.fields(config):
    old, new = getattr(config, f.name), getattr(larger, f.name)
    if f.name in sizes and new < old:
      raise ValueError(f'cannot grow: {f.name} would shrink from {old} to {new}')
    if f.name not in sizes + ('dropout',) and new != old:
      raise ValueError(f'cannot grow: {f.name} differs ({old!r} and {new!r})')
  if config.tied:
    raise ValueError('cannot grow a model whose head is tied: the head would need another scale than the embedding')

  if config.layer_bias:
    raise ValueError('cannot grow a model with a relative bias in every layer (umT5)')

  ratio = math.sqrt(larger.d_model / config.d_model)
  one_layer = dataclasses.replace(larger, vocab_size=1, num_encoder_layers=1, num_decoder_layers=1)

  def fresh_layers(i):
    """What is new in layer i of both stacks: random as at initialisation, except where it must guard the rest."""
    if key is not None:
      return t5.init_params(one_layer, jax.random.fold_in(key, i))
    shapes = jax.eval_shape(lambda: t5.init_params(one_layer, jax.random.key(0)))
    return jax.tree.map(lambda a: jnp.zeros(a.shape), shapes)

  def fresh(name, shape, std):
    """The same for a matrix outside of the layers."""
    if key is None:
      return jnp.zeros(shape)
    return std * jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), shape)

  def put(old, new, zero=()):
    """`old` in the leading corner of `new`; along the axes in `zero`, all that is new is zero."""
    for axis in zero:
      new = jnp.where((jnp.arange(new.shape[axis]) < old.shape[axis])
                      .reshape([-1 if a == axis else 1 for a in range(new.ndim)]), new, 0)
    return new.at[tuple(slice(0, n) for n in old.shape)].set(old)

  def heads(w, c, parts):  # [d, heads × parts × d_kv] → [d, heads, parts, d_kv]
    return w.reshape(w.shape[0], c.num_heads, parts, c.d_kv)

  def attention(old, new):
    """Self-attention's qkv. New head dimensions: keys are zero, so scores are unchanged."""
    old, new = heads(old, config, 3), heads(new, larger, 3)
    new = new.at[:, :config.num_heads, 1, config.d_kv:].set(0)
    return put(old, new).reshape(larger.d_model, -1)

  def output(old, new):  # [heads × d_kv, d]: writes nothing from new heads or dimensions, nor into new width
    old = old.reshape(config.num_heads, config.d_kv, -1) * ratio
    new = new.reshape(larger.num_heads, larger.d_kv, -1)
    return put(old, new, zero=(0, 1, 2)).reshape(-1, larger.d_model)

  def cross(old, new):
    kv_old, kv_new = heads(old['kv'], config, 2), heads(new['kv'], larger, 2)
    kv_new = kv_new.at[:, :config.num_heads, 0, config.d_kv:].set(0)
    return {'q': put(heads(old['q'], config, 1), heads(new['q'], larger, 1)).reshape(larger.d_model, -1),
            'kv': put(kv_old, kv_new).reshape(larger.d_model, -1),
            'out': output(old['out'], new['out'])}

  def wi(w, c):  # [d, blocks × 2 × block] → [d, 2, d_ff]
    if not c.gated:
      return w.reshape(w.shape[0], 1, c.d_ff)
    return w.reshape(w.shape[0], -1, 2, c.gate_block).swapaxes(1, 2).reshape(w.shape[0], 2, c.d_ff)

  def mlp(old, new):
    w = put(wi(old['wi'], config), wi(new['wi'], larger))
    if larger.gated:
      w = w.reshape(larger.d_model, 2, -1, larger.gate_block).swapaxes(1, 2)
    return {'wi': w.reshape(larger.d_model, -1), 'wo': put(old['wo'] * ratio, new['wo'], zero=(0, 1))}

  def norm(old, new):
    return {'scale': put(old['scale'], new['scale']) / ratio}

  def layer(old, new):
    grown = {
        'attention_norm': norm(old['attention_norm'], new['attention_norm']),
        'attention': {'qkv': attention(old['attention']['qkv'], new['attention']['qkv']),
                      'out': output(old['attention']['out'], new['attention']['out'])},
        'mlp_norm': norm(old['mlp_norm'], new['mlp_norm']),
        'mlp': mlp(old['mlp'], new['mlp']),
    }
    if 'cross' in old:
      grown['cross_norm'] = norm(old['cross_norm'], new['cross_norm'])
      grown['cross'] = cross(old['cross'], new['cross'])
    return grown

  def silent(new):
    """A new layer, which writes nothing."""
    new = dict(new, attention=dict(new['attention'], out=jnp.zeros_like(new['attention']['out'])),
               mlp=dict(new['mlp'], wo=jnp.zeros_like(new['mlp']['wo'])))
    if 'cross' in new:
      new['cross'] = dict(new['cross'], out=jnp.zeros_like(new['cross']['out']))
    return new

  old = jax.tree.map(jnp.asarray, params)
  float32 = functools.partial(jax.tree.map, lambda a: a.astype(jnp.float32))
  kept = functools.partial(jax.tree.map, lambda a: a.astype(dtype))
  grown = {'embedding': kept(put(float32(old['embedding']) * ratio,
                                 fresh('embedding', (larger.vocab_size, larger.d_model), 1.), zero=(1,))),
           'head': kept(put(float32(old['head']), fresh('head', (larger.d_model, larger.vocab_size), larger.d_model ** -.5))),
           'encoder': {}, 'decoder': {}}
  depths = {'encoder': larger.num_encoder_layers, 'decoder': larger.num_decoder_layers}
  for i in range(max(depths.values())):
    new = fresh_layers(i)
    for stack, depth in depths.items():
      theirs, ours, name = old[stack], grown[stack], f'layer_{i}'
      if i == 0:
        ours['relative_bias'] = kept(put(float32(theirs['relative_bias']), new[stack]['relative_bias'], zero=(1,)))
        ours['final_norm'] = kept(norm(float32(theirs['final_norm']), new[stack]['final_norm']))
      if i < depth:
        ours[name] = kept(layer(float32(theirs[name]), new[stack]['layer_0']) if name in theirs
                          else silent(new[stack]['layer_0']))
  return grown
