"""Sinusoidal position encodings. Section 3.5."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.positions.table import rows_at
from transformer_jax.shapes import Array, Float, Int


@functools.cache
def sinusoids(num_positions: int, d_model: int, layout: str = 'interleaved') -> np.ndarray:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos of the same: float32 `[num_positions, d_model]`.

    `layout` 'concatenated' puts all sines before all cosines (as Marian does); 'tensor2tensor' does so too and divides
    the exponent by d/2 - 1 instead of d/2. Odd widths are refused by the config.
    """
    half = d_model // 2
    steps = max(half - 1, 1) if layout == 'tensor2tensor' else half
    angles = np.arange(num_positions)[:, None] / 10_000.0 ** (np.arange(half)[None, :] / steps)
    pair = np.stack([np.sin(angles), np.cos(angles)], axis=-1 if layout == 'interleaved' else 1)
    table = pair.reshape(num_positions, d_model).astype(np.float32)
    table.setflags(write=False)
    return table


def on_embedding(
    config: ModelConfig, params: Mapping[str, Array], positions: Int[Array, 'B T']
) -> Float[Array, 'B T D']:
    """The sinusoids of these positions, which must be below `max_length`; one beyond reads as NaN."""
    return rows_at(jnp.asarray(sinusoids(config.max_length, config.d_model, config.sinusoid_layout)), positions)
