"""Whole models whose lengths are split over devices: attention goes round the ring, and nothing changes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import tiny
from transformer_jax import models
from transformer_jax.config import (
    Config,
    ConfigError,
    DecoderOnlyConfig,
    EncoderOnlyConfig,
    MeshConfig,
    TrainConfig,
)
from transformer_jax.models.interface import Model
from transformer_jax.overlay import overlay
from transformer_jax.parallel.mesh import make_mesh, place_batch
from transformer_jax.training.loss import loss_sum
from transformer_jax.training.step import _row_keys

# Dropout of 'dense', which auto would take on one device, draws other weights.
HEADS = dataclasses.replace(tiny.CONFIG.attention, impl='blockwise', dropout_rate=0.2, block_size=3)
MODELS: dict[str, dict[str, Any]] = {
    'encoder-decoder, sines': {},
    'encoder-decoder, Shaw': {'positions': 'shaw'},
    'encoder-decoder, T5, grouped': {'positions': 't5', 'attention': dataclasses.replace(HEADS, num_kv_heads=1)},
    'encoder-decoder, general': {'attention': dataclasses.replace(HEADS, kind='general')},
    'translation by prefix': {'family': 'decoder_only', 'positions': 'alibi'},
    'language model, rope, window': {
        'family': 'decoder_only',
        'decoder_only': DecoderOnlyConfig(task='language_model'),
        'positions': 'rope',
        'attention': dataclasses.replace(HEADS, head_dim=6, window=5, num_global=1),
    },
    'encoder alone, learned': {
        'family': 'encoder_only',
        'encoder_only': EncoderOnlyConfig(selected_rate=0.5),
        'positions': 'learned',
    },
}
FAST = ('translation by prefix', MeshConfig(data=1, sequence=2))
MESHES = [FAST[1], MeshConfig(data=1, sequence=4), MeshConfig(data=2, sequence=4), MeshConfig(data=4, sequence=2)]


def make_model(name: str) -> Model:
    changes = {'attention': HEADS, 'dropout_rate': 0.2, 'num_decoder_layers': 2} | MODELS[name]
    return tiny.make_model('pre-norm', **changes)


def make_batch() -> Any:
    """Rows of 12 and of 16 subwords at most, of very unlike lengths."""
    return tiny.make_batch([12, 1, 7, 3, 5, 12, 2, 9], [3, 16, 1, 8, 13, 2, 11, 5])


def compute(model: Model, mesh_config: MeshConfig | None) -> tuple[Any, Any, str]:
    """Loss, gradients and the program on a mesh, or without one."""
    params, batch = tiny.make_params(model), make_batch()
    mesh = make_mesh(mesh_config or MeshConfig(data=1), jax.devices()[: _size(mesh_config)])
    key = jax.random.key(3, impl='threefry2x32')

    def loss(params: Any, batch: Any) -> jax.Array:
        task = model.objective(batch, _row_keys(key, batch.inputs.shape[0]))
        return loss_sum(model, params, task, TrainConfig(loss_block_tokens=7), dropout_rng=key, mesh=mesh)[0]

    with jax.set_mesh(mesh):
        program = jax.jit(jax.value_and_grad(loss)).lower(params, place_batch(batch, mesh)).compile()
        value, gradients = jax.device_get(program(params, place_batch(batch, mesh)))
    return value, gradients, program.as_text()


def _size(config: MeshConfig | None) -> int:
    return 1 if config is None else (config.data or 1) * config.fsdp * config.model * config.sequence


@pytest.mark.parametrize(
    ('name', 'config'),
    [
        pytest.param(name, config, marks=() if (name, config) == FAST else pytest.mark.slow)
        for name in MODELS
        for config in MESHES
    ],
)
def test_loss_and_gradients_are_those_of_one_device(name: str, config: MeshConfig) -> None:
    model = make_model(name)
    (value, gradients, text), (expected, others, _) = compute(model, config), compute(model, None)
    assert 'collective-permute' in text
    assert abs(value / expected - 1) < 5e-6
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(others), strict=True):
        error, size = (np.linalg.norm(np.float64(x).ravel()) for x in (one - other, other))
        assert error <= 5e-6 * size, f'{jax.tree_util.keystr(path)}: {error / size:.1e}'


@pytest.mark.slow
def test_decoding_on_such_a_mesh_is_that_of_one_device() -> None:
    """The encoder's attention goes round the ring; caches are whole on each device."""
    model = make_model('encoder-decoder, Shaw')
    params, batch = tiny.make_params(model), jax.tree.map(jnp.asarray, make_batch())

    @jax.jit
    def decode(params: Any, batch: Any) -> list[jax.Array]:
        memory = model.encode(params, batch.inputs, batch.input_segment_ids, batch.input_positions)
        cache = model.init_decode(params, memory, 7)
        lengths = jnp.full(len(batch.inputs), 2)
        logits, cache = model.prefill(params, batch.targets[:, :2], lengths, cache)
        found = [logits[:, -1]]
        for _ in range(3):
            logits, cache = model.decode_step(params, found[-1].argmax(-1, keepdims=True).astype(jnp.int32), cache)
            found.append(logits[:, 0])
        return found

    expected = decode(params, batch)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, sequence=4))):
        ours = decode(params, batch)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'model.attention.impl': 'dense'}, 'sequence .lengths split.*working here: dot/blockwise, general/blockwise'),
        ({'model.attention.kind': 'linear'}, 'sequence .lengths split.*working here: dot/blockwise'),
        ({'model.encoder_mixing': 'recurrence'}, "mesh.sequence is 2, but config.model.encoder_mixing is 'recurrence'"),
        ({'model.family': 'convolutional'}, "mesh.sequence is 2, but config.model.family is 'convolutional'"),
    ],
)
def test_what_runs_over_whole_lengths_is_refused_with_what_works(changes: dict[str, Any], message: str) -> None:
    split = overlay(Config(), {'execution.mesh.sequence': 2})
    models.validate(split)
    with pytest.raises(ConfigError, match=message):
        models.validate(overlay(split, changes))


def test_auto_takes_the_ring_on_every_platform() -> None:
    config = overlay(Config(), {'execution.mesh.sequence': 2, 'model.compute_dtype': 'bfloat16'})
    for use in models.uses_of_attention(config):
        for platform in ('cpu', 'gpu', 'tpu'):
            assert models.attention.choose(use._replace(platform=platform)) == 'blockwise'
