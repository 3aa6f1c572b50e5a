"""The words of each level as typed entries, read from the tables in `nouns`, `verbs` and `modifiers`.

Each table is read once, at import. A malformed line is a `ValueError` that shows it.
"""

from dataclasses import dataclass
from functools import cached_property

from . import english, modifiers, morphology, nouns, verbs

# Groups of noun classes; a class stands for itself.
_GROUPS = {
    'person': 'man woman child',
    'clothing': 'garment headwear',
    'animate': 'man woman child animal',
    'portable': 'item device container text garment headwear food',
    'thing': 'item device container text garment headwear food furniture vehicle',
    'concrete': 'man woman child animal item device container text garment headwear food furniture vehicle',
}
_CLASSES = frozenset(
    'man woman child animal item device container text garment headwear food furniture vehicle place'.split()
)
PERSONS = frozenset(_GROUPS['person'].split())


@dataclass(frozen=True, eq=False, slots=True)
class Noun:
    english: str
    english_plural: str
    german: str
    gender: str
    german_plural: str
    genitive_ending: str
    semantic_class: str

    def agreement(self, plural: bool) -> str:
        return 'p' if plural else self.gender

    def decline(self, plural: bool, case: str) -> str:
        return morphology.decline_noun(
            self.german, self.german_plural, self.genitive_ending, self.gender, self.agreement(plural), case
        )

    def english_pronoun(self, plural: bool) -> str | None:
        """`he`, `she`, `it` or `they`; None for the nouns whose pronoun German itself wavers about."""
        if plural:
            return 'they'
        return {'man': 'he', 'woman': 'she', 'child': None}.get(self.semantic_class, 'it')


@dataclass(frozen=True, eq=False, slots=True)
class Verb:
    english: str
    english_past: str
    english_participle: str
    particle: str | None  # follows a pronoun object: picks it up
    preposition: str | None  # precedes every object: looks at it
    german: str  # the infinitive without the separable prefix
    prefix: str | None
    third: str
    past: str
    auxiliary: str  # 'haben' or 'sein'
    participle: str
    subjects: frozenset[str]
    objects: frozenset[str] | None
    object_case: str
    recipients: frozenset[str] | None

    @property
    def infinitive(self) -> str:
        return (self.prefix or '') + self.german

    @property
    def lemma(self) -> str:
        """The English citation form, which names one verb: `look at`."""
        return ' '.join(filter(None, (self.english, self.particle, self.preposition)))

    def has_tense(self, tense: str) -> bool:
        """Whether English shows the tense: "the men read" is present or past, so `read` gets no past here."""
        return tense != 'past' or self.english != self.english_past


@dataclass(frozen=True, eq=False, slots=True)
class Adjective:
    english: str
    german: str
    stem: str
    group: str
    classes: frozenset[str]


@dataclass(frozen=True, eq=False, slots=True)
class Adverb:
    english: str
    german: str
    places: frozenset[str]  # of 'first', 'last', 'before'
    tenses: frozenset[str]


@dataclass(frozen=True, eq=False, slots=True)
class Determiner:
    english: str | None  # None where it has no singular
    english_plural: str | None  # None where it has no plural, '' for plurals without any article
    german: str  # the stem
    pattern: str  # 'der', 'ein' or 'none': how it declines
    declension: str  # 'weak', 'mixed' or 'strong': the endings of an adjective after it
    definiteness: str  # 'definite', 'indefinite' or 'negative'

    def decline(self, agreement: str, case: str) -> str:
        """The German word; empty for plurals without an article."""
        if self.pattern == 'none':
            return ''
        if self.pattern == 'ein':
            return morphology.ein_word(self.german, agreement, case)
        if self.german == 'd':
            return morphology.definite_article(agreement, case)
        return morphology.der_word(self.german, agreement, case)


@dataclass(frozen=True, eq=False, slots=True)
class Subordinator:
    english: str
    german: str
    tenses: frozenset[str]


@dataclass(frozen=True, eq=False, slots=True)
class Modal:
    english: str
    takes_to: bool
    infinitive: str
    third: str
    plural: str
    negatable: bool


def _expand(names: list[str]) -> frozenset[str]:
    classes = frozenset(member for name in names for member in _GROUPS.get(name, name).split())
    if unknown := classes - _CLASSES:
        raise ValueError(f'unknown noun class {sorted(unknown)}; the classes are {sorted(_CLASSES)}')
    return classes


def _parse_noun(line: str) -> Noun:
    word, german, gender, plural, genitive, semantic_class = line.split()
    singular, _, irregular = word.partition('/')
    if gender not in 'mfn' or semantic_class not in _CLASSES:
        raise ValueError(f'noun {line!r}: the gender must be m, f or n and the class one of {sorted(_CLASSES)}')
    ending = '' if genitive == '-' else genitive
    return Noun(singular, irregular or english.add_s(singular), german, gender, plural, ending, semantic_class)


def _parse_verb(line: str) -> Verb:
    english_part, german_part, frame = (part.strip() for part in line.split('|'))
    base, past, participle, *satellite = english_part.split()
    infinitive, third, german_past, auxiliary, german_participle = german_part.split()
    prefix, _, stem = infinitive.rpartition('-')
    satellite_word = satellite[0] if satellite else ''
    subjects, _, rest = frame.partition('>')
    recipients, plus, objects = rest.rpartition('+')
    case = 'dative' if objects.strip().startswith('dative:') else 'accusative'
    objects = objects.replace('dative:', '')
    return Verb(
        english=base,
        english_past=past,
        english_participle=participle,
        particle=satellite_word[1:] if satellite_word.startswith('+') else None,
        preposition=satellite_word[1:] if satellite_word.startswith('=') else None,
        german=stem,
        prefix=prefix or None,
        third=third,
        past=german_past,
        auxiliary={'hat': 'haben', 'ist': 'sein'}[auxiliary],
        participle=german_participle,
        subjects=_expand(subjects.split()),
        objects=_expand(objects.split()) if objects.strip() else None,
        object_case=case,
        recipients=_expand(recipients.split()) if plus else None,
    )


def _parse_adjective(line: str) -> Adjective:
    word, german, group, *classes = line.split()
    base, _, stem = german.partition('/')
    return Adjective(word, base, stem or base, group, _expand(classes))


def _parse_adverb(line: str) -> Adverb:
    word, german, places, *tenses = line.split()
    return Adverb(word, german, frozenset(places.split(',')), frozenset(tenses))


def _parse_subordinator(line: str) -> Subordinator:
    word, german, *tenses = line.split()
    return Subordinator(word, german, frozenset(tenses))


def _parse_determiner(line: str) -> Determiner:
    singular, plural, stem, pattern, declension, definiteness = line.split()
    plural_word = None if plural == '-' else plural.replace('*', '')
    return Determiner(None if singular == '-' else singular, plural_word, stem, pattern, declension, definiteness)


def _parse_modal(line: str) -> Modal:
    word, to, infinitive, third, plural, negatable = line.split()
    return Modal(word, to == 'to', infinitive, third, plural, negatable == 'negatable')


def _lines(*tables: str) -> list[str]:
    return [line for table in tables for line in table.strip().splitlines()]


THE, A, BARE = map(_parse_determiner, _lines(modifiers.QUICKSTART_DETERMINERS))
FURTHER_DETERMINERS = tuple(map(_parse_determiner, _lines(modifiers.FURTHER_DETERMINERS)))
QUANTIFIERS = frozenset(d for d in FURTHER_DETERMINERS if d.german in ('jed', 'all'))  # unclear beside a negation
NUMBER = Determiner(None, '', '', 'none', 'strong', 'indefinite')  # the number itself stands in the noun phrase
NO = next(d for d in FURTHER_DETERMINERS if d.german == 'kein')
HIS, HER = (Determiner(None, None, stem, 'ein', 'mixed', 'definite') for stem in ('sein', 'ihr'))

# "is", for adjectives said of a noun, and nothing else.
BE = Verb(
    'be', 'was', 'been', None, None, 'sein', None, 'ist', 'war', 'sein', 'gewesen', _CLASSES, None, 'accusative', None
)


def _read_pairs(table: str) -> tuple[tuple[str, str], ...]:
    return tuple((english_word, german) for english_word, german in map(str.split, _lines(table)))


class Lexicon:
    """The words of one level. `full` holds all of `quickstart`."""

    def __init__(self, level: str):
        tables = ('QUICKSTART_', 'FURTHER_') if level == 'full' else ('QUICKSTART_',)

        def read(module, name: str, parse):
            return tuple(parse(line) for line in _lines(*(getattr(module, table + name, '') for table in tables)))

        self.level = level
        self.nouns: tuple[Noun, ...] = read(nouns, 'NOUNS', _parse_noun)
        self.verbs: tuple[Verb, ...] = read(verbs, 'VERBS', _parse_verb)
        self.adjectives: tuple[Adjective, ...] = read(modifiers, 'ADJECTIVES', _parse_adjective)
        self.adverbs: tuple[Adverb, ...] = read(modifiers, 'ADVERBS', _parse_adverb)
        self.subordinators: tuple[Subordinator, ...] = read(modifiers, 'SUBORDINATORS', _parse_subordinator)
        self.modals: tuple[Modal, ...] = read(modifiers, 'MODALS', _parse_modal)
        is_full = level == 'full'
        self.further_determiners = FURTHER_DETERMINERS if is_full else ()
        self.months = _read_pairs(modifiers.MONTHS)
        self.weekdays = _read_pairs(modifiers.WEEKDAYS) if is_full else ()
        self.reporting_verbs = tuple(map(_parse_verb, _lines(verbs.REPORTING_VERBS))) if is_full else ()
        self.control_verbs = tuple(map(_parse_verb, _lines(verbs.CONTROL_VERBS))) if is_full else ()
        self._nouns_by_classes: dict[frozenset[str], tuple[Noun, ...]] = {}
        self._adjectives_by_class: dict[str, tuple[Adjective, ...]] = {}

    def nouns_of(self, classes: frozenset[str]) -> tuple[Noun, ...]:
        if classes not in self._nouns_by_classes:
            self._nouns_by_classes[classes] = tuple(n for n in self.nouns if n.semantic_class in classes)
        return self._nouns_by_classes[classes]

    def adjectives_of(self, semantic_class: str) -> tuple[Adjective, ...]:
        """The adjectives that fit nouns of a class; never empty."""
        if semantic_class not in self._adjectives_by_class:
            self._adjectives_by_class[semantic_class] = tuple(a for a in self.adjectives if semantic_class in a.classes)
        return self._adjectives_by_class[semantic_class]

    @cached_property
    def intransitive_verbs(self) -> tuple[Verb, ...]:
        return tuple(v for v in self.verbs if v.objects is None)

    @cached_property
    def action_verbs(self) -> tuple[Verb, ...]:
        """The verbs that one can be able, allowed or about to do."""
        return tuple(v for v in self.verbs if v.lemma not in verbs.STATIVE_VERBS)

    @cached_property
    def purposeful_verbs(self) -> tuple[Verb, ...]:
        return tuple(v for v in self.intransitive_verbs if v.lemma in verbs.PURPOSEFUL_VERBS)

    @cached_property
    def transitive_verbs(self) -> tuple[Verb, ...]:
        return tuple(v for v in self.verbs if v.objects is not None and v.recipients is None)

    @cached_property
    def ditransitive_verbs(self) -> tuple[Verb, ...]:
        return tuple(v for v in self.verbs if v.recipients is not None)

    @property
    def num_lexemes(self) -> int:
        """Entries of the open classes and of modals, months and weekdays; no articles, pronouns, number words."""
        entries = (self.nouns, self.verbs, self.adjectives, self.adverbs, self.subordinators, self.modals)
        rest = (self.months, self.weekdays, self.reporting_verbs, self.control_verbs)
        return sum(map(len, (*entries, *rest)))
