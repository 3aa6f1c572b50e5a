"""What a sentence says, before either language has words for it: noun phrases, clauses and how clauses are joined.

Everything that will become a word has a *node*, an integer of its own in the sentence. Both languages mark each word
with the nodes it expresses, and words that share a node are aligned. A phrase owns the nodes from its `node` on, by the
offsets below.
"""

from dataclasses import dataclass

from .lexicon import Adjective, Determiner, Modal, Noun, Verb

NODES_A_PHRASE = 8
# Offsets in a noun phrase; the noun itself is 0.
DETERMINER, NUMBER_WORD, PREPOSITION, ADJECTIVE = 1, 2, 3, 4
# Offsets in a clause; the main verb is 0.
AUXILIARY, NEGATION, RELATIVE_PRONOUN, PREDICATE, INFINITIVE_MARK = 1, 2, 3, 4, 5


@dataclass(eq=False, slots=True)
class NounPhrase:
    noun: Noun
    node: int
    determiner: Determiner
    plural: bool = False
    adjectives: tuple[Adjective, ...] = ()
    number: int | None = None  # with the determiner NUMBER
    possessor: 'NounPhrase | None' = None  # whose it is, with the determiner HIS or HER
    companion: 'NounPhrase | None' = None  # the man with the dog
    owner: 'NounPhrase | None' = None  # the dog of the man
    relative: 'Clause | None' = None

    @property
    def agreement(self) -> str:
        return 'p' if self.plural else self.noun.gender

    @property
    def english_pronoun(self) -> str | None:
        return self.noun.english_pronoun(self.plural)

    @property
    def is_bare(self) -> bool:
        """Whether nothing follows the noun."""
        return self.companion is None and self.owner is None and self.relative is None


@dataclass(eq=False, slots=True)
class Pronoun:
    """A personal pronoun; the antecedent is a noun phrase whose English pronoun is not None."""

    antecedent: NounPhrase
    node: int

    @property
    def plural(self) -> bool:
        return self.antecedent.plural

    @property
    def agreement(self) -> str:
        return self.antecedent.agreement


@dataclass(eq=False, slots=True)
class Adverbial:
    """A time or manner as ready words of both languages, their nodes counted from 0."""

    english: tuple[tuple[str, int], ...]
    german: tuple[tuple[str, int], ...]
    node: int
    place: str  # 'first', 'last' or 'before' the English verb
    is_date: bool = False


@dataclass(eq=False, slots=True)
class Clause:
    """One verb with what belongs to it. `gap` names the part that a relative clause shares with its head noun."""

    node: int
    verb: Verb
    subject: NounPhrase | Pronoun
    object: NounPhrase | Pronoun | None = None
    recipient: NounPhrase | None = None
    predicate: Adjective | None = None
    location: NounPhrase | None = None
    adverbial: Adverbial | None = None
    modal: Modal | None = None
    tense: str = 'present'
    negated: bool = False
    gap: str | None = None  # 'subject' or 'object' in a relative clause
    subject_elided: bool = False  # "... and washes it", "to wash it"

    @property
    def has_auxiliary(self) -> bool:
        return self.modal is not None or self.tense in ('perfect', 'future')

    @property
    def negates_object(self) -> bool:
        """Whether the negation is `kein` on the object instead of `nicht`."""
        return (
            self.negated and isinstance(self.object, NounPhrase) and self.object.determiner.definiteness == 'indefinite'
        )


@dataclass(eq=False, slots=True)
class Link:
    """How a second clause is joined: 'subordinate', 'that', 'and', 'but', 'infinitive' or 'purpose'."""

    kind: str
    node: int
    english: str = ''
    german: str = ''


@dataclass(eq=False, slots=True)
class Sentence:
    main: Clause
    link: Link | None = None
    second: Clause | None = None
    second_first: bool = False  # the subordinate clause opens the sentence

    def clauses(self) -> list[Clause]:
        """Every clause: the main one, the second, then relative clauses."""
        told = [self.main] if self.second is None else [self.main, self.second]
        for clause in told:  # grows while it is walked; only subjects and objects have relative clauses
            for part in (clause.subject, clause.object):
                if isinstance(part, NounPhrase) and part.relative is not None and part.relative not in told:
                    told.append(part.relative)
        return told


def noun_phrases(clauses: list[Clause]) -> list[NounPhrase]:
    """The noun phrases of the clauses and those inside them, each once; not those of their relative clauses."""
    found: list[NounPhrase] = []
    for clause in clauses:
        for part in (clause.subject, clause.recipient, clause.object, clause.location):
            # An elided subject and the head of a relative clause are noun phrases of another clause.
            if isinstance(part, NounPhrase) and part not in found:
                found += [np for np in (part, part.companion, part.owner) if np is not None]
    return found
