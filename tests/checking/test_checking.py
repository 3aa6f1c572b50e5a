"""The oracle suite passes what is right and tells what is wrong."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from tests.checking.small import SMALL, broken, first_findings, make_config, names_of_failed
from transformer_jax import models
from transformer_jax.attention import VARIANTS
from transformer_jax.attention.dense import DENSE
from transformer_jax.attention.performer import PERFORMER
from transformer_jax.checking import Finding, check_config, check_variant, format_table
from transformer_jax.checking.attention_checks import implementations, make_use, small_block
from transformer_jax.checking.model_checks import check_sharding, make_batch, reduce_sizes
from transformer_jax.config import AttentionConfig, Config
from transformer_jax.overlay import overlay


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


def see_only_the_first_blocks(q, k, v, mask, options):
    size = options.config.block_size or 128
    near = jnp.arange(k.shape[1]) < size
    return q, k, v, dataclasses.replace(mask, k_segments=jnp.where(near[None], mask.k_segments, 0)), options


def test_a_variant_that_leaves_blocks_out_is_told():
    variant = broken(see_only_the_first_blocks)._replace(reads=frozenset({'block_size'}))
    with pytest.raises(AssertionError) as caught:
        check_variant(variant, SMALL, uses=('cross',))
    failed = {re.split('  +', line)[1] for line in str(caught.value).splitlines() if 'FAILED' in line}
    assert failed >= {'values, 5 at a time', 'gradients, 5 at a time'}
    assert all('5 at a time' in check for check in failed)  # whole texts in one block are right


def test_blocks_are_of_a_size_that_the_variant_takes():
    def check(use):
        return 'it must be 16 or more' if (use.config.block_size or 16) < 16 else None

    variant = DENSE._replace(reads=frozenset({'block_size'}), check=check)
    for own, expected in ((None, [16]), (256, [16]), (8, [])):  # blocks of 8 are several already
        use = make_use('cross', dataclasses.replace(SMALL, block_size=own))
        assert small_block(use, variant) == expected
        assert small_block(use, DENSE) == []  # which reads no such field


@pytest.mark.parametrize('change', ['zeros', 'no gradients'])
def test_an_approximation_that_is_wrong_is_told(change, monkeypatch):
    def attend(q, k, v, mask, options):
        output, _ = PERFORMER.function(q, k, v, mask, options)
        return (0 * output if change == 'zeros' else jax.lax.stop_gradient(output)), None

    config = make_config(attention__kind='performer', attention__num_features=16)
    assert names_of_failed(first_findings(config, 3)) == []
    monkeypatch.setitem(VARIANTS, ('performer', 'chunked'), PERFORMER._replace(function=attend))
    failed = names_of_failed(first_findings(config, 3))
    assert failed == (['values', 'gradients', 'near softmax on short rows'] if change == 'zeros' else ['gradients'])


def test_what_runs_is_what_is_checked():
    """`auto` stands for another variant where texts are long."""
    for max_length, expected in ((256, ['dense']), (1024, ['blockwise', 'dense'])):
        config = make_config(max_length=max_length)
        use = models.uses_of_attention(config)[0]
        assert [checked.config.impl for checked, _ in implementations(use)] == expected
        assert [checked.config.dropout_rate for checked, _ in implementations(use)] == [0.0] * len(expected)
        assert reduce_sizes(config).encoder_self.impl == expected[0]
    assert first_findings(make_config(max_length=1024))[0].subject == 'encoder_self, blockwise'


def halve(change=None):
    """Dense attention that has no float32."""
    return (broken(change) if change else DENSE)._replace(supports=DENSE.supports - {'float32'})


def test_a_variant_without_float32_is_checked_in_bfloat16(monkeypatch):
    config = make_config(attention__impl='half', compute_dtype='bfloat16')
    monkeypatch.setitem(VARIANTS, ('dot', 'half'), halve())
    found = first_findings(config, 6)
    assert names_of_failed(found) == []
    assert [one.limit for one in found[:2]] == [2e-2, 2e-2]
    assert found[0].error is not None
    assert found[0].error > 1e-4  # which float32 has not
    assert reduce_sizes(config).compute_dtype == 'bfloat16'
    monkeypatch.setitem(VARIANTS, ('dot', 'half'), halve(forget_scale))
    assert names_of_failed(first_findings(config)) == ['values', 'gradients']


@pytest.mark.parametrize(('count', 'told'), [(1, 'there is 1 device;'), (3, '8 rows do not go evenly over 3 devices;')])
def test_the_table_counts_devices(count, told, monkeypatch):
    monkeypatch.setattr(jax, 'device_count', lambda: count)
    finding = check_sharding(None, None, None)
    assert finding.note.startswith(told)
    assert '8' not in finding.check


def test_a_variant_by_import_path_with_an_equation_of_its_own(tmp_path, monkeypatch):
    (tmp_path / 'averaging.py').write_text(
        'from transformer_jax.attention.dense import dense_attention\n'
        'from transformer_jax.attention.variant import Variant\n'
        'def attend(q, k, v, mask, options):\n'
        '    return dense_attention(0 * q, k, v, mask, options)\n'
        "average = Variant(attend, frozenset({'cross', 'cpu', 'float32'}), reads=frozenset())\n"
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
    config = overlay(Config(), {'model.positions': 'rope', 'model.attention.num_kv_heads': 2})
    reduced = reduce_sizes(config)
    assert (reduced.positions, reduced.attention.num_kv_heads, reduced.attention.num_heads) == ('rope', 2, 8)
    assert reduced.num_encoder_layers == 2
    assert reduced.dropout_rate == 0
    assert reduced.max_length == 64


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
        {'model.family': 'decoder_only', 'model.positions': 'alibi', 'model.max_length': 1024},
        {'model.family': 'decoder_only', 'model.attention.kind': 'performer', 'model.decoder_only.prefix': 'causal'},
        {'model.family': 'convolutional', 'model.positions': 'learned'},
        {
            'model.family': 'recurrent',
            'model.positions': 'none',
            'model.attention.num_heads': 8,
            'model.attention.head_dim': 64,
        },
    ],
    ids=str,
)
def test_models_pass(changes):
    small = {'model.d_model': 32, 'model.attention.num_heads': 4, 'model.attention.head_dim': 8}
    small |= {'model.num_encoder_layers': 2, 'model.num_decoder_layers': 2}
    found = list(check_config(overlay(Config(), {**small, **changes})))
    assert all(one.passed for one in found), format_table(found)
