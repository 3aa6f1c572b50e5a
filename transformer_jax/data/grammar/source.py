"""The data source: splits without overlap, drawn in a fixed order, with everything that is known of each pair."""

import hashlib
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import NamedTuple

from transformer_jax.config import ConfigError, GrammarConfig
from transformer_jax.data.batch import Pair

from . import english_sentence, german_sentence
from .annotation import annotate, swap_roles
from .counting import count_pairs
from .generator import SentenceGenerator
from .lexicon import Lexicon
from .meaning import NounPhrase, Pronoun, Sentence
from .profiles import LONG_PROFILES, PROFILES
from .words import Words

SPLITS = ('train', 'validation', 'test', 'long', 'combinations')
# Changing what is drawn must change this: it tells prepared data of another version from this one's.
VERSION = 1
_MAX_EXTRA_ENGLISH = 2  # words that English may have beyond the longest German
_TEST_SHARE = 0.12
_VALIDATION_SHARE = 0.06
_COMBINATION_SHARE = 0.04
_MIN_OBJECTS = 12  # a verb with fewer possible objects has none held out
_PROBE_PAIRS = 32  # the first pairs, which stand for the content in the fingerprint
# At most this part of the counted pairs may be asked for, so that drawing distinct ones does not slow down.
_MAX_SHARE = 0.1


class _Draw(NamedTuple):
    meaning: Sentence
    english: Words
    german: Words
    source: str

    def pair(self, pair_id: int, reversed_id: int | None) -> Pair:
        info = annotate(self.meaning, self.english, self.german)
        info['reversed_id'] = reversed_id
        return Pair(pair_id, self.source, _join(self.german), info)


class GrammarSource:
    """English-German pairs of the built-in grammar.

    The splits: `train`, `validation` and `test` share constructions and no sentence; the German of `long` has more
    words than any of training; each sentence of `combinations` has a verb with an object noun that it meets in no other
    split. Which split a sentence belongs to depends on its English alone, so splits of two seeds don't overlap either,
    and a sentence and its role reversal are in the same split. The number of `long` and of `combinations` is that of
    `validation`. Raises `ConfigError` when a split is larger than the level can fill well.

    `Pair.info` holds `phenomena` (names of `PHENOMENA`), `alignment` ((source, target) word places), `subject_links`
    ((verb, subject) target places), `antecedent_links` ((pronoun, noun) target places) and `reversed_id` (the id of the
    pair of the same split in which subject and object have changed places, or None). Places count the words between
    spaces, from 0; punctuation belongs to the word before it.
    """

    def __init__(self, config: GrammarConfig, seed: int):
        self._level = config.level
        self._seed = seed
        self._sizes = {
            'train': config.num_train,
            'validation': config.num_validation,
            'test': config.num_test,
            'long': config.num_validation,
            'combinations': config.num_validation,
        }
        most = int(count_pairs(config.level) * _MAX_SHARE)
        for name in ('num_train', 'num_validation', 'num_test'):
            if (size := getattr(config, name)) > most:
                raise ConfigError(
                    f'config.data.grammar.{name} is {size}; at level {config.level!r} it must be at most {most}'
                )

    def splits(self) -> tuple[str, ...]:
        return SPLITS

    def size(self, split: str) -> int:
        """The number of pairs `read` yields."""
        return self._sizes[self._checked(split)]

    def read(self, split: str) -> Iterator[Pair]:
        """The pairs of a split in the order of their ids, distinct, and the same at every call."""
        size = self.size(split)
        seen: set[str] = set()
        next_id = 0
        for draw in self._draws(split):
            reversal = swap_roles(draw.meaning) if split in ('validation', 'test') else None
            if draw.source in seen or (reversal is not None and next_id + 2 > size):
                continue  # a sentence once; a reversal only with its mate
            group = [draw] if reversal is None else [draw, _realize(reversal)]
            for place, member in enumerate(group):
                seen.add(member.source)
                yield member.pair(next_id + place, None if reversal is None else next_id + 1 - place)
            next_id += len(group)
            if next_id == size:
                return

    def fingerprint(self, split: str) -> str:
        """Names the content: level, split, size, seed, version and the first pairs themselves."""
        digest = hashlib.sha256(f'{VERSION}/{self._level}/{split}/{self.size(split)}/{self._seed}'.encode())
        for pair, _ in zip(self.read(split), range(_PROBE_PAIRS), strict=False):
            digest.update(f'\n{pair.source}\t{pair.target}'.encode())
        return digest.hexdigest()[:32]

    def contents(self, split: str) -> dict[str, str]:
        """The fingerprint, by the config group that makes the pairs."""
        return {'config.data.grammar': self.fingerprint(split)}

    def _checked(self, split: str) -> str:
        if split not in SPLITS:
            raise ValueError(f'split is {split!r}; the built-in task has {", ".join(map(repr, SPLITS))}')
        return split

    def _draws(self, split: str) -> Iterator[_Draw]:
        """Sentences of the split without end; they may repeat."""
        profile = (LONG_PROFILES if split == 'long' else PROFILES)[self._level]
        generator = SentenceGenerator(_lexicon(self._level), profile)
        digest = hashlib.sha256(f'{self._level}/{split}/{self._seed}'.encode()).digest()
        rng = Random(int.from_bytes(digest[:8], 'big'))
        while True:
            meaning = generator.draw(rng)
            english = english_sentence.sentence(meaning)
            if split == 'long':
                belongs = not has_held_out_combination(meaning, self._level)
            else:
                belongs = find_split(meaning, _join(english), self._level) == split
            if not belongs or len(english) > profile.max_words + _MAX_EXTRA_ENGLISH:
                continue
            german = german_sentence.sentence(meaning)
            if profile.min_words <= len(german) <= profile.max_words:
                yield _Draw(meaning, english, german, _join(english))


@cache
def _lexicon(level: str) -> Lexicon:
    return Lexicon(level)


def find_split(meaning: Sentence, source: str, level: str) -> str:
    """`train`, `validation`, `test` or `combinations`: a function of the English sentence and its role reversal."""
    if has_held_out_combination(meaning, level):
        return 'combinations'
    reversal = swap_roles(meaning)
    if reversal is not None:
        if has_held_out_combination(reversal, level):
            return 'combinations'
        source = min(source, _join(english_sentence.sentence(reversal)))
    mark = _hash_share(source)
    if mark < _TEST_SHARE:
        return 'test'
    return 'validation' if mark < _TEST_SHARE + _VALIDATION_SHARE else 'train'


def has_held_out_combination(meaning: Sentence, level: str) -> bool:
    """Whether some verb meets an object noun that training never shows it with."""
    held_out = _held_out_combinations(level)
    for clause in meaning.clauses():
        obj = clause.object
        if isinstance(obj, Pronoun):
            obj = obj.antecedent
        if isinstance(obj, NounPhrase) and (clause.verb.lemma, obj.noun.english) in held_out:
            return True
    return False


@cache
def _held_out_combinations(level: str) -> frozenset[tuple[str, str]]:
    lexicon = _lexicon(level)
    return frozenset(
        (verb.lemma, noun.english)
        for verb in lexicon.verbs
        if verb.objects is not None and len(nouns := lexicon.nouns_of(verb.objects)) >= _MIN_OBJECTS
        for noun in nouns
        if _hash_share(f'{verb.lemma} + {noun.english}') < _COMBINATION_SHARE
    )


def _hash_share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big') / 2.0**64


def _join(words: Words) -> str:
    return ' '.join(text for text, _ in words)


def _realize(meaning: Sentence) -> _Draw:
    words = english_sentence.sentence(meaning)
    return _Draw(meaning, words, german_sentence.sentence(meaning), _join(words))
