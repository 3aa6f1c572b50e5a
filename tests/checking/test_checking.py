"""The oracle suite passes what is right and tells what is wrong."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest

from transformer_jax.attention import VARIANTS
from transformer_jax.attention.dense import DENSE, dense_attention
from transformer_jax.checking import Finding, check_config, check_variant, format_table
from transformer_jax.checking.model_checks import make_batch, reduce_sizes
from transformer_jax.config import AttentionConfig, Config
from transformer_jax.overlay import overlay

SMALL = AttentionConfig(num_heads=2, head_dim=3)


def broken(change):
    """Dense attention whose arguments `change` spoils."""

    def attend(q, k, v, mask, options):
        return dense_attention(*change(q, k, v, mask, options))

    return DENSE._replace(function=attend)


def forget_causality(q, k, v, mask, options):
    return q, k, v, dataclasses.replace(mask, causal=False), options


def forget_scale(q, k, v, mask, options):
    return q, k, v, mask, options._replace(scale=1.0)


def forget_padding(q, k, v, mask, options):
    return q, k, v, dataclasses.replace(mask, k_segments=jnp.maximum(mask.k_segments, 1)), options


@pytest.mark.parametrize(
    ('change', 'use', 'told'),
    [
        (forget_causality, 'decoder_self', 'hidden keys have no influence'),
        (forget_scale, 'cross', 'values'),
        (forget_padding, 'cross', 'padding may hold anything'),
    ],
)
def test_a_broken_variant_is_told(change, use, told):
    with pytest.raises(AssertionError) as caught:
        check_variant(broken(change), SMALL, uses=(use,))
    failed = [line for line in str(caught.value).splitlines() if 'FAILED' in line]
    assert any(told in line for line in failed)


def test_a_variant_by_import_path_with_an_equation_of_its_own(tmp_path, monkeypatch):
    (tmp_path / 'averaging.py').write_text(
        'from transformer_jax.attention.dense import dense_attention\n'
        'from transformer_jax.attention.variant import Variant\n'
        'def attend(q, k, v, mask, options):\n'
        '    return dense_attention(0 * q, k, v, mask, options)\n'
        "average = Variant(attend, frozenset({'cross', 'cpu', 'float32'}))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def equation(q, k, v, seen, params, config):
        weights = seen / jnp.maximum(seen.sum(axis=2, keepdims=True), 1)
        return jnp.einsum('BTS,BSNU->BTNU', weights, v) + 0 * q.sum() * k.sum()

    found = check_variant('averaging:average', SMALL, oracle=equation, uses=('cross', 'decoder_self'))
    assert {one.subject for one in found} == {'cross'}  # it does not say that it can be causal
    assert {one.check for one in found if one.error is None} == {'packed segments are as if alone'}
    with pytest.raises(AssertionError, match='values'):
        check_variant('averaging:average', SMALL, oracle=functools.partial(wrong, equation), uses=('cross',))


def wrong(equation, *args):
    return 1.01 * equation(*args)


def test_a_variant_that_serves_no_use_does_not_pass():
    with pytest.raises(AssertionError, match='0 of 0 checks'):
        check_variant(DENSE._replace(supports=frozenset()), SMALL)


def test_the_table_says_what_failed_and_what_was_not_run():
    found = [Finding('cross', 'values', 3e-4, 5e-6), Finding('model', 'packing', None, 1e-5, 'it can not')]
    table = format_table([*found, Finding('model', 'decoding', float('nan'), 1e-5)])
    assert 'not run: it can not' in table
    assert table.count('FAILED') == 2


def test_reduced_sizes_keep_heads_and_schemes():
    config = overlay(Config(), {'model.positions': 'rope', 'model.attention.num_kv_heads': 2}).model
    reduced = reduce_sizes(config)
    assert (reduced.positions, reduced.attention.num_kv_heads, reduced.attention.num_heads) == ('rope', 2, 8)
    assert reduced.num_encoder_layers == 2
    assert reduced.dropout_rate == 0


def test_more_padding_leaves_the_pairs_as_they_are():
    batch, padded = make_batch(), make_batch(pads=3)
    assert (padded.inputs[:, : batch.inputs.shape[1]] == batch.inputs).all()
    assert (padded.input_segment_ids.sum(axis=1) == batch.input_segment_ids.sum(axis=1)).all()


@pytest.mark.slow
@pytest.mark.parametrize('key', [key for key, variant in VARIANTS.items() if 'cpu' in variant.supports], ids='/'.join)
def test_every_variant_passes(key):
    config = dataclasses.replace(AttentionConfig(num_heads=6, head_dim=8, num_kv_heads=3), kind=key[0], impl=key[1])
    check_variant(VARIANTS[key], config)


@pytest.mark.slow
@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'model.attention.impl': 'blockwise', 'model.attention.window': 5, 'model.positions': 'shaw'},
        {'model.attention.kind': 'linear', 'model.positions': 'learned'},
        {'model.attention.kind': 'general', 'model.positions': 't5', 'model.attention.num_kv_heads': 2},
        {'model.family': 'decoder_only', 'model.positions': 'rope'},
        {'model.family': 'convolutional', 'model.positions': 'learned'},
    ],
    ids=str,
)
def test_models_pass(changes):
    small = {'model.d_model': 32, 'model.attention.num_heads': 4, 'model.attention.head_dim': 8}
    small |= {'model.num_encoder_layers': 2, 'model.num_decoder_layers': 2}
    found = list(check_config(overlay(Config(), {**small, **changes})))
    assert all(one.passed for one in found), format_table(found)
