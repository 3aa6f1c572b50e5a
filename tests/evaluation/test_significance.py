"""The bootstrap against every resample there is, against sacreBLEU's own, and against what it must say of a tie."""

import itertools
from collections import Counter

import numpy as np
import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from transformer_jax.evaluation.bleu import exact_match, sacrebleu_score
from transformer_jax.evaluation.significance import (
    bleu_statistics,
    compare,
    estimate_interval,
    exact_match_statistics,
    resample_scores,
    share_statistics,
)

WORDS = 'ein zwei drei der die das Hund Katze sieht mag nicht heute gern und .'.split()


def corpus(num_lines, *, noise, seed):
    """References and hypotheses that differ from them in a share of the words."""
    rng = np.random.default_rng(seed)
    references = [[str(word) for word in rng.choice(WORDS, size=rng.integers(3, 13))] for _ in range(num_lines)]
    hypotheses = [
        ' '.join(str(rng.choice(WORDS)) if rng.random() < noise else word for word in line) for line in references
    ]
    return hypotheses, [' '.join(line) for line in references]


def enumerate_scores(parts, wholes):
    """Every resample of so few lines: the probability of each score."""
    lines = range(len(parts))
    scores = Counter()
    for draw in itertools.product(lines, repeat=len(parts)):
        scores[round(100 * sum(parts[i] for i in draw) / sum(wholes[i] for i in draw), 9)] += 1
    total = sum(scores.values())
    return {score: count / total for score, count in scores.items()}


@pytest.mark.parametrize(('parts', 'wholes'), [([1, 0, 1, 0, 1], [1] * 5), ([3, 0, 5, 2], [7, 2, 5, 11])])
def test_resamples_are_distributed_as_all_of_them_are(parts, wholes):
    expected = enumerate_scores(parts, wholes)
    num = 20_000
    scores = resample_scores(share_statistics(np.array(parts), np.array(wholes)), num)
    found = Counter(np.round(scores, 9).tolist())
    assert found.keys() <= expected.keys()
    for score, probability in expected.items():
        spread = (probability * (1 - probability) / num) ** 0.5
        assert abs(found[score] / num - probability) < 5 * spread, score


def test_a_difference_is_distributed_as_over_all_resamples():
    ours, base = np.array([1, 1, 0, 1, 0.0]), np.array([0, 1, 0, 0, 1.0])
    draws = [np.array(draw) for draw in itertools.product(range(5), repeat=5)]
    exact = np.array([100 * (ours[draw] - base[draw]).mean() for draw in draws])
    statistics = [share_statistics(right, np.ones(5)) for right in (ours, base)]
    found = compare(
        statistics[0].score,
        resample_scores(statistics[0], 20_000),
        statistics[1].score,
        resample_scores(statistics[1], 20_000),
    )
    assert found.value == pytest.approx(20)
    assert found.interval == pytest.approx(estimate_interval(exact))
    chance = np.abs(exact) - np.abs(exact).mean()
    assert found.p_value == pytest.approx((chance > 20).mean(), abs=0.02)


def test_bleu_is_as_sacrebleus_own_paired_bootstrap():
    hypotheses, references = corpus(53, noise=0.3, seed=3)
    baseline, _ = corpus(53, noise=0.35, seed=3)
    metric = BLEU()
    _, theirs = PairedTest([('base', baseline), ('ours', hypotheses)], {'BLEU': metric}, [references], 'bs', 1000)()
    base, ours = theirs['BLEU']
    statistics = [bleu_statistics(lines, references) for lines in (hypotheses, baseline)]
    scores = [resample_scores(one) for one in statistics]
    found = compare(statistics[0].score, scores[0], statistics[1].score, scores[1])
    assert found.value == pytest.approx(ours.score - base.score)
    assert found.p_value == pytest.approx(ours.p_value, abs=1e-12)
    for resampled, result in zip(scores, (ours, base), strict=True):
        low, high = estimate_interval(resampled)
        assert (high - low) / 2 == pytest.approx(result.ci, rel=1e-5)
        assert resampled.mean() == pytest.approx(result.mean, rel=1e-5)


def test_the_score_of_all_lines_is_the_corpus_score():
    hypotheses, references = corpus(31, noise=0.2, seed=7)
    hypotheses[3], hypotheses[5] = '', references[5]
    assert bleu_statistics(hypotheses, references).score == pytest.approx(sacrebleu_score(hypotheses, references).value)
    match = exact_match(hypotheses, references).value
    assert exact_match_statistics(hypotheses, references).score == pytest.approx(match)
    assert 0 < match < 100


def test_a_model_against_itself_differs_by_nothing():
    hypotheses, references = corpus(29, noise=0.1, seed=11)
    statistics = exact_match_statistics(hypotheses, references)
    scores = resample_scores(statistics)
    found = compare(statistics.score, scores, statistics.score, scores)
    assert (found.value, found.interval, found.p_value) == (0, (0, 0), None)


def test_unequal_lists_are_refused():
    with pytest.raises(ValueError, match='2 hypotheses, but 1 references'):
        bleu_statistics(['a', 'b'], ['a'])
