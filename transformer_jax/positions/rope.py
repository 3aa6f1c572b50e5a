"""Rotary position embedding (Su et al. 2021): queries and keys are turned by angles proportional to their positions.

The product of a turned query and a turned key depends on the offset between the two alone.
"""

import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.shapes import Array, Float, Int


def on_heads(config: ModelConfig, x: Float[Array, 'B T N H'], positions: Int[Array, '#B T']) -> Float[Array, 'B T N H']:
    """Turns the pair (x[i], x[i + H/2]) of every head by positions / `rope_scaling` * `rope_base`^(-2i/H) radians.

    Angles are float32 made from the positions, so there is no longest text; a `rope_scaling` of 2 puts twice as many
    positions into the angles of training (position interpolation, Chen et al. 2023). The result has the dtype of `x`.

    Deviation: the pairs are half-split (as in GPT-NeoX and Llama), not neighbours as in the paper: the same up to a
    permutation of the columns of W^Q and W^K.
    """
    half = x.shape[-1] // 2
    frequencies = np.float32(config.rope_base ** (-np.arange(half) / half) / config.rope_scaling)
    angles = positions.astype(jnp.float32)[:, :, None, None] * jnp.asarray(frequencies)[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def check(config: ModelConfig, use: str) -> str | None:
    """Why the heads of one use of self-attention can not be turned, or None when they can."""
    own = getattr(config, use).head_dim
    path, width = ('attention', config.attention.head_dim) if own is None else (use, own)
    if width % 2 == 0:
        return None
    nearest = f'{width - 1} or {width + 1}' if width > 1 else '2'
    return f"config.model.{path}.head_dim is {width}; positions='rope' turns pairs, so it must be even: {nearest}"
