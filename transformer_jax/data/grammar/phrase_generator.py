"""Draws noun phrases and clauses at random: words that fit each other, and what is added to them."""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from . import english, morphology
from .lexicon import (
    BARE,
    BE,
    HER,
    HIS,
    NO,
    NUMBER,
    PERSONS,
    QUANTIFIERS,
    THE,
    A,
    Adjective,
    Lexicon,
    Noun,
    Verb,
)
from .meaning import NODES_A_PHRASE, Adverbial, Clause, NounPhrase, Pronoun, Sentence, noun_phrases
from .profiles import Profile

Item = TypeVar('Item')

# Adjectives that follow each other without a comma do so in this order, in both languages: the small old red car.
_ADJECTIVE_RANKS = {'size': 1, 'looks': 1, 'price': 1, 'age': 2, 'color': 3}
_DAYS_IN_MONTH = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
COMPANIONS = frozenset('animal item garment headwear container'.split())
_PLACE = frozenset({'place'})
# Which of the further determiners suit a role: no "with no violin", and one negative word in a clause at most.
_DEFINITENESS = {
    'subject': ('definite', 'indefinite', 'negative'),
    'object': ('definite', 'indefinite'),
    'inner': ('indefinite',),
    'definite': ('definite',),
}
# What a clause inside a sentence of another tense is told in.
_RELATIVE_TENSE = {'present': 'present', 'past': 'past', 'perfect': 'past', 'future': 'present'}


class DeadEndError(Exception):
    """The draw came to a place where nothing fits; the next draw starts anew."""


def _is_plainly_definite(np: NounPhrase) -> bool:
    return np.determiner.definiteness == 'definite' and np.determiner not in QUANTIFIERS


class PhraseGenerator:
    """Draws the parts of sentences by one profile. All chance comes from the `Random` in use, by `random()` alone."""

    def __init__(self, lexicon: Lexicon, profile: Profile):
        self.lexicon = lexicon
        self.profile = profile

    def start(self, rng: Random) -> None:
        """Begins a new sentence: no nouns used, nodes counted from the start."""
        self._random = rng.random
        self._next_node = 0
        self._used: list[Noun] = []

    # Chance

    def _pick(self, items: Sequence[Item]) -> Item:
        if not items:
            raise DeadEndError
        return items[int(self._random() * len(items))]

    def _chance(self, rate: float) -> bool:
        return rate > 0.0 and self._random() < rate

    def _weighted(self, choices: tuple[tuple[str, float], ...]) -> str:
        mark = self._random() * sum(weight for _, weight in choices)
        for name, weight in choices:
            mark -= weight
            if mark < 0:
                return name
        return choices[-1][0]

    def _node(self) -> int:
        self._next_node += NODES_A_PHRASE
        return self._next_node

    # Noun phrases

    def _noun(self, classes: frozenset[str]) -> Noun:
        """A noun that the sentence has not used yet."""
        nouns = self.lexicon.nouns_of(classes)
        noun = self._pick(nouns)
        if noun in self._used:
            noun = self._pick([n for n in nouns if n not in self._used])
        self._used.append(noun)
        return noun

    def _adjectives(self, noun: Noun) -> tuple[Adjective, ...]:
        if not self._chance(self.profile.adjective_rate):
            return ()
        fitting = self.lexicon.adjectives_of(noun.semantic_class)
        first = self._pick(fitting)
        if not self._chance(self.profile.second_adjective_rate):
            return (first,)
        second = self._pick(fitting)
        ranks = [_ADJECTIVE_RANKS.get(adjective.group, 0) for adjective in (first, second)]
        return (first, second) if 0 < ranks[0] < ranks[1] else (first,)

    def _noun_phrase(
        self, classes: frozenset[str], role: str = 'object', *, plain: bool = False, possessor: NounPhrase | None = None
    ) -> NounPhrase:
        """A noun phrase for a role: `subject`, `object`, `inner` (inside another), or `definite` (never a, some, two).

        `plain` bars what stands after the noun; the possessor may show as his, her, its or their.
        """
        profile = self.profile
        noun = self._noun(classes)
        np = NounPhrase(noun, self._node(), THE)
        np.plural = self._chance(profile.plural_rate)
        self._determine(np, role, possessor)
        np.adjectives = self._adjectives(noun)
        if plain or np.determiner not in (THE, A):
            return np
        if noun.semantic_class in ('man', 'woman') and self._chance(profile.companion_rate):
            np.companion = self._noun_phrase(COMPANIONS, 'inner', plain=True)
        elif noun.semantic_class not in ('man', 'woman', 'child', 'place') and self._chance(profile.owner_rate):
            np.owner = self._noun_phrase(PERSONS, 'definite', plain=True)
            np.owner.determiner = THE
        return np

    def _determine(self, np: NounPhrase, role: str, possessor: NounPhrase | None) -> None:
        profile = self.profile
        if possessor is not None and possessor.english_pronoun and self._chance(profile.possessive_rate):
            np.possessor = possessor
            np.determiner = HIS if morphology.possessive_stem(possessor.agreement) == 'sein' else HER
            return
        if role != 'definite' and self._chance(profile.number_rate):
            np.plural, np.determiner = True, NUMBER
            np.number = 2 + int(self._random() * 98)
        elif self._chance(profile.determiner_rate):
            fitting = [
                d
                for d in self.lexicon.further_determiners
                if (d.english_plural if np.plural else d.english) and d.definiteness in _DEFINITENESS[role]
            ]
            np.determiner = self._pick(fitting) if fitting else THE
        elif role != 'definite' and self._chance(profile.indefinite_rate):
            if np.plural:
                np.determiner = THE if role == 'subject' else BARE
            else:
                np.determiner = A

    def _is_only_antecedent(self, wanted: NounPhrase, mentioned: list[NounPhrase]) -> bool:
        """Whether an English pronoun for `wanted` can mean nothing else that was mentioned."""
        word = wanted.english_pronoun
        if word is None:
            return False
        # A child may be he, she or it.
        return not any(
            np is not wanted and (np.english_pronoun == word or (np.english_pronoun is None and word != 'they'))
            for np in mentioned
        )

    def _pronoun(self, wanted: NounPhrase, first_clause: Clause) -> Pronoun:
        if not self._is_only_antecedent(wanted, noun_phrases(Sentence(first_clause).clauses())):
            raise DeadEndError
        return Pronoun(wanted, self._node())

    # Clauses

    def _clause(
        self,
        verb: Verb,
        tense: str = 'present',
        *,
        subject: NounPhrase | Pronoun | None = None,
        obj: Pronoun | None = None,
        plain: bool = False,
    ) -> Clause:
        """A clause of the verb with fitting noun phrases; `plain` bars what stands after a noun."""
        if not verb.has_tense(tense):
            raise DeadEndError
        if subject is None:
            subject = self._noun_phrase(verb.subjects, 'subject', plain=plain)
        clause = Clause(self._node(), verb, subject, tense=tense)
        possessor = subject if isinstance(subject, NounPhrase) and subject.is_bare else None
        if verb.recipients is not None:
            clause.recipient = self._noun_phrase(verb.recipients, 'definite', plain=True)
            possessor = None
        if obj is not None:
            clause.object = obj
        elif verb.objects is not None:
            clause.object = self._noun_phrase(verb.objects, plain=plain, possessor=possessor)
        return clause

    def _add_modal(self, clause: Clause) -> None:
        if clause.tense == 'present' and clause.verb in self.lexicon.action_verbs:
            clause.modal = self._pick(self.lexicon.modals)

    def _add_negation(self, clause: Clause) -> None:
        """Negates where `nicht` or `kein` has one right place and the sentence stays plain to read."""
        subject, obj = clause.subject, clause.object
        if isinstance(subject, NounPhrase) and not _is_plainly_definite(subject):
            return
        if clause.modal is not None and not clause.modal.negatable:
            return
        if isinstance(obj, NounPhrase):
            takes_negation = _is_plainly_definite(obj) or obj.determiner in (A, BARE)
            if not takes_negation or clause.location is not None:
                return
        clause.negated = True

    def _add_adverbial(self, clause: Clause, *, may_be_first: bool = True) -> None:
        places = {'last', 'first'} if may_be_first else {'last'}
        obj = clause.object
        if isinstance(obj, NounPhrase) and obj.relative is not None:
            places.discard('last')  # it would seem to belong to the relative clause
        if self._chance(self.profile.date_share):
            if clause.tense != 'perfect' and places and clause.verb in self.lexicon.action_verbs:
                clause.adverbial = self._date(self._pick(sorted(places)))
            return
        is_negative = isinstance(clause.subject, NounPhrase) and clause.subject.determiner is NO
        if not clause.negated and not is_negative:
            places.add('before')
        adverbs = [
            (adverb, place)
            for adverb in self.lexicon.adverbs
            if clause.tense in adverb.tenses
            for place in sorted(adverb.places & places)
        ]
        if adverbs:
            adverb, place = self._pick(adverbs)
            clause.adverbial = Adverbial(((adverb.english, 0),), ((adverb.german, 0),), self._node(), place)

    def _date(self, place: str) -> Adverbial:
        lexicon = self.lexicon
        if lexicon.weekdays and self._chance(0.25):
            name, german_name = self._pick(lexicon.weekdays)
            return Adverbial((('on', 0), (name, 1)), (('am', 0), (german_name, 1)), self._node(), place)
        index = int(self._random() * 12)
        month, german_month = lexicon.months[index]
        day = 1 + int(self._random() * _DAYS_IN_MONTH[index])
        if self._chance(self.profile.spelled_date_share):
            words = (('on', 0), ('the', 0), (english.ordinal(day), 2), ('of', 1), (month, 1))
            german = (('am', 0), (morphology.ordinal(day) + 'en', 2), (german_month, 1))
            return Adverbial(words, german, self._node(), place, is_date=True)
        german = (('am', 0), (f'{day}.', 2), (german_month, 1))
        return Adverbial((('on', 0), (month, 1), (str(day), 2)), german, self._node(), place, is_date=True)

    def _decorate(self, clause: Clause, *, may_be_first: bool = True, may_be_negated: bool = True) -> Clause:
        """Adds a modal, a negation, a place or an adverbial by the rates of the profile."""
        profile = self.profile
        if self._chance(profile.modal_rate):
            self._add_modal(clause)
        obj = clause.object
        location_rate = profile.location_rate if clause.verb.objects is None else profile.object_location_rate
        takes_place = clause.verb.prefix is None and clause.verb is not BE and clause.recipient is None
        if (
            takes_place
            and (obj is None or (isinstance(obj, NounPhrase) and obj.is_bare))
            and self._chance(location_rate)
        ):
            is_place = isinstance(obj, NounPhrase) and obj.noun.semantic_class == 'place'
            if not is_place:
                clause.location = self._noun_phrase(_PLACE, 'definite', plain=True)
                if clause.location.determiner.english is not None:
                    clause.location.plural = False  # one is in one place
        if may_be_negated and self._chance(profile.negation_rate):
            self._add_negation(clause)
        elif self._chance(profile.adverbial_rate):
            self._add_adverbial(clause, may_be_first=may_be_first)
        return clause

    def _add_relative(self, np: NounPhrase, tense: str) -> None:
        """Gives the noun phrase a relative clause in which it is the subject or the object."""
        semantic_class = np.noun.semantic_class
        tense = _RELATIVE_TENSE[tense]
        verbs = [v for v in self.lexicon.verbs if v.recipients is None and v.has_tense(tense)]
        as_object = [v for v in verbs if v.objects is not None and semantic_class in v.objects]
        as_subject = [v for v in verbs if semantic_class in v.subjects]
        if as_object and (not as_subject or self._chance(0.5)):
            verb = self._pick(as_object)
            subject = self._noun_phrase(verb.subjects, 'subject', plain=True)
            np.relative = Clause(self._node(), verb, subject, np, tense=tense, gap='object')
            return
        verb = self._pick(as_subject)
        np.relative = Clause(self._node(), verb, np, tense=tense, gap='subject')
        if verb.objects is not None:
            np.relative.object = self._noun_phrase(verb.objects, plain=True)

    def _maybe_relative(self, clause: Clause) -> Clause:
        for part in (clause.subject, clause.object):
            if not isinstance(part, NounPhrase) or not part.is_bare or part.possessor is not None:
                continue
            if self._chance(self.profile.relative_rate):
                self._add_relative(part, clause.tense)
        return clause

    def _tense(self) -> str:
        return self._weighted(self.profile.tenses)

    def _any_verb(self) -> Verb:
        lexicon = self.lexicon
        kind = self._random()
        if kind < 0.25:
            return self._pick(lexicon.intransitive_verbs)
        return self._pick(lexicon.ditransitive_verbs if kind > 0.9 else lexicon.transitive_verbs)
