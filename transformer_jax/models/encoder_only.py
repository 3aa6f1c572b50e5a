"""An encoder alone, trained to restore masked subwords. Devlin et al. 2019 (BERT).

Deviation: there is no prediction of the next sentence, and so no token types, no [CLS] and no pooling; a text is one
side of a pair, with eos at its end.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.attention.mask import Mask
from transformer_jax.config import ConfigError, EncoderOnlyConfig, ModelConfig
from transformer_jax.data.batch import Batch
from transformer_jax.layers.dropout import Dropout
from transformer_jax.layers.embedding import PositionEmbedding
from transformer_jax.layers.feed_forward import ACTIVATIONS
from transformer_jax.layers.multihead import SharedTerms
from transformer_jax.layers.residual import make_norm
from transformer_jax.models.family import Family, VocabularyModule, check_single_table
from transformer_jax.models.interface import Task
from transformer_jax.models.stacks import EncoderLayer, Stack
from transformer_jax.shapes import Array, Bool, Float, Int, Key, Params, PRNGKey


class Encoder(VocabularyModule):
    """The parameters; `EncoderOnly` is what the rest of the program uses.

    The table of what is read is that of what is predicted, `target_embedding`. The mask symbol is no entry of the
    vocabulary: it has the id V as input, and a vector of its own.
    """

    def setup(self) -> None:
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        self.declare_tables()
        normal: Any = nn.with_logical_partitioning(nn.initializers.normal(config.d_model**-0.5), ('embed',))
        self.mask_embedding = self.param('mask_embedding', normal, (config.d_model,), jnp.float32)
        self.source_positions = PositionEmbedding(config)
        if config.encoder_only.embedding_norm:
            self.embedding_norm: Any = make_norm(config, dtype)
        self.encoder_terms = SharedTerms(config, 'encoder_self', causal=False)
        self.encoder = Stack(EncoderLayer, config.num_encoder_layers, config, self.execution, dtype)
        if config.encoder_only.prediction_layer:
            glorot: Any = nn.with_logical_partitioning(nn.initializers.glorot_uniform(), ('embed', None))
            zeros: Any = nn.with_logical_partitioning(nn.initializers.zeros_init(), (None,))
            self.prediction = nn.Dense(config.d_model, dtype=dtype, kernel_init=glorot, bias_init=zeros)
            self.prediction_norm: Any = make_norm(config, dtype)
        self.drop = Dropout(config.dropout_rate)

    def __call__(self, batch: Batch, decoder_inputs: Int[Array, 'B S'] | None = None) -> Float[Array, 'B S D']:
        """States of the inputs before the vocabulary projection."""
        segments, positions = batch.input_segment_ids, batch.input_positions
        x = self.source_positions(self._embed(batch.inputs), positions)
        if self.config.encoder_only.embedding_norm:
            x = self.embedding_norm(x)
        x = self.encoder(
            self.drop(x), Mask(segments, segments, positions, positions, aligned=True), self.encoder_terms()
        )
        if not self.config.encoder_only.prediction_layer:
            return x
        activation = 'swish' if self.config.activation == 'swiglu' else self.config.activation
        return self.prediction_norm(ACTIVATIONS[activation](self.prediction(x)))

    def _embed(self, ids: Int[Array, 'B S']) -> Float[Array, 'B S D']:
        is_mask = ids == self.vocab_size
        scale = self.config.d_model**0.5 if self.config.scale_embedding else 1.0
        embedded = self.target_embedding(jnp.where(is_mask, 0, ids))
        mask = (self.mask_embedding * scale).astype(embedded.dtype)
        return jnp.where(is_mask[:, :, None], mask[None, None], embedded)


@dataclass(frozen=True)
class EncoderOnly(Family):
    """Meets the first part of `models.interface.Model`, up to `output_table`; it writes no text."""

    @staticmethod
    def task_of(config: ModelConfig) -> Task:
        side = config.encoder_only.side
        return Task('masked language modelling', (side,), f'masked {side} subwords')

    @staticmethod
    def attention_uses(config: ModelConfig) -> dict[str, dict[str, Any]]:
        return {'encoder_self': {'decodes': False}}

    @staticmethod
    def attention_length(config: ModelConfig, use: str, source_length: int, target_length: int) -> int:
        return source_length if config.encoder_only.side == 'source' else target_length

    @staticmethod
    def check(config: ModelConfig) -> None:
        check_single_table(config)
        own = config.encoder_only
        if own.masked_share + own.random_share > 1:
            raise ConfigError(
                f'config.model.encoder_only.masked_share {own.masked_share} and random_share {own.random_share} are '
                f'more than 1 together; of what is selected only {1 - own.masked_share:.4g} is left for random subwords'
            )

    @property
    def module(self) -> Encoder:
        """The Flax module that holds the parameters."""
        return Encoder(self.config, self.vocab_size, self.execution)

    def objective(self, batch: Batch, rngs: Key[Array, 'B']) -> Batch:
        """Masks some subwords of one side, which are to be restored. The eos of a text is never among them."""
        own = self.config.encoder_only
        ids, segments, positions = (
            (batch.inputs, batch.input_segment_ids, batch.input_positions)
            if own.side == 'source'
            else (batch.targets, batch.target_segment_ids, batch.target_positions)
        )
        inputs, selected = mask_subwords(ids, segments, rngs, own, self.vocab_size)
        return Batch(inputs, ids, segments, jnp.where(selected, segments, 0), positions, positions)

    def hidden(self, params: Params, batch: Batch, *, dropout_rng: PRNGKey | None = None) -> Float[Array, 'B S D']:
        return self._apply(params, batch, rngs=None if dropout_rng is None else {'dropout': dropout_rng})


def mask_subwords(
    ids: Int[Array, 'B S'],
    segments: Int[Array, 'B S'],
    rngs: Key[Array, 'B'],
    config: EncoderOnlyConfig,
    vocab_size: int,
) -> tuple[Int[Array, 'B S'], Bool[Array, 'B S']]:
    """What the encoder reads instead of `ids`, and which subwords were selected, each on its own. `rngs`: one a row.

    A selected subword is read as the mask symbol (the id `vocab_size`), as a random entry of the vocabulary (the right
    one may come up), or as itself.
    """
    slots = jnp.arange(ids.shape[1])

    def draw(row: PRNGKey) -> Array:
        return jax.vmap(lambda slot: jax.random.bits(jax.random.fold_in(row, slot), (3,), jnp.uint32))(slots)

    bits = jax.vmap(draw)(rngs)
    chances = (bits[..., :2] >> 8).astype(jnp.float32) * 2.0**-24  # below 1
    random_ids = (bits[..., 2] % vocab_size).astype(ids.dtype)
    is_eos = segments != jnp.pad(segments[:, 1:], ((0, 0), (0, 1)))  # every text ends with it
    selected = (segments > 0) & ~is_eos & (chances[..., 0] < config.selected_rate)
    kind = chances[..., 1]
    replaced = jnp.where(kind < config.masked_share + config.random_share, random_ids, ids)
    replaced = jnp.where(kind < config.masked_share, vocab_size, replaced)
    return jnp.where(selected, replaced, ids).astype(ids.dtype), selected
