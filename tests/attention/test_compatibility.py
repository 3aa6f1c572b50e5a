"""The table in the README is the table in the code, and what it does not mark is refused before tracing."""

import dataclasses
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import transformer_jax
from transformer_jax import attention
from transformer_jax.attention import VARIANTS
from transformer_jax.attention.api import attention_and_weights
from transformer_jax.attention.compatibility import compatibility_table
from transformer_jax.attention.dense import DENSE
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import FEATURES, Use
from transformer_jax.config import AttentionConfig, AttentionOverlayConfig, ConfigError

README = Path(transformer_jax.__file__).parent.parent / 'README.md'
# How a use asks for each feature: what of the use, and what of its config.
ASKS = {
    'causal': ({'causal': True}, {}),
    'cross': ({'cross': True}, {}),
    'segments': ({'packed': True}, {}),
    'window': ({}, {'window': 5}),
    'globals': ({}, {'window': 5, 'num_global': 2}),
    'prefix': ({'prefix': True, 'causal': True}, {}),
    'grouped_heads': ({}, {'num_kv_heads': 2}),
    'value_dim': ({}, {'value_dim': 3}),
    'positions': ({'terms': True}, {}),
    'rotary': ({'turned': True}, {}),
    'dropout': ({}, {'dropout_rate': 0.1}),
    'sequence': ({'sequence_shards': 2}, {}),
    'bfloat16': ({'compute_dtype': 'bfloat16'}, {}),
    'gpu': ({'platform': 'gpu'}, {}),
    'tpu': ({'platform': 'tpu'}, {}),
}


uncached = DENSE._replace(supports=DENSE.supports - {'cache'})


def make_use(config, **changes):
    use = Use('encoder_self', config, causal=False, cross=False, packed=False, terms=False, compute_dtype='float32',
              platform='cpu', decodes=False, max_length=64)  # fmt: skip
    return use._replace(**changes)


def test_the_readme_has_the_table():
    assert compatibility_table() in README.read_text()


def test_variants_name_known_features_alone():
    for variant in VARIANTS.values():
        assert variant.supports <= FEATURES.keys()
        assert variant.supports & {'cpu', 'gpu', 'tpu'}
        assert variant.supports & {'float32', 'bfloat16'}


@pytest.mark.parametrize('feature', ASKS)
@pytest.mark.parametrize('key', VARIANTS, ids='/'.join)
def test_what_a_variant_lacks_is_refused_with_what_works(key, feature):
    kind, impl = key
    of_use, of_config = ASKS[feature]
    use = make_use(AttentionConfig(num_heads=6, kind=kind, impl=impl, **of_config), **of_use)
    asked = set(attention.needs(use))
    assert feature in asked
    if asked <= VARIANTS[key].supports:
        return  # what else a variant's own check refuses is tested with the variant
    with pytest.raises(ConfigError, match=r'config\.model\.encoder_self is kind') as caught:
        attention.check(use, 'config.model.encoder_self')
    missing = asked - VARIANTS[key].supports
    assert all(name in str(caught.value) for name in missing)
    working = [f'{k}/{i}' for (k, i), v in VARIANTS.items() if attention.why_not(v, use) is None]
    assert all(name in str(caught.value) for name in working)


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        ({'kind': 'dott'}, r"kind is 'dott'.*did you mean 'dot'"),
        ({'impl': 'densee'}, r"impl is 'densee'.*did you mean 'dense'"),
        ({'num_kv_heads': 4}, r'num_kv_heads is 4, which does not divide num_heads 6.*one of 1, 2, 3, 6'),
        ({'num_global': 2}, r'num_global is 2, but .*window is None'),
        ({'kind': 'no_such_module:x'}, r"kind is 'no_such_module:x', which can not be imported"),
        ({'kind': ':x'}, r"kind is ':x', which can not be imported: ValueError"),
        ({'kind': 'math:pi'}, r"kind is 'math:pi', a float; it must be a .*Variant"),
    ],
)
def test_other_faults_name_field_value_and_choices(changes, words):
    config = dataclasses.replace(AttentionConfig(num_heads=6), **changes)
    with pytest.raises(ConfigError, match=words):
        attention.check(make_use(config), 'config.model.encoder_self')


def test_a_window_is_not_for_cross_attention():
    with pytest.raises(ConfigError, match=r'cross\.window is 5; a window is of self-attention only'):
        attention.check(make_use(AttentionConfig(window=5), name='cross', cross=True), 'config.model.cross')


def test_a_kind_that_can_not_take_a_cache_is_refused_where_the_model_decodes(monkeypatch):
    kind = f'{__name__}:uncached'
    use = make_use(AttentionConfig(kind=kind), decodes=True)
    attention.check(use._replace(decodes=False), 'config.model.encoder_self')
    with pytest.raises(ConfigError, match=r'does not support cache \(decoding with cached keys'):
        attention.check(use, 'config.model.encoder_self')
    monkeypatch.setattr(sys.modules[__name__], 'uncached', DENSE)
    attention.check(use, 'config.model.encoder_self')


def test_errors_name_the_field_where_it_was_set():
    config = AttentionConfig(kind='dott', num_heads=6, num_kv_heads=4)
    with pytest.raises(ConfigError, match=r"^config\.model\.attention\.kind is 'dott'; it must be"):
        attention.check(make_use(config), 'config.model.encoder_self', AttentionOverlayConfig(num_kv_heads=4))
    config = dataclasses.replace(config, kind='dot')
    with pytest.raises(ConfigError, match=r'^config\.model\.encoder_self\.num_kv_heads is 4'):
        attention.check(make_use(config), 'config.model.encoder_self', AttentionOverlayConfig(num_kv_heads=4))


def test_weights_of_a_named_implementation_that_has_none_are_refused():
    rows, ids = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3), jnp.int32)
    mask, config = Mask(ids, ids, ids, ids), AttentionConfig(impl='blockwise', num_heads=2, head_dim=4)
    with pytest.raises(ValueError, match=r"impl 'blockwise' of kind 'dot' never holds the weights; .*: dense$"):
        attention_and_weights(rows, rows, rows, mask, config)
    for impl in ('auto', 'dense'):
        assert attention_and_weights(rows, rows, rows, mask, dataclasses.replace(config, impl=impl))[1].shape[1] == 2


@pytest.mark.parametrize('kind', ['linear', 'performer', 'low_rank'])
def test_weights_of_a_kind_that_has_none_are_refused_with_the_kinds_that_have(kind):
    rows, ids = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3), jnp.int32)
    config = AttentionConfig(kind=kind, num_heads=2, head_dim=4)
    with pytest.raises(ValueError, match=rf'{kind!r} has no weights .*these have: dot, additive, general, concat$'):
        attention_and_weights(rows, rows, rows, Mask(ids, ids, ids, ids), config)
