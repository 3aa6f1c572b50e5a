"""The config's own checks: each rule holds at its edge, and each joined rule names both fields."""

import functools

import pytest

from transformer_jax.config import (
    AttentionConfig,
    AttentionOverlayConfig,
    Config,
    ConfigError,
    allowed_types,
    check,
    walk,
)
from transformer_jax.layers.feed_forward import ACTIVATIONS
from transformer_jax.layers.recurrence import CELLS
from transformer_jax.models.stacks import MIXING_NAMES, REMAT_POLICIES
from transformer_jax.overlay import config_to_dict, overlay
from transformer_jax.recipes import LEVELS
from transformer_jax.training.optimizer import OPTIMIZERS
from transformer_jax.training.schedule import SCHEDULES

LEAVES = list(walk(Config()))


def test_the_default_is_the_papers_base_model():
    config = Config()
    model = config.model
    assert (model.num_encoder_layers, model.num_decoder_layers, model.d_model, model.d_ff) == (6, 6, 512, 2048)
    assert (model.attention.num_heads, model.attention.head_dim, model.dropout_rate) == (8, 64, 0.1)
    assert (model.norm_order, model.sinusoid_layout, model.activation) == ('post', 'interleaved', 'relu')
    assert (model.tie_embeddings, model.scale_embedding, model.attention.use_bias) == ('all', True, False)
    optimizer = config.optimizer
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon, optimizer.clip_norm) == (0.9, 0.98, 1e-9, None)
    assert (optimizer.schedule.name, optimizer.schedule.warmup_steps) == ('warmup', 4000)
    assert (config.train.label_smoothing, config.train.smoothing_over, config.vocabulary.size) == (0.1, 'all', 37_000)
    decoding = config.decoding
    assert (decoding.beam_size, decoding.alpha, decoding.max_extra_length) == (4, 0.6, 50)
    check(config)


@pytest.mark.parametrize(('path', 'field'), [(path, field) for path, field, _ in LEAVES])
def test_every_rule_holds_at_its_edge(path, field):
    """Just outside each bound and beside each choice is refused by this field's name."""
    integer = int in allowed_types(field)
    rule = field.metadata
    tiny = 1 if integer else 1e-12
    outside = []
    if rule.get('minimum') is not None:
        outside.append(rule['minimum'] - tiny)
    if rule.get('maximum') is not None:
        outside.append(rule['maximum'] + tiny)
    outside += [rule[name] for name in ('above', 'below') if rule.get(name) is not None]
    if rule.get('choices'):
        outside.append('neither of them')
    for value in outside:
        with pytest.raises(ConfigError, match=rf'config\.{path} is '):
            overlay(Config(), {path: int(value) if integer else value})


def test_every_default_is_of_its_own_type_and_optional_means_none():
    for path, field, value in LEAVES:
        assert type(value) in allowed_types(field), path
        assert len([t for t in allowed_types(field) if t is not type(None)]) == 1, path


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'model.d_model': 511}, 'sinusoidal positions need an even width'),
        ({'data.max_length': 300}, 'above config.model.max_length 256'),
        ({'data.batch_tokens': 100}, 'below config.data.max_length 128'),
        ({'evaluation.bleu': False}, "use score='loss'"),
        ({'data.batching': 'packing', 'data.num_buckets': 3}, 'num_buckets is 3, but .*one shape; leave it 8'),
        ({'evaluation.patience': 3}, 'patience is 3, but config.evaluation.every_steps is None'),
    ],
)
def test_rules_that_join_fields(changes, message):
    with pytest.raises(ConfigError, match=message):
        overlay(Config(), changes)


def test_choices_are_the_names_in_the_tables():
    tables = {
        'optimizer.name': OPTIMIZERS,
        'optimizer.schedule.name': SCHEDULES,
        'model.activation': ACTIVATIONS,
        'model.recurrence.cell': CELLS,
        'model.encoder_mixing': MIXING_NAMES,
        'model.decoder_mixing': MIXING_NAMES,
        'execution.remat': {'none', *REMAT_POLICIES},
        'data.grammar.level': LEVELS,
    }
    choices = {path: field.metadata['choices'] for path, field, _ in LEAVES if path in tables}
    assert {path: set(names) for path, names in choices.items()} == {path: set(names) for path, names in tables.items()}


@pytest.mark.parametrize(
    'changes',
    [
        {'data.max_length': 300, 'model.max_length': 300},
        {'data.max_length': 100, 'data.batch_tokens': 100},
        {'optimizer.weight_decay': 0.1, 'optimizer.name': 'adamw'},
        {'evaluation.bleu': False, 'evaluation.score': 'loss'},
    ],
    ids=str,
)
def test_what_the_joined_rules_allow(changes):
    config = overlay(Config(), changes)
    check(config)
    for path, _, default in LEAVES:
        assert functools.reduce(getattr, path.split('.'), config) == changes.get(path, default), path


def test_an_overlay_of_attention_changes_what_it_names_alone():
    common = AttentionConfig(num_heads=3, head_dim=11, dropout_rate=0.25, use_bias=True)
    assert AttentionOverlayConfig().over(common) == common
    changed = AttentionOverlayConfig(head_dim=13, use_bias=False, dropout_rate=0.0).over(common)
    assert changed == AttentionConfig(num_heads=3, head_dim=13, dropout_rate=0.0, use_bias=False)


def test_an_overlay_of_attention_can_change_every_common_field():
    sections = config_to_dict(Config())['model']
    assert sections['attention'].keys() == sections['cross'].keys()
