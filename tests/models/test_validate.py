"""What can not work is refused by the whole config's check, before anything is traced, with what would work."""

from typing import Any

import pytest

from transformer_jax import models
from transformer_jax.attention import choose
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
        (
            {'model.attention.impl': 'cudnn'},
            r"cuDNN runs on NVIDIA GPUs, not on cpu; impl='blockwise'.*working here: dot/dense, dot/blockwise",
        ),
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


LOW_RANK_CROSS = {'model.cross.kind': 'low_rank'}
LANGUAGE_MODEL = ENCODER_ONLY | {'model.family': 'decoder_only', 'model.decoder_only.task': 'language_model'}
RECURRENT = {'model.family': 'recurrent', 'model.positions': 'none'}


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'model.attention.rank': 7}, r"attention\.rank is 7, but kind 'dot' does not read it \(read by 'low_rank'\)"),
        ({'model.attention.num_features': 8}, r"num_features is 8, .*\(read by 'performer'\); leave it 256"),
        (
            {'model.attention.kind': 'linear', 'model.attention.scale': None},
            r"scale is None, but kind 'linear' does not",
        ),
        (LOW_RANK_CROSS | {'model.encoder_self.rank': 7}, r"encoder_self\.rank is 7, but kind 'dot' does not read it"),
        (
            LOW_RANK_CROSS | {'model.cross.block_size': 7},
            r"cross\.block_size is 7, but kind 'low_rank' does not read it",
        ),
        ({'model.rope_base': 500.0}, r"rope_base is 500\.0, but .*positions='sinusoidal' does not read it .*'rope'"),
        ({'model.positions': 'rope', 'model.relative_clip': 7}, r"relative_clip is 7, but .*positions='rope' does not"),
        ({'model.encoder_only.side': 'target'}, r"encoder_only\.side is 'target', but it is of family 'encoder_only'"),
        (
            ENCODER_ONLY | {'model.cross.num_heads': 2},
            r"cross\.num_heads is 2, but .*'encoder_only', which has no such",
        ),
        (LANGUAGE_MODEL | {'model.encoder_self.window': 7}, r'encoder_self\.window is 7, but .*which has no such'),
        (LANGUAGE_MODEL | {'model.decoder_only.prefix': 'causal'}, r"prefix is 'causal', .*which has no prefix"),
        (
            RECURRENT | {'model.attention.impl': 'blockwise'},
            r"impl is 'blockwise', but family 'recurrent' has the",
        ),
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(overlay(Config(), changes))


@pytest.mark.parametrize(
    'changes',
    [
        LOW_RANK_CROSS | {'model.attention.rank': 7},
        LOW_RANK_CROSS | {'model.cross.rank': 7},
        {'model.attention.impl': 'dense', 'model.attention.block_size': 64},  # of another implementation of the kind
        {'model.attention.kind': 'performer', 'model.attention.num_features': 8, 'model.attention.scale': None},
        {'model.positions': 't5', 'model.t5_buckets': 8},
    ],
    ids=str,
)
def test_what_is_read_somewhere_is_allowed(changes: dict[str, Any]) -> None:
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


def test_kernels_that_count_by_index_are_refused_behind_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, 'target_platform', lambda: 'tpu')
    changes = {'model.family': 'decoder_only', 'model.decoder_only.prefix': 'causal', 'model.attention.impl': 'pallas'}
    with pytest.raises(ConfigError, match='count positions by index.*working here: dot/dense, dot/blockwise'):
        validate(overlay(Config(), changes))
    (use,) = models.uses_of_attention(overlay(Config(), changes | {'model.attention.impl': 'auto'}), (61, 67))
    assert (use.max_length, choose(use)) == (128, 'dense')
    validate(overlay(Config(), LANGUAGE_MODEL | {'model.attention.impl': 'pallas'}))


def test_cudnn_on_a_gpu_in_16_bits_and_heads_of_any_width_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    validate(overlay(Config(), {'model.d_model': 500, 'model.attention.head_dim': 7, 'model.attention.num_heads': 3}))
    monkeypatch.setattr(models, 'target_platform', lambda: 'gpu')
    for positions in ('sinusoidal', 'rope'):
        changes = {'model.attention.impl': 'cudnn', 'model.compute_dtype': 'bfloat16', 'model.positions': positions}
        validate(overlay(Config(), changes))
    wide = {'model.family': 'convolutional', 'model.compute_dtype': 'bfloat16', 'model.attention.impl': 'cudnn'}
    with pytest.raises(ConfigError, match='head_dim of at most 128 .* and it is 512'):  # its one head
        validate(overlay(Config(), wide))
