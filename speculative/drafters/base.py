"""The drafter protocol.

A drafter is any object with

  params: a tree of arrays;
  prefill(params, inputs int32[B, S], max_len) → state: called once; max_len slots hold every token ever drafted from;
  draft(params, state, tokens int32[B, L], lengths int32[B], gamma, sample) → (x int32[B, γ], q float32[B, γ, V], state).

tokens[b, :lengths[b]] is everything committed, from the start token on; the rest is padding. `sample(logits[B, ≥ V], i)`
belongs to the loop: it adjusts logits as the target's are adjusted, draws draft number i (0 … γ − 1), and returns
(x_i int32[B], q_i float32[B, V]). Return those very q: exactness rests on q being what x was drawn from.

`prefill` and `draft` are pure and compare equal from call to call (see `speculative.decoding.targets`). Every leaf of the
state has the batch axis first. Optional, compared with the target's before anything is compiled: vocab_size, pad_id,
eos_id, start_id, vocabulary.
"""


def as_drafter(drafter):
  """A drafter as it is; a target (anything with `extend`) wrapped as `ModelDrafter`. Raises TypeError for others."""
  from speculative.drafters.model import ModelDrafter
  if hasattr(drafter, 'draft') and hasattr(drafter, 'prefill'):
    return drafter
  if hasattr(drafter, 'extend') and hasattr(drafter, 'prefill'):
    return ModelDrafter(drafter)
  raise TypeError(f'{type(drafter).__name__} is no drafter: it needs prefill and draft (or extend, as a model has)')
