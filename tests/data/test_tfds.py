"""Sets of TensorFlow Datasets, read without TensorFlow from a small set prepared here."""

import sys

import pytest

from transformer_jax import data
from transformer_jax.config import Config, ConfigError, DataConfig, TfdsConfig
from transformer_jax.data.tfds import TfdsSource

TRAIN = {f'key {number}': {'de': f'Satz {number} größer\u2028', 'en': f'sentence {number}'} for number in range(11)}
TEST = {'a': {'de': 'ein\nzwei', 'en': 'one\r\ntwo'}, 'b': {'de': 'drei', 'en': 'three'}}


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory) -> str:
    import tensorflow_datasets as tfds

    class SmallTranslate(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version('1.2.3')

        def _info(self):
            # The keys are (de, en) as in the WMT sets, whichever direction is asked for.
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.Translation(languages=('de', 'en')))

        def _split_generators(self, dl_manager):
            return {'train': iter(TRAIN.items()), 'test': iter(TEST.items())}

        def _generate_examples(self):
            raise NotImplementedError

    folder = str(tmp_path_factory.mktemp('tfds'))
    SmallTranslate(data_dir=folder, file_format='array_record').download_and_prepare()
    return folder


def make_source(data_dir: str, languages: tuple[str, str] = ('en', 'de'), *, report=print, **changes) -> TfdsSource:
    return TfdsSource(make_config(data_dir, **changes), languages, report=report)


def make_config(data_dir: str, **changes) -> TfdsConfig:
    fields = {'name': 'small_translate', 'train_split': 'train', 'validation_split': 'test', 'test_split': 'test'}
    return TfdsConfig(data_dir=data_dir, **{**fields, **changes})


@pytest.mark.parametrize('source_language, target_language', [('en', 'de'), ('de', 'en')])
def test_direction_is_the_configs_and_nothing_is_lost(data_dir, source_language, target_language):
    own = DataConfig(source='tfds', tfds=make_config(data_dir))
    source = data.make_source(Config(data=own, source_language=source_language, target_language=target_language))
    pairs = list(source.read('train'))
    assert [pair.id for pair in pairs] == list(range(11))
    expected = {(example[source_language], example[target_language]) for example in TRAIN.values()}
    assert {(pair.source, pair.target) for pair in pairs} == expected
    assert source.size('train') == 11
    assert list(source.read('train')) == pairs
    assert 'tensorflow' not in sys.modules


def test_slices_are_splits(data_dir):
    source = make_source(data_dir, train_split='train[3:]+test', validation_split='train[:3]')
    everything = [pair.source for split in ('train', 'validation') for pair in source.read(split)]
    assert (source.size('train'), source.size('validation')) == (10, 3)
    assert len(set(everything)) == 13


def test_line_ends_inside_a_text_become_spaces_and_are_counted(data_dir):
    notes = []
    source = make_source(data_dir, report=notes.append)
    assert {(pair.source, pair.target) for pair in source.read('test')} == {('one  two', 'ein zwei'), ('three', 'drei')}
    assert notes == ['small_translate test: line ends inside 1 pairs became spaces']


def test_text_may_be_str_or_bytes(data_dir, monkeypatch):
    source = make_source(data_dir)

    class StrData:
        def __len__(self):
            return 2

        def __getitems__(self, indices):
            return [{'en': f'e{index}', 'de': f'd{index}'.encode()} for index in indices]

    monkeypatch.setattr(source._builder, 'as_data_source', lambda name: StrData())
    assert [(pair.source, pair.target) for pair in source.read('train')] == [('e0', 'd0'), ('e1', 'd1')]


def test_fingerprints_follow_content_and_direction(data_dir):
    one = make_source(data_dir, validation_split='train[:4]')
    other = make_source(data_dir, ('de', 'en'), validation_split='train[4:]')
    prints = [source.fingerprint(split) for source in (one, other) for split in source.splits()]
    assert len(set(prints)) == 6
    assert make_source(data_dir).fingerprint('train') == prints[0]


REFUSED = {
    'unknown set': ({'name': 'small_translat'}, r"config\.data\.tfds\.name is 'small_translat': .*not found"),
    'unknown pair': ({'name': 'wmt14_translate/de-xx'}, r"config\.data\.tfds\.name is 'wmt14_translate/de-xx'"),
    'language': ({'languages': ('fr', 'de')}, r"config\.source_language is 'fr'; small_translate has 'de', 'en'"),
    'one language': ({'languages': ('de', 'de')}, r"target_language is 'de', as is config\.source_language"),
    'split': ({'test_split': 'tst'}, r"test_split is 'tst' \(did you mean 'test'\?\); the set has 'train', 'test'"),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_the_set_does_not_have_is_refused(data_dir, name):
    changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make_source(data_dir, **changes)


def test_a_set_prepared_for_tensorflow_says_what_to_do(data_dir, monkeypatch):
    source = make_source(data_dir)

    def refuse(name):
        raise NotImplementedError('Random access data source for file format tfrecord is not supported')

    monkeypatch.setattr(source._builder, 'as_data_source', refuse)
    with pytest.raises(ConfigError, match=r"config\.data\.tfds\.name 'small_translate' .* as array_record .*tfrecord"):
        next(source.read('train'))


def test_the_wmt_sets_are_known_and_prepared_when_absent(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    prepared = []

    def pretend(builder):
        prepared.append(builder)

    monkeypatch.setattr(tfds.core.DatasetBuilder, 'download_and_prepare', pretend)
    notes = []
    with pytest.raises(ConfigError, match='train_split'):  # nothing was really prepared, so there are no splits
        TfdsSource(TfdsConfig(data_dir=str(tmp_path)), ('en', 'de'), report=notes.append)
    assert [builder.info.full_name for builder in prepared] == ['wmt14_translate/de-en/1.0.0']
    assert prepared[0].info.file_format.value == 'array_record'
    assert 'downloading and preparing' in notes[0]
