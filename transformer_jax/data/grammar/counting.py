"""How many different sentences a level has at least, counted from its lexicon."""

from functools import cache

from .lexicon import Determiner, Lexicon, Noun
from .profiles import PROFILES

_NUMBERS = 98  # from two to ninety-nine


@cache
def count_pairs(level: str) -> int:
    """A lower bound of the distinct pairs: plain transitive clauses in the present, with at most one adjective a noun.

    Nothing is added to the clauses and the two nouns differ, so each choice of verb, nouns, articles or numbers and
    adjectives is another English sentence, and all of them can be drawn.
    """
    lexicon = Lexicon(level)
    total = 0
    for verb in lexicon.transitive_verbs:
        assert verb.objects is not None
        subjects = {noun: count_noun_phrases(lexicon, noun) for noun in lexicon.nouns_of(verb.subjects)}
        objects = {noun: count_noun_phrases(lexicon, noun) for noun in lexicon.nouns_of(verb.objects)}
        same = sum(count * objects[noun] for noun, count in subjects.items() if noun in objects)
        total += sum(subjects.values()) * sum(objects.values()) - same
    return total


def count_noun_phrases(lexicon: Lexicon, noun: Noun) -> int:
    """Noun phrases of one noun: articles and numbers, with one adjective or none."""
    determiners: tuple[Determiner, ...] = lexicon.further_determiners if PROFILES[lexicon.level].determiner_rate else ()
    further = sum((d.english is not None) + (d.english_plural is not None) for d in determiners)
    # the, a; the, no article and each number in the plural
    return (4 + _NUMBERS + further) * (1 + len(lexicon.adjectives_of(noun.semantic_class)))
