"""Vocabularies of new runs: trained on the run's text, or given."""

import itertools

import pytest

from tests.data.test_vocabulary import make_texts, train_model
from transformer_jax.config import ConfigError, VocabularyConfig
from transformer_jax.data.batch import Pair
from transformer_jax.data.vocabulary_training import _training_texts, make_vocabulary, train_vocabulary


def test_a_corpus_too_small_for_the_size_says_the_largest_that_does():
    texts = make_texts(count=20)
    with pytest.raises(ConfigError, match=r'config\.vocabulary\.size is 9,000.*at most; set it to (\d+)') as error:
        train_vocabulary(VocabularyConfig(size=9000), texts)
    largest = int(str(error.value).split()[-1])
    assert train_vocabulary(VocabularyConfig(size=largest), texts, report=lambda _: None).size == largest


def test_a_size_below_the_single_characters_is_refused():
    with pytest.raises(ConfigError, match=r'config\.vocabulary\.size is 262, but .* alone are (27\d|28\d)'):
        train_vocabulary(VocabularyConfig(size=262), make_texts())


def test_lines_that_training_leaves_out_are_counted():
    notes = []
    texts = [*make_texts(), 'x' * 10_000, '', ' \t', 'a\0b', 'a\u2585b', 'y' * 5_000]
    train_vocabulary(VocabularyConfig(size=400), texts, report=notes.append)
    (note,) = notes
    assert '400 lines, 2 left out: blank, 2 left out: longer than 4,192 bytes, 2 left out: with U+0000' in note


@pytest.mark.parametrize('texts', [[], ['', '  '], ['x' * 9000]])
def test_no_usable_line_is_a_clear_error(texts):
    with pytest.raises(ConfigError, match='there is no text to train a vocabulary on: 0 lines'):
        train_vocabulary(VocabularyConfig(size=400), texts)


class ListSource:
    def __init__(self, pairs: list[tuple[str, str]]):
        self.pairs = pairs

    def splits(self):
        return ('train',)

    def size(self, split):
        return len(self.pairs)

    def read(self, split):
        return (Pair(index, *pair) for index, pair in enumerate(self.pairs))

    def fingerprint(self, split):
        return str(hash(tuple(self.pairs)))

    def contents(self, split):
        return {'pairs': self.fingerprint(split)}


def test_the_lines_that_train_are_spread_over_the_corpus():
    source = ListSource([(f's{index}', f't{index}') for index in range(1009)])
    taken = list(_training_texts(source, 7))
    numbers = [int(text[1:]) for text in taken if text[0] == 's']
    assert [f't{number}' for number in numbers] == taken[1::2]
    assert len(numbers) == 7
    assert {b - a for a, b in itertools.pairwise(numbers)} <= {144, 145}
    assert len(list(_training_texts(source, 5000))) == 2 * 1009


def test_a_given_model_is_used_with_its_own_ids(tmp_path):
    path = tmp_path / 'given.model'
    path.write_bytes(train_model(make_texts(), pad_id=5, eos_id=2, unk_id=0, bos_id=-1))
    vocabulary = make_vocabulary(
        VocabularyConfig(model_file=str(path)), ListSource([('a', 'b')]), report=lambda _: None
    )
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (5, 2, 0)
    assert (vocabulary.bos_id, vocabulary.start_id) == (None, 5)
    assert vocabulary.files()['spm.model'] == path.read_bytes()


@pytest.mark.parametrize(
    'content, message',
    [(None, 'can not be read'), (b'no model', 'is not a SentencePiece model'), (b'', 'it is empty')],
)
def test_an_unusable_given_model_is_refused(tmp_path, content, message):
    path = tmp_path / 'given.model'
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf'config\.vocabulary\.model_file.*{message}'):
        make_vocabulary(VocabularyConfig(model_file=str(path)), ListSource([]))


def test_a_given_model_without_pad_is_refused(tmp_path):
    path = tmp_path / 'given.model'
    path.write_bytes(train_model(make_texts()))  # SentencePiece's own default has no pad
    with pytest.raises(ConfigError, match='pad none, eos 2, unk 0; all three must exist and differ'):
        make_vocabulary(VocabularyConfig(model_file=str(path)), ListSource([]))
