"""How sure a score is: the bootstrap over sentences, of one model and of two on the same sentences (Koehn, 2004).

A corpus score is a function of sums over lines, so a resample needs no more than these sums anew. Every call draws
the same resamples of the same number of lines, which makes the scores of two models on one test set a pair in each
resample. The draws, the interval and the p value are those of sacreBLEU's paired bootstrap, which itself gives no
interval of the difference and knows no exact match.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from transformer_jax.evaluation.bleu import check_lines

NUM_RESAMPLES = 1000
_SEED = 12345


@dataclass(frozen=True)
class LineStatistics:
    """What each line adds to a corpus score: `rows` `[lines, figures]`, and the score of their sum `[figures]`."""

    rows: np.ndarray
    score_of: Callable[[np.ndarray], float]

    @property
    def score(self) -> float:
        """The score of all lines."""
        return self.score_of(self.rows.sum(axis=0))


class Interval(NamedTuple):
    """What 95 % of the resamples lie in."""

    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """A score less the baseline's, on the same lines."""

    value: float
    interval: Interval
    p_value: float | None  # how often the draw alone moves it by more than it is; None if no draw tells the two apart


def exact_match_statistics(hypotheses: Sequence[str], references: Sequence[str]) -> LineStatistics:
    """Per cent of the lines equal to their reference."""
    check_lines(hypotheses, references)
    equal = [hypothesis == reference for hypothesis, reference in zip(hypotheses, references, strict=True)]
    return share_statistics(np.array(equal, float), np.ones(len(equal)))


def share_statistics(parts: np.ndarray, wholes: np.ndarray) -> LineStatistics:
    """Per cent that `parts` `[lines]` are of `wholes` `[lines]`, over all lines together."""
    return LineStatistics(np.stack([parts, wholes], axis=1).astype(float), lambda sums: 100 * float(sums[0] / sums[1]))


def bleu_statistics(
    hypotheses: Sequence[str], references: Sequence[str], target_language: str | None = None
) -> LineStatistics:
    """BLEU as `evaluation.bleu.sacrebleu_score` gives it."""
    from sacrebleu.metrics import BLEU

    check_lines(hypotheses, references)
    # The order is said to be the effective one, which changes no count, since it would warn at every short line.
    metric = BLEU(trg_lang=target_language or '', effective_order=True)
    rows = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        one = metric.sentence_score(hypothesis, [reference])
        rows.append([one.sys_len, one.ref_len, *one.counts, *one.totals])
    order = metric.max_ngram_order

    def score_of(sums: np.ndarray) -> float:
        whole = [int(figure) for figure in sums]
        correct, total = whole[2 : 2 + order], whole[2 + order :]
        return BLEU.compute_bleu(correct, total, whole[0], whole[1], smooth_method=metric.smooth_method).score

    return LineStatistics(np.array(rows, float), score_of)


def resample_scores(statistics: LineStatistics, num_resamples: int = NUM_RESAMPLES) -> np.ndarray:
    """The scores `[num_resamples]` of as many lines drawn with replacement; the same draws in every call."""
    rng = np.random.default_rng(_SEED)
    num_lines = len(statistics.rows)
    scores = np.empty(num_resamples)
    for index in range(num_resamples):
        counts = np.bincount(rng.choice(num_lines, size=num_lines, replace=True), minlength=num_lines)
        scores[index] = statistics.score_of(counts @ statistics.rows)
    return scores


def estimate_interval(resampled: np.ndarray) -> Interval:
    """The interval that leaves out a fortieth of the resampled figures at each end."""
    ordered = np.sort(resampled)
    left_out = len(ordered) // 40
    return Interval(float(ordered[left_out]), float(ordered[-1 - left_out]))


def compare(value: float, resampled: np.ndarray, baseline: float, baseline_resampled: np.ndarray) -> Difference:
    """A score against a baseline's; the resampled scores of both must be of the same draws."""
    differences = resampled - baseline_resampled
    interval = estimate_interval(differences)
    if not differences.any():
        return Difference(value - baseline, interval, None)
    by_chance = np.abs(differences) - np.abs(differences).mean()
    exceeding = int((by_chance > abs(value - baseline)).sum())
    return Difference(value - baseline, interval, (exceeding + 1) / (len(differences) + 1))
