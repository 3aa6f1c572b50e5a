"""How far a key stands from a query, clipped: what a table with one row an offset is read by."""

import jax.numpy as jnp

from transformer_jax.shapes import Array, Int


def clipped_offsets(q_positions: Int[Array, 'B T'], k_positions: Int[Array, 'B S'], clip: int) -> Int[Array, 'B T S']:
    """The row, 0 to 2 `clip`, of each key's position minus the query's: `clip` for its own, more for later keys."""
    offsets = k_positions[:, None, :] - q_positions[:, :, None]
    return jnp.clip(offsets, -clip, clip) + clip
