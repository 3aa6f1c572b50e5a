"""Relative positions of Shaw et al. (2018): a learned vector for each clipped offset, for keys and for values.

score(q_i, k_j) = q_i . (k_j + a^K[clip(j - i)]) and output_i = sum_j weight_ij (v_j + a^V[clip(j - i)]). Only the added
terms are here. Their cost is O(T (2k + 1) d) for the products and O(T S) for reading them: a `[T, S, d]` of vectors
never exists.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from transformer_jax.config import AttentionConfig, ModelConfig
from transformer_jax.parameters import Parameter
from transformer_jax.positions.offsets import clipped_offsets
from transformer_jax.shapes import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShawTerms:
    """The tables of one self-attention layer, R = 2 `relative_clip` + 1 rows each, shared by its heads."""

    keys: Float[Array, 'R H']
    values: Float[Array, 'R U']

    def bias(self, q_positions: Int[Array, '#B T'], k_positions: Int[Array, '#B S']) -> None:
        """None: the terms depend on the query and on the weights."""

    def score_term(
        self, q: Float[Array, 'B T N H'], q_positions: Int[Array, '#B T'], k_positions: Int[Array, '#B S']
    ) -> Float[Array, 'B N T S']:
        """The product q . a^K[clip(j - i)], not yet scaled. Rows of padding must be finite, for they meet the table."""
        by_offset = jnp.einsum('BTNH,RH->BNTR', q, self.keys.astype(q.dtype), preferred_element_type=jnp.float32)
        offsets = clipped_offsets(q_positions, k_positions, len(self.keys) // 2)
        return jnp.take_along_axis(by_offset, offsets[:, None], axis=-1, mode='promise_in_bounds')

    def output_term(
        self, weights: Float[Array, 'B N T S'], q_positions: Int[Array, '#B T'], k_positions: Int[Array, '#B S']
    ) -> Float[Array, 'B T N U']:
        """The sum over j of weight_ij a^V[clip(j - i)]; the weights are summed by offset first."""
        num_offsets = len(self.values)
        offsets = clipped_offsets(q_positions, k_positions, num_offsets // 2)
        offsets = jnp.broadcast_to(offsets, (weights.shape[0], *offsets.shape[1:]))

        def sum_by_offset(row: Float[Array, 'S'], row_offsets: Int[Array, 'S']) -> Float[Array, 'R']:
            return jnp.zeros(num_offsets).at[row_offsets].add(row, mode='promise_in_bounds')

        over_queries = jax.vmap(sum_by_offset)
        over_heads = jax.vmap(over_queries, in_axes=(0, None))
        by_offset = jax.vmap(over_heads)(weights.astype(jnp.float32), offsets)
        return jnp.einsum('BNTR,RU->BTNU', by_offset, self.values)


def parameters(config: ModelConfig, attention: AttentionConfig) -> dict[str, Parameter]:
    """The tables of one self-attention layer: 2 (2k + 1) d_k parameters where d_v = d_k."""
    rows = 2 * config.relative_clip + 1
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        'relative_keys': Parameter(glorot, (rows, attention.head_dim), (None, 'head_dim')),
        'relative_values': Parameter(glorot, (rows, attention.value_dim or attention.head_dim), (None, 'head_dim')),
    }


def terms(config: ModelConfig, attention: AttentionConfig, params: Mapping[str, Array], causal: bool) -> ShawTerms:
    """The terms of one self-attention layer from its tables."""
    return ShawTerms(params['relative_keys'], params['relative_values'])
