"""Beam search against a list of all outputs."""

import jax
import numpy as np
import pytest
from tests.decoding.toy_models import EOS, TableModel, WordVocabulary, divisor, list_outputs

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.translator import Translator

LONGEST = 5
SOURCES = [f'w4 w{k}' for k in range(2, 6)] + ['w5', 'w2 w2 w2', 'w3 w5 w4', 'w5 w5', 'w4 w4 w4 w4', 'w2']


def make_translator(model: TableModel, params, *, longest: int | None = None, **changes) -> Translator:
    """A translator without report whose outputs have at most `longest` subwords, set through the model's own limit."""
    if longest is not None:
        model = TableModel(model.vocab_size, longest, num_sentences=model.num_sentences, start_id=model.start_id)
    config = DecodingConfig(**{'max_extra_length': 50, **changes})
    return Translator(model, params, WordVocabulary(model.vocab_size), config, report=lambda line: None)


def sentence_of(model: TableModel, source: str) -> int:
    ids = [int(word[1:]) for word in source.split()] + [EOS]
    return sum(i * k for i, k in enumerate(ids, 1)) % model.num_sentences


@pytest.mark.parametrize('alpha', [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize('kind', ['gnmt', 'power'])
def test_a_beam_as_wide_as_the_space_is_exhaustive_search(alpha, kind):
    model = TableModel(vocab_size=5, num_sentences=47)
    sources = [f'w4 w{k % 5} w{k // 5 % 5} w{k // 25}' for k in range(125)]
    seen = set()
    params = model.init(jax.random.key(3))
    translator = make_translator(model, params, longest=LONGEST, beam_size=48, alpha=alpha, length_penalty=kind)
    for source, best in zip(sources, translator.translate_n_best(sources, 1), strict=True):
        seen.add(sentence := sentence_of(model, source))
        outputs = [o for o in list_outputs(model, params, sentence, LONGEST) if o[3]]
        expected = max(outputs, key=lambda output: output[1] / divisor(kind, alpha, output[2]))
        assert best[0].ids == expected[0]
        assert best[0].finished
        assert best[0].log_probability == pytest.approx(expected[1], abs=1e-5)
        assert best[0].score == pytest.approx(expected[1] / divisor(kind, alpha, expected[2]), abs=1e-5)
    assert len(seen) > 30
