"""The rounds of a decode, as a page that needs no other file."""
import base64
import importlib.resources
import io

import jinja2

from speculative.decoding.state import FinishReason
from speculative.measure import alpha
from speculative.measure import trace

ENDS = {FinishReason.EOS: 'end of text', FinishReason.LENGTH: 'length limit', FinishReason.STOP: 'stop',
        FinishReason.ERROR: 'error'}


def trace_page(texts, rows, result, vocabulary, gamma, settings, timeline=None):
  """One line a round, as in the paper's Figure 1.

  Args:
    texts: list of B inputs.
    rows: each text's list of `trace.Round`.
    result: their `DecodeResult`.
    vocabulary: `Vocabulary`.
    gamma: the γ it was decoded with.
    settings: {name: value} of what else a reader should know of the run.
    timeline: Figure to show below, or None.

  Returns:
    str, HTML without scripts, links or files beside it; all texts are escaped.
  """
  template = jinja2.Environment(
      autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
  ).from_string(importlib.resources.files(__package__).joinpath('trace.html').read_text('utf-8'))
  decodes = []
  for b, (text, rounds) in enumerate(zip(texts, rows)):
    lines, before = [], ''
    for r, spans in zip(rounds, trace.spans(rounds, vocabulary)):
      lines.append({'accepted': len(r.accepted), 'before': before, 'spans': spans})
      before += ''.join(text for text, kind in spans if kind != trace.REJECTED)
    decodes.append({
        'input': text, 'output': vocabulary.decode(result.tokens[b, :result.lengths[b]]), 'lines': lines,
        'end': ENDS[result.finish_reason[b]], 'totals': _totals(result, [b])})
  return template.render(
      decodes=decodes, gamma=gamma, settings=settings, totals=_totals(result, slice(None)),
      by_position=alpha.acceptance_by_position(result, gamma), timeline=_png(timeline) if timeline else None)


def _totals(result, rows):
  rounds, tokens, accepted, tested = (int(getattr(result, key)[rows].sum())
                                      for key in ('rounds', 'lengths', 'accepted', 'tested'))
  return (f'{rounds} rounds, {tokens} tokens, {tokens / max(rounds, 1):.2f} tokens a round; '
          f'{accepted} of {tested} tested drafts accepted')


def _png(figure):
  file = io.BytesIO()
  figure.savefig(file, format='png', dpi=200)
  return base64.b64encode(file.getvalue()).decode()
