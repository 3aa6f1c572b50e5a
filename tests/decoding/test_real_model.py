"""Search through the decode cache of the encoder-decoder: what it reports is what a teacher-forced pass says."""

import jax
import numpy as np
import pytest

from tests.decoding.toy_models import BOS, EOS, WordVocabulary, random_sources
from transformer_jax import models
from transformer_jax.config import AttentionConfig, DecodingConfig, ModelConfig
from transformer_jax.decoding.translator import Translator


def test_cached_beams_score_as_a_teacher_forced_pass_does():
    config = ModelConfig(
        d_model=14, d_ff=22, num_encoder_layers=1, num_decoder_layers=2, max_length=37, output_bias=True,
        attention=AttentionConfig(num_heads=3, head_dim=5),
    )  # fmt: skip
    model = models.build(config, vocab_size=13, start_id=BOS)
    # Larger weights than fresh ones, so that the outputs differ and the cache matters.
    params = jax.tree.map(lambda leaf: 3 * leaf, model.init(jax.random.key(0)))
    params['output_bias'] = params['output_bias'].at[EOS].set(2.0)
    settings = DecodingConfig(beam_size=3, batch_size=4, max_extra_length=8)
    translator = Translator(model, params, WordVocabulary(13), settings, report=lambda line: None)
    sources = ['w4 w5', 'w6', 'w7 w8 w9 w10 w11', 'w12 w12 w4', 'w9 w4 w4 w4 w6 w7 w8']
    prefixes = ['', 'w5', '', 'w6 w7 w8', '']
    found = translator.translate_n_best(sources, 3, prefixes=prefixes)
    num_finished = 0
    for source, prefix, best in zip(sources, prefixes, found, strict=True):
        assert len({one.ids for one in best}) == 3
        for one in best:
            assert [f'w{token}' for token in one.ids[: len(prefix.split())]] == prefix.split()
            if one.finished and not prefix:
                num_finished += 1
                again = translator.score([source], [' '.join(f'w{token}' for token in one.ids)])[0]
                assert again.log_probability == pytest.approx(one.log_probability, abs=1e-4)
    assert num_finished > 0


@pytest.mark.parametrize(('longest', 'batch_sizes'), [(11, [7]), pytest.param(21, [7, 64], marks=pytest.mark.slow)])
def test_batch_size_order_and_neighbours_change_nothing(longest, batch_sizes):
    """Against each line alone; lines of 21 words are padded to another length than short ones."""
    config = ModelConfig(
        d_model=14, d_ff=22, num_encoder_layers=1, num_decoder_layers=1, max_length=37, output_bias=True,
        attention=AttentionConfig(num_heads=3, head_dim=5),
    )  # fmt: skip
    model = models.build(config, vocab_size=13, start_id=BOS)
    params = jax.tree.map(lambda leaf: 3 * leaf, model.init(jax.random.key(1)))
    params['output_bias'] = params['output_bias'].at[EOS].set(1.0)
    lines = random_sources(40, 2, longest=longest, vocab_size=13)
    order = np.random.default_rng(0).permutation(len(lines)).tolist()

    def make(batch_size):
        settings = DecodingConfig(method='greedy', batch_size=batch_size, max_extra_length=3)
        return Translator(model, params, WordVocabulary(13), settings, report=lambda line: None)

    alone = [best for (best,) in make(1).translate_n_best(lines, 1)]
    assert len({one.text for one in alone}) > 10
    for translator in map(make, batch_sizes):
        as_they_come = [best for (best,) in translator.translate_n_best(lines, 1)]
        moved = translator.translate_n_best([lines[place] for place in order], 1)
        back = [moved[order.index(place)][0] for place in range(len(lines))]
        for found in (as_they_come, back):
            assert [one.text for one in found] == [one.text for one in alone]
            np.testing.assert_allclose([one.score for one in found], [one.score for one in alone], atol=1e-4)
