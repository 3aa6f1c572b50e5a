"""Puts a meaning into German words: verb second, verb last, the bracket of verb parts, and the order between them."""

from . import morphology
from .lexicon import NO
from .meaning import (
    ADJECTIVE,
    AUXILIARY,
    DETERMINER,
    INFINITIVE_MARK,
    NEGATION,
    NUMBER_WORD,
    PREDICATE,
    PREPOSITION,
    RELATIVE_PRONOUN,
    Clause,
    NounPhrase,
    Pronoun,
    Sentence,
)
from .words import Words, add_comma, finish


def sentence(meaning: Sentence) -> Words:
    """The words with their punctuation attached, ready to be joined by spaces."""
    link, second = meaning.link, meaning.second
    if link is None or second is None:
        return finish(clause(meaning.main, 'second'))
    mark = (link.node,)
    if meaning.second_first:
        opening = [(link.german, mark), *clause(second, 'last')]
        add_comma(opening)
        return finish(opening + clause(meaning.main, 'first'))
    words = clause(meaning.main, 'second')
    if link.kind != 'and':
        add_comma(words)
    if link.kind == 'infinitive':
        return finish(words + clause(second, 'zu'))
    if link.kind == 'purpose':
        return finish([*words, ('um', mark), *clause(second, 'zu')])
    return finish([*words, (link.german, mark), *clause(second, 'second' if link.kind in ('and', 'but') else 'last')])


def clause(meaning: Clause, verb_place: str) -> Words:
    """A clause with its finite verb `first`, `second` or `last`, or an infinitive with `zu`."""
    finite, bracket = _verb_group(meaning, verb_place)
    middle, extraposed = _middle_field(meaning, something_follows=bool(bracket))
    adverbial = meaning.adverbial
    opening: Words = []
    if adverbial is not None and adverbial.place == 'first':
        opening = [(text, (adverbial.node + offset,)) for text, offset in adverbial.german]
    subject: Words = []
    if meaning.gap is not None:
        opening = [(_relative_word(meaning), (meaning.node + RELATIVE_PRONOUN,))]
    if meaning.gap != 'subject' and not meaning.subject_elided:
        subject = _reference(meaning.subject, 'nominative')
    if verb_place in ('last', 'zu'):
        words = opening + subject + middle + bracket
    elif verb_place == 'first':
        words = finite + subject + opening + middle + bracket
    elif opening:
        words = opening + finite + subject + middle + bracket
    else:
        words = subject + finite + middle + bracket
    if extraposed:
        add_comma(words)
        words += extraposed
    return words


def noun_phrase(meaning: NounPhrase, case: str, negated_by: int | None = None) -> Words:
    """A noun phrase with its article, number, adjectives and what follows the noun but the relative clause.

    `negated_by` is the node of the negation that turns `ein` or no article into `kein`.
    """
    agreement, node = meaning.agreement, meaning.node
    determiner = meaning.determiner if negated_by is None else NO
    words: Words = []
    article = determiner.decline(agreement, case)
    if article:
        nodes = (node + DETERMINER,) if negated_by is None else (node + DETERMINER, negated_by)
        words.append((article, nodes))
    if meaning.number is not None:
        words.append((morphology.cardinal(meaning.number), (node + NUMBER_WORD,)))
    ending = morphology.adjective_ending(determiner.declension, agreement, case)
    for index, adjective in enumerate(meaning.adjectives):
        words.append((morphology.add_ending(adjective.stem, ending), (node + ADJECTIVE + index,)))
    words.append((meaning.noun.decline(meaning.plural, case), (node,)))
    if meaning.companion is not None:
        words.append(('mit', (meaning.companion.node + PREPOSITION,)))
        words += noun_phrase(meaning.companion, 'dative')
    if meaning.owner is not None:
        words += noun_phrase(meaning.owner, 'genitive')
    return words


def relative_clause(meaning: NounPhrase) -> Words:
    """The relative clause with its closing comma; empty where there is none."""
    if meaning.relative is None:
        return []
    words = clause(meaning.relative, 'last')
    add_comma(words)
    return words


def _reference(meaning: NounPhrase | Pronoun, case: str) -> Words:
    if isinstance(meaning, Pronoun):
        return [(morphology.personal_pronoun(meaning.agreement, case), (meaning.node,))]
    words = noun_phrase(meaning, case)
    if meaning.relative is not None:
        add_comma(words)
    return words + relative_clause(meaning)


def _relative_word(meaning: Clause) -> str:
    if meaning.gap == 'subject':
        return morphology.relative_pronoun(meaning.subject.agreement, 'nominative')
    assert meaning.object is not None
    return morphology.relative_pronoun(meaning.object.agreement, meaning.verb.object_case)


def _location(place: NounPhrase) -> Words:
    words = noun_phrase(place, 'dative')
    preposition = (place.node + PREPOSITION,)
    if words[0][0] == 'dem':
        return [('im', preposition + words[0][1]), *words[1:]]
    return [('in', preposition), *words]


def _middle_field(meaning: Clause, something_follows: bool) -> tuple[Words, Words]:
    """What stands between the subject and the closing part of the verb, and the relative clause moved behind it.

    A pronoun or a definite object stands before an adverbial, unless a recipient or a relative clause makes the middle
    heavy; other objects stand after it, and `nicht` after all of them.
    """
    obj, case = meaning.object, meaning.verb.object_case
    adverbial: Words = []
    if meaning.adverbial is not None and meaning.adverbial.place != 'first':
        adverbial = [(text, (meaning.adverbial.node + offset,)) for text, offset in meaning.adverbial.german]
    recipient = [] if meaning.recipient is None else noun_phrase(meaning.recipient, 'dative')
    negation = meaning.node + NEGATION
    object_words: Words = []
    relative: Words = []
    object_comes_first = True
    if meaning.gap != 'object' and obj is not None:
        if isinstance(obj, Pronoun):
            object_words = _reference(obj, case)
        else:
            is_definite = obj.determiner.definiteness == 'definite'
            object_comes_first = is_definite and meaning.recipient is None and obj.relative is None
            object_words = noun_phrase(obj, case, negation if meaning.negates_object else None)
            relative = relative_clause(obj)
    words = recipient + (object_words + adverbial if object_comes_first else adverbial + object_words)
    rest: Words = []
    if meaning.negated and not meaning.negates_object:
        rest.append(('nicht', (negation,)))
    if meaning.predicate is not None:
        rest.append((meaning.predicate.german, (meaning.node + PREDICATE,)))
    if meaning.location is not None:
        rest += _location(meaning.location)
    if relative and not rest and not something_follows:
        add_comma(words)
        return words + relative, []
    return words + rest, relative


def _verb_group(meaning: Clause, verb_place: str) -> tuple[Words, Words]:
    """The finite verb where it stands early, and the closing part of the verb; all of it when the verb is last."""
    verb, plural = meaning.verb, meaning.subject.plural
    main, auxiliary = (meaning.node,), (meaning.node + AUXILIARY,)
    if verb_place == 'zu':
        mark = (meaning.node + INFINITIVE_MARK,)
        if verb.prefix is not None:
            return [], [(f'{verb.prefix}zu{verb.german}', mark + main)]
        return [], [('zu', mark), (verb.german, main)]
    if meaning.has_auxiliary:
        finite, closing = _auxiliary_forms(meaning)
        parts: tuple[Words, Words] = [(finite, auxiliary)], [(closing, main)]
        return parts if verb_place != 'last' else ([], parts[1] + parts[0])
    if meaning.tense == 'past':
        form = morphology.past_plural(verb.past) if plural else verb.past
    else:
        form = ('sind' if verb.german == 'sein' else verb.german) if plural else verb.third
    if verb_place == 'last':
        return [], [((verb.prefix or '') + form, main)]
    return [(form, main)], [(verb.prefix, main)] if verb.prefix is not None else []


def _auxiliary_forms(meaning: Clause) -> tuple[str, str]:
    """The finite auxiliary and the infinitive or participle that goes with it."""
    plural, verb, modal = meaning.subject.plural, meaning.verb, meaning.modal
    if modal is not None:
        return (modal.plural if plural else modal.third), verb.infinitive
    if meaning.tense == 'future':
        return ('werden' if plural else 'wird'), verb.infinitive
    forms = {'haben': ('hat', 'haben'), 'sein': ('ist', 'sind')}[verb.auxiliary]
    return forms[plural], verb.participle
