"""Pages that need no other file: the rounds of a decode, and the report."""
import base64
import importlib.resources
import io
import re

import jinja2
import markupsafe
import numpy as np

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
  return _render('trace.html', **describe_trace(texts, rows, result, vocabulary, gamma, settings), timeline=timeline)


def trace_fragment(texts, rows, result, vocabulary, gamma, settings):
  """The same, without the page around it: for a notebook."""
  return _render('style.html') + _render('rounds.html', **describe_trace(texts, rows, result, vocabulary, gamma, settings))


def describe_trace(texts, rows, result, vocabulary, gamma, settings):
  """What the pages show of it, as results.jsonl can hold it: dict. Arguments: as for `trace_page`."""
  decodes = []
  for b, (text, rounds) in enumerate(zip(texts, rows)):
    lines, before = [], ''
    for r, spans in zip(rounds, trace.spans(rounds, vocabulary)):
      lines.append({'accepted': len(r.accepted), 'before': before, 'spans': spans})
      before += ''.join(text for text, kind in spans if kind != trace.REJECTED)
    decodes.append({
        'input': text, 'output': vocabulary.decode(result.tokens[b, :result.lengths[b]]), 'lines': lines,
        'end': ENDS[result.finish_reason[b]], 'totals': _totals(result, [b])})
  return {'decodes': decodes, 'gamma': gamma, 'settings': settings, 'totals': _totals(result, slice(None)),
          'by_position': [None if np.isnan(share) else round(float(share), 4)
                          for share in alpha.acceptance_by_position(result, gamma)]}


def report_page(title, sections):
  """The report on one page.

  Args:
    title: of the page.
    sections: list of `report.Section`.

  Returns:
    str, HTML as `trace_page` has it.
  """
  return _render('report.html', title=title, sections=sections)


def _render(name, **values):
  environment = jinja2.Environment(
      autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
      loader=jinja2.FunctionLoader(lambda name: importlib.resources.files(__package__).joinpath(name).read_text('utf-8')))
  environment.filters |= {'png': _png, 'emphasised': _emphasised}
  return environment.get_template(name).render(**values)


def _emphasised(text):
  """**words** as bold type; everything else is escaped."""
  return markupsafe.Markup(re.sub(r'\*\*(.+?)\*\*', r'<b>\1</b>', str(markupsafe.escape(text))))


def _totals(result, rows):
  rounds, tokens, accepted, tested = (int(getattr(result, key)[rows].sum())
                                      for key in ('rounds', 'lengths', 'accepted', 'tested'))
  return (f'{rounds} rounds, {tokens} tokens, {tokens / max(rounds, 1):.2f} tokens a round; '
          f'{accepted} of {tested} tested drafts accepted')


def _png(figure):
  file = io.BytesIO()
  figure.savefig(file, format='png', dpi=200)
  return base64.b64encode(file.getvalue()).decode()
