"""The splits, the shares of phenomena, and what must hold of every sentence that the grammar can draw."""

import itertools
import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.config import ConfigError, GrammarConfig
from transformer_jax.data.grammar import LONG_WORDS, PHENOMENA, GrammarSource, count_pairs
from transformer_jax.data.grammar.annotation import annotate, node_positions, swap_roles
from transformer_jax.data.grammar.counting import count_noun_phrases
from transformer_jax.data.grammar.english_sentence import sentence as to_english
from transformer_jax.data.grammar.generator import SentenceGenerator
from transformer_jax.data.grammar.german_sentence import sentence as to_german
from transformer_jax.data.grammar.lexicon import THE, A, Lexicon
from transformer_jax.data.grammar.meaning import RELATIVE_PRONOUN, Clause, NounPhrase, Pronoun, Sentence, noun_phrases
from transformer_jax.data.grammar.profiles import LONG_PROFILES, PROFILES
from transformer_jax.data.grammar.source import SPLITS, find_split, has_held_out_combination

LEVELS = ('quickstart', 'full', 'lengths')
LEXICONS = {level: Lexicon(level) for level in LEVELS}
GENERATORS = {
    (level, is_long): SentenceGenerator(LEXICONS[level], (LONG_PROFILES if is_long else PROFILES)[level])
    for level in LEVELS
    for is_long in (False, True)
}
SMALL = {
    level: GrammarSource(GrammarConfig(level=level, num_train=6007, num_validation=307, num_test=1009), seed=3)
    for level in LEVELS
}
ARTICLES = {  # m f n p
    ('THE', 'nominative'): 'der die das die',
    ('THE', 'accusative'): 'den die das die',
    ('THE', 'dative'): 'dem der dem den',
    ('THE', 'genitive'): 'des der des der',
    ('A', 'nominative'): 'ein eine ein -',
    ('A', 'accusative'): 'einen eine ein -',
    ('A', 'dative'): 'einem einer einem -',
}
FIRST_PAIRS = [
    ('On May 12, the teacher buys the small knife.', 'Am 12. Mai kauft der Lehrer das kleine Messer.'),
    ('Nineteen nurses help the tired kings.', 'Neunzehn Krankenschwestern helfen den müden Königen.'),
    (
        'The beautiful witch with the pigs does not pick up a tired child.',
        'Die schöne Hexe mit den Schweinen holt kein müdes Kind ab.',
    ),
]


@pytest.fixture(scope='module')
def pairs() -> dict:
    return {(level, split): list(SMALL[level].read(split)) for level in LEVELS for split in SPLITS}


def text(words) -> str:
    return ' '.join(word for word, _ in words)


def draw(level: str, is_long: bool, seed: int) -> Sentence:
    return GENERATORS[level, is_long].draw(Random(seed))


any_sentence = st.builds(draw, st.sampled_from(LEVELS), st.booleans(), st.integers(0, 2**32))


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('split', SPLITS)
def test_a_split_has_its_size_and_ids_in_order_and_no_repeats(pairs, level: str, split: str):
    found = pairs[level, split]
    assert len(found) == SMALL[level].size(split)
    assert [pair.id for pair in found] == list(range(len(found)))
    assert len({pair.source for pair in found}) == len(found)


@pytest.mark.parametrize('level', LEVELS)
def test_splits_share_no_sentence_even_across_seeds(pairs, level: str):
    other = GrammarSource(GrammarConfig(level=level, num_train=2003, num_validation=101, num_test=401), seed=4)
    sources = {split: {pair.source for pair in pairs[level, split]} for split in SPLITS}
    for split in SPLITS:
        theirs = {pair.source for pair in other.read(split)}
        for own_split in SPLITS:
            if split != own_split:
                assert not sources[own_split] & theirs
                assert not sources[own_split] & sources[split]
    assert {pair.source for pair in other.read('train')} != sources['train']


def test_reading_again_yields_the_same(pairs):
    again = GrammarSource(GrammarConfig(num_train=6007, num_validation=307, num_test=1009), seed=3)
    assert list(again.read('test')) == pairs['quickstart', 'test']
    interleaved = zip(again.read('train'), again.read('train'), strict=True)
    assert all(one == two for one, two in itertools.islice(interleaved, 50))


def test_first_pairs_are_known():
    # They change only when the grammar does; then VERSION must rise as well, or prepared data would be reused.
    source = GrammarSource(GrammarConfig(), seed=0)
    assert [(p.source, p.target) for p in itertools.islice(source.read('train'), 3)] == FIRST_PAIRS


def test_fingerprint_tells_contents_apart():
    def fingerprint(split: str = 'test', seed: int = 3, **fields) -> str:
        return GrammarSource(GrammarConfig(**fields), seed).fingerprint(split)

    different = [
        fingerprint(),
        fingerprint('validation'),
        fingerprint(seed=4),
        fingerprint(num_test=211),
        fingerprint(level='full'),
    ]
    assert len(set(different)) == len(different)
    assert fingerprint() == fingerprint()
    assert fingerprint(num_train=211) == fingerprint()


@pytest.mark.parametrize('level', LEVELS)
def test_long_sentences_are_longer_than_any_in_training(pairs, level: str):
    longest = max(len(pair.target.split()) for pair in pairs[level, 'train'])
    assert longest <= PROFILES[level].max_words
    assert min(len(pair.target.split()) for pair in pairs[level, 'long']) > PROFILES[level].max_words


def test_held_out_combinations_stay_out_of_training(pairs):
    """By the words alone: training never shows the verb with the object, or with that of the reversal."""
    verbs = '(sees|hears|looks for|finds|draws|chases|loves|bites|knows|visits|greets)'
    with_object = re.compile(rf' {verbs} the (?:\w+ )?(\w+)\.$')
    plain = re.compile(rf'^(?:The|An?) (?:\w+ )?(\w+) {verbs} the (?:\w+ )?(\w+)\.$')
    trained = {m.groups() for p in pairs['quickstart', 'train'] if (m := with_object.search(p.source))}
    tested = {m.groups() for p in pairs['quickstart', 'test'] if (m := plain.search(p.source))}
    held_out = [m.groups() for p in pairs['quickstart', 'combinations'] if (m := plain.search(p.source))]
    assert len(trained) > 100
    assert len(held_out) > 5
    for subject, verb, obj in held_out:
        assert (verb, obj) not in trained or (verb, subject) not in trained
    assert any((verb, obj) in trained and (verb, subject) in trained for subject, verb, obj in tested)


@pytest.mark.parametrize('level', LEVELS)
def test_every_word_is_in_training(pairs, level: str):
    trained = {word.strip('.,').lower() for pair in pairs[level, 'train'] for word in pair.source.split()}
    lexicon = LEXICONS[level]
    for noun in lexicon.nouns:
        assert {noun.english, noun.english_plural} & trained, noun.english
    for verb in lexicon.verbs:
        assert verb.english in trained or verb.english_past in trained or verb.english + 's' in trained, verb.lemma


@pytest.mark.parametrize('level', LEVELS)
def test_shares_of_phenomena_in_the_test_split(pairs, level: str):
    found = pairs[level, 'test']
    counts = Counter(name for pair in found for name in pair.info['phenomena'])
    assert set(counts) == set(PHENOMENA)
    assert {name: count for name, count in counts.items() if count < 0.05 * len(found)} == {}
    lengths = sorted(len(pair.target.split()) for pair in found)
    assert lengths[len(lengths) // 2] >= 8
    assert lengths[-1] >= LONG_WORDS
    assert lengths[0] >= PROFILES[level].min_words


@pytest.mark.parametrize('level', LEVELS)
@pytest.mark.parametrize('split', ['validation', 'test'])
def test_reversed_pairs_stand_beside_each_other(pairs, level: str, split: str):
    found = pairs[level, split]
    with_mates = [pair for pair in found if pair.info['reversed_id'] is not None]
    assert len(with_mates) > 0.1 * len(found)
    for pair in with_mates:
        mate = found[pair.info['reversed_id']]
        assert mate.info['reversed_id'] == pair.id
        assert abs(mate.id - pair.id) == 1
        assert mate.source != pair.source
        words = [Counter(re.findall(r'[a-z0-9-]+', p.source.lower())) for p in (pair, mate)]
        # Agreement aside ("dog bites men", "men bite dog"), it is the same words in another order.
        assert sum(((words[0] - words[1]) + (words[1] - words[0])).values()) <= 4
    for pair in found:
        assert ('role_order' in pair.info['phenomena']) == (pair.info['reversed_id'] is not None)


def test_counts():
    assert count_pairs('quickstart') >= 10**6
    assert count_pairs('full') >= 10**9


def test_count_equals_enumeration_for_one_verb():
    """All subjects and objects of one verb without numbers, written out, are as many as counted."""
    lexicon = LEXICONS['quickstart']
    verb = next(v for v in lexicon.transitive_verbs if v.lemma == 'open')
    men = [noun for noun in lexicon.nouns if noun.english in ('king', 'aunt')]
    boxes = [noun for noun in lexicon.nouns if noun.english in ('box', 'bag', 'bottle')]
    assert set(boxes) == set(lexicon.nouns_of(verb.objects or frozenset()))

    def phrases(noun):
        adjectives = [(), *((a,) for a in lexicon.adjectives_of(noun.semantic_class))]
        for (determiner, plural), adjective in itertools.product([(THE, False), (A, False), (THE, True)], adjectives):
            yield NounPhrase(noun, 8, determiner, plural, adjective)

    seen = {
        text(to_english(Sentence(Clause(24, verb, subject, obj))))
        for man, box in itertools.product(men, boxes)
        for subject, obj in itertools.product(phrases(man), phrases(box))
    }
    # 3 of the 102 ways to say an article or number were written out
    counted = [sum(count_noun_phrases(lexicon, n) for n in nouns) * 3 // 102 for nouns in (men, boxes)]
    assert len(seen) == counted[0] * counted[1]


@pytest.mark.parametrize('level', LEVELS)
def test_the_source_decides_the_target(level: str):
    # Few words, so that the same English comes up again and again, also from other meanings.
    lexicon = Lexicon(level)
    nouns = 'man woman child dog cat cup box coat garden computer'.split()
    verbs = ['see', 'look at', 'give', 'call', 'throw away', 'sleep', 'laugh', 'work', 'help', 'turn on', 'open']
    lexicon.nouns = tuple(noun for noun in lexicon.nouns if noun.english in nouns)
    lexicon.verbs = tuple(verb for verb in lexicon.verbs if verb.lemma in verbs)
    profile = replace(PROFILES[level], number_rate=0.0, adjective_rate=0.1, date_share=0.1)
    generator = SentenceGenerator(lexicon, profile)
    target_of: dict[str, str] = {}
    num_repeats = 0
    rng = Random(11)
    for _ in range(10_000):
        meaning = generator.draw(rng)
        source, target = text(to_english(meaning)), text(to_german(meaning))
        num_repeats += source in target_of
        assert target_of.setdefault(source, target) == target, source
    assert num_repeats > 150


def test_english_always_shows_the_tense():
    """With one form for both, "the men hit the women" would be schlagen or schlugen."""
    rng = Random(19)
    alike = {verb.lemma for verb in LEXICONS['full'].verbs if verb.english == verb.english_past}
    assert {'read', 'hit'} <= alike
    seen = Counter()
    for _ in range(4000):
        for clause in GENERATORS['full', False].draw(rng).clauses():
            if clause.verb.lemma in alike:
                seen[clause.tense] += 1
    assert seen['past'] == 0
    assert seen['present'] > 10


def test_a_split_that_cannot_be_filled_is_refused():
    with pytest.raises(ConfigError, match=r'config\.data\.grammar\.num_train is 100000000000; .* at most'):
        GrammarSource(GrammarConfig(num_train=10**11), seed=0)
    with pytest.raises(ValueError, match="split is 'dev'; the built-in task has 'train', 'validation'"):
        next(SMALL['quickstart'].read('dev'))


@given(any_sentence)
@settings(max_examples=300, deadline=None)
def test_every_word_is_aligned(meaning: Sentence):
    source, target = to_english(meaning), to_german(meaning)
    info = annotate(meaning, source, target)
    assert {i for i, _ in info['alignment']} == set(range(len(source)))
    assert {j for _, j in info['alignment']} == set(range(len(target)))
    assert text(source) == ' '.join(text(source).split())


@given(any_sentence)
@settings(max_examples=300, deadline=None)
def test_spelling_and_punctuation(meaning: Sentence):
    for words in (to_english(meaning), to_german(meaning)):
        line = text(words)
        assert line[0].isupper()
        assert line.endswith('.')
        assert not re.search(r',,|,\.|\.\.| ,| \.|[^\w ,.ÄÖÜäöüß-]', line)
    german = to_german(meaning)
    for clause in meaning.clauses():
        if clause.gap is not None:
            pronoun = node_positions(german)[clause.node + RELATIVE_PRONOUN][0]
            assert german[pronoun - 1][0].endswith(',')


def cases_of(meaning: Sentence):
    """Each noun phrase with the case that its place in the sentence asks for."""
    for clause in meaning.clauses():
        parts = {
            'nominative': [] if clause.gap == 'subject' else [clause.subject],
            clause.verb.object_case: [] if clause.gap == 'object' else [clause.object],
        }
        parts['dative'] = parts.get('dative', []) + [clause.recipient, clause.location]
        for case, nps in parts.items():
            for np in nps:
                if isinstance(np, NounPhrase):
                    yield np, case, clause
                    yield from ((inner, 'dative', clause) for inner in [np.companion] if inner)
                    yield from ((inner, 'genitive', clause) for inner in [np.owner] if inner)


@given(any_sentence)
@settings(max_examples=500, deadline=None)
def test_an_article_agrees_with_gender_number_and_case(meaning: Sentence):
    words = to_german(meaning)
    positions = node_positions(words)
    for np, case, clause in cases_of(meaning):
        column = 3 if np.plural else 'mfn'.index(np.noun.gender)
        name = 'THE' if np.determiner is THE else 'A' if np.determiner is A else None
        if name is None or (clause.negates_object and np is clause.object):
            continue
        article = words[positions[np.node + 1][0]][0].lower()
        expected = ARTICLES[name, case].split()[column]
        assert article == ('im' if np is clause.location and expected == 'dem' else expected)


@given(any_sentence)
@settings(max_examples=300, deadline=None)
def test_verbs_agree_with_their_subjects(meaning: Sentence):
    words = [word.strip('.,').lower() for word, _ in to_german(meaning)]
    positions = node_positions(to_german(meaning))
    is_infinitive = meaning.link is not None and meaning.link.kind in ('infinitive', 'purpose')
    for clause in meaning.clauses():
        if is_infinitive and clause is meaning.second:
            continue
        finite = words[positions[clause.node + clause.has_auxiliary][0]]
        assert finite.endswith('n') or finite == 'sind' if clause.subject.plural else not finite.endswith('en')


@given(any_sentence)
@settings(max_examples=300, deadline=None)
def test_links_point_to_what_they_say(meaning: Sentence):
    target = to_german(meaning)
    info = annotate(meaning, to_english(meaning), target)
    words = [word.strip('.,') for word, _ in target]
    nouns = {form for noun in LEXICONS['full'].nouns for plural in (False, True) for form in noun_forms(noun, plural)}
    assert len(info['subject_links']) >= len(meaning.clauses())
    for _, subject in info['subject_links']:
        assert words[subject] in nouns or words[subject] in ('er', 'sie', 'es')
    for pronoun, antecedent in info['antecedent_links']:
        assert words[antecedent] in nouns
        assert re.fullmatch(r'er|sie|es|ihn|ihm|ihnen|(sein|ihr)(e|en|em|er)?', words[pronoun])
        assert antecedent < pronoun


def noun_forms(noun, plural: bool) -> set[str]:
    return {noun.decline(plural, case) for case in ('nominative', 'accusative', 'dative', 'genitive')}


@pytest.mark.parametrize('level', LEVELS)
def test_a_pronoun_can_mean_one_noun_only(level: str):
    rng = Random(17)
    found = Counter()
    while sum(found.values()) < 400:
        meaning = GENERATORS[level, False].draw(rng)
        pronouns = [part for c in meaning.clauses() for part in (c.subject, c.object) if isinstance(part, Pronoun)]
        for pronoun in pronouns:
            mentioned = noun_phrases(Sentence(meaning.main).clauses())
            plural, noun = pronoun.antecedent.plural, pronoun.antecedent.noun
            same_number = [np for np in mentioned if np.plural == plural]
            if plural:
                candidates = same_number
            elif noun.semantic_class in ('man', 'woman'):
                candidates = [np for np in same_number if np.noun.semantic_class in (noun.semantic_class, 'child')]
            else:
                candidates = [np for np in same_number if np.noun.semantic_class not in ('man', 'woman')]
            assert candidates == [pronoun.antecedent]
            found['p' if plural else noun.gender] += 1
    assert min(found[gender] for gender in 'mfnp') > 10


@given(any_sentence)
@settings(max_examples=300, deadline=None)
def test_a_sentence_and_its_reversal_are_in_one_split(meaning: Sentence):
    swapped = swap_roles(meaning)
    if swapped is None:
        return
    back = swap_roles(swapped)
    assert back is not None
    assert text(to_english(back)) == text(to_english(meaning))
    for level in LEVELS:
        splits = {find_split(each, text(to_english(each)), level) for each in (meaning, swapped)}
        assert len(splits) == 1
        if has_held_out_combination(meaning, level):
            assert splits == {'combinations'}
