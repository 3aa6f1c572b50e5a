"""Learned absolute positions: one vector a position, trained with the rest. Table 3, row E."""

from collections.abc import Mapping

import jax

from transformer_jax.config import ModelConfig
from transformer_jax.parameters import Parameter
from transformer_jax.positions.table import rows_at
from transformer_jax.shapes import Array, Float, Int


def parameters(config: ModelConfig) -> dict[str, Parameter]:
    """The table of one side, source or target: `max_length` rows, drawn as the token embeddings are."""
    normal = jax.nn.initializers.normal(config.d_model**-0.5)
    return {'table': Parameter(normal, (config.max_length, config.d_model), (None, 'embed'))}


def on_embedding(
    config: ModelConfig, params: Mapping[str, Array], positions: Int[Array, 'B T']
) -> Float[Array, 'B T D']:
    """The rows of these positions, which must be below `max_length`; one beyond reads as NaN."""
    return rows_at(params['table'], positions)
