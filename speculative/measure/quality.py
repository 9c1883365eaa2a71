"""Quality of decoded texts: BLEU and chrF (sacrebleu), ROUGE-2 and ROUGE-L (rouge-score), with bootstrap intervals."""
import numpy as np
import sacrebleu


def bleu(hypotheses, references, samples=1000, seed=0):
  """Corpus BLEU and chrF of lists of texts: {'bleu', 'bleu_low', 'bleu_high', 'chrf'}; 95 % bootstrap interval."""
  metric = sacrebleu.BLEU()
  score = metric.corpus_score(hypotheses, [references])
  low, high = _interval(len(hypotheses), samples, seed, lambda picked: metric.corpus_score(
      [hypotheses[i] for i in picked], [[references[i] for i in picked]]).score)
  chrf = sacrebleu.CHRF().corpus_score(hypotheses, [references]).score
  return {'bleu': score.score, 'bleu_low': low, 'bleu_high': high, 'chrf': chrf}


def rouge(hypotheses, references, samples=1000, seed=0):
  """Mean ROUGE F-measures in percent: {'rouge2', 'rougeL', 'rougeL_low', 'rougeL_high'}; 95 % bootstrap interval."""
  from rouge_score import rouge_scorer  # here: importing it takes 2 s (SciPy), which no other command should wait for
  scorer = rouge_scorer.RougeScorer(['rouge2', 'rougeL'])
  scores = [scorer.score(reference, hypothesis) for hypothesis, reference in zip(hypotheses, references)]
  each = {name: 100 * np.array([s[name].fmeasure for s in scores]) for name in ('rouge2', 'rougeL')}
  low, high = _interval(len(scores), samples, seed, lambda picked: each['rougeL'][picked].mean())
  return {'rouge2': each['rouge2'].mean(), 'rougeL': each['rougeL'].mean(), 'rougeL_low': low, 'rougeL_high': high}


def _interval(n, samples, seed, statistic):
  rng = np.random.default_rng(seed)
  return tuple(np.percentile([statistic(rng.integers(0, n, n)) for _ in range(samples)], [2.5, 97.5]))
