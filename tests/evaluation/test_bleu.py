"""The scores against the sacreBLEU command line and against multi-bleu written out; lists that must be refused."""

import json
import math
import random
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.evaluation.bleu import (
    SPLIT_BLEU,
    chrf_score,
    exact_match,
    sacrebleu_score,
    scores_by_length,
    split_bleu_score,
    split_compounds,
    tokenise_german,
)

WORDS = re.findall(
    r'\S+', 'der Hund beißt den Mann , und die U-Bahn fährt nach Bad-Süd . " 3,5 % z. B. & <x> „Ja“ nicht-lineare'
)
ODD_LINES = [
    'eine Zeile mit \u2028 und \x85 und \x0c darin .',
    'ein \r allein',
    '',
    'rand\r',
    '\ufeffam Anfang',
    'viel ' * 3000,
]


def make_lines(seed: int, number: int) -> tuple[list[str], list[str]]:
    """References of random words, and hypotheses that share most of them."""
    rng = random.Random(seed)
    references = [' '.join(rng.choices(WORDS, k=rng.randint(1, 13))) for _ in range(number)]
    hypotheses = []
    for reference in references:
        words = reference.split()
        words[rng.randrange(len(words))] = rng.choice(WORDS)
        hypotheses.append(' '.join(words if rng.random() < 0.7 else words[: len(words) // 2 + 1]))
    return hypotheses, references


def multi_bleu(hypotheses: list[list[str]], references: list[list[str]]) -> float:
    """The classic script's arithmetic: clipped precisions of orders 1 to 4, brevity penalty, no smoothing."""
    logs = 0.0
    for order in range(1, 5):
        matches = total = 0
        for hypothesis, reference in zip(hypotheses, references, strict=True):
            ours = Counter(tuple(hypothesis[i : i + order]) for i in range(len(hypothesis) - order + 1))
            theirs = Counter(tuple(reference[i : i + order]) for i in range(len(reference) - order + 1))
            matches += sum((ours & theirs).values())
            total += sum(ours.values())
        if not matches:
            return 0.0
        logs += math.log(matches / total) / 4
    num_ours, num_theirs = sum(map(len, hypotheses)), sum(map(len, references))
    return 100 * math.exp(logs + min(0.0, 1 - num_theirs / num_ours))


def test_scores_and_signatures_equal_the_command_line_on_saved_files(tmp_path):
    hypotheses, references = make_lines(3, 211)
    hypotheses += [ODD_LINES[0], 'ein allein', 'etwas', 'rand', 'am Anfang', 'viel ' * 2900]
    references += ODD_LINES
    for name, lines in (('hypotheses', hypotheses), ('references', references)):
        (tmp_path / name).write_bytes(''.join(f'{line}\n' for line in lines).encode())
    command = [sys.executable, '-m', 'sacrebleu', 'references', '-i', 'hypotheses', '-m', 'bleu', 'chrf', '-w', '9']
    told = json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout)
    for ours, theirs in zip(
        (sacrebleu_score(hypotheses, references), chrf_score(hypotheses, references)), told, strict=True
    ):
        assert 20 < ours.value < 99
        assert ours.value == pytest.approx(theirs['score'], abs=1e-8)
        assert ours.signature == theirs['signature']


def test_chinese_is_scored_by_characters():
    hypotheses, references = ['他看见了那只小狗。'], ['她看见了那只小狗。']
    assert sacrebleu_score(hypotheses, references).value < 1
    score = sacrebleu_score(hypotheses, references, target_language='zh')
    assert score.value > 50
    assert 'tok:zh' in score.signature


@pytest.mark.parametrize('score', [sacrebleu_score, chrf_score, split_bleu_score, exact_match])
@pytest.mark.parametrize(
    ('hypotheses', 'references', 'message'),
    [
        (['a', 'b', 'c'], ['a', 'b'], '3 hypotheses, but 2 references'),
        ([], [], 'at least one line'),
        (['a', 'b', 'c'], [['a', 'b', 'c']], 'references, line 1 is a list'),
        (['a', 'b'], [['a'], ['b']], 'references, line 1 is a list'),
        (['a', None], ['a', 'b'], 'hypotheses, line 2 is a NoneType'),
        ('ab', ['a', 'b'], 'hypotheses is one string'),
        (['a', 'b'], 'ab', 'references is one string'),
        (['a', 'b\nc'], ['a', 'b'], 'hypotheses, line 2 holds a line feed'),
    ],
)
def test_lists_that_do_not_pair_up_are_refused(score, hypotheses, references, message):
    with pytest.raises(ValueError, match=message):
        score(hypotheses, references)


@pytest.mark.parametrize(
    ('line', 'tokens'),
    [
        ('Die „U-Bahn“ fährt, z. B. um 3,5 & 4 Uhr.', 'Die „ U-Bahn &quot; fährt , z. B. um 3,5 &amp; 4 Uhr .'),
        ('Geht’s？ Ja …  wirklich!', 'Geht &apos; s ? Ja ... wirklich !'),
        ('Der 2. Mai war der Tag.', 'Der 2. Mai war der Tag .'),
        ('[a|b] <c>', '&#91; a &#124; b &#93; &lt; c &gt;'),
        ('', ''),
    ],
)
def test_german_tokens(line, tokens):
    assert tokenise_german(line) == tokens


@pytest.mark.parametrize(
    ('line', 'split'),
    [
        ('die U-Bahn', 'die U ##AT##-##AT## Bahn'),
        ('a-b-c', 'a ##AT##-##AT## b-c'),
        ('ab-cd-ef', 'ab ##AT##-##AT## cd ##AT##-##AT## ef'),
        ('1 - 2 -x y-', '1 - 2 -x y-'),
    ],
)
def test_hyphens_inside_words_become_tokens(line, split):
    assert split_compounds(line) == split


def test_split_bleu_is_multi_bleu_of_split_tokens():
    hypotheses, references = make_lines(5, 97)
    split = [[split_compounds(tokenise_german(line)).split() for line in lines] for lines in (hypotheses, references)]
    score = split_bleu_score(hypotheses, references)
    assert score.value == pytest.approx(multi_bleu(*split), abs=1e-9)
    assert 20 < score.value < 99
    assert abs(score.value - sacrebleu_score(hypotheses, references).value) > 0.1
    assert score.name == SPLIT_BLEU
    assert 'tok:none|smooth:none' in score.signature


def test_split_bleu_sees_case_and_smooths_nothing():
    assert split_bleu_score(['der Hund beißt den Mann'], ['der hund beißt den mann']).value == 0
    assert sacrebleu_score(['der Hund beißt den Mann'], ['der hund beißt den mann']).value > 0


def test_a_tokenised_reference_is_not_tokenised_again():
    hypotheses, references = make_lines(7, 41)
    tokenised = [tokenise_german(line) for line in references]
    raw = split_bleu_score(hypotheses, references).value
    assert split_bleu_score(hypotheses, tokenised, references_tokenised=True).value == raw
    assert split_bleu_score(hypotheses, tokenised).value < raw


def test_exact_match_by_phenomenon():
    match = exact_match(
        ['a b', 'a  c', 'd', 'e', 'f '],
        ['a b', 'a c', 'd', 'x', 'f'],
        [('number', 'order'), ('order',), ('order', 'order'), ('long',), ()],
    )
    assert match.value == pytest.approx(40)
    assert match.by_phenomenon == {'long': 0, 'number': 100, 'order': pytest.approx(200 / 3)}
    assert match.num_lines_by_phenomenon == {'long': 1, 'number': 1, 'order': 3}
    assert match.num_lines == 5


def test_scores_by_length_are_those_of_the_groups_as_corpora():
    hypotheses, references = make_lines(7, 41)
    numbers = np.random.default_rng(5).permutation(np.arange(41) % 23)
    sources = [' '.join('x' * number) for number in numbers]
    groups = scores_by_length(hypotheses, references, sources, edges=(3, 11))
    assert [(group.min_words, group.max_words) for group in groups] == [(0, 2), (3, 10), (11, None)]
    for group in groups:
        top = np.inf if group.max_words is None else group.max_words
        lines = [line for line, number in enumerate(numbers) if group.min_words <= number <= top]
        chosen = [hypotheses[line] for line in lines], [references[line] for line in lines]
        assert group.num_lines == len(lines) > 0
        assert group.bleu == sacrebleu_score(*chosen).value
        assert group.exact_match == exact_match(*chosen).value
    assert sum(group.num_lines for group in groups) == 41


def test_lengths_that_no_line_has_are_left_out_and_other_sources_refused():
    (group,) = scores_by_length(['a b', 'c'], ['a b', 'd'], ['x ' * 9, 'x ' * 10])
    assert (group.min_words, group.max_words, group.num_lines, group.exact_match) == (8, 11, 2, 50)
    with pytest.raises(ValueError, match='2 hypotheses, but 1 sources'):
        scores_by_length(['a', 'b'], ['a', 'b'], ['x'])


def test_phenomena_of_other_lines_are_refused():
    with pytest.raises(ValueError, match='2 lines, but phenomena of 3'):
        exact_match(['a', 'b'], ['a', 'b'], [(), (), ()])


@given(st.lists(st.text(st.characters(exclude_characters='\n', exclude_categories=['Cs'])), min_size=1, max_size=5))
def test_any_unicode_scores_and_a_copy_matches(lines):
    assert exact_match(lines, lines).value == 100
    assert 0 <= sacrebleu_score(lines, lines).value <= 100 + 1e-9
    assert 0 <= split_bleu_score(lines, lines[::-1]).value <= 100 + 1e-9
    assert 0 <= chrf_score(lines, lines).value <= 100 + 1e-9
