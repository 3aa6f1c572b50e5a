"""The Transformer of the paper: encoder-decoder. Section 3."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer_jax import positions as position_schemes
from transformer_jax.attention.mask import Mask
from transformer_jax.config import ExecutionConfig, ModelConfig
from transformer_jax.data.batch import Batch
from transformer_jax.layers import kv_cache
from transformer_jax.layers.dropout import Dropout
from transformer_jax.layers.embedding import Embedding, padded_rows
from transformer_jax.layers.kv_cache import KVCache
from transformer_jax.layers.residual import make_norm
from transformer_jax.models.stacks import DecoderLayer, EncoderLayer, Stack
from transformer_jax.shapes import Array, Float, Int, Params, PRNGKey


def shift_right(targets: Int[Array, 'B T'], positions: Int[Array, 'B T'], start_id: int) -> Int[Array, 'B T']:
    """The decoder's inputs: each target's predecessor, and the start id where a segment begins."""
    previous = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(positions == 0, start_id, previous)


class Transformer(nn.Module):
    """The parameters and the two halves; `EncoderDecoder` is what the rest of the program uses."""

    config: ModelConfig
    vocab_size: int
    execution: ExecutionConfig

    def setup(self) -> None:
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        self.target_embedding = Embedding(config, self.vocab_size, dtype)
        if config.tie_embeddings != 'all':
            self.source_embedding = Embedding(config, self.vocab_size, dtype)
        rows = padded_rows(self.vocab_size, config.vocab_pad_multiple)
        if config.tie_embeddings == 'none':
            normal = nn.with_logical_partitioning(nn.initializers.normal(config.d_model**-0.5), ('vocab', 'embed'))
            self.output_table = self.param('output_table', normal, (rows, config.d_model), jnp.float32)
        if config.output_bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), ('vocab',))
            self.output_bias = self.param('output_bias', zeros, (rows,), jnp.float32)
        self.encoder = Stack(EncoderLayer, config.num_encoder_layers, config, self.execution, dtype)
        self.decoder = Stack(DecoderLayer, config.num_decoder_layers, config, self.execution, dtype)
        self.drop = Dropout(config.dropout_rate)

    def __call__(self, batch: Batch, decoder_inputs: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        """Decoder states before the vocabulary projection."""
        memory = self.encode(batch.inputs, batch.input_segment_ids, batch.input_positions)
        q_place = (batch.target_segment_ids, batch.target_positions)
        x = self.embed_target(decoder_inputs, batch.target_positions)
        cross_mask = _mask(q_place, (batch.input_segment_ids, batch.input_positions))
        return self.decoder(x, _mask(q_place, q_place, causal=True), memory, cross_mask)

    def encode(
        self, inputs: Int[Array, 'B S'], segment_ids: Int[Array, 'B S'], positions: Int[Array, 'B S']
    ) -> Float[Array, 'B S D']:
        """The encoder's output."""
        embedding = self.target_embedding if self.config.tie_embeddings == 'all' else self.source_embedding
        place = (segment_ids, positions)
        return self.encoder(self._place(embedding(inputs), positions), _mask(place, place))

    def embed_target(self, ids: Int[Array, 'B T'], positions: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        """Decoder input ids at their positions."""
        return self._place(self.target_embedding(ids), positions)

    def _place(self, embedded: Float[Array, 'B T D'], positions: Int[Array, 'B T']) -> Float[Array, 'B T D']:
        return self.drop(embedded + position_schemes.on_embedding(self.config, {}, positions).astype(embedded.dtype))


def _mask(q_place: tuple[Array, Array], k_place: tuple[Array, Array], *, causal: bool = False) -> Mask:
    """A mask between `(segments, positions)` of queries and of keys."""
    return Mask(q_place[0], k_place[0], q_place[1], k_place[1], causal=causal)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """The encoder's output and which of its rows are real."""

    states: Float[Array, 'B S D']
    segment_ids: Int[Array, 'B S']


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeCache:
    """What a decode keeps. Only `past` depends on the hypothesis; the rest is held once a sentence."""

    past: KVCache
    cross_keys: tuple[Float[Array, 'B S N H'], ...]
    cross_values: tuple[Float[Array, 'B S N U'], ...]
    source_segment_ids: Int[Array, 'B S']


@dataclass(frozen=True)
class EncoderDecoder:
    """Meets `models.interface.Model`; see there for what each method promises."""

    config: ModelConfig
    vocab_size: int
    start_id: int
    execution: ExecutionConfig = ExecutionConfig()

    @property
    def max_length(self) -> int:
        """The longest source or target, subwords with eos."""
        return self.config.max_length

    @property
    def module(self) -> Transformer:
        """The Flax module that holds the parameters."""
        return Transformer(self.config, self.vocab_size, self.execution)

    def init(self, rng: PRNGKey) -> Params:
        return nn.unbox(self._boxed_init(rng))

    def logical_axes(self) -> Any:
        boxed = jax.eval_shape(self._boxed_init, jax.random.key(0))
        return jax.tree.map(
            tuple, nn.get_partition_spec(boxed), is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
        )

    def _boxed_init(self, rng: PRNGKey) -> Any:
        ones = jnp.ones((1, 1), jnp.int32)
        return self.module.init(rng, Batch(ones, ones, ones, ones, 0 * ones, 0 * ones), ones)['params']

    def hidden(self, params: Params, batch: Batch, *, dropout_rng: PRNGKey | None = None) -> Float[Array, 'B T D']:
        decoder_inputs = shift_right(batch.targets, batch.target_positions, self.start_id)
        rngs = None if dropout_rng is None else {'dropout': dropout_rng}
        return self._apply(params, batch, decoder_inputs, rngs=rngs)

    def output_table(self, params: Params) -> tuple[Float[Array, 'V D'], Float[Array, 'V'] | None]:
        """The matrix (and bias) of the vocabulary projection, padded rows included."""
        table = params['output_table'] if self.config.tie_embeddings == 'none' else params['target_embedding']['table']
        return table, params.get('output_bias')

    def project(self, params: Params, hidden: Float[Array, '... D']) -> Float[Array, '... V']:
        table, bias = self.output_table(params)
        logits = jnp.einsum('...D,VD->...V', hidden, table.astype(hidden.dtype)).astype(jnp.float32)
        if bias is not None:
            logits += jnp.broadcast_to(bias, logits.shape)
        return logits[..., : self.vocab_size]

    def encode(
        self, params: Params, inputs: Int[Array, 'B S'], segment_ids: Int[Array, 'B S'], positions: Int[Array, 'B S']
    ) -> Memory:
        states = self._apply(params, inputs, segment_ids, positions, method='encode')
        return Memory(states, segment_ids)

    def init_decode(self, params: Params, memory: Memory, max_length: int) -> DecodeCache:
        config = self.config
        attention = config.decoder_self.over(config.attention)
        cross = [self._layer(params, index, memory.states, method='project_memory') for index in self._layers()]
        past = kv_cache.empty_cache(
            config.num_decoder_layers, memory.states.shape[0], max_length, attention.num_heads, attention.head_dim,
            attention.value_dim or attention.head_dim, memory.states.dtype,
        )  # fmt: skip
        return DecodeCache(past, tuple(k for k, _ in cross), tuple(v for _, v in cross), memory.segment_ids)

    def prefill(
        self, params: Params, tokens: Int[Array, 'B P'], lengths: Int[Array, 'B'], cache: DecodeCache
    ) -> tuple[Float[Array, 'B P V'], DecodeCache]:
        hidden, cache = self._read(params, tokens, lengths, tokens.shape[1], cache)
        return self.project(params, hidden), cache

    def decode_step(
        self, params: Params, tokens: Int[Array, 'B W'], cache: DecodeCache
    ) -> tuple[Float[Array, 'B W V'], DecodeCache]:
        hidden, cache = self._read(params, tokens, jnp.ones(tokens.shape[0], jnp.int32), 1, cache)
        return self.project(params, hidden), cache

    def _read(
        self, params: Params, tokens: Int[Array, 'B T'], lengths: Int[Array, 'B'], num_new: int, cache: DecodeCache
    ) -> tuple[Float[Array, 'B T D'], DecodeCache]:
        """Reads `num_new` slots of tokens for each hypothesis (several slots only while W = 1)."""
        first_slot, width = cache.past.next_slot, cache.past.num_hypotheses
        past, positions = kv_cache.open_slots(cache.past, lengths, num_new)
        positions = jnp.broadcast_to(positions, tokens.shape)
        positions = jnp.minimum(positions, self.max_length - 1)  # only rows of ended sentences ever go beyond
        past_mask = kv_cache.visible_past(past, positions)
        ones = jnp.ones_like(tokens)
        memory_mask = Mask(ones, cache.source_segment_ids, positions, jnp.zeros_like(cache.source_segment_ids))
        x = self._apply(params, tokens, positions, method='embed_target')
        keys, values = [], []
        for index in self._layers():

            def extend(k: Array, v: Array, index: int = index) -> tuple[Array, Array, Mask, tuple[Array, Array]]:
                k = kv_cache.write(past.keys[index], k, first_slot, width)
                v = kv_cache.write(past.values[index], v, first_slot, width)
                return k, v, past_mask, (k, v)

            memory_kv = (cache.cross_keys[index], cache.cross_values[index])
            x, (k, v) = self._layer(params, index, x, extend, memory_kv, memory_mask, method='step')
            keys.append(k)
            values.append(v)
        if self.config.norm_order == 'pre':
            x = self._final_norm(params, x)
        past = dataclasses.replace(past, keys=tuple(keys), values=tuple(values))
        return x, dataclasses.replace(cache, past=past)

    def broadcast(self, cache: DecodeCache, num_hypotheses: int) -> DecodeCache:
        return dataclasses.replace(cache, past=kv_cache.broadcast(cache.past, num_hypotheses))

    def reorder(self, cache: DecodeCache, parents: Int[Array, 'B W']) -> DecodeCache:
        return dataclasses.replace(cache, past=kv_cache.reorder(cache.past, parents))

    def select(self, cache: DecodeCache, sentences: Int[Array, 'C']) -> DecodeCache:
        return jax.tree.map(lambda leaf: leaf[sentences] if leaf.ndim else leaf, cache)

    def grow(self, cache: DecodeCache, max_length: int) -> DecodeCache:
        return dataclasses.replace(cache, past=kv_cache.grow(cache.past, max_length))

    def _apply(self, params: Params, *args: Any, **options: Any) -> Any:
        return self.module.apply({'params': params}, *args, **options)

    def _layers(self) -> range:
        return range(self.config.num_decoder_layers)

    def _layer(self, params: Params, index: int, *args: Any, method: str) -> Any:
        """One decoder layer on its own, outside the scan: a decode unrolls the layers."""
        layer = DecoderLayer(self.config, jnp.dtype(self.config.compute_dtype))
        own = jax.tree.map(lambda stacked: stacked[index], params['decoder']['layers'])
        return layer.apply({'params': own}, *args, method=method)

    def _final_norm(self, params: Params, x: Float[Array, 'B T D']) -> Float[Array, 'B T D']:
        norm: Any = make_norm(self.config, jnp.dtype(self.config.compute_dtype))
        return norm.apply({'params': params['decoder']['final_norm']}, x)
