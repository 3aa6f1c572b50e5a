"""Draws meanings at random: which construction, which words that fit each other, and what is added to them."""

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from . import english, morphology
from .lexicon import (
    A,
    BARE,
    BE,
    HER,
    HIS,
    NUMBER,
    QUANTIFIERS,
    THE,
    Adjective,
    Lexicon,
    Modal,
    Noun,
    Verb,
)
from .meaning import NODES_A_PHRASE, Adverbial, Clause, Link, NounPhrase, Pronoun, Sentence, noun_phrases
from .profiles import Profile

Item = TypeVar('Item')

_DAYS_IN_MONTH = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_COMPANIONS = frozenset('animal item clothing container'.split())
_PLACE = frozenset({'place'})
# What a clause inside a sentence of another tense is told in.
_RELATIVE_TENSE = {'present': 'present', 'past': 'past', 'perfect': 'past', 'future': 'present'}


class _NoSuchSentence(Exception):
    """The draw came to a place where nothing fits; the next draw starts anew."""


class SentenceGenerator:
    """Draws sentences of one profile. All chance comes from the `Random` given, by `random()` alone."""

    def __init__(self, lexicon: Lexicon, profile: Profile):
        self.lexicon = lexicon
        self.profile = profile
        self._constructions: dict[str, Callable[[], Sentence]] = {
            name: getattr(self, f'_draw_{name}') for name, _ in profile.constructions
        }
        self._separable = tuple(v for v in lexicon.verbs if v.prefix is not None and v.recipients is None)
        self._reversible = tuple(
            v for v in lexicon.transitive_verbs if v.objects is not None and v.subjects & v.objects
        )

    def draw(self, rng: Random) -> Sentence:
        """One meaning; its length is not yet checked."""
        self._random = rng.random
        while True:
            self._next_node = 0
            self._used: list[Noun] = []
            try:
                return self._constructions[self._weighted(self.profile.constructions)]()
            except _NoSuchSentence:
                continue

    # Chance

    def _pick(self, items: Sequence[Item]) -> Item:
        if not items:
            raise _NoSuchSentence
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
        # Colour stands next to the noun in both languages.
        if second.group == first.group or first.group == 'color':
            return (first,)
        return (first, second)

    def _noun_phrase(
        self,
        classes: frozenset[str],
        *,
        definite: bool = False,
        plain: bool = False,
        possessor: NounPhrase | None = None,
    ) -> NounPhrase:
        """A noun phrase; `definite` bars a, numbers and bare plurals, `plain` bars what stands after the noun."""
        profile = self.profile
        noun = self._noun(classes)
        np = NounPhrase(noun, self._node(), THE)
        np.plural = self._chance(profile.plural_rate)
        self._determine(np, definite, possessor)
        np.adjectives = self._adjectives(noun)
        if plain or np.possessor is not None:
            return np
        if noun.semantic_class in ('man', 'woman') and self._chance(profile.companion_rate):
            np.companion = self._noun_phrase(_COMPANIONS, plain=True)
        elif noun.semantic_class not in ('man', 'woman', 'child', 'place') and self._chance(profile.owner_rate):
            np.owner = self._noun_phrase(frozenset({'man', 'woman', 'child'}), definite=True, plain=True)
            np.owner.determiner = THE
        return np

    def _determine(self, np: NounPhrase, definite: bool, possessor: NounPhrase | None) -> None:
        profile = self.profile
        if possessor is not None and self._chance(profile.possessive_rate):
            if self._is_only_antecedent(possessor, [possessor]):
                np.possessor = possessor
                np.determiner = HIS if morphology.possessive_stem(possessor.agreement) == 'sein' else HER
                return
        if not definite and self._chance(profile.number_rate):
            np.plural, np.determiner = True, NUMBER
            np.number = 2 + int(self._random() * 98)
        elif self._chance(profile.determiner_rate):
            wanted = [
                d
                for d in self.lexicon.further_determiners
                if (d.english_plural if np.plural else d.english) and (not definite or d.definiteness == 'definite')
            ]
            np.determiner = self._pick(wanted)
        elif not definite and self._chance(profile.indefinite_rate):
            np.determiner = BARE if np.plural else A

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
        if not self._is_only_antecedent(wanted, noun_phrases([first_clause])):
            raise _NoSuchSentence
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
            raise _NoSuchSentence
        if subject is None:
            subject = self._noun_phrase(verb.subjects, plain=plain)
        clause = Clause(self._node(), verb, subject, tense=tense)
        possessor = subject if isinstance(subject, NounPhrase) and subject.is_bare else None
        if verb.recipients is not None:
            clause.recipient = self._noun_phrase(verb.recipients, definite=True, plain=True)
            possessor = None
        if obj is not None:
            clause.object = obj
        elif verb.objects is not None:
            clause.object = self._noun_phrase(verb.objects, plain=plain, possessor=possessor)
        return clause

    def _add_modal(self, clause: Clause) -> None:
        if clause.tense == 'present' and clause.verb is not BE:
            clause.modal = self._pick(self.lexicon.modals)

    def _add_negation(self, clause: Clause) -> None:
        """Negates where `nicht` or `kein` has one right place and the sentence stays plain to read."""
        subject, obj = clause.subject, clause.object
        if isinstance(subject, NounPhrase):
            if subject.determiner.definiteness != 'definite' or subject.determiner in QUANTIFIERS:
                return
        if clause.modal is not None and not clause.modal.negatable:
            return
        if isinstance(obj, NounPhrase):
            determiner = obj.determiner
            is_definite = determiner.definiteness == 'definite' and determiner not in QUANTIFIERS
            if not (is_definite or determiner in (A, BARE)) or clause.location is not None:
                return
        clause.negated = True

    def _add_adverbial(self, clause: Clause, *, may_be_first: bool = True) -> None:
        places = {'last', 'first'} if may_be_first else {'last'}
        obj = clause.object
        if isinstance(obj, NounPhrase) and obj.relative is not None:
            places.discard('last')  # it would seem to belong to the relative clause
        if self._chance(self.profile.date_share):
            if clause.tense != 'perfect' and places:
                clause.adverbial = self._date(self._pick(sorted(places)))
            return
        if not clause.negated:
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

    def _decorate(self, clause: Clause, *, may_be_first: bool = True) -> Clause:
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
                clause.location = self._noun_phrase(_PLACE, definite=True, plain=True)
        if self._chance(profile.negation_rate):
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
            subject = self._noun_phrase(verb.subjects, plain=True)
            np.relative = Clause(self._node(), verb, subject, np, tense=tense, gap='object')
            return
        verb = self._pick(as_subject)
        np.relative = Clause(self._node(), verb, np, tense=tense, gap='subject')
        if verb.objects is not None:
            np.relative.object = self._noun_phrase(verb.objects, plain=True)

    def _maybe_relative(self, clause: Clause) -> Clause:
        for part in (clause.subject, clause.object):
            if isinstance(part, NounPhrase) and part.is_bare and part.possessor is None:
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

    # Constructions

    def _single(self, verb: Verb) -> Sentence:
        return Sentence(self._decorate(self._maybe_relative(self._clause(verb, self._tense()))))

    def _draw_transitive(self) -> Sentence:
        return self._single(self._pick(self.lexicon.transitive_verbs))

    def _draw_intransitive(self) -> Sentence:
        return self._single(self._pick(self.lexicon.intransitive_verbs))

    def _draw_ditransitive(self) -> Sentence:
        return self._single(self._pick(self.lexicon.ditransitive_verbs))

    def _draw_separable(self) -> Sentence:
        return self._single(self._pick(self._separable))

    def _draw_reversible(self) -> Sentence:
        """A clause whose subject and object could change places."""
        verb = self._pick(self._reversible)
        assert verb.objects is not None
        both = verb.subjects & verb.objects
        subject = self._noun_phrase(both, plain=True)
        obj = self._noun_phrase(both, plain=True)
        clause = Clause(self._node(), verb, subject, obj, tense=self._tense())
        if not verb.has_tense(clause.tense):
            raise _NoSuchSentence
        return Sentence(self._decorate(clause))

    def _draw_modal(self) -> Sentence:
        clause = self._clause(self._any_verb())
        self._add_modal(clause)
        if self._chance(self.profile.negation_rate):
            self._add_negation(clause)
        elif self._chance(self.profile.adverbial_rate):
            self._add_adverbial(clause)
        return Sentence(clause)

    def _draw_companion(self) -> Sentence:
        """A subject followed by a noun of the other number: the man with the dogs sleeps."""
        verb = self._any_verb()
        subject = self._noun_phrase(verb.subjects & frozenset({'man', 'woman'}), plain=True)
        if subject.number is not None:
            raise _NoSuchSentence
        subject.companion = self._noun_phrase(_COMPANIONS, plain=True)
        return Sentence(self._decorate(self._clause(verb, self._tense(), subject=subject)))

    def _draw_relative(self) -> Sentence:
        """A noun with a relative clause, at the beginning or at the end of the sentence."""
        tense = self._tense()
        clause = self._clause(self._pick(self.lexicon.transitive_verbs), tense, plain=True)
        if self._chance(0.6):
            if self._chance(0.5):
                clause = self._clause(self._pick(self.lexicon.intransitive_verbs), tense, plain=True)
            target = clause.subject
        else:
            target = clause.object
        assert isinstance(target, NounPhrase)
        self._add_relative(target, tense)
        return Sentence(clause)

    def _second_clause_link(self, tense: str) -> tuple[Link, str]:
        fitting = [s for s in self.lexicon.subordinators if tense in s.tenses]
        subordinator = self._pick(fitting)
        second_tense = 'present' if tense == 'future' else tense
        return Link('subordinate', self._node(), subordinator.english, subordinator.german), second_tense

    def _draw_subordinate(self) -> Sentence:
        tense = self._tense()
        link, second_tense = self._second_clause_link(tense)
        simple = self.profile.relative_rate == 0.0
        main = self._clause(self._pick(self.lexicon.intransitive_verbs) if simple else self._any_verb(), tense)
        second = self._clause(self._pick(self.lexicon.transitive_verbs), second_tense)
        second_first = self._chance(0.3)
        if not simple:
            self._decorate(self._maybe_relative(main), may_be_first=not second_first)
            self._decorate(self._maybe_relative(second), may_be_first=False)
        return Sentence(main, link, second, second_first)

    def _draw_report(self) -> Sentence:
        verb = self._pick(self.lexicon.reporting_verbs)
        main = self._clause(verb, 'present' if self._chance(0.5) else 'past')
        verb = self._any_verb()
        second = self._decorate(self._maybe_relative(self._clause(verb, self._tense())), may_be_first=False)
        return Sentence(main, Link('that', self._node(), 'that', 'dass'), second)

    def _draw_infinitive(self) -> Sentence:
        """The man tries to see the dog; the man works in order to see the dog."""
        tense = self._tense()
        is_purpose = self._chance(0.4)
        verb = self._pick(self.lexicon.intransitive_verbs if is_purpose else self.lexicon.control_verbs)
        main = self._clause(verb, tense)
        if not isinstance(main.subject, NounPhrase):
            raise _NoSuchSentence
        verbs = [v for v in self.lexicon.transitive_verbs if main.subject.noun.semantic_class in v.subjects]
        second = self._clause(self._pick(verbs), subject=main.subject)
        second.subject_elided = True
        if self._chance(0.3):
            self._add_adverbial(main)
            if main.adverbial is not None and main.adverbial.place == 'last':
                main.adverbial = None  # it would seem to belong to the infinitive
        return Sentence(main, Link('purpose' if is_purpose else 'infinitive', self._node()), second)

    def _draw_contrast(self) -> Sentence:
        """The cup is old, but it is beautiful."""
        tense = 'past' if self.profile.tenses[0][1] < 1.0 and self._chance(0.3) else 'present'
        subject = self._noun_phrase(frozenset('man woman animal item container clothing vehicle furniture'.split()))
        subject.adjectives = ()
        adjectives = self.lexicon.adjectives_of(subject.noun.semantic_class)
        first = self._pick(adjectives)
        second = self._pick([a for a in adjectives if a.group != first.group])
        main = Clause(self._node(), BE, subject, predicate=first, tense=tense)
        pronoun = self._pronoun(subject, main)
        other = Clause(self._node(), BE, pronoun, predicate=second, tense=tense)
        if self._chance(0.25):
            self._add_negation(self._pick((main, other)))
        return Sentence(main, Link('but', self._node(), 'but', 'aber'), other)

    def _draw_reason(self) -> Sentence:
        """The woman buys the cup because it is beautiful; the pronoun means the object or the subject."""
        tense = self._tense()
        main = self._clause(self._pick(self.lexicon.transitive_verbs), tense)
        wanted = main.object if self._chance(0.75) else main.subject
        assert isinstance(wanted, NounPhrase)
        pronoun = self._pronoun(wanted, main)
        tense = 'past' if tense in ('past', 'perfect') else 'present'
        adjective = self._pick(self.lexicon.adjectives_of(wanted.noun.semantic_class))
        reason = Clause(self._node(), BE, pronoun, predicate=adjective, tense=tense)
        return Sentence(main, Link('subordinate', self._node(), 'because', 'weil'), reason)

    def _draw_sequence(self) -> Sentence:
        """The man finds the cup and washes it."""
        tense = self._tense()
        main = self._clause(self._pick(self.lexicon.transitive_verbs), tense, plain=True)
        if not isinstance(main.object, NounPhrase) or not isinstance(main.subject, NounPhrase):
            raise _NoSuchSentence
        pronoun = self._pronoun(main.object, main)
        classes = main.subject.noun.semantic_class, main.object.noun.semantic_class
        verbs = [
            v
            for v in self.lexicon.transitive_verbs
            if v is not main.verb and classes[0] in v.subjects and v.objects and classes[1] in v.objects
        ]
        second = self._clause(self._pick(verbs), tense, subject=main.subject, obj=pronoun)
        second.subject_elided = True
        return Sentence(main, Link('and', self._node(), 'and', 'und'), second)
