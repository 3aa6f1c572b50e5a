"""A decoder alone: a causal language model, or translation with the source as the prefix of one sequence.

As a language model it reads the target side of a pair. In translation one stack reads source and target as one sequence
of a segment: the start id stands between them, target positions go on where the source ends, and only target subwords
are predicted. Source rows see the whole source (prefix-LM: Liu et al. 2018; Raffel et al. 2020) or what precedes them.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.attention.dense import empty_unseen
from transformer_jax.attention.mask import Mask
from transformer_jax.config import ConfigError, ModelConfig, refuse_ignored
from transformer_jax.data.batch import Batch
from transformer_jax.layers import kv_cache
from transformer_jax.layers.dropout import Dropout
from transformer_jax.layers.embedding import PositionEmbedding
from transformer_jax.layers.kv_cache import DecodeState, KeyValues, LayerState, Reading, RunningState
from transformer_jax.layers.multihead import SharedTerms
from transformer_jax.layers.norm import Rows, finish
from transformer_jax.layers.residual import Residual
from transformer_jax.models.family import Family, VocabularyModule, check_single_table
from transformer_jax.models.interface import LANGUAGE_MODEL, TRANSLATION, Task
from transformer_jax.models.stacks import Stack, apply_layer, finish_decode, make_attention, make_feed_forward
from transformer_jax.position_terms import PositionTerms
from transformer_jax.shapes import Array, Bool, Float, Int, Params


def translates(config: ModelConfig) -> bool:
    """Whether the stack reads a source before its target."""
    return config.decoder_only.task == 'translation'


def has_open_prefix(config: ModelConfig) -> bool:
    """Whether source rows see later source rows."""
    return translates(config) and config.decoder_only.prefix == 'bidirectional'


class CausalLayer(nn.Module):
    """Self-attention, then feed-forward, as one layer of a decoder without an encoder."""

    config: ModelConfig
    dtype: jnp.dtype

    takes_open_rows = True  # takes and returns `Normalised` rows

    def setup(self) -> None:
        config, dtype = self.config, self.dtype
        self.self_attention = make_attention(config, 'decoder_self', dtype, causal=not has_open_prefix(config))
        self.self_attention_residual = Residual(config, dtype)
        self.feed_forward = make_feed_forward(config, dtype)
        self.feed_forward_residual = Residual(config, dtype)

    def __call__(self, inputs: Rows, mask: Mask, terms: PositionTerms | None = None) -> Rows:
        x = self.self_attention_residual(finish(inputs), lambda y: self.self_attention(y, y, mask, terms))
        return self.feed_forward_residual.leave_open(x, self.feed_forward)

    def init_state(self, batch: int, num_slots: int) -> LayerState:
        """What the layer keeps of the target read so far."""
        return self.self_attention.init_state(batch, num_slots)

    def read_source(
        self, inputs: Float[Array, 'B S D'], reading: Reading, terms: PositionTerms | None = None
    ) -> tuple[Float[Array, 'B S D'], LayerState]:
        """The layer on a whole source, and what is kept of it: its keys and values, or the state that it leaves."""
        kept = self.self_attention.init_state(inputs.shape[0], 0)

        def mix(y: Array) -> Array:
            nonlocal kept
            if isinstance(kept, RunningState):
                mixed, kept = self.self_attention.extend(y, kept, reading, terms)
                return mixed
            k, v = self.self_attention.project_kv(y, reading.positions)
            kept = KeyValues(empty_unseen(k, reading.holds), empty_unseen(v, reading.holds))
            return self.self_attention.attend(y, kept.keys, kept.values, reading.mask, terms)

        x = self.self_attention_residual(inputs, mix)
        return self.feed_forward_residual(x, self.feed_forward), kept

    def step(
        self,
        inputs: Float[Array, 'B T D'],
        state: LayerState,
        reading: Reading,
        source: KeyValues | None,
        joint_mask: Mask | None,
        terms: PositionTerms | None = None,
    ) -> tuple[Float[Array, 'B T D'], LayerState]:
        """The layer on new target rows, which see the source (where there is one) and their own past in one softmax."""
        new_state = state

        def mix(y: Array) -> Array:
            nonlocal new_state
            if source is None or joint_mask is None:
                mixed, new_state = self.self_attention.extend(y, state, reading, terms)
                return mixed
            assert isinstance(state, KeyValues)
            new_state = state.write(*self.self_attention.project_kv(y, reading.positions), reading)
            both = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), source, new_state)
            return self.self_attention.attend(y, both.keys, both.values, joint_mask, terms, cached=True)

        x = self.self_attention_residual(inputs, mix)
        return self.feed_forward_residual(x, self.feed_forward), new_state


class Decoder(VocabularyModule):
    """The parameters; `DecoderOnly` is what the rest of the program uses."""

    def setup(self) -> None:
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        self.declare_tables()
        self.target_positions = PositionEmbedding(config)
        self.decoder_terms = SharedTerms(config, 'decoder_self', causal=not has_open_prefix(config))
        self.decoder = Stack(CausalLayer, config.num_decoder_layers, config, self.execution, dtype)
        self.drop = Dropout(config.dropout_rate)

    def __call__(self, batch: Batch, decoder_inputs: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        """States of the target rows before the vocabulary projection."""
        segments, positions = batch.target_segment_ids, batch.target_positions
        target = self.target_embedding(decoder_inputs)
        if not translates(self.config):
            x = self.place(target, positions)
            mask = Mask(segments, segments, positions, positions, causal=True, aligned=True)
            return self.decoder(x, mask, self.decoder_terms())
        positions = positions + count_source_rows(batch.input_segment_ids, segments)
        segments = jnp.concatenate([batch.input_segment_ids, segments], axis=1)
        positions = jnp.concatenate([batch.input_positions, positions], axis=1)
        x = self.place(jnp.concatenate([self.embed_source(batch.inputs), target], axis=1), positions)
        num_source = batch.inputs.shape[1]
        prefix = self._prefix(segments, num_source)
        mask = Mask(segments, segments, positions, positions, k_prefix=prefix, causal=True)
        return self.decoder(x, mask, self.decoder_terms())[:, num_source:]

    def place(self, embedded: Float[Array, 'B T D'], positions: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        """Embeddings with what the position scheme adds, and dropout."""
        return self.drop(self.target_positions(embedded, positions))

    def shared_terms(self) -> PositionTerms | None:
        """What the position scheme's parameters of the whole stack add inside its attention."""
        return self.decoder_terms()

    def embed_source_rows(self, ids: Int[Array, 'B S'], positions: Int[Array, 'B S']) -> Float[Array, 'B S D']:
        """What the stack is given of a source."""
        return self.place(self.embed_source(ids), positions)

    def embed_target_rows(self, ids: Int[Array, 'B T'], positions: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        """What the stack is given of a target; `positions` count from where the source begins."""
        return self.place(self.target_embedding(ids), positions)

    def _prefix(self, segments: Int[Array, 'B L'], num_source: int) -> Bool[Array, 'B L'] | None:
        if not has_open_prefix(self.config):
            return None
        return jnp.broadcast_to(jnp.arange(segments.shape[1]) < num_source, segments.shape)


def count_source_rows(source_segments: Int[Array, 'B S'], target_segments: Int[Array, 'B T']) -> Int[Array, 'B T']:
    """For each target row the number of source rows of its segment; 0 at padding."""
    same = source_segments[:, None, :] == target_segments[:, :, None]
    return jnp.where(target_segments > 0, same.sum(axis=2, dtype=jnp.int32), 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SourceMemory:
    """What each layer keeps of the sources; no layers in a language model, which has read nothing."""

    layers: tuple[LayerState, ...]
    segment_ids: Int[Array, 'B S']
    positions: Int[Array, 'B S']


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeCache:
    """What a decode keeps. Only `state` depends on the hypothesis; the rest is held once a sentence.

    `source_layers` is empty where there is no source, or where the state that it left is part of `state`.
    """

    state: DecodeState
    source_layers: tuple[KeyValues, ...]
    source_segment_ids: Int[Array, 'B S']
    source_positions: Int[Array, 'B S']


@dataclass(frozen=True)
class DecoderOnly(Family):
    """Meets `models.interface.Model`; see there for what each method promises."""

    @staticmethod
    def task_of(config: ModelConfig) -> Task:
        return TRANSLATION if translates(config) else LANGUAGE_MODEL

    @staticmethod
    def attention_uses(config: ModelConfig) -> dict[str, dict[str, Any]]:
        # Behind a source, targets begin at another index than position.
        own = {'causal': True, 'prefix': has_open_prefix(config), 'by_index': not translates(config)}
        return {'decoder_self': own}

    @staticmethod
    def attention_length(config: ModelConfig, use: str, source_length: int, target_length: int) -> int:
        return source_length * translates(config) + target_length

    @staticmethod
    def check(config: ModelConfig) -> None:
        if not translates(config):
            check_single_table(config)
            reason = f'config.model.decoder_only.task is {config.decoder_only.task!r}, which has no prefix'
            refuse_ignored(config, 'config.model', {'decoder_only.prefix': reason})
        if config.decoder_mixing != 'attention':
            raise ConfigError(
                f"config.model.decoder_mixing is {config.decoder_mixing!r}; family 'decoder_only' has 'attention' alone"
            )

    @property
    def module(self) -> Decoder:
        """The Flax module that holds the parameters."""
        return Decoder(self._stack_config, self.vocab_size, self.execution)

    @property
    def _stack_config(self) -> ModelConfig:
        """The config of the stack, which in translation holds the longest source and the longest target at once."""
        return dataclasses.replace(self.config, max_length=self.max_length * (1 + translates(self.config)))

    def encode(
        self, params: Params, inputs: Int[Array, 'B S'], segment_ids: Int[Array, 'B S'], positions: Int[Array, 'B S']
    ) -> SourceMemory:
        if not translates(self.config):
            return SourceMemory((), segment_ids, positions)
        causal = not has_open_prefix(self.config)
        mask = Mask(segment_ids, segment_ids, positions, positions, causal=causal, aligned=True)
        reading = Reading(positions, segment_ids > 0, mask, jnp.int32(0), num_hypotheses=1)
        terms = self._apply(params, method='shared_terms')
        x = self._apply(params, inputs, positions, method='embed_source_rows')
        layers = []
        for index in self._layers():
            x, kept = self._layer(params, index, x, reading, terms, method='read_source')
            layers.append(kept)
        return SourceMemory(tuple(layers), segment_ids, positions)

    def init_decode(self, params: Params, memory: SourceMemory, max_length: int) -> DecodeCache:
        batch = memory.segment_ids.shape[0]
        past = kv_cache.empty_past(batch, max_length)
        if translates(self.config):
            past = dataclasses.replace(past, next_position=(memory.segment_ids > 0).sum(axis=1, dtype=jnp.int32))
        running = tuple(layer for layer in memory.layers if isinstance(layer, RunningState))
        layers = running or tuple(
            self._layer(params, index, batch, max_length, method='init_state') for index in self._layers()
        )
        source = tuple(layer for layer in memory.layers if isinstance(layer, KeyValues))
        return DecodeCache(DecodeState(past, layers), source, memory.segment_ids, memory.positions)

    def _read(
        self, params: Params, tokens: Int[Array, 'B T'], lengths: Int[Array, 'B'], num_new: int, cache: DecodeCache
    ) -> tuple[Float[Array, 'B T D'], DecodeCache]:
        """Reads `num_new` slots of tokens for each hypothesis (several slots only while W = 1)."""
        past, reading = kv_cache.read(cache.state.past, tokens, lengths, num_new, self._stack_config.max_length)
        joint_mask = _join(cache, reading.mask) if cache.source_layers else None
        terms = self._apply(params, method='shared_terms')
        x = self._apply(params, tokens, reading.positions, method='embed_target_rows')
        layers = []
        for index, state in enumerate(cache.state.layers):
            source = cache.source_layers[index] if cache.source_layers else None
            x, state = self._layer(params, index, x, state, reading, source, joint_mask, terms, method='step')
            layers.append(state)
        x = finish_decode(self.config, params, x)
        return x, dataclasses.replace(cache, state=DecodeState(past, tuple(layers)))

    def _layers(self) -> range:
        return range(self.config.num_decoder_layers)

    def _layer(self, params: Params, index: int, *args: Any, method: str) -> Any:
        layer = CausalLayer(self._stack_config, jnp.dtype(self.config.compute_dtype))
        return apply_layer(layer, params, index, *args, method=method)


def _join(cache: DecodeCache, mask: Mask) -> Mask:
    """What new target rows may see of the source's rows, all of them, and of their own past behind these."""
    is_source = cache.source_segment_ids > 0
    assert mask.allowed is not None
    seen = jnp.broadcast_to(is_source[:, None, :], (*mask.allowed.shape[:2], is_source.shape[1]))
    return dataclasses.replace(
        mask,
        k_segments=jnp.concatenate([is_source.astype(jnp.int32), mask.k_segments], axis=1),
        k_positions=jnp.concatenate([cache.source_positions, mask.k_positions], axis=1),
        allowed=jnp.concatenate([seen, mask.allowed], axis=2),
    )
