"""A small encoder-decoder whose sizes are all distinct, with parameters that leave nothing at zero or one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import AttentionConfig, ExecutionConfig, ModelConfig
from transformer_jax.data.batch import Batch
from transformer_jax.models import build
from transformer_jax.models.interface import Model
from transformer_jax.shapes import Params

V, START = 23, 2
CONFIG = ModelConfig(
    d_model=14,
    d_ff=17,
    num_encoder_layers=2,
    num_decoder_layers=3,
    max_length=31,
    attention=AttentionConfig(num_heads=3, head_dim=5, value_dim=7),
    dropout_rate=0.0,
)

# What each model of the tests changes of CONFIG.
VARIANTS: dict[str, dict[str, Any]] = {
    'paper': {},
    'pre-norm': {'norm_order': 'pre', 'activation': 'gelu'},
    'rms-norm, swiglu': {'norm': 'rms_norm', 'activation': 'swiglu', 'norm_order': 'pre'},
    'swish, untied, biases': {
        'activation': 'swish',
        'tie_embeddings': 'none',
        'output_bias': True,
        'scale_embedding': False,
        'attention': dataclasses.replace(CONFIG.attention, use_bias=True),
    },
    'own source table, padded rows': {'tie_embeddings': 'output', 'vocab_pad_multiple': 8},
}


def make_model(variant: str = 'paper', execution: ExecutionConfig | None = None, **changes: Any) -> Model:
    config = dataclasses.replace(CONFIG, **VARIANTS[variant] | changes)
    # A loop over the layers compiles faster than a program that repeats them.
    return build(config, vocab_size=V, start_id=START, execution=execution or ExecutionConfig(unroll=1))


@functools.cache
def make_params(model: Model, seed: int = 0) -> Params:
    """Parameters of which none is zero or one, made without compiling an initialisation."""

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        noise = np.random.default_rng([seed, *name.encode()]).normal(size=leaf.shape)
        return jnp.float32(noise * 0.3 + ('scale' in name))

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0)))


def make_batch(
    source_lengths: list[int], target_lengths: list[int], seed: int = 0, pads: tuple[int, int] = (0, 0)
) -> Batch:
    """Unpacked rows of these lengths, with so many more pad columns on each side than the longest row needs."""
    rng = np.random.default_rng(seed)
    sides = []
    for lengths, more in ((source_lengths, pads[0]), (target_lengths, pads[1])):
        width = max(lengths) + more
        real = np.arange(width) < np.array(lengths)[:, None]
        rows = [np.pad(rng.integers(3, V, length), (0, width - length)) for length in lengths]
        positions = np.where(real, np.arange(width), 0)
        sides.append([np.stack(rows).astype(np.int32), real.astype(np.int32), positions.astype(np.int32)])
    (inputs, *source), (targets, *target) = sides
    return Batch(inputs, targets, source[0], target[0], source[1], target[1])


@functools.partial(jax.jit, static_argnums=0)
def compute_logits(model: Model, params: Params, batch: Batch) -> jax.Array:
    return model.project(params, model.hidden(params, batch))
