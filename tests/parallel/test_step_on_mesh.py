"""An update on any mesh is that of one device, and no device holds more of it than its share."""

import re
from typing import Any

import jax
import numpy as np
import pytest

from tests.parallel.meshed import assert_equal, make_batch, make_model, make_optimizers, update
from transformer_jax.config import (
    AttentionConfig,
    ConvolutionConfig,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    MeshConfig,
    RecurrenceConfig,
)
from transformer_jax.training.state import abstract_state

ONE = MeshConfig(data=1)
MESHES = {
    'data2': MeshConfig(data=2),
    'data8': MeshConfig(data=8),
    'fsdp2': MeshConfig(data=1, fsdp=2),
    'fsdp4': MeshConfig(data=1, fsdp=4),
    'fsdp8': MeshConfig(data=1, fsdp=8),
    'model2': MeshConfig(data=1, model=2),
    'model4': MeshConfig(data=1, model=4),
    'model8': MeshConfig(data=1, model=8),
    'sequence2': MeshConfig(data=1, sequence=2),
    'sequence8': MeshConfig(data=1, sequence=8),
    'fsdp2model2': MeshConfig(data=1, fsdp=2, model=2),
    'data2fsdp2model2': MeshConfig(data=2, fsdp=2, model=2),
    'data2sequence4': MeshConfig(data=2, sequence=4),
    'fsdp2model2sequence2': MeshConfig(data=1, fsdp=2, model=2, sequence=2),
    'data4model2': MeshConfig(data=4, model=2),
}
MIXED = MESHES['data2fsdp2model2']
FAMILIES: dict[str, dict[str, Any]] = {
    'translation by prefix': {'family': 'decoder_only'},
    'language model': {'family': 'decoder_only', 'decoder_only': DecoderOnlyConfig(task='language_model')},
    'encoder alone': {
        'family': 'encoder_only',
        'encoder_only': EncoderOnlyConfig(selected_rate=0.5),
        'positions': 'learned',
        'output_bias': True,
    },
    'recurrent': {
        'family': 'recurrent',
        'positions': 'none',
        'recurrence': RecurrenceConfig('lstm', 'luong', 'general'),
    },
    'recurrent, bahdanau': {'family': 'recurrent', 'positions': 'none', 'recurrence': RecurrenceConfig()},
    'convolutional': {'family': 'convolutional', 'attention': AttentionConfig()},
    'convolutional, separable': {
        'family': 'convolutional',
        'attention': AttentionConfig(),
        'convolution': ConvolutionConfig(separable=True),
    },
    'three tables, biases': {'tie_embeddings': 'none', 'output_bias': True, 'norm_order': 'pre'},
    'Shaw, swiglu': {'positions': 'shaw', 'activation': 'swiglu', 'norm': 'rms_norm'},
    'T5, rope': {'positions': 't5'},
}
WIDTHS = {'vocab': 'model', 'heads': 'model', 'kv_heads': 'model', 'mlp': 'model', 'embed': 'fsdp'}


@pytest.mark.slow
@pytest.mark.parametrize('name', MESHES)
def test_an_update_on_a_mesh_is_that_of_one_device(name: str) -> None:
    model = make_model()
    assert_equal(update(model, MESHES[name]), update(model, ONE))


def test_an_update_on_a_mixed_mesh_is_that_of_one_device_and_its_state_is_split() -> None:
    model = make_model()
    mixed = update(model, MIXED)
    assert_equal(mixed, update(model, ONE))
    _require_split(mixed, model, MIXED)
    _require_no_table(mixed.text, MIXED)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['fsdp8', 'model8', 'fsdp2model2', 'fsdp2model2sequence2'])
def test_no_device_holds_more_of_the_state_than_its_share(name: str) -> None:
    model = make_model()
    _require_split(update(model, MESHES[name]), model, MESHES[name])
    _require_no_table(update(model, MESHES[name]).text, MESHES[name])


def _require_split(found: Any, model: Any, config: MeshConfig) -> None:
    """By hand: what each leaf takes when every axis is split as `WIDTHS` says, five times over, and the batch."""
    ways = {'model': config.model, 'fsdp': config.fsdp}
    axes = jax.tree.leaves(model.logical_axes(), is_leaf=lambda node: isinstance(node, tuple))
    shapes = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    share = 0.0
    for names, shape in zip(axes, shapes, strict=True):
        parts = np.prod([ways[WIDTHS[name]] for name in names if name in WIDTHS])
        share += 4 * np.prod(shape.shape) / parts
    parameters_and_more = 5 * share  # parameters, gradient, two moments, moving average
    assert found.bytes_a_device == pytest.approx(parameters_and_more, rel=0.05)
    batch = sum(array.nbytes for array in make_batch()) / ((config.data or 1) * config.fsdp * config.sequence)
    assert found.argument_bytes == pytest.approx(parameters_and_more + batch, rel=0.05)
    split = {
        jax.tree_util.keystr(path)
        for path, names in jax.tree_util.tree_leaves_with_path(
            model.logical_axes(), is_leaf=lambda node: isinstance(node, tuple)
        )
        if any(ways[WIDTHS[name]] > 1 for name in names if name in WIDTHS)
    }
    assert not [name for name in found.whole if any(name.endswith(own) for own in split)]


def _require_no_table(text: str, config: MeshConfig) -> None:
    """No array of all 24 rows of the vocabulary is on any device, and no collective moves more than one's own rows."""
    if config.model == 1:
        return
    shapes = {tuple(map(int, dims.split(','))) for dims in re.findall(r'f32\[([0-9,]+)\]', text)}
    assert any(24 // config.model in shape for shape in shapes)
    assert not [shape for shape in shapes if 24 in shape]


@pytest.mark.slow
@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('mesh', ['data2fsdp2model2', 'fsdp4', 'model2'])
def test_every_family_learns_the_same_on_a_mesh(family: str, mesh: str) -> None:
    model = make_model(**FAMILIES[family])
    # At half its parameters this attention sees all alike: its gradient is 1e-4 of all, and a part of that rounding.
    factor = 1.0 if family == 'recurrent, bahdanau' else 0.5
    found = update(model, MESHES[mesh], factor=factor)
    assert_equal(found, update(model, ONE, factor=factor))
    _require_split(found, model, MESHES[mesh])


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['data8', 'data2fsdp2model2'])
def test_accumulated_updates_are_those_of_one_device(mesh: str) -> None:
    model = make_model()
    assert_equal(update(model, MESHES[mesh], accumulation=2), update(model, ONE, accumulation=2))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['adafactor', 'lion'])
def test_other_optimizers_are_split_too(name: str) -> None:
    model = make_model(d_model=128, d_ff=256)  # Adafactor factors axes of 128 and more
    found, one = update(model, MIXED, name), update(model, ONE, name)
    np.testing.assert_allclose(found.loss, one.loss, rtol=5e-6)
    numbers = {
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            abstract_state(model, make_optimizers(name)[0], with_average=True)
        )
        if leaf.size == 1
    }
    assert set(found.whole) <= numbers
