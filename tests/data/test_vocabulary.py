"""The vocabulary: round trips, specials that text can't reach, fingerprints, and errors that say what would do."""

import io
import json
import random

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.config import VocabularyConfig
from transformer_jax.data.vocabulary import (
    JointVocabulary,
    MarianVocabulary,
    Vocabulary,
    load_vocabulary,
)
from transformer_jax.data.vocabulary_training import train_vocabulary


def make_texts(seed: int = 0, count: int = 400) -> list[str]:
    rng = random.Random(seed)
    words = [''.join(rng.choices('abcdefghiklmnopr', k=rng.randint(2, 7))) for _ in range(150)]
    return [' '.join(rng.choices(words, k=rng.randint(3, 11))) for _ in range(count)]


def train_model(texts: list[str], size: int = 120, **settings) -> bytes:
    """A SentencePiece model as some other program would train it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=size, model_type='bpe', minloglevel=2, **settings
    )
    return model.getvalue()


@pytest.fixture(scope='module')
def trained() -> JointVocabulary:
    return train_vocabulary(VocabularyConfig(size=400), make_texts(), report=lambda _: None)


@pytest.fixture(scope='module')
def marian() -> MarianVocabulary:
    models = train_model(make_texts(1)), train_model(make_texts(2))
    pieces = {'</s>': 0, '<unk>': 1, '>>deu<<': 2}
    for model in models:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        for index in range(3, processor.get_piece_size()):
            pieces.setdefault(processor.id_to_piece(index), len(pieces))
    pieces['<pad>'] = len(pieces)
    return MarianVocabulary(*models, pieces)


def test_ids_are_laid_out_as_documented(trained):
    assert trained.size == 400
    assert trained.pieces([0, 1, 2, 3, 4, 259]) == ['<pad>', '</s>', '<unk>', '<s>', '<0x00>', '<0xFF>']
    assert (trained.pad_id, trained.eos_id, trained.unk_id, trained.bos_id, trained.start_id) == (0, 1, 2, 3, 3)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=('Cs',)), max_size=40))
def test_text_never_becomes_a_special(trained, text):
    for spelled in (text, f'<pad>{text}</s> <s>', f'{text}<unk>'):
        (ids,) = trained.encode_source([spelled])
        assert all(3 < token < trained.size for token in ids)  # with byte fallback there is no unk either
        assert trained.encode_target([spelled]) == [ids]


# What the default normalisation (NFKC of the nmt kind) makes of a character between two letters.
CHARACTERS = {
    'zero width joiner': ('\u200d', '\u200d'),
    'zero width non-joiner': ('\u200c', ' '),
    'no-break space': ('\u00a0', ' '),
    'thin space': ('\u2009', ' '),
    'composed e acute': ('\u00e9', '\u00e9'),
    'decomposed e acute': ('e\u0301', '\u00e9'),
    'ligature fi': ('\ufb01', 'fi'),
    'full-width A': ('\uff21', 'A'),
    'line separator': ('\u2028', ' '),
    'next line': ('\u0085', '\u0085'),
    'tab': ('\t', ' '),
    'emoji': ('\U0001f642', '\U0001f642'),
}


@pytest.mark.parametrize('name', CHARACTERS)
def test_round_trip_of_unusual_characters(trained, name):
    character, expected = CHARACTERS[name]
    (text,) = trained.decode(trained.encode_source([f'ab{character}cd']))
    assert text == f'ab{expected}cd'


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=('Cs', 'Zs', 'Cc', 'Zl', 'Zp')), max_size=30))
def test_identity_normalisation_keeps_every_character(text):
    vocabulary = _identity_vocabulary()
    text = text.replace('\u2581', '')  # SentencePiece's own mark for a space
    assert vocabulary.decode(vocabulary.encode_source([text])) == [text]


def _identity_vocabulary(cache: list[Vocabulary] = []) -> Vocabulary:  # noqa: B006 one training for all examples
    if not cache:
        config = VocabularyConfig(size=300, normalization='identity')
        cache.append(train_vocabulary(config, make_texts(), report=lambda _: None))
    return cache[0]


def test_decode_stops_at_eos_and_drops_specials(trained):
    (ids,) = trained.encode_target(['abc de'])
    assert trained.decode([[3, 0, *ids, 1, *ids], ids + [0, 0], [], [1]]) == ['abc de', 'abc de', '', '']


def test_an_unknown_mark_leaves_no_double_space():
    model = train_model(make_texts(), size=60, pad_id=0, eos_id=1, unk_id=2, bos_id=3)
    vocabulary = JointVocabulary(model)
    (ids,) = vocabulary.encode_source(['ab \u2603 cd'])
    assert vocabulary.unk_id in ids
    assert vocabulary.decode([ids]) == ['ab cd']


def test_broken_byte_runs_become_replacement_characters(trained):
    byte = {value: 4 + value for value in range(256)}
    whole = [byte[value] for value in '\u2603'.encode()]
    assert trained.decode([whole]) == ['\u2603']
    (broken,) = trained.decode([[*whole[:2], byte[ord('A')]]])
    assert broken.endswith('A')
    assert set(broken[:-1]) == {'\ufffd'}


def test_a_sequence_stays_one_line(trained):
    newline, carriage_return = 4 + 10, 4 + 13
    (ids,) = trained.encode_target(['ab'])
    assert trained.decode([[*ids, newline, *ids, carriage_return, *ids]])[0].splitlines() == ['ab  ab  ab']


@pytest.mark.parametrize('token', [-1, 400])
def test_an_id_outside_the_vocabulary_is_refused(trained, token):
    with pytest.raises(ValueError, match=f'id {token} is outside the vocabulary of 400'):
        trained.decode([[7, token]])


def test_training_is_deterministic_and_the_fingerprint_follows_the_pieces(trained):
    again = train_vocabulary(VocabularyConfig(size=400), make_texts(), report=lambda _: None)
    other = train_vocabulary(VocabularyConfig(size=400), make_texts(seed=5), report=lambda _: None)
    plain = train_vocabulary(VocabularyConfig(size=400, normalization='identity'), make_texts(), report=lambda _: None)
    assert again.files() == trained.files()
    assert again.fingerprint == trained.fingerprint
    assert other.size == trained.size
    assert len({trained.fingerprint, other.fingerprint, plain.fingerprint}) == 3


def test_the_fingerprint_ignores_how_the_model_was_trained():
    models = [
        train_model(make_texts(), pad_id=0, eos_id=1, unk_id=2, bos_id=3, num_threads=threads) for threads in (1, 2)
    ]
    assert models[0] != models[1]
    assert JointVocabulary(models[0]).fingerprint == JointVocabulary(models[1]).fingerprint
    assert JointVocabulary(models[0], start_id=0).fingerprint != JointVocabulary(models[0]).fingerprint


@pytest.mark.parametrize('kind', ['trained', 'marian'])
def test_save_and_load(kind, request, tmp_path):
    vocabulary = request.getfixturevalue(kind)
    vocabulary.save(tmp_path / 'v')
    vocabulary.save(tmp_path / 'v')  # the same again changes nothing
    loaded = load_vocabulary(tmp_path / 'v')
    assert type(loaded) is type(vocabulary)
    texts = make_texts(3, 20)
    assert loaded.encode_source(texts) == vocabulary.encode_source(texts)
    assert loaded.encode_target(texts) == vocabulary.encode_target(texts)
    for name in ('size', 'pad_id', 'eos_id', 'unk_id', 'bos_id', 'start_id', 'fingerprint'):
        assert getattr(loaded, name) == getattr(vocabulary, name), name


def test_the_start_id_is_saved(tmp_path, trained):
    JointVocabulary(trained.files()['spm.model'], start_id=0).save(tmp_path)
    assert load_vocabulary(tmp_path).start_id == 0


def test_a_folder_of_another_vocabulary_is_neither_overwritten_nor_taken(trained, marian, tmp_path):
    trained.save(tmp_path)
    with pytest.raises(ValueError, match='holds another vocabulary'):
        marian.save(tmp_path)
    other = train_vocabulary(VocabularyConfig(size=400), make_texts(seed=5), report=lambda _: None)
    (tmp_path / 'spm.model').write_bytes(other.files()['spm.model'])  # of the same size
    with pytest.raises(ValueError, match='fingerprint differs'):
        load_vocabulary(tmp_path)


@pytest.mark.parametrize('damage', ['remove description', 'remove model', 'cut model', 'no json', 'kind'])
def test_a_damaged_folder_is_refused(trained, tmp_path, damage):
    trained.save(tmp_path)
    description, model = tmp_path / 'vocabulary.json', tmp_path / 'spm.model'
    if damage == 'remove description':
        description.unlink()
    elif damage == 'remove model':
        model.unlink()
    elif damage == 'cut model':
        model.write_bytes(model.read_bytes()[:1000])
    elif damage == 'no json':
        description.write_text('{')
    else:
        description.write_text(json.dumps({**json.loads(description.read_text()), 'kind': 'words'}))
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_vocabulary(tmp_path)


def test_marian_uses_a_model_a_side_and_one_table(marian):
    text = make_texts(1, 1)[0]
    (source,), (target,) = marian.encode_source([text]), marian.encode_target([text])
    assert source != target
    expected = sentencepiece.SentencePieceProcessor(model_proto=marian.files()['source.spm']).encode(text, out_type=str)
    assert marian.pieces(source) == expected
    assert marian.decode([target]) == [text]
    assert marian.start_id == marian.pad_id == marian.size - 1
    assert (marian.eos_id, marian.unk_id, marian.bos_id) == (0, 1, None)


def test_marian_language_tokens_and_missing_pieces(marian):
    (plain,), (tagged,) = marian.encode_source(['abc']), marian.encode_source(['>>deu<< abc'])
    assert tagged == [2, *plain]
    assert marian.encode_source(['>>xyz<< abc'])[0][0] != 2
    (odd,) = marian.encode_source(['\u2603'])
    assert marian.unk_id in odd
    assert not {marian.pad_id, marian.eos_id} & set(marian.encode_source(['</s> <pad>'])[0])


def test_a_marian_table_with_a_gap_is_refused(marian):
    files = marian.files()
    table = json.loads(files['vocab.json'])
    with pytest.raises(ValueError, match='must be 0 to'):
        MarianVocabulary(files['source.spm'], files['target.spm'], {**table, '<pad>': len(table) + 5})
    del table['</s>']
    table['other'] = 0
    with pytest.raises(ValueError, match='lacks </s>'):
        MarianVocabulary(files['source.spm'], files['target.spm'], table)
