"""Corpus scores of translations: sacreBLEU, chrF, the paper's split BLEU for German, and exact match.

References are the raw lines of the file. sacreBLEU's API scores unequal or turned-round lists without a word (100.0 for
some), so every score here checks its two lists first.
"""

import bisect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

SPLIT_BLEU = 'tokenised compound-split BLEU (paper protocol)'
LENGTH_EDGES = (8, 12, 17, 25, 41)  # source words at which the next group of sentences begins


@dataclass(frozen=True)
class Score:
    """One corpus score from 0 to 100, with what is needed to compare it with another."""

    name: str
    value: float
    signature: str

    def __str__(self) -> str:
        return f'{self.name} {self.value:.2f} ({self.signature})'


@dataclass(frozen=True)
class ExactMatch:
    """Per cent of the lines equal to their reference, overall and of the lines that show a phenomenon."""

    value: float
    num_lines: int
    by_phenomenon: dict[str, float] = field(default_factory=dict)
    num_lines_by_phenomenon: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LengthScore:
    """The scores of the lines whose source has `min_words` to `max_words` words (`None` = any number more)."""

    min_words: int
    max_words: int | None
    num_lines: int
    bleu: float  # sacreBLEU of these lines as a corpus of their own
    exact_match: float  # per cent


def sacrebleu_score(hypotheses: Sequence[str], references: Sequence[str], target_language: str | None = None) -> Score:
    """BLEU as the sacreBLEU command line gives it for the two lists saved as files, one line each.

    Args:
        hypotheses: detokenised translations.
        references: raw reference lines.
        target_language: as in the command line's `-l`; it matters for languages written without spaces only.
    """
    from sacrebleu.metrics import BLEU

    check_lines(hypotheses, references)
    metric = BLEU(trg_lang=target_language or '')
    return _score('sacreBLEU', metric, hypotheses, references)


def chrf_score(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """ChrF (characters to order 6, beta 2) as the sacreBLEU command line gives it with `-m chrf`."""
    from sacrebleu.metrics import CHRF

    check_lines(hypotheses, references)
    return _score('chrF', CHRF(), hypotheses, references)


def split_bleu_score(
    hypotheses: Sequence[str], references: Sequence[str], *, references_tokenised: bool = False
) -> Score:
    """The paper's score for German: Moses tokens, compounds split at hyphens, multi-bleu. Case matters.

    It is not comparable to sacreBLEU; on WMT 2014 the splitting alone adds most of a point.
    The published reference of that set is tokenised already: say `references_tokenised`, or it is escaped twice.
    """
    from sacrebleu.metrics import BLEU

    check_lines(hypotheses, references)
    tokenised = references if references_tokenised else [tokenise_german(line) for line in references]
    metric = BLEU(tokenize='none', smooth_method='none', force=True)  # multi-bleu's arithmetic
    return _score(
        SPLIT_BLEU,
        metric,
        [split_compounds(tokenise_german(line)) for line in hypotheses],
        [split_compounds(line) for line in tokenised],
    )


def exact_match(
    hypotheses: Sequence[str], references: Sequence[str], phenomena: Sequence[Iterable[str]] | None = None
) -> ExactMatch:
    """Counts lines equal to their reference, character by character.

    Args:
        hypotheses: detokenised translations.
        references: raw reference lines.
        phenomena: for each line the names of what it shows; a line counts for each of them.
    """
    check_lines(hypotheses, references)
    equal = [hypothesis == reference for hypothesis, reference in zip(hypotheses, references, strict=True)]
    overall = 100 * sum(equal) / len(equal)
    if phenomena is None:
        return ExactMatch(overall, len(equal))
    if len(phenomena) != len(equal):
        raise ValueError(f'{len(equal)} lines, but phenomena of {len(phenomena)}; give each line its own')
    lines_of: dict[str, list[bool]] = {}
    for right, names in zip(equal, phenomena, strict=True):
        for name in set(names):
            lines_of.setdefault(name, []).append(right)
    return ExactMatch(
        overall,
        len(equal),
        {name: 100 * sum(rights) / len(rights) for name, rights in sorted(lines_of.items())},
        {name: len(rights) for name, rights in sorted(lines_of.items())},
    )


def scores_by_length(
    hypotheses: Sequence[str],
    references: Sequence[str],
    sources: Sequence[str],
    target_language: str | None = None,
    *,
    edges: Sequence[int] = LENGTH_EDGES,
) -> tuple[LengthScore, ...]:
    """Scores each group of sentences of similar length, shortest first; groups without a line are left out.

    Args:
        hypotheses: detokenised translations.
        references: raw reference lines.
        sources: what was translated; words are what whitespace parts.
        target_language: as for `sacrebleu_score`.
        edges: rising numbers of source words at which the next group begins.
    """
    check_lines(hypotheses, references)
    if len(sources) != len(hypotheses):
        raise ValueError(f'{len(hypotheses)} hypotheses, but {len(sources)} sources; there must be equally many')
    groups: list[list[int]] = [[] for _ in range(len(edges) + 1)]
    for line, source in enumerate(sources):
        groups[bisect.bisect_right(edges, len(source.split()))].append(line)
    starts, ends = (0, *edges), (*(edge - 1 for edge in edges), None)
    scores = []
    for start, end, lines in zip(starts, ends, groups, strict=True):
        if lines:
            chosen = [hypotheses[line] for line in lines], [references[line] for line in lines]
            bleu = sacrebleu_score(*chosen, target_language).value
            scores.append(LengthScore(start, end, len(lines), bleu, exact_match(*chosen).value))
    return tuple(scores)


def check_lines(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Raises `ValueError` unless both are sequences of single lines, equally many and at least one."""
    for name, lines in (('hypotheses', hypotheses), ('references', references)):
        if isinstance(lines, str):
            raise ValueError(f'{name} is one string, {lines[:40]!r}; it must be a sequence with one string a line')
        for number, line in enumerate(lines, start=1):
            if not isinstance(line, str):
                raise ValueError(
                    f'{name}, line {number} is a {type(line).__name__}; it must be a string: '
                    'give one flat sequence, with a single reference for each hypothesis'
                )
            if '\n' in line:
                raise ValueError(f'{name}, line {number} holds a line feed and would become two lines: {line[:80]!r}')
    if len(hypotheses) != len(references):
        raise ValueError(f'{len(hypotheses)} hypotheses, but {len(references)} references; there must be equally many')
    if not hypotheses:
        raise ValueError('there are no hypotheses and no references; a score needs at least one line')


def tokenise_german(line: str) -> str:
    """Moses tokens with a space between, after Unicode punctuation became ASCII; XML characters are escaped."""
    normalizer, tokenizer = _moses()
    return tokenizer.tokenize(normalizer.replace_unicode_punct(line), return_str=True)


def split_compounds(line: str) -> str:
    """Makes a token of every hyphen inside a word: `U-Bahn` becomes `U ##AT##-##AT## Bahn`."""
    return re.sub(r'(\S)-(\S)', r'\1 ##AT##-##AT## \2', line)


@cache
def _moses() -> tuple[Any, Any]:
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    return MosesPunctNormalizer(lang='de'), MosesTokenizer(lang='de')


def _score(name: str, metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    value = metric.corpus_score(list(hypotheses), [list(references)]).score
    return Score(name, value, str(metric.get_signature()))
