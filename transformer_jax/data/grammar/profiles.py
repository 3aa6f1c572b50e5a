"""How often each construction is drawn, and how long sentences may be: one profile a level, and one for its long split.

`quickstart` adds little to each construction, so that a small model learns it in minutes; `full` combines them freely.
`lengths` has the words of `quickstart` in sentences of very different lengths: what length alone does to a model.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Profile:
    """Rates are chances between 0 and 1, each drawn where its construction is possible; words are counted in German."""

    constructions: tuple[tuple[str, float], ...]  # name in `SentenceGenerator.CONSTRUCTIONS` and weight
    min_words: int
    max_words: int
    tenses: tuple[tuple[str, float], ...] = (('present', 1.0),)
    determiner_rate: float = 0.0  # a determiner beyond the, a and none
    indefinite_rate: float = 0.25
    plural_rate: float = 0.25
    number_rate: float = 0.13
    adjective_rate: float = 0.3
    second_adjective_rate: float = 0.0
    possessive_rate: float = 0.0
    companion_rate: float = 0.0
    owner_rate: float = 0.0
    relative_rate: float = 0.0
    adverbial_rate: float = 0.3
    date_share: float = 0.6  # of the adverbials
    spelled_date_share: float = 0.0  # of the dates: on the third of May
    negation_rate: float = 0.25
    modal_rate: float = 0.0  # in clauses of any construction
    location_rate: float = 0.5  # with intransitive verbs
    object_location_rate: float = 0.0  # with others


_QUICKSTART = Profile(
    constructions=(
        ('transitive', 0.10),
        ('reversible', 0.07),
        ('ditransitive', 0.11),
        ('modal', 0.12),
        ('separable', 0.11),
        ('companion', 0.10),
        ('relative', 0.12),
        ('subordinate', 0.12),
        ('contrast', 0.05),
        ('reason', 0.06),
        ('sequence', 0.04),
    ),
    min_words=4,
    max_words=16,
    adjective_rate=0.4,
)
_FULL = Profile(
    constructions=(
        ('transitive', 0.10),
        ('reversible', 0.10),
        ('intransitive', 0.04),
        ('ditransitive', 0.08),
        ('modal', 0.08),
        ('separable', 0.10),
        ('companion', 0.06),
        ('relative', 0.08),
        ('subordinate', 0.12),
        ('contrast', 0.05),
        ('reason', 0.05),
        ('sequence', 0.04),
        ('report', 0.05),
        ('infinitive', 0.05),
    ),
    min_words=3,
    max_words=24,
    tenses=(('present', 0.4), ('past', 0.25), ('perfect', 0.2), ('future', 0.15)),
    determiner_rate=0.25,
    number_rate=0.12,
    adjective_rate=0.35,
    second_adjective_rate=0.15,
    possessive_rate=0.15,
    companion_rate=0.08,
    owner_rate=0.08,
    relative_rate=0.12,
    adverbial_rate=0.35,
    date_share=0.55,
    spelled_date_share=0.3,
    modal_rate=0.15,
    object_location_rate=0.1,
)
_LENGTHS = replace(
    _QUICKSTART,
    constructions=(
        ('transitive', 0.08),
        ('reversible', 0.09),
        ('ditransitive', 0.08),
        ('modal', 0.10),
        ('separable', 0.08),
        ('companion', 0.10),
        ('relative', 0.09),
        ('subordinate', 0.25),
        ('contrast', 0.06),
        ('reason', 0.05),
        ('sequence', 0.02),
    ),
    min_words=3,
    max_words=24,
    adjective_rate=0.5,
    companion_rate=0.2,
    relative_rate=0.2,
)
PROFILES = {'quickstart': _QUICKSTART, 'full': _FULL, 'lengths': _LENGTHS}

# The same constructions and words, but sentences longer than any of the training split.
_LONG_CONSTRUCTIONS = (('subordinate', 0.6), ('relative', 0.2), ('companion', 0.2))
LONG_PROFILES = {
    'quickstart': replace(
        _QUICKSTART,
        constructions=_LONG_CONSTRUCTIONS,
        min_words=17,
        max_words=30,
        adjective_rate=0.6,
        companion_rate=0.3,
        relative_rate=0.35,
    ),
    'full': replace(
        _FULL,
        constructions=(*_LONG_CONSTRUCTIONS, ('report', 0.2), ('infinitive', 0.1)),
        min_words=25,
        max_words=45,
        adjective_rate=0.7,
        companion_rate=0.35,
        relative_rate=0.45,
    ),
    'lengths': replace(
        _LENGTHS,
        constructions=_LONG_CONSTRUCTIONS,
        min_words=25,
        max_words=40,
        adjective_rate=0.6,
        companion_rate=0.3,
        relative_rate=0.35,
    ),
}
