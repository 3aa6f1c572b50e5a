"""The same parameters under other attention: exact implementations change nothing but rounding, others are measured."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.models.tiny import CONFIG, START, V, compute_logits, make_batch, make_model, make_params
from transformer_jax.config import ConfigError, EncoderOnlyConfig
from transformer_jax.data.batch import HostBatch
from transformer_jax.evaluation.comparison import Comparison, divergence, require_same_parameters
from transformer_jax.evaluation.evaluator import Result
from transformer_jax.models import build

BATCHES = [HostBatch(make_batch([9, 4, 1], [3, 11, 2], seed=seed), np.arange(3)) for seed in (0, 1)]


def with_attention(**changes):
    return make_model(attention=dataclasses.replace(CONFIG.attention, **changes))


def test_an_exact_implementation_changes_nothing_beyond_float_error():
    model, blockwise = with_attention(impl='dense'), with_attention(impl='blockwise', block_size=3)
    params = make_params(model)
    for one in BATCHES:
        real = one.batch.target_segment_ids > 0
        ours, theirs = (np.asarray(compute_logits(each, params, one.batch))[real] for each in (model, blockwise))
        assert np.abs(ours - theirs).max() <= 1e-5
    assert abs(divergence(model, blockwise, params, BATCHES)) <= np.finfo(np.float32).eps  # of log-probabilities


def test_divergence_is_the_mean_over_real_tokens():
    model, narrow = with_attention(), with_attention(window=2)
    params = make_params(model)
    total, count = 0.0, 0
    for one in BATCHES:
        real = one.batch.target_segment_ids > 0
        p, q = (
            np.float64(jax.nn.log_softmax(compute_logits(each, params, one.batch)))[real] for each in (model, narrow)
        )
        total += (np.exp(p) * (p - q)).sum()
        count += real.sum()
    assert total / count > 1e-3
    assert divergence(model, narrow, params, BATCHES) == pytest.approx(total / count, rel=1e-4)


def test_divergence_is_of_what_was_masked_where_it_was_masked():
    own = EncoderOnlyConfig(selected_rate=0.5)
    model, narrow = (
        make_model(
            family='encoder_only', encoder_only=own, attention=dataclasses.replace(CONFIG.attention, window=window)
        )
        for window in (None, 2)
    )
    params, total, count, posed = make_params(model), 0.0, 0, []
    for seed, one in enumerate(BATCHES):
        keys = jax.random.split(jax.random.key(seed, impl='threefry2x32'), 3)
        batch = jax.device_get(jax.jit(model.objective)(one.batch, keys))
        posed.append(one._replace(batch=batch))
        real = batch.target_segment_ids > 0
        p, q = (np.float64(jax.nn.log_softmax(compute_logits(each, params, batch)))[real] for each in (model, narrow))
        total += (np.exp(p) * (p - q)).sum()
        count += real.sum()
    assert divergence(model, narrow, params, posed) == pytest.approx(total / count, rel=1e-4)


def test_other_parameters_are_refused_by_name():
    with pytest.raises(ConfigError, match='9 differ, such as decoder.layers.cross_attention.key_map') as caught:
        require_same_parameters(with_attention(), with_attention(kind='additive'))
    assert 'trained not at all' in str(caught.value)
    require_same_parameters(with_attention(), with_attention(kind='linear'))
    wider = build(dataclasses.replace(CONFIG, d_ff=19), vocab_size=V, start_id=START)
    with pytest.raises(ConfigError, match='feed_forward'):
        require_same_parameters(with_attention(), wider)


def test_the_report_gives_both_figures_and_the_change():
    before = Result(split='test', num_pairs=3, num_tokens=10, num_words=5, nll=20.0, num_correct=4, predicts='x')
    after = dataclasses.replace(before, nll=25.0)
    text = Comparison(before, after, 0.25).format()
    assert 'NLL: 2.500000 - 2.000000 = +0.500000' in text
    assert '2.500e-01 nats' in text
