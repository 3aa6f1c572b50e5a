"""German and English forms against tables written out by hand."""

import pytest

from transformer_jax.data.grammar import english, morphology
from transformer_jax.data.grammar.lexicon import BARE, HER, HIS, NO, NUMBER, THE, A, Lexicon

CASES = ('nominative', 'accusative', 'dative', 'genitive')
LEXICONS = {level: Lexicon(level) for level in ('quickstart', 'full')}
FULL = LEXICONS['full']
NOUNS = {noun.english: noun for noun in FULL.nouns}
VERBS = {verb.lemma: verb for verb in FULL.verbs}


def table(function, *arguments) -> list[str]:
    """One line a case, columns m f n p."""
    return [' '.join(function(*arguments, agreement, case) for agreement in 'mfnp') for case in CASES]


def test_definite_article():
    assert table(morphology.definite_article) == [
        'der die das die',
        'den die das die',
        'dem der dem den',
        'des der des der',
    ]


def test_indefinite_article_and_its_relatives():
    assert table(morphology.ein_word, 'kein') == [
        'kein keine kein keine',
        'keinen keine kein keine',
        'keinem keiner keinem keinen',
        'keines keiner keines keiner',
    ]
    assert morphology.ein_word('unser', 'f', 'dative') == 'unserer'


def test_words_that_decline_like_der():
    assert table(morphology.der_word, 'dies') == [
        'dieser diese dieses diese',
        'diesen diese dieses diese',
        'diesem dieser diesem diesen',
        'dieses dieser dieses dieser',
    ]


@pytest.mark.parametrize(
    ('declension', 'expected'),
    [
        ('weak', ['e e e en', 'en e e en', 'en en en en', 'en en en en']),
        ('mixed', ['er e es en', 'en e es en', 'en en en en', 'en en en en']),
        ('strong', ['er e es e', 'en e es e', 'em er em en', 'en er en er']),
    ],
)
def test_adjective_endings(declension: str, expected: list[str]):
    assert table(morphology.adjective_ending, declension) == expected


@pytest.mark.parametrize(
    ('determiner', 'declension'),
    [(THE, 'weak'), (A, 'mixed'), (NO, 'mixed'), (HIS, 'mixed'), (HER, 'mixed'), (BARE, 'strong'), (NUMBER, 'strong')],
)
def test_which_declension_follows_a_determiner(determiner, declension: str):
    assert determiner.declension == declension


def test_determiners_of_the_full_level():
    forms = {
        (d.english or d.english_plural): (d.declension, d.decline('p' if d.english is None else 'm', 'dative'))
        for d in FULL.further_determiners
    }
    assert forms == {
        'this': ('weak', 'diesem'),
        'every': ('weak', 'jedem'),
        'no': ('mixed', 'keinem'),
        'my': ('mixed', 'meinem'),
        'our': ('mixed', 'unserem'),
        'many': ('strong', 'vielen'),
        'some': ('strong', 'einigen'),
        'all': ('weak', 'allen'),
    }


def test_pronouns():
    pronouns = [' '.join(morphology.personal_pronoun(agreement, case) for agreement in 'mfnp') for case in CASES[:3]]
    assert pronouns == ['er sie es sie', 'ihn sie es sie', 'ihm ihr ihm ihnen']
    relative = [' '.join(morphology.relative_pronoun(agreement, case) for agreement in 'mfnp') for case in CASES[:3]]
    assert relative == ['der die das die', 'den die das die', 'dem der dem denen']
    assert [morphology.possessive_stem(agreement) for agreement in 'mfnp'] == ['sein', 'ihr', 'sein', 'ihr']


@pytest.mark.parametrize(
    ('noun', 'singular', 'plural'),
    [
        ('dog', 'Hund Hund Hund Hundes', 'Hunde Hunde Hunden Hunde'),
        ('cat', 'Katze Katze Katze Katze', 'Katzen Katzen Katzen Katzen'),
        ('child', 'Kind Kind Kind Kindes', 'Kinder Kinder Kindern Kinder'),
        ('lion', 'Löwe Löwen Löwen Löwen', 'Löwen Löwen Löwen Löwen'),
        ('student', 'Student Studenten Studenten Studenten', 'Studenten Studenten Studenten Studenten'),
        ('farmer', 'Bauer Bauern Bauern Bauern', 'Bauern Bauern Bauern Bauern'),
        ('car', 'Auto Auto Auto Autos', 'Autos Autos Autos Autos'),
        ('garden', 'Garten Garten Garten Gartens', 'Gärten Gärten Gärten Gärten'),
        ('teacher', 'Lehrer Lehrer Lehrer Lehrers', 'Lehrer Lehrer Lehrern Lehrer'),
        ('museum', 'Museum Museum Museum Museums', 'Museen Museen Museen Museen'),
        ('castle', 'Schloss Schloss Schloss Schlosses', 'Schlösser Schlösser Schlössern Schlösser'),
    ],
)
def test_nouns(noun: str, singular: str, plural: str):
    assert ' '.join(NOUNS[noun].decline(False, case) for case in CASES) == singular
    assert ' '.join(NOUNS[noun].decline(True, case) for case in CASES) == plural


@pytest.mark.parametrize(
    ('adjective', 'forms'),
    [
        ('small', 'kleine kleinen kleiner'),
        ('expensive', 'teure teuren teurer'),
        ('dark', 'dunkle dunklen dunkler'),
        ('tired', 'müde müden müder'),
        ('quiet', 'leise leisen leiser'),
    ],
)
def test_adjective_stems(adjective: str, forms: str):
    stem = next(a.stem for a in FULL.adjectives if a.english == adjective)
    assert ' '.join(morphology.add_ending(stem, ending) for ending in ('e', 'en', 'er')) == forms


@pytest.mark.parametrize(
    ('lemma', 'forms'),
    [
        ('see', 'sehen sieht sah sahen gesehen haben'),
        ('call', 'anrufen ruft rief riefen angerufen haben'),
        ('follow', 'folgen folgt folgte folgten gefolgt sein'),
        ('arrive', 'ankommen kommt kam kamen angekommen sein'),
        ('give back', 'zurückgeben gibt gab gaben zurückgegeben haben'),
        ('offer', 'anbieten bietet bot boten angeboten haben'),
        ('buy', 'kaufen kauft kaufte kauften gekauft haben'),
    ],
)
def test_verbs(lemma: str, forms: str):
    verb = VERBS[lemma]
    parts = (verb.infinitive, verb.third, verb.past, morphology.past_plural(verb.past), verb.participle, verb.auxiliary)
    assert ' '.join(parts) == forms


def test_every_verb_entry_is_consistent():
    for verb in (*FULL.verbs, *FULL.reporting_verbs, *FULL.control_verbs):
        assert verb.third.endswith('t'), verb.lemma
        assert verb.german.endswith('n'), verb.lemma
        assert verb.participle.startswith(verb.prefix or ''), verb.lemma
        assert verb.participle.endswith(('t', 'n')), verb.lemma
        # Weak past and participle belong together: kaufte, gekauft.
        if verb.past.endswith('te') and verb.past not in ('brachte', 'kannte'):
            assert verb.participle.endswith(verb.past.removesuffix('e')), verb.lemma


def test_every_noun_entry_is_consistent():
    for noun in FULL.nouns:
        assert noun.german[0].isupper(), noun.english
        assert noun.german_plural[0].isupper(), noun.english
        assert (noun.genitive_ending == '') == (noun.gender == 'f'), noun.english
        assert noun.english_plural != noun.english, noun.english
        # Endings that settle the gender.
        if noun.german.endswith(('erin', 'ung', 'heit')):
            assert noun.gender == 'f', noun.english
        if noun.german.endswith(('chen', 'lein')) and noun.german != 'Kuchen':
            assert noun.gender == 'n', noun.english
        if noun.semantic_class in ('man', 'woman'):
            assert noun.gender == {'man': 'm', 'woman': 'f'}[noun.semantic_class], noun.english


@pytest.mark.parametrize('level', ['quickstart', 'full'])
def test_each_english_word_has_one_german_word(level: str):
    lexicon = LEXICONS[level]
    for entries in (lexicon.nouns, lexicon.adjectives, lexicon.adverbs, lexicon.modals):
        words = [entry.english for entry in entries]
        assert len(set(words)) == len(words)
    forms = [form for noun in lexicon.nouns for form in (noun.english, noun.english_plural)]
    assert len(set(forms)) == len(forms)
    by_lemma: dict[str, list] = {}
    for verb in lexicon.verbs:
        for other in by_lemma.setdefault(verb.lemma, []):
            assert not verb.subjects & other.subjects, f'{verb.lemma} is two verbs for the same subject'
        by_lemma[verb.lemma].append(verb)


def test_number_of_lexemes():
    assert LEXICONS['quickstart'].num_lexemes >= 120
    assert LEXICONS['full'].num_lexemes >= 300
    assert LEXICONS['quickstart'].num_lexemes < LEXICONS['full'].num_lexemes


@pytest.mark.parametrize(
    ('number', 'english_word', 'german_word', 'english_ordinal', 'german_ordinal'),
    [
        (1, 'one', 'eins', 'first', 'erst'),
        (2, 'two', 'zwei', 'second', 'zweit'),
        (3, 'three', 'drei', 'third', 'dritt'),
        (7, 'seven', 'sieben', 'seventh', 'siebt'),
        (8, 'eight', 'acht', 'eighth', 'acht'),
        (12, 'twelve', 'zwölf', 'twelfth', 'zwölft'),
        (16, 'sixteen', 'sechzehn', 'sixteenth', 'sechzehnt'),
        (17, 'seventeen', 'siebzehn', 'seventeenth', 'siebzehnt'),
        (20, 'twenty', 'zwanzig', 'twentieth', 'zwanzigst'),
        (21, 'twenty-one', 'einundzwanzig', 'twenty-first', 'einundzwanzigst'),
        (23, 'twenty-three', 'dreiundzwanzig', 'twenty-third', 'dreiundzwanzigst'),
        (30, 'thirty', 'dreißig', 'thirtieth', 'dreißigst'),
        (47, 'forty-seven', 'siebenundvierzig', 'forty-seventh', 'siebenundvierzigst'),
        (66, 'sixty-six', 'sechsundsechzig', 'sixty-sixth', 'sechsundsechzigst'),
        (99, 'ninety-nine', 'neunundneunzig', 'ninety-ninth', 'neunundneunzigst'),
    ],
)
def test_numbers(number: int, english_word: str, german_word: str, english_ordinal: str, german_ordinal: str):
    assert (english.cardinal(number), morphology.cardinal(number)) == (english_word, german_word)
    assert (english.ordinal(number), morphology.ordinal(number)) == (english_ordinal, german_ordinal)


@pytest.mark.parametrize(
    ('word', 'with_s'),
    [
        ('wash', 'washes'),
        ('carry', 'carries'),
        ('play', 'plays'),
        ('box', 'boxes'),
        ('kiss', 'kisses'),
        ('city', 'cities'),
    ],
)
def test_english_s(word: str, with_s: str):
    assert english.add_s(word) == with_s


@pytest.mark.parametrize(
    ('word', 'article'),
    [('apple', 'an'), ('old', 'an'), ('useful', 'a'), ('ugly', 'an'), ('uncle', 'an'), ('dog', 'a')],
)
def test_english_article(word: str, article: str):
    assert english.indefinite_article(word) == article
