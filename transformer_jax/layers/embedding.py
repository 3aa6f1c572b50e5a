"""Token embeddings, shared with the output projection where the config says so. Section 3.4."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from transformer_jax import positions as position_schemes
from transformer_jax.config import ModelConfig
from transformer_jax.layers.declaring import declare
from transformer_jax.parallel.rules import constrain
from transformer_jax.parallel.vocabulary import look_up
from transformer_jax.shapes import Array, Float, Int


def padded_rows(vocab_size: int, multiple: int) -> int:
    """Rows of a table of `vocab_size` entries padded to a multiple, for sharding."""
    return -(-vocab_size // multiple) * multiple


class Embedding(nn.Module):
    """A table `[V, D]` drawn from N(0, 1 / D); a lookup is multiplied by sqrt(D) where `scale_embedding` is on.

    Ids must lie in the vocabulary: the host has checked them (a lookup out of range is undefined).
    """

    config: ModelConfig
    vocab_size: int
    dtype: jnp.dtype

    def setup(self) -> None:
        config = self.config
        rows = padded_rows(self.vocab_size, config.vocab_pad_multiple)
        normal: Any = nn.with_logical_partitioning(nn.initializers.normal(config.d_model**-0.5), ('vocab', 'embed'))
        self.table = self.param('table', normal, (rows, config.d_model), jnp.float32)

    def __call__(self, ids: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        """Looks the ids up."""
        embedded = constrain(look_up(self.table, ids, self.dtype), 'batch', 'length', None)
        return embedded * jnp.asarray(self.config.d_model**0.5, self.dtype) if self.config.scale_embedding else embedded


class PositionEmbedding(nn.Module):
    """What the position scheme adds to the embeddings of one side, its parameters included. Section 3.5."""

    config: ModelConfig

    @nn.compact
    def __call__(self, embedded: Float[Array, 'B T D'], positions: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        """The embeddings at these positions, which must be below `max_length`."""
        scheme = position_schemes.SCHEMES[self.config.positions]
        params = declare(self, scheme.embedding_parameters(self.config)) if scheme.embedding_parameters else {}
        return embedded + position_schemes.on_embedding(self.config, params, positions).astype(embedded.dtype)
