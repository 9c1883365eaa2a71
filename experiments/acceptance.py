"""α against position and temperature, and accepted lengths against the i.i.d. assumption of Theorem 3.8.

  python -m experiments.acceptance [--gin.acceptance_settings.tokens=10000]
"""
import os

import gin
import numpy as np

from experiments import alpha as alphas
from experiments import command
from experiments import zoo as zoos
from speculative import text as decoding
from speculative import theory
from speculative.decoding.autoregressive import autoregressive_decode
from speculative.decoding.config import DecodeConfig
from speculative.decoding.speculative import speculative_decode
from speculative.measure import alpha as measure
from speculative.report import results
from speculative.report import tables


@gin.configurable
def acceptance(output_dir, dry_run=False):
  """Measures, prints the tables, writes results.jsonl."""
  loaded = zoos.zoo(dry_run=dry_run)
  if dry_run:
    return
  rows = measure_acceptance(loaded)
  os.makedirs(output_dir, exist_ok=True)
  results.write_jsonl(os.path.join(output_dir, 'results.jsonl'), rows)
  for table in tables.acceptance_tables(rows):
    print(table.to_text())


@gin.configurable('acceptance_settings')
def measure_acceptance(loaded, tokens=4000, temperatures=(0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0), at=(0.0, 1.0), gamma=7,
                       edges=(0, 1, 2, 4, 8, 16, 32, 64, 128), texts=64, max_input_len=64, max_decode_len=128, seed=0):
  """Three kinds of rows for results.jsonl.

  Args:
    loaded: `packaged.Zoo`.
    tokens: α is over at least so many of the target's, at each temperature.
    temperatures: of target and draft, for α against temperature.
    at: those of them at which positions and accepted lengths are looked at.
    gamma: γ of the decodes whose accepted lengths are counted.
    edges: positions in the output that begin a group, and the end of the last.
    texts: decoded for the accepted lengths, at most: plainly, and with every model as draft.
    max_input_len, max_decode_len: as for `alpha.measure_alphas`.

  Returns:
    list of rows. 'temperature': `alpha`. 'position': `alpha` of output positions `first` … `last`. 'accepted': `counts`, how
    many rounds accepted 0 … γ drafts, those cut by a text's end apart (`cut`); `tokens_per_round` of all rounds; `alpha` of
    the target's own texts for the same inputs, `tokens_per_round_iid` by Equation 1 with it, `tokens_per_round_beta` by the β
    of each of their places (`measure.tokens_per_round`); `by_position`, the share accepted of the drafts tested at each
    position of a round.
  """
  rows = []
  with alphas.steps('acceptance', len(loaded.texts) * (len(temperatures) + len(at) * len(loaded.drafts))) as advance:
    for task in loaded.texts:
      short = alphas.short_texts(loaded, task, max_input_len)
      inputs = decoding.encode(loaded.target, [text for text, _ in alphas.shuffled(short)[:texts]], buckets=(max_input_len,))
      for temperature in temperatures:
        config = DecodeConfig(gamma=gamma, max_decode_len=max_decode_len, temperature=temperature)
        groups, _ = alphas.target_texts(loaded, short, config, tokens, seed, max_input_len)
        found = alphas.alphas_of(loaded, task, groups, config, seed)
        common = {'seed': seed, 'gamma': None}
        rows += [zoos.row('temperature', task, loaded, name, temperature, alpha=a.alpha, alpha_se=a.standard_error,
                          tokens=a.tokens, **common) for name, a in found.items()]
        advance()
        if temperature not in at:
          continue
        for name, a in found.items():
          rows += [zoos.row('position', task, loaded, name, temperature, first=first, last=last - 1, alpha=part.alpha,
                            alpha_se=part.standard_error, tokens=part.tokens, **common)
                   for first, last, part in zip(edges[:-1], edges[1:], measure.by_position(a.beta, edges)) if part]
        plain = autoregressive_decode(loaded.target, inputs, config, seed)
        for name, drafter in loaded.drafts.items():
          result = speculative_decode(loaded.target, drafter, inputs, config, seed)
          a = measure.measure_alpha(loaded.target, drafter, inputs, plain, config, seed)
          rows.append(zoos.row('accepted', task, loaded, name, temperature, **_accepted(result, a, gamma), seed=seed))
          advance()
  return rows


def _accepted(result, alpha, gamma):
  """What a row 'accepted' has."""
  last = np.arange(result.accepted_per_round.shape[1]) == result.rounds[:, None] - 1
  whole = result.accepted_per_round[(result.accepted_per_round >= 0) & ~last]
  by_position = measure.acceptance_by_position(result, gamma)
  return {
      'gamma': gamma, 'alpha': alpha.alpha, 'counts': np.bincount(whole, minlength=gamma + 1).tolist(), 'cut': int(last.sum()),
      'tokens_per_round': float(result.lengths.sum() / result.rounds.sum()),
      'tokens_per_round_iid': float(theory.expected_tokens(min(alpha.alpha, 1.0), gamma)),
      'tokens_per_round_beta': measure.tokens_per_round(alpha.beta, gamma),
      'by_position': [None if np.isnan(share) else round(float(share), 4) for share in by_position]}


if __name__ == '__main__':
  command.main(acceptance)
