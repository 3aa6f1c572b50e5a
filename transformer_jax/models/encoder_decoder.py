"""The Transformer of the paper: encoder-decoder. Section 3."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.attention.mask import Mask
from transformer_jax.data.batch import Batch
from transformer_jax.layers import kv_cache
from transformer_jax.layers.dropout import Dropout
from transformer_jax.layers.embedding import PositionEmbedding
from transformer_jax.layers.kv_cache import DecodeState
from transformer_jax.layers.multihead import SharedTerms
from transformer_jax.models.family import Family, VocabularyModule
from transformer_jax.models.stacks import DecoderLayer, EncoderLayer, Stack, apply_layer, finish_decode
from transformer_jax.position_terms import PositionTerms
from transformer_jax.shapes import Array, Float, Int, Params


class Transformer(VocabularyModule):
    """The parameters and the two halves; `EncoderDecoder` is what the rest of the program uses."""

    def setup(self) -> None:
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        self.declare_tables()
        self.source_positions = PositionEmbedding(config)
        self.target_positions = PositionEmbedding(config)
        self.encoder_terms = SharedTerms(config, 'encoder_self', causal=False)
        self.decoder_terms = SharedTerms(config, 'decoder_self', causal=True)
        self.encoder = Stack(EncoderLayer, config.num_encoder_layers, config, self.execution, dtype)
        self.decoder = Stack(DecoderLayer, config.num_decoder_layers, config, self.execution, dtype)
        self.drop = Dropout(config.dropout_rate)

    def __call__(self, batch: Batch, decoder_inputs: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        """Decoder states before the vocabulary projection."""
        memory = self.encode(batch.inputs, batch.input_segment_ids, batch.input_positions)
        q_place = (batch.target_segment_ids, batch.target_positions)
        x = self.embed_target(decoder_inputs, batch.target_positions)
        cross_mask = _mask(q_place, (batch.input_segment_ids, batch.input_positions))
        return self.decoder(x, _mask(q_place, q_place, causal=True), memory, cross_mask, self.decoder_terms())

    def encode(
        self, inputs: Int[Array, 'B S'], segment_ids: Int[Array, 'B S'], positions: Int[Array, 'B S']
    ) -> Float[Array, 'B S D']:
        """The encoder's output."""
        place = (segment_ids, positions)
        x = self.drop(self.source_positions(self.embed_source(inputs), positions))
        return self.encoder(x, _mask(place, place), self.encoder_terms())

    def embed_target(self, ids: Int[Array, 'B T'], positions: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        """Decoder input ids at their positions."""
        return self.drop(self.target_positions(self.target_embedding(ids), positions))

    def shared_decoder_terms(self) -> PositionTerms | None:
        """What the position scheme's parameters of the whole decoder add inside its self-attention."""
        return self.decoder_terms()


def _mask(q_place: tuple[Array, Array], k_place: tuple[Array, Array], *, causal: bool = False) -> Mask:
    """A mask between `(segments, positions)` of queries and of keys."""
    same = q_place is k_place
    return Mask(q_place[0], k_place[0], q_place[1], k_place[1], causal=causal, aligned=same)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """The encoder's output and which of its rows are real."""

    states: Float[Array, 'B S D']
    segment_ids: Int[Array, 'B S']
    positions: Int[Array, 'B S']


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeCache:
    """What a decode keeps. Only `state` depends on the hypothesis; the rest is held once a sentence."""

    state: DecodeState
    cross_keys: tuple[Float[Array, 'B S N H'], ...]
    cross_values: tuple[Float[Array, 'B S N U'], ...]
    source_segment_ids: Int[Array, 'B S']
    source_positions: Int[Array, 'B S']


@dataclass(frozen=True)
class EncoderDecoder(Family):
    """Meets `models.interface.Model`; see there for what each method promises."""

    @property
    def module(self) -> Transformer:
        """The Flax module that holds the parameters."""
        return Transformer(self.config, self.vocab_size, self.execution)

    def encode(
        self, params: Params, inputs: Int[Array, 'B S'], segment_ids: Int[Array, 'B S'], positions: Int[Array, 'B S']
    ) -> Memory:
        states = self._apply(params, inputs, segment_ids, positions, method='encode')
        return Memory(states, segment_ids, positions)

    def init_decode(self, params: Params, memory: Memory, max_length: int) -> DecodeCache:
        batch = memory.states.shape[0]
        states = jnp.where((memory.segment_ids > 0)[..., None], memory.states, 0)  # no step empties padding again
        cross = [self._layer(params, index, states, method='project_memory') for index in self._layers()]
        layers = [self._layer(params, index, batch, max_length, method='init_state') for index in self._layers()]
        return DecodeCache(
            DecodeState(kv_cache.empty_past(batch, max_length), tuple(layers)),
            tuple(k for k, _ in cross),
            tuple(v for _, v in cross),
            memory.segment_ids,
            memory.positions,
        )

    def _read(
        self, params: Params, tokens: Int[Array, 'B T'], lengths: Int[Array, 'B'], num_new: int, cache: DecodeCache
    ) -> tuple[Float[Array, 'B T D'], DecodeCache]:
        """Reads `num_new` slots of tokens for each hypothesis (several slots only while W = 1)."""
        past, reading = kv_cache.read(cache.state.past, tokens, lengths, num_new, self.max_length)
        memory_mask = Mask(jnp.ones_like(tokens), cache.source_segment_ids, reading.positions, cache.source_positions)
        terms = self._apply(params, method='shared_decoder_terms')
        x = self._apply(params, tokens, reading.positions, method='embed_target')
        layers = []
        for index, state in enumerate(cache.state.layers):
            memory_kv = (cache.cross_keys[index], cache.cross_values[index])
            x, state = self._layer(params, index, x, state, reading, memory_kv, memory_mask, terms, method='step')
            layers.append(state)
        x = finish_decode(self.config, params, x)
        return x, dataclasses.replace(cache, state=DecodeState(past, tuple(layers)))

    def _layers(self) -> range:
        return range(self.config.num_decoder_layers)

    def _layer(self, params: Params, index: int, *args: Any, method: str) -> Any:
        layer = DecoderLayer(self.config, jnp.dtype(self.config.compute_dtype), index)
        return apply_layer(layer, params, index, *args, method=method)
