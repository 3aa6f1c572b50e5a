"""The convolutional encoder-decoder. Gehring et al. 2017.

Each layer is a gated convolution with a residual connection; each decoder layer attends to the encoder after its
convolution. Sums of two are scaled by sqrt(0.5), and what attention finds by sqrt(m) for m source subwords, so that
variances stay.

Sublayers of the Transformer have no counterpart here: `d_ff`, `activation`, `norm` and their like mean nothing.

Deviation: there is no weight normalisation and no scaling of the encoder's gradients; attention scores are divided by
sqrt(d_model) unless `attention.scale` is None. Positions are those of the config: the paper's are 'learned'.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.attention import variants_of
from transformer_jax.attention.api import attention, attention_and_weights
from transformer_jax.attention.mask import Mask
from transformer_jax.config import AttentionConfig, ModelConfig, refuse_ignored
from transformer_jax.data.batch import Batch
from transformer_jax.layers import kv_cache
from transformer_jax.layers.convolution import Convolution
from transformer_jax.layers.declaring import declare
from transformer_jax.layers.dropout import Dropout
from transformer_jax.layers.embedding import PositionEmbedding
from transformer_jax.layers.kv_cache import DecodeState, Reading, RunningState
from transformer_jax.models.family import Family, VocabularyModule
from transformer_jax.models.settings import check_reach, refuse_inner_positions
from transformer_jax.models.stacks import Stack, apply_layer
from transformer_jax.shapes import Array, Float, Int, Params

_HALF = 0.5**0.5  # keeps the variance of a sum of two


def _make_convolution(config: ModelConfig, dtype: jnp.dtype, *, causal: bool) -> Convolution:
    # Of a sum of 4 (1 - dropout) / fan-in the variance is kept by gate and dropout: Gehring et al., section 3.5.
    variance = 4 * (1 - config.dropout_rate)
    return Convolution(config.convolution, config.d_model, dtype, causal, gated=True, init_scale=variance)


class EncoderLayer(nn.Module):
    """A gated convolution around each row."""

    config: ModelConfig
    dtype: jnp.dtype

    def setup(self) -> None:
        self.convolution = _make_convolution(self.config, self.dtype, causal=False)
        self.drop = Dropout(self.config.dropout_rate)

    def __call__(
        self, inputs: Float[Array, 'B S D'], mask: Mask, index: Int[Array, ''] | None = None
    ) -> Float[Array, 'B S D']:
        return (inputs + self.convolution.mix(self.drop(inputs), mask, index=index)) * _HALF


class SourceAttention(nn.Module):
    """Attention of one head to keys z and values z + e, of the encoder's output z and the source embeddings e.

    The query is W h + b + g, of the layer's output h and the embedding g of the subword before.
    """

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        inputs: Float[Array, 'B T D'],
        embedded: Float[Array, 'B T D'],
        keys: Float[Array, 'B S D'],
        values: Float[Array, 'B S D'],
        mask: Mask,
        *,
        cached: bool = False,
    ) -> Float[Array, 'B T D']:
        config = one_wide_head(self.config)
        own = next(iter(variants_of(config.kind).values())).parameters
        params = declare(self, own(config, self.config.max_length)) if own else {}
        partitioned: Any = nn.with_logical_partitioning
        query = nn.Dense(
            self.config.d_model,
            dtype=self.dtype,
            kernel_init=partitioned(nn.initializers.glorot_uniform(), ('embed', None)),
            bias_init=partitioned(nn.initializers.zeros_init(), (None,)),
            name='query',
        )
        q, k, v = ((query(inputs) + embedded)[:, :, None], keys[:, :, None], values[:, :, None])
        if self.is_mutable_collection('weights'):  # asked for by `apply(..., mutable='weights')`
            output, weights = attention_and_weights(q, k, v, mask, config, params=params)
            self.sow('weights', 'weights', weights)
        else:
            rng = self.make_rng('dropout') if config.dropout_rate > 0 and self.has_rng('dropout') else None
            output = attention(q, k, v, mask, config, params=params, dropout_rng=rng, cached=cached)
        num_seen = mask.materialize().sum(axis=2, keepdims=True)
        return output[:, :, 0] * jnp.sqrt(num_seen.astype(output.dtype))


class DecoderLayer(nn.Module):
    """A gated convolution over each row and those before, then attention to the source."""

    config: ModelConfig
    dtype: jnp.dtype

    def setup(self) -> None:
        self.convolution = _make_convolution(self.config, self.dtype, causal=True)
        self.attention = SourceAttention(self.config, self.dtype)
        self.drop = Dropout(self.config.dropout_rate)

    def __call__(
        self,
        inputs: Float[Array, 'B T D'],
        mask: Mask,
        embedded: Float[Array, 'B T D'],
        keys: Float[Array, 'B S D'],
        values: Float[Array, 'B S D'],
        memory_mask: Mask,
        index: Int[Array, ''] | None = None,
    ) -> Float[Array, 'B T D']:
        x = self.convolution.mix(self.drop(inputs), mask, index=index)
        x = (x + self.attention(x, embedded, keys, values, memory_mask)) * _HALF
        return (inputs + x) * _HALF

    def init_state(self, batch: int, num_slots: int, index: int) -> RunningState:
        """What the layer keeps of the target read so far."""
        return self.convolution.init_state(batch, num_slots, index)

    def step(
        self,
        inputs: Float[Array, 'B T D'],
        state: RunningState,
        reading: Reading,
        embedded: Float[Array, 'B T D'],
        keys: Float[Array, 'B S D'],
        values: Float[Array, 'B S D'],
        memory_mask: Mask,
        index: int,
    ) -> tuple[Float[Array, 'B T D'], RunningState]:
        """The layer on new rows only."""
        x, state = self.convolution.extend(inputs, state, reading, index=index)
        x = (x + self.attention(x, embedded, keys, values, memory_mask, cached=True)) * _HALF
        return (inputs + x) * _HALF, state


class ConvolutionalNetwork(VocabularyModule):
    """The parameters and the two halves; `Convolutional` is what the rest of the program uses."""

    def setup(self) -> None:
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        self.declare_tables()
        self.source_positions = PositionEmbedding(config)
        self.target_positions = PositionEmbedding(config)
        without_norm = dataclasses.replace(config, norm_order='post')  # a stack of pre-norm layers ends with one
        self.encoder = Stack(EncoderLayer, config.num_encoder_layers, without_norm, self.execution, dtype)
        self.decoder = Stack(DecoderLayer, config.num_decoder_layers, without_norm, self.execution, dtype)
        self.drop = Dropout(config.dropout_rate)

    def __call__(self, batch: Batch, decoder_inputs: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        """Decoder states before the vocabulary projection."""
        keys, values = self.encode(batch.inputs, batch.input_segment_ids, batch.input_positions)
        segments, positions = batch.target_segment_ids, batch.target_positions
        embedded = self.embed_target(decoder_inputs, positions)
        mask = Mask(segments, segments, positions, positions, causal=True, aligned=True)
        memory_mask = Mask(segments, batch.input_segment_ids, positions, batch.input_positions)
        return self.drop(self.decoder(embedded, mask, embedded, keys, values, memory_mask))

    def encode(
        self, inputs: Int[Array, 'B S'], segment_ids: Int[Array, 'B S'], positions: Int[Array, 'B S']
    ) -> tuple[Float[Array, 'B S D'], Float[Array, 'B S D']]:
        """What the decoder's attention takes as keys and as values."""
        embedded = self.drop(self.source_positions(self.embed_source(inputs), positions))
        keys = self.encoder(embedded, Mask(segment_ids, segment_ids, positions, positions, aligned=True))
        return keys, keys + embedded

    def embed_target(self, ids: Int[Array, 'B T'], positions: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        """Decoder input ids at their positions."""
        return self.drop(self.target_positions(self.target_embedding(ids), positions))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """What the decoder attends to, and which of its rows are real."""

    keys: Float[Array, 'B S D']
    values: Float[Array, 'B S D']
    segment_ids: Int[Array, 'B S']
    positions: Int[Array, 'B S']


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeCache:
    """What a decode keeps. Only `state` depends on the hypothesis; the rest is held once a sentence."""

    state: DecodeState
    memory: Memory


@dataclass(frozen=True)
class Convolutional(Family):
    """Meets `models.interface.Model`; see there for what each method promises."""

    @staticmethod
    def attention_uses(config: ModelConfig) -> dict[str, dict[str, Any]]:
        return {'cross': {'cross': True}}

    @staticmethod
    def attention_config(config: ModelConfig, use: str) -> AttentionConfig:
        return one_wide_head(config)

    @staticmethod
    def check(config: ModelConfig) -> None:
        check_convolutional(config)

    @property
    def module(self) -> ConvolutionalNetwork:
        """The Flax module that holds the parameters."""
        return ConvolutionalNetwork(self.config, self.vocab_size, self.execution)

    def encode(
        self, params: Params, inputs: Int[Array, 'B S'], segment_ids: Int[Array, 'B S'], positions: Int[Array, 'B S']
    ) -> Memory:
        keys, values = self._apply(params, inputs, segment_ids, positions, method='encode')
        return Memory(keys, values, segment_ids, positions)

    def init_decode(self, params: Params, memory: Memory, max_length: int) -> DecodeCache:
        batch = memory.keys.shape[0]
        layers = [self._layer(params, index, batch, max_length, method='init_state') for index in self._layers()]
        real = (memory.segment_ids > 0)[..., None]  # no step empties padding again
        memory = dataclasses.replace(
            memory, keys=jnp.where(real, memory.keys, 0), values=jnp.where(real, memory.values, 0)
        )
        return DecodeCache(DecodeState(kv_cache.empty_past(batch, max_length), tuple(layers)), memory)

    def _read(
        self, params: Params, tokens: Int[Array, 'B T'], lengths: Int[Array, 'B'], num_new: int, cache: DecodeCache
    ) -> tuple[Float[Array, 'B T D'], DecodeCache]:
        """Reads `num_new` slots of tokens for each hypothesis (several slots only while W = 1)."""
        past, reading = kv_cache.read(cache.state.past, tokens, lengths, num_new, self.max_length)
        memory = cache.memory
        memory_mask = Mask(jnp.ones_like(tokens), memory.segment_ids, reading.positions, memory.positions)
        x = embedded = self._apply(params, tokens, reading.positions, method='embed_target')
        layers = []
        for index, state in enumerate(cache.state.layers):
            source = (memory.keys, memory.values, memory_mask)
            x, state = self._layer(params, index, x, state, reading, embedded, *source, method='step')
            layers.append(state)
        return x, dataclasses.replace(cache, state=DecodeState(past, tuple(layers)))

    def _layers(self) -> range:
        return range(self.config.num_decoder_layers)

    def _layer(self, params: Params, index: int, *args: Any, method: str) -> Any:
        layer = DecoderLayer(self.config, jnp.dtype(self.config.compute_dtype))
        return apply_layer(layer, params, index, *args, index, method=method)


def one_wide_head(config: ModelConfig) -> AttentionConfig:
    """The settings of the attention to the source: one head of width d_model."""
    return dataclasses.replace(config.attention_of('cross'), num_heads=1, num_kv_heads=None, head_dim=config.d_model)


def check_convolutional(config: ModelConfig) -> None:
    """What the family would ignore, or can't have."""
    refuse_inner_positions(config, "family 'convolutional' has none")
    attends = "family 'convolutional' attends to the source alone, by one head of width d_model"
    ignored = {f'attention.{name}': attends for name in ('window', 'window_right', 'num_global', 'num_kv_heads')}
    ignored |= {f'attention.{name}': attends for name in ('value_dim', 'use_bias')}
    ignored |= {f'cross.{name}': attends for name in ('num_heads', 'num_kv_heads', 'head_dim', 'value_dim', 'use_bias')}
    ignored |= dict.fromkeys(('encoder_self', 'decoder_self'), attends)
    ignored |= dict.fromkeys(('encoder_mixing', 'decoder_mixing'), "family 'convolutional' has no such layers")
    ignored['recurrence'] = "family 'convolutional' has no recurrence"
    refuse_ignored(config, 'config.model', ignored)
    check_reach(config, config.num_encoder_layers)
    check_reach(config, config.num_decoder_layers)
