"""Sentences built by hand, one or more for every construction, against what a native speaker would write."""
# ruff: noqa: E501 (the table of sentences has one a line)

from itertools import count

import pytest

from transformer_jax.data.grammar import english_sentence, german_sentence
from transformer_jax.data.grammar.annotation import annotate, swap_roles
from transformer_jax.data.grammar.lexicon import BARE, BE, HER, HIS, NUMBER, THE, A, Lexicon
from transformer_jax.data.grammar.meaning import Adverbial, Clause, Link, NounPhrase, Pronoun, Sentence

LEXICON = Lexicon('full')
NOUNS = {noun.english: noun for noun in LEXICON.nouns} | {noun.english_plural: noun for noun in LEXICON.nouns}
VERBS = {verb.lemma: verb for verb in (*LEXICON.reporting_verbs, *LEXICON.control_verbs, *LEXICON.verbs)}
VERBS['try'] = next(verb for verb in LEXICON.control_verbs if verb.english == 'try')
ADJECTIVES = {adjective.english: adjective for adjective in LEXICON.adjectives}
MODALS = {modal.english: modal for modal in LEXICON.modals}
DETERMINERS = {d.english or d.english_plural: d for d in LEXICON.further_determiners} | {'the': THE, 'a': A, '': BARE}
DETERMINERS |= {'his': HIS, 'her': HER}
EAT, DEVOUR = (verb for verb in LEXICON.verbs if verb.english == 'eat')

_nodes = count(8, 8)


def np(text: str, **parts) -> NounPhrase:
    """`the old dogs`, `a cat`, `23 dogs`, `dogs`: a determiner or number, adjectives, the noun in its number."""
    *before, word = text.split()
    noun = NOUNS[word]
    number = int(before.pop(0)) if before and before[0].isdigit() else None
    has_determiner = before and before[0] in DETERMINERS
    determiner = DETERMINERS[before.pop(0)] if has_determiner else NUMBER if number is not None else BARE
    adjectives = tuple(ADJECTIVES[adjective] for adjective in before)
    return NounPhrase(noun, next(_nodes), determiner, word == noun.english_plural, adjectives, number, **parts)


def clause(subject, verb, obj=None, **parts) -> Clause:
    verb = VERBS[verb] if isinstance(verb, str) else verb
    subject = np(subject) if isinstance(subject, str) else subject
    obj = np(obj) if isinstance(obj, str) else obj
    for name in ('recipient', 'location'):
        if name in parts:
            parts[name] = np(parts[name])
    if 'modal' in parts:
        parts['modal'] = MODALS[parts['modal']]
    if 'predicate' in parts:
        parts['predicate'] = ADJECTIVES[parts['predicate']]
    return Clause(next(_nodes), verb, subject, obj, **parts)


def adverb(english: str, german: str, place: str) -> Adverbial:
    return Adverbial(((english, 0),), ((german, 0),), next(_nodes), place)


def date(place: str) -> Adverbial:
    return Adverbial(
        (('on', 0), ('May', 1), ('3', 2)), (('am', 0), ('3.', 2), ('Mai', 1)), next(_nodes), place, is_date=True
    )


def joined(main: Clause, kind: str, english: str, german: str, second: Clause, second_first: bool = False) -> Sentence:
    return Sentence(main, Link(kind, next(_nodes), english, german), second, second_first)


def with_relative(text: str, verb: str, *, subject=None, obj=None, **parts) -> NounPhrase:
    """A noun phrase with a relative clause, whose object it is when another subject is given."""
    head = np(text)
    head.relative = clause(
        subject or head, verb, head if subject else obj, gap='object' if subject else 'subject', **parts
    )
    return head


def possessed(owner: NounPhrase, text: str) -> NounPhrase:
    thing = np(text)
    thing.possessor = owner
    return thing


def coreference() -> list[tuple[Sentence, str, str]]:
    rows = []
    for noun, german in (('coat', 'den Mantel'), ('cup', 'die Tasse'), ('book', 'das Buch')):
        thing = np(f'the {noun}')
        pronoun = {'coat': 'er', 'cup': 'sie', 'book': 'es'}[noun]
        reason = clause(Pronoun(thing, next(_nodes)), BE, predicate='beautiful')
        main = clause('the woman', 'buy', thing)
        rows.append(
            (
                joined(main, 'subordinate', 'because', 'weil', reason),
                f'The woman buys the {noun} because it is beautiful.',
                f'Die Frau kauft {german}, weil {pronoun} schön ist.',
            )
        )
    coat, man = np('the coat'), np('the man')
    washes = clause(man, 'wash', Pronoun(coat, next(_nodes)), subject_elided=True)
    rows.append(
        (
            joined(clause(man, 'find', coat), 'and', 'and', 'und', washes),
            'The man finds the coat and washes it.',
            'Der Mann findet den Mantel und wäscht ihn.',
        )
    )
    coat, man = np('the coat'), np('the man')
    throws = clause(man, 'throw away', Pronoun(coat, next(_nodes)), subject_elided=True)
    rows.append(
        (
            joined(clause(man, 'find', coat), 'and', 'and', 'und', throws),
            'The man finds the coat and throws it away.',
            'Der Mann findet den Mantel und wirft ihn weg.',
        )
    )
    bag = np('the bag')
    rows.append((
        joined(
            clause(bag, BE, predicate='old'), 'but', 'but', 'aber',
            clause(Pronoun(bag, next(_nodes)), BE, predicate='dirty', negated=True),
        ),
        'The bag is old, but it is not dirty.',
        'Die Tasche ist alt, aber sie ist nicht schmutzig.',
    ))  # fmt: skip
    cat, soldiers = np('the cat'), np('the soldiers')
    rows.append(
        (
            Sentence(clause(cat, DEVOUR, possessed(cat, 'her pear'))),
            'The cat eats its pear.',
            'Die Katze frisst ihre Birne.',
        )
    )
    rows.append(
        (
            Sentence(clause(soldiers, 'lose', possessed(soldiers, 'her old key'), tense='past')),
            'The soldiers lost their old key.',
            'Die Soldaten verloren ihren alten Schlüssel.',
        )
    )
    return rows


SENTENCES = [
    # verb second, cases, role order
    (Sentence(clause('the dog', 'bite', 'the man')), 'The dog bites the man.', 'Der Hund beißt den Mann.'),
    (Sentence(clause('the man', 'bite', 'the dog')), 'The man bites the dog.', 'Der Mann beißt den Hund.'),
    (Sentence(clause('a old uncle', 'see', 'the lion')), 'An old uncle sees the lion.', 'Ein alter Onkel sieht den Löwen.'),
    (Sentence(clause('the children', 'help', 'the small boy')), 'The children help the small boy.', 'Die Kinder helfen dem kleinen Jungen.'),
    (Sentence(clause('the man', EAT, 'a apple')), 'The man eats an apple.', 'Der Mann isst einen Apfel.'),
    (Sentence(clause('the bear', DEVOUR, 'the apples')), 'The bear eats the apples.', 'Der Bär frisst die Äpfel.'),
    # numbers, strong endings
    (Sentence(clause('23 small dogs', 'see', 'the cat')), 'Twenty-three small dogs see the cat.', 'Dreiundzwanzig kleine Hunde sehen die Katze.'),
    (Sentence(clause('the woman', 'thank', '51 old farmers')), 'The woman thanks fifty-one old farmers.', 'Die Frau dankt einundfünfzig alten Bauern.'),
    # ditransitive
    (Sentence(clause('the teacher', 'give', 'a new book', recipient='the child')), 'The teacher gives the child a new book.', 'Der Lehrer gibt dem Kind ein neues Buch.'),
    (Sentence(clause('the witch', 'offer', 'the bag', recipient='the girls')), 'The witch offers the girls the bag.', 'Die Hexe bietet den Mädchen die Tasche an.'),
    # separable verbs, with particles and prepositions in English
    (Sentence(clause('the doctor', 'call', 'the nurse')), 'The doctor calls the nurse.', 'Der Arzt ruft die Krankenschwester an.'),
    (Sentence(clause('the doctor', 'call', 'the nurse', negated=True)), 'The doctor does not call the nurse.', 'Der Arzt ruft die Krankenschwester nicht an.'),
    (Sentence(clause('the king', 'throw away', 'the hats')), 'The king throws away the hats.', 'Der König wirft die Hüte weg.'),
    (Sentence(clause('the king', 'look at', 'the hats')), 'The king looks at the hats.', 'Der König sieht die Hüte an.'),
    (Sentence(clause('the king', 'call', 'the queen', tense='perfect')), 'The king has called the queen.', 'Der König hat die Königin angerufen.'),
    # modals
    (Sentence(clause('the man', 'buy', 'the car', modal='want')), 'The man wants to buy the car.', 'Der Mann will das Auto kaufen.'),
    (Sentence(clause('the men', 'buy', 'the car', modal='want', negated=True)), 'The men do not want to buy the car.', 'Die Männer wollen das Auto nicht kaufen.'),
    (Sentence(clause('the men', 'invite', 'the aunt', modal='can', negated=True)), 'The men cannot invite the aunt.', 'Die Männer können die Tante nicht einladen.'),
    (Sentence(clause('the girl', 'draw', 'a horse', modal='should')), 'The girl should draw a horse.', 'Das Mädchen sollte ein Pferd zeichnen.'),
    (Sentence(clause('the girl', 'sing', modal='may', negated=True)), 'The girl may not sing.', 'Das Mädchen darf nicht singen.'),
    # negation
    (Sentence(clause('the man', 'see', 'the dog', negated=True)), 'The man does not see the dog.', 'Der Mann sieht den Hund nicht.'),
    (Sentence(clause('the men', 'see', 'a dog', negated=True)), 'The men do not see a dog.', 'Die Männer sehen keinen Hund.'),
    (Sentence(clause('the man', 'buy', 'old lamps', negated=True)), 'The man does not buy old lamps.', 'Der Mann kauft keine alten Lampen.'),
    (Sentence(clause('the man', 'sleep', location='the small garden', negated=True)), 'The man does not sleep in the small garden.', 'Der Mann schläft nicht im kleinen Garten.'),
    (Sentence(clause('the dogs', 'follow', 'the man', negated=True, tense='past')), 'The dogs did not follow the man.', 'Die Hunde folgten dem Mann nicht.'),
    (Sentence(clause('no boy', 'see', 'this lion')), 'No boy sees this lion.', 'Kein Junge sieht diesen Löwen.'),
    # places
    (Sentence(clause('the cats', 'wait', location='the kitchen')), 'The cats wait in the kitchen.', 'Die Katzen warten in der Küche.'),
    (Sentence(clause('the cat', 'sleep', location='our house')), 'The cat sleeps in our house.', 'Die Katze schläft in unserem Haus.'),
    # adverbs and dates: inversion and middle field
    (Sentence(clause('the cat', 'see', 'the dog', adverbial=adverb('today', 'heute', 'first'))), 'Today the cat sees the dog.', 'Heute sieht die Katze den Hund.'),
    (Sentence(clause('the boys', 'pick up', 'the guest', adverbial=date('first'))), 'On May 3, the boys pick up the guest.', 'Am 3. Mai holen die Jungen den Gast ab.'),
    (Sentence(clause('the boys', 'pick up', 'the guest', adverbial=date('last'))), 'The boys pick up the guest on May 3.', 'Die Jungen holen den Gast am 3. Mai ab.'),
    (Sentence(clause('the boys', 'buy', 'a cake', adverbial=date('last'))), 'The boys buy a cake on May 3.', 'Die Jungen kaufen am 3. Mai einen Kuchen.'),
    (Sentence(clause('the boy', 'give', 'the ball', recipient='the girl', adverbial=adverb('often', 'oft', 'before'))), 'The boy often gives the girl the ball.', 'Der Junge gibt dem Mädchen oft den Ball.'),
    (Sentence(clause('the boy', 'see', 'the girl', tense='perfect', adverbial=adverb('often', 'oft', 'before'))), 'The boy has often seen the girl.', 'Der Junge hat das Mädchen oft gesehen.'),
    # tenses
    (Sentence(clause('the guests', 'arrive', tense='perfect')), 'The guests have arrived.', 'Die Gäste sind angekommen.'),
    (Sentence(clause('the guest', 'see', 'the bear', tense='future', negated=True)), 'The guest will not see the bear.', 'Der Gast wird den Bären nicht sehen.'),
    (Sentence(clause('the guests', 'write', 'a letter', tense='past')), 'The guests wrote a letter.', 'Die Gäste schrieben einen Brief.'),
    # relative clauses
    (Sentence(clause(with_relative('the man', 'see', obj='the dogs'), 'laugh')), 'The man who sees the dogs laughs.', 'Der Mann, der die Hunde sieht, lacht.'),
    (Sentence(clause(with_relative('the dog', 'see', subject='the man'), 'sleep')), 'The dog that the man sees sleeps.', 'Der Hund, den der Mann sieht, schläft.'),
    (Sentence(clause(with_relative('the woman', 'help', subject='the men'), 'sing')), 'The woman whom the men help sings.', 'Die Frau, der die Männer helfen, singt.'),
    (Sentence(clause(with_relative('the children', 'follow', subject='the wolf'), 'wait')), 'The children whom the wolf follows wait.', 'Die Kinder, denen der Wolf folgt, warten.'),
    (Sentence(clause('the man', 'see', with_relative('the girl', 'open', obj='the box'))), 'The man sees the girl who opens the box.', 'Der Mann sieht das Mädchen, das die Kiste aufmacht.'),
    (Sentence(clause('the man', 'call', with_relative('the woman', 'sing'))), 'The man calls the woman who sings.', 'Der Mann ruft die Frau an, die singt.'),
    (Sentence(clause('the man', 'see', with_relative('the woman', 'sing'), negated=True)), 'The man does not see the woman who sings.', 'Der Mann sieht die Frau nicht, die singt.'),
    # noun phrases inside noun phrases, agreement over them
    (Sentence(clause(np('the man', companion=np('the dogs')), 'sleep')), 'The man with the dogs sleeps.', 'Der Mann mit den Hunden schläft.'),
    (Sentence(clause(np('the women', companion=np('a green hat')), 'arrive')), 'The women with a green hat arrive.', 'Die Frauen mit einem grünen Hut kommen an.'),
    (Sentence(clause('the boy', 'wash', np('the car', owner=np('the old doctor')))), 'The boy washes the car of the old doctor.', 'Der Junge wäscht das Auto des alten Arztes.'),
    (Sentence(clause('the boy', 'need', np('a small old red bag'))), 'The boy needs a small old red bag.', 'Der Junge braucht eine kleine alte rote Tasche.'),
    # subordinate clauses, before and after
    (joined(clause('the woman', 'laugh'), 'subordinate', 'because', 'weil', clause('the dog', 'bite', 'the man')), 'The woman laughs because the dog bites the man.', 'Die Frau lacht, weil der Hund den Mann beißt.'),
    (joined(clause('the woman', 'laugh'), 'subordinate', 'although', 'obwohl', clause('the dog', 'bite', 'the man'), True), 'Although the dog bites the man, the woman laughs.', 'Obwohl der Hund den Mann beißt, lacht die Frau.'),
    (joined(clause('the cat', 'sleep'), 'subordinate', 'when', 'wenn', clause('the nurse', 'call', 'the doctor')), 'The cat sleeps when the nurse calls the doctor.', 'Die Katze schläft, wenn die Krankenschwester den Arzt anruft.'),
    (joined(clause('the cat', 'sleep'), 'subordinate', 'because', 'weil', clause('the nurse', 'see', 'the doctor', modal='must')), 'The cat sleeps because the nurse must see the doctor.', 'Die Katze schläft, weil die Krankenschwester den Arzt sehen muss.'),
    (joined(clause('the cat', 'sleep', tense='perfect'), 'subordinate', 'because', 'weil', clause('the nurse', 'call', 'the doctor', tense='perfect'), True), 'Because the nurse has called the doctor, the cat has slept.', 'Weil die Krankenschwester den Arzt angerufen hat, hat die Katze geschlafen.'),
    (joined(clause('the witch', 'believe'), 'that', 'that', 'dass', clause('every princess', 'open', 'a bottle')), 'The witch believes that every princess opens a bottle.', 'Die Hexe glaubt, dass jede Prinzessin eine Flasche aufmacht.'),
    # infinitives
    (joined(clause('the judge', 'try'), 'infinitive', '', '', clause('the judge', 'find', 'the thief', subject_elided=True)), 'The judge tries to find the thief.', 'Der Richter versucht, den Dieb zu finden.'),
    (joined(clause('the judge', 'try'), 'infinitive', '', '', clause('the judge', 'call', 'the thief', subject_elided=True)), 'The judge tries to call the thief.', 'Der Richter versucht, den Dieb anzurufen.'),
    (joined(clause('the judge', 'work'), 'purpose', '', '', clause('the judge', 'buy', 'a car', subject_elided=True)), 'The judge works in order to buy a car.', 'Der Richter arbeitet, um ein Auto zu kaufen.'),
    *coreference(),
]  # fmt: skip


def text(words) -> str:
    return ' '.join(word for word, _ in words)


@pytest.mark.parametrize(('meaning', 'english', 'german'), SENTENCES, ids=[row[1] for row in SENTENCES])
def test_sentence(meaning: Sentence, english: str, german: str):
    assert text(english_sentence.sentence(meaning)) == english
    assert text(german_sentence.sentence(meaning)) == german


def annotated(meaning: Sentence) -> dict:
    return annotate(meaning, english_sentence.sentence(meaning), german_sentence.sentence(meaning))


def test_alignment_of_a_separable_verb():
    # The doctor does not call the nurse. / Der Arzt ruft die Krankenschwester nicht an.
    info = annotated(Sentence(clause('the doctor', 'call', 'the nurse', negated=True)))
    assert info['alignment'] == ((0, 0), (1, 1), (2, 2), (2, 6), (3, 5), (4, 2), (4, 6), (5, 3), (6, 4))
    assert info['subject_links'] == ((2, 1),)
    assert {'separable_verb', 'negation', 'role_order'} == set(info['phenomena'])


def test_alignment_of_a_contraction_and_of_kein():
    # The man does not sleep in the garden. / Der Mann schläft nicht im Garten.
    info = annotated(Sentence(clause('the man', 'sleep', location='the garden', negated=True)))
    assert info['alignment'] == ((0, 0), (1, 1), (2, 2), (3, 3), (4, 2), (5, 4), (6, 4), (7, 5))
    # The man does not buy a lamp. / Der Mann kauft keine Lampe.
    info = annotated(Sentence(clause('the man', 'buy', 'a lamp', negated=True)))
    assert info['alignment'] == ((0, 0), (1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (6, 4))


def test_links_across_clauses():
    # The cat sleeps because the nurse must see the doctor.
    # Die Katze schläft, weil die Krankenschwester den Arzt sehen muss.
    second = clause('the nurse', 'see', 'the doctor', modal='must')
    info = annotated(joined(clause('the cat', 'sleep'), 'subordinate', 'because', 'weil', second))
    assert info['subject_links'] == ((2, 1), (8, 5), (9, 5))
    assert 'long_distance_verb' in info['phenomena']
    # The man who sees the dogs laughs. / Der Mann, der die Hunde sieht, lacht.
    info = annotated(Sentence(clause(with_relative('the man', 'see', obj='the dogs'), 'laugh')))
    assert info['subject_links'] == ((5, 1), (6, 1))
    assert set(info['phenomena']) == {'relative_clause', 'agreement', 'long_distance_verb'}
    # The woman buys the coat because it is beautiful. / Die Frau kauft den Mantel, weil er schön ist.
    meaning = next(row[0] for row in SENTENCES if row[1].startswith('The woman buys the coat'))
    assert annotated(meaning)['antecedent_links'] == ((6, 4),)
    assert annotated(meaning)['subject_links'] == ((2, 1), (8, 6))


def test_swapping_roles():
    meaning = Sentence(clause('the dogs', 'bite', 'a lion', adverbial=adverb('today', 'heute', 'first')))
    swapped = swap_roles(meaning)
    assert swapped is not None
    assert text(german_sentence.sentence(swapped)) == 'Heute beißt ein Löwe die Hunde.'
    back = swap_roles(swapped)
    assert back is not None
    assert text(english_sentence.sentence(back)) == text(english_sentence.sentence(meaning))
    assert swap_roles(Sentence(clause('the man', 'buy', 'the dog'))) is None  # a dog buys nothing
    assert swap_roles(Sentence(clause('the man', 'see', 'a dog', negated=True))) is None
