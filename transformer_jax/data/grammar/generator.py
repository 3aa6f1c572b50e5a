"""Draws whole sentences at random: one method a construction."""

from collections.abc import Callable
from random import Random

from .lexicon import BARE, BE, NO, THE, A, Lexicon, Verb
from .meaning import Clause, Link, NounPhrase, Sentence
from .phrase_generator import COMPANIONS, DeadEndError, PhraseGenerator
from .profiles import Profile

_DESCRIBED = frozenset('man woman animal item container garment headwear vehicle furniture'.split())

_MOTIVES = frozenset('mood need mind manner force wealth courage zeal health'.split())  # groups that explain a deed


class SentenceGenerator(PhraseGenerator):
    """Draws sentences of one profile; their length is not yet checked."""

    def __init__(self, lexicon: Lexicon, profile: Profile):
        super().__init__(lexicon, profile)
        self._constructions: dict[str, Callable[[], Sentence]] = {
            name: getattr(self, f'_draw_{name}') for name, _ in profile.constructions
        }
        self._transitive_actions = tuple(v for v in lexicon.transitive_verbs if v in lexicon.action_verbs)
        self._separable = tuple(v for v in lexicon.verbs if v.prefix is not None and v.recipients is None)
        self._reversible = tuple(v for v in lexicon.transitive_verbs if v.subjects & (v.objects or frozenset()))

    def draw(self, rng: Random) -> Sentence:
        while True:
            self.start(rng)
            try:
                return self._constructions[self._weighted(self.profile.constructions)]()
            except DeadEndError:
                continue

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
        subject = self._noun_phrase(both, 'subject', plain=True)
        obj = self._noun_phrase(both, 'subject' if subject.determiner is not NO else 'object', plain=True)
        clause = Clause(self._node(), verb, subject, obj, tense=self._tense())
        if not verb.has_tense(clause.tense):
            raise DeadEndError
        return Sentence(self._decorate(clause))

    def _draw_modal(self) -> Sentence:
        verb = self._any_verb()
        if verb not in self.lexicon.action_verbs:
            raise DeadEndError
        clause = self._clause(verb)
        self._add_modal(clause)
        if self._chance(self.profile.negation_rate):
            self._add_negation(clause)
        elif self._chance(self.profile.adverbial_rate):
            self._add_adverbial(clause)
        return Sentence(clause)

    def _draw_companion(self) -> Sentence:
        """A subject followed by a noun of the other number: the man with the dogs sleeps."""
        verb = self._any_verb()
        subject = self._noun_phrase(verb.subjects & frozenset({'man', 'woman'}), 'subject', plain=True)
        if subject.determiner not in (THE, A):
            raise DeadEndError
        subject.companion = self._noun_phrase(COMPANIONS, 'inner', plain=True)
        if subject.companion.number is None:
            subject.companion.plural = not subject.plural
            subject.companion.determiner = self._pick((THE, BARE if subject.companion.plural else A))
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
        main = self._clause(self._any_verb(), tense)
        second = self._clause(self._pick(self.lexicon.transitive_verbs), second_tense)
        second_first = self._chance(0.3)
        if not simple:
            self._decorate(self._maybe_relative(main), may_be_first=not second_first)
            may_be_negated = link.english in ('because', 'although')
            self._decorate(self._maybe_relative(second), may_be_first=False, may_be_negated=may_be_negated)
        return Sentence(main, link, second, second_first)

    def _draw_report(self) -> Sentence:
        verb = self._pick(self.lexicon.reporting_verbs)
        tense = self._tense()
        # "said that he sees" would not do in English.
        main = self._clause(verb, 'past' if tense == 'past' else 'present')
        second = self._clause(self._any_verb(), tense)
        self._decorate(self._maybe_relative(second), may_be_first=False)
        return Sentence(main, Link('that', self._node(), 'that', 'dass'), second)

    def _draw_infinitive(self) -> Sentence:
        """The man tries to see the dog; the man works in order to see the dog."""
        tense = self._tense()
        is_purpose = self._chance(0.4)
        verb = self._pick(self.lexicon.purposeful_verbs if is_purpose else self.lexicon.control_verbs)
        main = self._clause(verb, tense)
        if not isinstance(main.subject, NounPhrase):
            raise DeadEndError
        semantic_class = main.subject.noun.semantic_class
        verbs = [v for v in self._transitive_actions if semantic_class in v.subjects]
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
        subject = self._noun_phrase(_DESCRIBED, 'definite')
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
        adjectives = self.lexicon.adjectives_of(wanted.noun.semantic_class)
        if wanted is main.subject:
            adjectives = tuple(a for a in adjectives if a.group in _MOTIVES)
        adjective = self._pick(adjectives)
        reason = Clause(self._node(), BE, pronoun, predicate=adjective, tense=tense)
        return Sentence(main, Link('subordinate', self._node(), 'because', 'weil'), reason)

    def _draw_sequence(self) -> Sentence:
        """The man finds the cup and washes it."""
        tense = self._tense()
        if tense not in ('present', 'past'):
            raise DeadEndError  # German would leave out the second auxiliary, English need not
        main = self._clause(self._pick(self.lexicon.transitive_verbs), tense, plain=True)
        if not isinstance(main.object, NounPhrase) or not isinstance(main.subject, NounPhrase):
            raise DeadEndError
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
