"""The copy and reverse tasks."""

import dataclasses

import pytest

from transformer_jax import data
from transformer_jax.config import Config, ConfigError, CopyingConfig, DataConfig
from transformer_jax.data.copying import CopyingSource

CONFIG = CopyingConfig(num_symbols=31, min_length=2, max_length=7, num_train=900, num_validation=101, num_test=103)


@pytest.mark.parametrize('task', ['copy', 'reverse'])
def test_targets_follow_the_task(task):
    source = CopyingSource(dataclasses.replace(CONFIG, task=task), seed=3)
    lengths, symbols = set(), set()
    for index, pair in enumerate(source.read('train')):
        words = pair.source.split(' ')
        assert pair.id == index
        assert pair.target.split(' ') == (words if task == 'copy' else words[::-1])
        lengths.add(len(words))
        symbols.update(words)
    assert lengths == {2, 3, 4, 5, 6, 7}
    assert len(symbols) == 31
    assert index == source.size('train') - 1 == 899


def test_splits_share_no_string_and_a_seed_repeats_itself():
    source = CopyingSource(CONFIG, seed=3)
    texts = {split: [pair.source for pair in source.read(split)] for split in source.splits()}
    assert [len(texts[split]) for split in ('train', 'validation', 'test')] == [900, 101, 103]
    assert not set(texts['train']) & set(texts['validation'])
    assert not set(texts['train'] + texts['validation']) & set(texts['test'])
    assert [pair.source for pair in CopyingSource(CONFIG, seed=3).read('train')] == texts['train']
    assert [pair.source for pair in CopyingSource(CONFIG, seed=4).read('train')] != texts['train']


def test_fingerprints_follow_content():
    made = [
        CopyingSource(config, seed) for config in (CONFIG, dataclasses.replace(CONFIG, max_length=8)) for seed in (1, 2)
    ]
    assert len({source.fingerprint(split) for source in made for split in source.splits()}) == 12
    assert CopyingSource(CONFIG, 1).fingerprint('test') == made[0].fingerprint('test')


def test_too_few_strings_and_unknown_splits_are_refused():
    tiny = CopyingSource(CopyingConfig(num_symbols=2, min_length=1, max_length=1), seed=0)
    with pytest.raises(ConfigError, match=r'config\.data\.copying has too few strings'):
        [list(tiny.read(split)) for split in tiny.splits()]
    with pytest.raises(ValueError, match="no split 'dev'; there are train, validation, test"):
        tiny.size('dev')
    bad = Config(data=DataConfig(source='copying', copying=CopyingConfig(min_length=9, max_length=8)))
    with pytest.raises(ConfigError, match=r'config\.data\.copying\.min_length is 9, above max_length 8'):
        data.make_source(bad)
