"""Puts a meaning into English words."""

from . import english
from .lexicon import BE, HER, HIS, PERSONS, A
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
    Adverbial,
    Clause,
    NounPhrase,
    Pronoun,
    Sentence,
)
from .words import Words, add_comma, finish

_OBJECT_FORMS = {'he': 'him', 'she': 'her', 'it': 'it', 'they': 'them'}
_POSSESSIVES = {'he': 'his', 'she': 'her', 'it': 'its', 'they': 'their'}


def sentence(meaning: Sentence) -> Words:
    """The words with their punctuation attached, ready to be joined by spaces."""
    words = clause(meaning.main)
    link, second = meaning.link, meaning.second
    if link is None or second is None:
        return finish(words)
    mark = (link.node,)
    if link.kind == 'infinitive':
        return finish(words + clause(second, infinitive=True))
    if link.kind == 'purpose':
        return finish(words + [('in', mark), ('order', mark)] + clause(second, infinitive=True))
    joined = [(link.english, mark), *clause(second)]
    if meaning.second_first:
        add_comma(joined)
        return finish(joined + words)
    if link.kind == 'but':
        add_comma(words)
    return finish(words + joined)


def clause(meaning: Clause, infinitive: bool = False) -> Words:
    """A clause; a relative clause begins with its pronoun, an infinitive with `to`."""
    words: Words = []
    adverbial = meaning.adverbial
    if adverbial is not None and adverbial.place == 'first':
        words += _adverbial(adverbial)
        if adverbial.is_date:
            add_comma(words)
    if meaning.gap is not None:
        words.append((_relative_word(meaning), (meaning.node + RELATIVE_PRONOUN,)))
    if meaning.gap != 'subject' and not meaning.subject_elided:
        words += _reference(meaning.subject, is_object=False)
    words += _verb_group(meaning, infinitive)
    words += _objects(meaning)
    if meaning.predicate is not None:
        words.append((meaning.predicate.english, (meaning.node + PREDICATE,)))
    if meaning.location is not None:
        words.append(('in', (meaning.location.node + PREPOSITION,)))
        words += noun_phrase(meaning.location)
    if adverbial is not None and adverbial.place == 'last':
        words += _adverbial(adverbial)
    return words


def noun_phrase(meaning: NounPhrase) -> Words:
    words: Words = []
    node = meaning.node
    determiner = _determiner_word(meaning)
    if determiner:
        words.append((determiner, (node + DETERMINER,)))
    if meaning.number is not None:
        words.append((english.cardinal(meaning.number), (node + NUMBER_WORD,)))
    for index, adjective in enumerate(meaning.adjectives):
        words.append((adjective.english, (node + ADJECTIVE + index,)))
    words.append((meaning.noun.english_plural if meaning.plural else meaning.noun.english, (node,)))
    if meaning.companion is not None:
        words.append(('with', (meaning.companion.node + PREPOSITION,)))
        words += noun_phrase(meaning.companion)
    if meaning.owner is not None:
        # German says "of the" in one word, the genitive article.
        words.append(('of', (meaning.owner.node + DETERMINER,)))
        words += noun_phrase(meaning.owner)
    if meaning.relative is not None:
        words += clause(meaning.relative)
    return words


def _determiner_word(meaning: NounPhrase) -> str | None:
    determiner = meaning.determiner
    if determiner in (HIS, HER) and meaning.possessor is not None:
        return _POSSESSIVES[meaning.possessor.english_pronoun or '']
    if determiner is A:
        next_word = meaning.adjectives[0].english if meaning.adjectives else meaning.noun.english
        return english.indefinite_article(next_word)
    return determiner.english_plural if meaning.plural else determiner.english


def _reference(meaning: NounPhrase | Pronoun, is_object: bool) -> Words:
    if isinstance(meaning, NounPhrase):
        return noun_phrase(meaning)
    word = meaning.antecedent.english_pronoun or ''
    return [(_OBJECT_FORMS[word] if is_object else word, (meaning.node,))]


def _adverbial(meaning: Adverbial) -> Words:
    return [(text, (meaning.node + offset,)) for text, offset in meaning.english]


def _relative_word(meaning: Clause) -> str:
    head = meaning.subject if meaning.gap == 'subject' else meaning.object
    assert isinstance(head, NounPhrase)
    if head.noun.semantic_class not in PERSONS:
        return 'that'
    return 'who' if meaning.gap == 'subject' else 'whom'


def _objects(meaning: Clause) -> Words:
    """The objects, with the particle or the preposition of the verb in its place."""
    verb, node = meaning.verb, (meaning.node,)
    words: Words = []
    if meaning.recipient is not None:
        words += noun_phrase(meaning.recipient)
    if verb.preposition is not None:
        words.append((verb.preposition, node))
    particle: Words = [(verb.particle, node)] if verb.particle is not None else []
    if meaning.object is None or meaning.gap == 'object':
        return words + particle
    phrase = _reference(meaning.object, is_object=True)
    return words + (phrase + particle if isinstance(meaning.object, Pronoun) else particle + phrase)


def _verb_group(meaning: Clause, infinitive: bool) -> Words:
    """The verb with its auxiliary, `not`, and an adverb that stands before it."""
    verb, node, plural = meaning.verb, meaning.node, meaning.subject.plural
    adverbial = meaning.adverbial
    adverb = _adverbial(adverbial) if adverbial is not None and adverbial.place == 'before' else []
    negation: Words = [('not', (node + NEGATION,))] if meaning.negated else []
    main = (node,)
    if infinitive:
        return [('to', (node + INFINITIVE_MARK,)), *adverb, (verb.english, main)]
    auxiliary = (node + AUXILIARY,)
    modal = meaning.modal
    if modal is not None and modal.takes_to:
        finite = modal.english if plural or meaning.negated else english.add_s(modal.english)
        support: Words = [('do' if plural else 'does', auxiliary)] if meaning.negated else []
        return [*support, *negation, *adverb, (finite, auxiliary), ('to', auxiliary), (verb.english, main)]
    if modal is not None:
        if modal.english == 'can' and meaning.negated:
            return [('cannot', auxiliary + negation[0][1]), *adverb, (verb.english, main)]
        return [(modal.english, auxiliary), *negation, *adverb, (verb.english, main)]
    if meaning.tense == 'future':
        return [('will', auxiliary), *negation, *adverb, (verb.english, main)]
    if meaning.tense == 'perfect':
        return [('have' if plural else 'has', auxiliary), *negation, *adverb, (verb.english_participle, main)]
    if verb is BE:
        forms = {'present': ('is', 'are'), 'past': ('was', 'were')}[meaning.tense]
        return [(forms[plural], main), *negation, *adverb]
    if meaning.negated:
        support_word = 'did' if meaning.tense == 'past' else 'do' if plural else 'does'
        return [(support_word, main), *negation, *adverb, (verb.english, main)]
    if meaning.tense == 'past':
        return [*adverb, (verb.english_past, main)]
    return [*adverb, (verb.english if plural else english.add_s(verb.english), main)]
