"""Search through the decode cache of the encoder-decoder: what it reports is what a teacher-forced pass says."""

import jax
import pytest

from tests.decoding.toy_models import BOS, EOS, WordVocabulary
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
