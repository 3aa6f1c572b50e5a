"""What can not work is refused by the whole config's check, before anything is traced, with what would work."""

from typing import Any

import pytest

from transformer_jax import models
from transformer_jax.config import Config, ConfigError
from transformer_jax.models import validate
from transformer_jax.overlay import overlay

ENCODER_ONLY = {'model.family': 'encoder_only', 'evaluation.bleu': False, 'evaluation.score': 'loss'}


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'model.d_model': 511}, r'd_model is 511; sinusoidal positions need an even width: 510 or 512'),
        ({'model.d_model': 1}, r'd_model is 1; sinusoidal positions need an even width: 2$'),
        ({'model.positions': 'rope', 'model.attention.head_dim': 63}, r'head_dim is 63; .*must be even: 62 or 64'),
        ({'model.attention.num_kv_heads': 3}, r'num_kv_heads is 3, .*num_heads 8; it must be one of 1, 2, 4, 8'),
        ({'model.attention.kind': 'linear', 'model.attention.window': 5}, r'window \(.*working here: dot/dense'),
        ({'model.attention.kind': 'performer', 'model.decoder_self.window': 5}, r'decoder_self .*window \(.*dot/dense'),
        (
            ENCODER_ONLY | {'model.attention.kind': 'low_rank', 'model.attention.window': 5},
            r'encoder_self .*window \(.*working here: dot/dense',
        ),
        ({'model.attention.kind': 'low_rank'}, r'decoder_self .*causal \(hides later positions\).*dot/dense'),
        ({'model.attention.impl': 'cudnn'}, r'not support cpu \(.*working here: dot/dense, dot/blockwise'),
        ({'model.attention.impl': 'pallas'}, r'not support cpu \(.*working here: dot/dense, dot/blockwise'),
        (
            {'model.positions': 'learned', 'model.max_length': 64, 'data.max_length': 65},
            r'data\.max_length is 65, above config\.model\.max_length 64; raise the model length or lower the data',
        ),
    ],
    ids=str,
)
def test_what_can_not_work_is_refused_with_what_would(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(overlay(Config(), changes))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({}, r'not support float32 \(computes in float32\); working here: dot/dense, dot/blockwise, dot/pallas'),
        (
            {'model.compute_dtype': 'bfloat16', 'model.attention.value_dim': 32},
            r'not support value_dim \(d_v other than d_k\); working here: dot/dense, dot/blockwise, dot/pallas',
        ),
        (
            {'model.compute_dtype': 'bfloat16', 'model.attention.head_dim': 60},
            r"head_dim .* multiple of 8, and it is 60; impl='blockwise' takes any; working here: dot/dense",
        ),
        (
            {'model.compute_dtype': 'bfloat16', 'model.positions': 'shaw'},
            r'not support positions \(.*working here: dot/dense, dot/blockwise',
        ),
        (
            {'model.compute_dtype': 'bfloat16', 'model.attention.dropout_rate': 0.1},
            r'not support dropout \(.*working here: dot/dense, dot/blockwise',
        ),
    ],
    ids=str,
)
def test_what_cudnn_can_not_is_refused_on_a_gpu(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, 'target_platform', lambda: 'gpu')
    with pytest.raises(ConfigError, match=message):
        validate(overlay(Config(), {'model.attention.impl': 'cudnn'} | changes))


def test_cudnn_on_a_gpu_in_16_bits_and_heads_of_any_width_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    validate(overlay(Config(), {'model.d_model': 500, 'model.attention.head_dim': 7, 'model.attention.num_heads': 3}))
    monkeypatch.setattr(models, 'target_platform', lambda: 'gpu')
    for positions in ('sinusoidal', 'rope'):
        changes = {'model.attention.impl': 'cudnn', 'model.compute_dtype': 'bfloat16', 'model.positions': positions}
        validate(overlay(Config(), changes))
