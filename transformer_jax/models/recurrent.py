"""The recurrent encoder-decoder, with a fixed vector or attention.

Cho et al. 2014; Bahdanau et al. 2015; Luong et al. 2015. The encoder reads both ways. The decoder's first states are
made of the encoder's last ones. Then, with s the decoder's top state, y the subword before and c what it knows of the
source, the state before the vocabulary projection is

- `none`: tanh(W [s; y; c]), c the fixed vector made of the encoder's last states, which each step is given;
- `bahdanau`: the same, c what additive attention by the lowest layer's previous state finds, and an input of the step;
- `luong`: tanh(W [c; s]), c what attention by s itself finds; it is an input of the next step (input feeding).

Sublayers of the Transformer have no counterpart here: `d_ff`, `activation`, `norm` and their like mean nothing.

Deviation: a tanh in place of Bahdanau's maxout, and s after the step in place of before it; the fixed vector is of both
directions.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.config import ATTENTION_USES, ConfigError, ModelConfig, refuse_ignored
from transformer_jax.data.batch import Batch
from transformer_jax.layers import kv_cache
from transformer_jax.layers.dropout import Dropout
from transformer_jax.layers.kv_cache import DecodeState, RunningState
from transformer_jax.layers.recurrence import Recurrence, segment_starts
from transformer_jax.models import recurrent_decoder
from transformer_jax.models.family import Family, VocabularyModule
from transformer_jax.models.recurrent_decoder import Decoder, Row, Source
from transformer_jax.shapes import Array, Float, Int, Params


class RecurrentNetwork(VocabularyModule):
    """The parameters and the two halves; `Recurrent` is what the rest of the program uses."""

    def setup(self) -> None:
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        self.declare_tables()
        self.encoder = [
            Recurrence(config.recurrence, config.d_model, dtype, causal=False) for _ in range(config.num_encoder_layers)
        ]
        self.decoder = Decoder(config)
        self.drop = Dropout(config.dropout_rate)

    def __call__(self, batch: Batch, decoder_inputs: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        """Decoder states before the vocabulary projection."""
        config, segments, weights = self.config, batch.target_segment_ids, self.decoder()
        annotations, states = self.encode(batch.inputs, batch.input_segment_ids)
        source = recurrent_decoder.map_source(config, weights, annotations, batch.input_segment_ids)
        initial, fixed = recurrent_decoder.begin(config, weights, summarize(states, batch.input_segment_ids, segments))
        embedded = self.embed_target(decoder_inputs)
        rows = Row(embedded, segments, fixed, segment_starts(segments), initial, self._drop_between(embedded))
        # Steps first, then sentences, each with one hypothesis.
        rows = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0)[:, :, None], rows)
        carry = recurrent_decoder.empty_carry(config, embedded.shape[0], 1)
        _, (hidden, scores) = recurrent_decoder.take_steps(config, weights, source, carry, rows, self.execution.remat)
        if scores is not None and self.is_mutable_collection('weights'):
            self.sow('weights', 'cross_attention', jnp.moveaxis(scores[:, :, :, 0], 0, 2))
        return self.drop(jnp.moveaxis(hidden[:, :, 0], 0, 1))

    def encode(
        self, inputs: Int[Array, 'B S'], segment_ids: Int[Array, 'B S']
    ) -> tuple[Float[Array, 'B S D'], Float[Array, 'B S E']]:
        """The annotations, and the top layer's states of both directions that they are made of, E = 2 D."""
        x = self.drop(self.embed_source(inputs))
        states = x
        for index, layer in enumerate(self.encoder):
            states = layer.read(self.drop(x) if index else x, segment_ids)
            x = layer.join(states)
        return x, states

    def embed_target(self, ids: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        """Decoder input ids."""
        return self.drop(self.target_embedding(ids))

    def _drop_between(self, embedded: Float[Array, 'B T D']) -> tuple[Float[Array, 'B T D'], ...]:
        if self.config.dropout_rate == 0.0 or not self.has_rng('dropout'):
            return ()
        return tuple(self.drop(jnp.ones_like(embedded)) for _ in range(self.config.num_decoder_layers - 1))


def summarize(
    states: Float[Array, 'B S E'], segment_ids: Int[Array, 'B S'], of: Int[Array, 'B T']
) -> Float[Array, 'B T E']:
    """The encoder's last states of these segments: forwards of the last row, backwards of the first, side by side."""
    length = segment_ids.shape[1]
    belongs = (of[:, :, None] == segment_ids[:, None, :]) & (of > 0)[:, :, None]
    index = jnp.arange(length)[None, None]
    last = jnp.maximum(jnp.where(belongs, index, -1).max(axis=2), 0)
    first = jnp.minimum(jnp.where(belongs, index, length).min(axis=2), length - 1)
    forward, backward = jnp.split(states, 2, axis=-1)
    parts = [jnp.take_along_axis(forward, last[..., None], 1), jnp.take_along_axis(backward, first[..., None], 1)]
    return jnp.concatenate(parts, axis=-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """The encoder's output: annotations, and the summary `[forwards at the end; backwards at the beginning]`."""

    annotations: Float[Array, 'B S D']
    summary: Float[Array, 'B E']
    segment_ids: Int[Array, 'B S']


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeCache:
    """What a decode keeps. Only `state` depends on the hypothesis; the rest is held once a sentence."""

    state: DecodeState
    source: Source | None
    fixed: Float[Array, 'B D'] | None


@dataclass(frozen=True)
class Recurrent(Family):
    """Meets `models.interface.Model`; see there for what each method promises."""

    @staticmethod
    def attention_uses(config: ModelConfig) -> dict[str, dict[str, Any]]:
        return {}  # its attention is the one that `config.recurrence` names, which needs no check

    @staticmethod
    def check(config: ModelConfig) -> None:
        check_recurrent(config)

    @property
    def module(self) -> RecurrentNetwork:
        """The Flax module that holds the parameters."""
        return RecurrentNetwork(self.config, self.vocab_size, self.execution)

    def encode(
        self, params: Params, inputs: Int[Array, 'B S'], segment_ids: Int[Array, 'B S'], positions: Int[Array, 'B S']
    ) -> Memory:
        one_text = (segment_ids > 0).astype(jnp.int32)
        annotations, states = self._apply(params, inputs, one_text, method='encode')
        summary = summarize(states, one_text, jnp.ones((inputs.shape[0], 1), jnp.int32))
        return Memory(annotations, summary[:, 0], one_text)

    def init_decode(self, params: Params, memory: Memory, max_length: int) -> DecodeCache:
        batch = memory.summary.shape[0]
        states, fixed = recurrent_decoder.begin(self.config, params['decoder'], memory.summary[:, None])
        carry = recurrent_decoder.empty_carry(self.config, batch, 1)._replace(states=states)
        source = recurrent_decoder.map_source(self.config, params['decoder'], memory.annotations, memory.segment_ids)
        state = DecodeState(kv_cache.empty_past(batch, max_length), (RunningState(carry),))
        return DecodeCache(state, source, None if fixed is None else fixed[:, 0])

    def _read(
        self, params: Params, tokens: Int[Array, 'B T'], lengths: Int[Array, 'B'], num_new: int, cache: DecodeCache
    ) -> tuple[Float[Array, 'B T D'], DecodeCache]:
        """Reads `num_new` slots of tokens for each hypothesis (several slots only while W = 1)."""
        past, reading = kv_cache.read(cache.state.past, tokens, lengths, num_new, self.max_length)
        width, batch = past.num_hypotheses, tokens.shape[0]
        embedded = self._apply(params, tokens, method='embed_target')
        embedded = jnp.moveaxis(embedded.reshape(batch, width, num_new, -1), 2, 0)
        holds = jnp.broadcast_to(reading.holds.T[:, :, None], embedded.shape[:3]).astype(jnp.int32)
        fixed = None if cache.fixed is None else jnp.broadcast_to(cache.fixed[None, :, None], embedded.shape)
        (state,) = cache.state.layers
        assert isinstance(state, RunningState)
        carry, (hidden, _) = recurrent_decoder.take_steps(
            self.config, params['decoder'], cache.source, state.leaves, Row(embedded, holds, fixed)
        )
        hidden = jnp.moveaxis(hidden, 0, 2).reshape(batch, width * num_new, -1)
        return hidden, dataclasses.replace(cache, state=DecodeState(past, (RunningState(carry),)))


def check_recurrent(config: ModelConfig) -> None:
    """What the family would ignore, or can't have."""
    if config.positions != 'none':
        raise ConfigError(
            f"config.model.positions is {config.positions!r}; family 'recurrent' reads a text in its order and has no "
            "positions: set it to 'none'"
        )
    attends = "family 'recurrent' has the attention that config.model.recurrence.attention names, of one head"
    names = {field.name for field in dataclasses.fields(config.attention)} - {'num_heads', 'head_dim'}  # sizes set them
    ignored = {f'attention.{name}': attends for name in names}
    ignored |= dict.fromkeys(ATTENTION_USES, attends)
    ignored |= dict.fromkeys(('encoder_mixing', 'decoder_mixing'), "family 'recurrent' has no such layers")
    ignored['convolution'] = "family 'recurrent' has no convolutions"
    if config.recurrence.attention != 'luong':
        reason = f'config.model.recurrence.attention is {config.recurrence.attention!r}'
        ignored |= {'recurrence.luong_score': reason, 'recurrence.input_feeding': reason}
    refuse_ignored(config, 'config.model', ignored)
