"""The oracle suite passes what is right and tells what is wrong."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from transformer_jax import models, positions
from transformer_jax.attention import VARIANTS
from transformer_jax.attention.dense import DENSE, dense_attention
from transformer_jax.attention.performer import PERFORMER
from transformer_jax.checking import Finding, check_config, check_variant, format_table
from transformer_jax.checking.attention_checks import implementations, make_use, small_block
from transformer_jax.checking.model_checks import check_sharding, make_batch, reduce_sizes
from transformer_jax.config import AttentionConfig, Config
from transformer_jax.layers import recurrence
from transformer_jax.models import recurrent_decoder
from transformer_jax.overlay import overlay

SMALL = AttentionConfig(num_heads=2, head_dim=3)
SMALL_MODEL = {
    'model.d_model': 8,
    'model.attention.num_heads': 3,
    'model.attention.head_dim': 4,
    'model.num_encoder_layers': 2,
    'model.num_decoder_layers': 2,
}


def make_config(**changes):
    """A small model; double underscores are dots, of the model's own fields."""
    return overlay(Config(), SMALL_MODEL | {f'model.{name.replace("__", ".")}': v for name, v in changes.items()})


def first_findings(config, count=2):
    """Of the first use: values and gradients. The others are not even computed."""
    return list(itertools.islice(check_config(config), count))


def names_of_failed(findings):
    return [one.check for one in findings if not one.passed]


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


def scaled(function, factor):
    return lambda *args, **more: factor * function(*args, **more)


def clip_later(function):
    return lambda q_positions, k_positions, clip: jnp.minimum(function(q_positions, k_positions, clip + 1), 2 * clip)


def give_buckets_away(function):
    return lambda num_buckets, max_distance, *, causal: function(num_buckets, 2 * max_distance, causal=causal)[
        max_distance : 3 * max_distance + 1
    ]


def turn_neighbours(function):
    """Pairs (0, 1), (2, 3), ... as in the paper."""

    def on_heads(config, x, positions):
        order = [*range(0, x.shape[-1], 2), *range(1, x.shape[-1], 2)]
        return function(config, x[..., order], positions)[..., jnp.argsort(jnp.array(order))]

    return on_heads


@pytest.mark.parametrize(
    ('scheme', 'place', 'change'),
    [
        ('shaw', 'shaw.ShawTerms.score_term', functools.partial(scaled, factor=-3)),
        ('shaw', 'shaw.ShawTerms.output_term', functools.partial(scaled, factor=2)),
        ('shaw', 'shaw.clipped_offsets', clip_later),
        ('t5', 't5.T5Terms.bias', functools.partial(scaled, factor=0.99)),
        ('t5', 't5.offset_buckets', give_buckets_away),
        ('alibi', 'alibi.slopes', functools.partial(scaled, factor=2)),
    ],
)
@pytest.mark.parametrize('is_right', [False, True])
def test_what_a_scheme_adds_is_compared(scheme, place, change, is_right, monkeypatch):
    config = make_config(positions=scheme, attention__impl='dense')
    if not is_right:
        *path, name = place.split('.')
        owner = functools.reduce(getattr, path, __import__('transformer_jax.positions').positions)
        monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    assert (names_of_failed(first_findings(config)) == []) == is_right


@pytest.mark.parametrize('change', [None, turn_neighbours])
def test_how_a_scheme_turns_heads_is_compared(change, monkeypatch):
    scheme = positions.SCHEMES['rope']
    if change:
        monkeypatch.setitem(positions.SCHEMES, 'rope', scheme._replace(on_heads=change(scheme.on_heads)))
    found = first_findings(make_config(positions='rope'))
    assert names_of_failed(found) == (['values', 'gradients'] if change else [])


def test_a_scheme_without_an_equation_is_not_compared(monkeypatch):
    monkeypatch.setitem(positions.SCHEMES, 'mine', positions.SCHEMES['rope'])
    config = make_config(positions='mine')
    monkeypatch.setattr(positions.rope, 'check', lambda config, use: None)
    assert ["'mine'" in one.note for one in first_findings(config)] == [True, True]


def forget_prefix(q, k, v, mask, options):
    return q, k, v, dataclasses.replace(mask, k_prefix=None), options


def test_a_prefix_is_in_the_mask(monkeypatch):
    config = make_config(family='decoder_only', positions='t5', attention__impl='dense')
    assert names_of_failed(first_findings(config)) == []
    monkeypatch.setitem(VARIANTS, ('dot', 'dense'), broken(forget_prefix))
    assert names_of_failed(first_findings(config)) == ['values', 'gradients']


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


def make_recurrent(**changes):
    given = {'family': 'recurrent', 'positions': 'none', 'attention__num_heads': 8, 'attention__head_dim': 64}
    return make_config(**given | {'num_decoder_layers': 2, 'num_encoder_layers': 1} | changes)


def scale_scores(monkeypatch):
    real = recurrent_decoder.scoring_of
    monkeypatch.setattr(
        recurrent_decoder, 'scoring_of', lambda config: dataclasses.replace(real(config), scale='inverse_sqrt')
    )


def forget_the_reset(monkeypatch):
    def step(gates, state, kernel):
        return recurrence.gru_step(gates.at[..., 1, :].set(9.0), state, kernel)

    monkeypatch.setitem(recurrence.CELLS, 'gru', recurrence.CELLS['gru']._replace(step=step))


def look_at_padding(monkeypatch):
    real = recurrent_decoder.look_up

    def look_up(config, weights, source, query, segment_ids):
        source = dataclasses.replace(source, segment_ids=jnp.maximum(source.segment_ids, 1))
        return real(config, weights, source, query, segment_ids)

    monkeypatch.setattr(recurrent_decoder, 'look_up', look_up)


@pytest.mark.parametrize(
    ('plant', 'attention', 'told'),
    [
        (scale_scores, ('luong', 'dot'), {'values', 'gradients', 'its steps are those of the equations'}),
        (look_at_padding, ('bahdanau', 'general'), {'values', 'gradients', 'its steps are those of the equations'}),
        (forget_the_reset, ('none', 'general'), {'its steps are those of the equations'}),
    ],
)
def test_a_wrong_recurrent_decoder_is_told(plant, attention, told, monkeypatch):
    config = make_recurrent(recurrence__attention=attention[0], recurrence__luong_score=attention[1])
    plant(monkeypatch)
    assert set(names_of_failed(first_findings(config, 3))) == told


@pytest.mark.parametrize(
    ('cell', 'attention', 'score', 'feeding'),
    [
        ('lstm', 'luong', 'general', True),
        pytest.param('gru', 'bahdanau', 'general', True, marks=pytest.mark.slow),
        pytest.param('rnn', 'luong', 'concat', False, marks=pytest.mark.slow),
        pytest.param('gru', 'luong', 'dot', True, marks=pytest.mark.slow),
        pytest.param('gru', 'none', 'general', True, marks=pytest.mark.slow),
    ],
)
def test_recurrent_decoders_pass(cell, attention, score, feeding):
    changes = {'cell': cell, 'attention': attention, 'luong_score': score, 'input_feeding': feeding}
    found = first_findings(make_recurrent(**{f'recurrence__{name}': v for name, v in changes.items()}), 3)
    assert [one.check for one in found] == ['values', 'gradients', 'its steps are those of the equations']
    assert names_of_failed(found) == []
    assert (found[0].error is None) == (attention == 'none')


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
