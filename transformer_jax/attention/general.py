"""Luong et al.'s `general` score q W k, 2015, section 3.1: dot-product attention of queries that a matrix has moved."""

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.attention.blockwise import BLOCKWISE
from transformer_jax.attention.dense import DENSE
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options, Variant
from transformer_jax.config import AttentionConfig
from transformer_jax.parameters import Parameter, heads_axis
from transformer_jax.shapes import Array, Float


def general_parameters(config: AttentionConfig, max_length: int) -> dict[str, Parameter]:
    """W `[N, H, H]`: d_k^2 a head."""
    glorot = jax.nn.initializers.glorot_uniform(in_axis=1, out_axis=2, batch_axis=0)
    shape = (config.num_heads, config.head_dim, config.head_dim)
    return {'query_map': Parameter(glorot, shape, (heads_axis(config.num_heads), 'head_dim', None))}


def on_moved_queries(dot: Variant) -> Variant:
    """The `general` form of an implementation of `dot`, softmax(q W k^T scale) v.

    It supports what that one supports except rotary positions: with W between a turned query and a turned key the
    score depends on both positions, not on their offset alone. The scale is that of `dot`, 1 / sqrt(d_k) unless
    `config.scale` is None, which is the paper's.
    """

    def attend(
        q: Float[Array, 'B T N H'],
        k: Float[Array, 'B S K H'],
        v: Float[Array, 'B S K U'],
        mask: Mask,
        options: Options,
    ) -> tuple[Float[Array, 'B T N U'], Any]:
        # Padding may hold NaN, which would reach the gradient of W.
        q = jnp.where((mask.q_segments > 0)[:, :, None, None], q, 0)
        moved = jnp.einsum('BTNH,NHJ->BTNJ', q, options.params['query_map'].astype(q.dtype))
        return dot.function(moved, k, v, mask, options)

    return dot._replace(function=attend, supports=dot.supports - {'rotary'}, parameters=general_parameters)


GENERAL = on_moved_queries(DENSE)
GENERAL_BLOCKWISE = on_moved_queries(BLOCKWISE)
