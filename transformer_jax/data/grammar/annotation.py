"""What is known about a sentence pair beside its words: phenomena, gold alignment and gold links."""

from dataclasses import replace
from typing import Any

from .lexicon import QUANTIFIERS
from .meaning import AUXILIARY, DETERMINER, RELATIVE_PRONOUN, Clause, NounPhrase, Pronoun, Sentence, noun_phrases
from .words import Words

PHENOMENA = (
    'role_order',  # subject and object could change places
    'long_distance_verb',  # two words or more part a verb from its subject (verb last) or auxiliary
    'relative_clause',
    'separable_verb',  # the prefix stands apart from its verb
    'agreement',  # a noun of the other number stands between subject and verb
    'coreference',  # a personal or possessive pronoun
    'number_inversion',  # twenty-three, dreiundzwanzig
    'negation',
    'date',
    'ditransitive',
    'modal',
    'length',  # at least LONG_WORDS German words
)
LONG_WORDS = 12
_MIN_DISTANCE = 3


def swap_roles(meaning: Sentence) -> Sentence | None:
    """The sentence with subject and object changed, or None where that is no sentence of the grammar."""
    clause = meaning.main
    subject, obj = clause.subject, clause.object
    if meaning.second is not None or not isinstance(subject, NounPhrase) or not isinstance(obj, NounPhrase):
        return None
    if clause.recipient is not None or not (subject.is_bare and obj.is_bare) or obj.possessor is not None:
        return None
    verb = clause.verb
    if obj.noun.semantic_class not in verb.subjects or subject.noun.semantic_class not in (verb.objects or ()):
        return None
    if clause.negated and (obj.determiner.definiteness != 'definite' or obj.determiner in QUANTIFIERS):
        return None  # would be a negated sentence with an indefinite subject
    return Sentence(replace(clause, subject=obj, object=subject))


def annotate(meaning: Sentence, source: Words, target: Words) -> dict[str, Any]:
    """Phenomena, alignment and links of a pair, as `GrammarSource` describes them."""
    positions = node_positions(target)
    clauses = meaning.clauses()
    phrases = noun_phrases(clauses)
    pronouns = _pronouns(clauses, phrases)
    found = {
        'role_order': swap_roles(meaning) is not None,
        'long_distance_verb': _has_distant_verb(meaning, clauses, positions),
        'relative_clause': any(clause.gap is not None for clause in clauses),
        'separable_verb': any(_has_split_verb(clause, positions) for clause in clauses),
        'agreement': any(_has_attractor(clause) for clause in clauses),
        'coreference': bool(pronouns),
        'number_inversion': any(np.number is not None and np.number > 20 and np.number % 10 for np in phrases),
        'negation': any(clause.negated for clause in clauses),
        'date': any(clause.adverbial is not None and clause.adverbial.is_date for clause in clauses),
        'ditransitive': any(clause.recipient is not None for clause in clauses),
        'modal': any(clause.modal is not None for clause in clauses),
        'length': len(target) >= LONG_WORDS,
    }
    return {
        'phenomena': tuple(name for name in PHENOMENA if found[name]),
        'alignment': _align(source, positions),
        'subject_links': _link_subjects(clauses, positions),
        'antecedent_links': tuple(sorted((positions[node][0], positions[np.node][0]) for node, np in pronouns)),
    }


def node_positions(words: Words) -> dict[int, list[int]]:
    """For each node the places, from 0, of the words that express it."""
    positions: dict[int, list[int]] = {}
    for index, (_, nodes) in enumerate(words):
        for node in nodes:
            positions.setdefault(node, []).append(index)
    return positions


def _align(source: Words, positions: dict[int, list[int]]) -> tuple[tuple[int, int], ...]:
    """The pairs (source place, target place) of words that share a node."""
    pairs = {(i, j) for i, (_, nodes) in enumerate(source) for node in nodes for j in positions.get(node, ())}
    return tuple(sorted(pairs))


def _link_subjects(clauses: list[Clause], positions: dict[int, list[int]]) -> tuple[tuple[int, int], ...]:
    """(verb, subject) places for every verb word but separated prefixes; the subject is a noun or a personal pronoun.

    The verb of a relative clause is linked to the noun it describes where that is its subject, and a verb whose subject
    is left out ("und wäscht sie", "zu sehen") to the subject that it shares.
    """
    links = []
    for clause in clauses:
        subject = positions[clause.subject.node][0]
        links.append((positions[clause.node][0], subject))
        if clause.has_auxiliary:
            links.append((positions[clause.node + AUXILIARY][0], subject))
    return tuple(sorted(links))


def _pronouns(clauses: list[Clause], phrases: list[NounPhrase]) -> list[tuple[int, NounPhrase]]:
    """The node of each pronoun and what it stands for."""
    personal = [
        (part.node, part.antecedent)
        for clause in clauses
        for part in (clause.subject, clause.object)
        if isinstance(part, Pronoun)
    ]
    return personal + [(np.node + DETERMINER, np.possessor) for np in phrases if np.possessor is not None]


def _has_split_verb(clause: Clause, positions: dict[int, list[int]]) -> bool:
    return clause.verb.prefix is not None and len(positions[clause.node]) > 1


def _has_distant_verb(meaning: Sentence, clauses: list[Clause], positions: dict[int, list[int]]) -> bool:
    """Whether at least two words part a verb from its subject (verb last) or from its auxiliary (verb second)."""
    kind = meaning.link.kind if meaning.link is not None else None
    for clause in clauses:
        verb = positions[clause.node][-1]
        is_second = clause is meaning.second
        if is_second and kind in ('infinitive', 'purpose'):
            start = positions[meaning.main.node][-1]  # the verb that governs the infinitive
        elif clause.gap == 'subject':
            start = positions[clause.node + RELATIVE_PRONOUN][0]
        elif clause.gap == 'object' or (is_second and kind in ('subordinate', 'that')):
            start = positions[clause.subject.node][0]
        elif clause.has_auxiliary:
            start = positions[clause.node + AUXILIARY][0]
        else:
            continue
        if verb - start >= _MIN_DISTANCE:
            return True
    return False


def _has_attractor(clause: Clause) -> bool:
    """Whether a noun inside the subject differs from it in number."""
    subject = clause.subject
    if not isinstance(subject, NounPhrase) or subject.is_bare or clause.gap == 'subject' or clause.subject_elided:
        return False
    inner = [np for np in (subject.companion, subject.owner) if np is not None]
    if subject.relative is not None:
        inner += [np for np in noun_phrases([subject.relative]) if np is not subject]
    return any(np.plural != subject.plural for np in inner)
