"""Texts at the limits on length: sources of just what a model reads, and targets without an end."""

import dataclasses
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from tests.decoding.toy_models import EOS, TableModel, WordVocabulary, make_translator, random_sources
from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.generator import Generator
from transformer_jax.models.interface import LANGUAGE_MODEL

VOCAB, LONGEST = 11, 13


@dataclass(frozen=True)
class TableWriter(TableModel):
    """The same tables for texts without a source."""

    task = LANGUAGE_MODEL


def make_endless(model):
    """Parameters by which no text ever ends."""
    params = model.init(jax.random.key(1))
    return dict(params, table=params['table'].at[..., EOS].set(-1e9))


def test_a_source_as_long_as_the_model_reads_is_whole_and_one_longer_by_a_subword_is_cut():
    model = TableModel(vocab_size=VOCAB, num_sentences=31, max_length=LONGEST)
    translator = make_translator(model, model.init(jax.random.key(1)), method='greedy', max_extra_length=2)
    words = random_sources(1, 3, longest=1)[0].split() + [f'w{4 + place % 5}' for place in range(LONGEST)]
    exact, longer = ' '.join(words[: LONGEST - 1]), ' '.join(words[:LONGEST])  # eos comes behind
    whole = translator.translate_n_best([exact], 1)
    assert translator.counts.cut == 0
    assert translator.translate_n_best([longer], 1) == whole
    assert translator.counts.cut == 1
    roomy = dataclasses.replace(model, max_length=LONGEST + 1)
    others = make_translator(roomy, translator.params, method='greedy', max_extra_length=2)
    assert others.translate_n_best([longer], 1) != whole
    assert others.counts.cut == 0


@pytest.mark.parametrize('method', ['greedy', pytest.param('beam', marks=pytest.mark.slow)])
def test_a_translation_that_never_ends_is_as_long_as_the_model_writes(method):
    model = TableModel(vocab_size=VOCAB, num_sentences=31, max_length=LONGEST)
    translator = make_translator(model, make_endless(model), method=method, beam_size=2, max_extra_length=100)
    found = translator.translate_n_best(['w4', 'w5 w6 w7', 'w8 w9'], 1, prefixes=['', 'w4 w5', 'w6'])
    for (best,), prefix in zip(found, (0, 2, 1), strict=True):
        assert len(best.ids) == LONGEST
        assert best.length == LONGEST - prefix
        assert not best.finished
        assert np.isfinite(best.score)
    assert translator.counts.unfinished == 3


@pytest.mark.parametrize('method', ['greedy', pytest.param('beam', marks=pytest.mark.slow)])
def test_a_text_that_never_ends_is_as_long_as_the_model_writes(method):
    model = TableWriter(vocab_size=VOCAB, num_sentences=31, max_length=LONGEST)
    settings = DecodingConfig(method=method, beam_size=2, max_extra_length=100, batch_size=8)
    said = []
    generator = Generator(model, make_endless(model), WordVocabulary(VOCAB), settings, report=said.append)
    found = generator.generate_n_best(['', 'w4 w5 w6'], 1)
    for (best,), prompt in zip(found, (0, 3), strict=True):
        assert len(best.ids) == LONGEST
        assert best.length == LONGEST - prompt
        assert not best.finished
        assert np.isfinite(best.score)
    assert generator.counts.unfinished == 2
    assert said == ['2 of 2 texts were cut by the limit on length']
