"""What every model family shares: parameters, the vocabulary projection, and caches as pytrees."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.config import AttentionConfig, ConfigError, ExecutionConfig, ModelConfig
from transformer_jax.data.batch import Batch
from transformer_jax.layers import kv_cache
from transformer_jax.layers.embedding import Embedding, padded_rows
from transformer_jax.models.interface import TRANSLATION, Task
from transformer_jax.shapes import Array, Cache, Float, Int, Key, Params, PRNGKey


def shift_right(targets: Int[Array, 'B T'], positions: Int[Array, 'B T'], start_id: int) -> Int[Array, 'B T']:
    """The decoder's inputs: each target's predecessor, and the start id where a segment begins."""
    previous = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(positions == 0, start_id, previous)


def check_single_table(config: ModelConfig) -> None:
    """Refuses what tells two token tables apart, in a family that reads one kind of text."""
    if config.tie_embeddings == 'output':
        raise ConfigError(
            "config.model.tie_embeddings is 'output', which gives source and target a table each, but this model reads "
            "one text; it must be 'all' (input = output) or 'none'"
        )


class VocabularyModule(nn.Module):
    """A Flax module with the tables of embeddings and of the vocabulary projection, tied as the config says."""

    config: ModelConfig
    vocab_size: int
    execution: ExecutionConfig

    def declare_tables(self) -> None:
        """To be called in `setup`."""
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        self.target_embedding = Embedding(config, self.vocab_size, dtype)
        if config.tie_embeddings != 'all':
            self.source_embedding = Embedding(config, self.vocab_size, dtype)
        rows = padded_rows(self.vocab_size, config.vocab_pad_multiple)
        partitioned: Any = nn.with_logical_partitioning
        if config.tie_embeddings == 'none':
            normal = partitioned(nn.initializers.normal(config.d_model**-0.5), ('vocab', 'embed'))
            self.output_table = self.param('output_table', normal, (rows, config.d_model), jnp.float32)
        if config.output_bias:
            zeros = partitioned(nn.initializers.zeros_init(), ('vocab',))
            self.output_bias = self.param('output_bias', zeros, (rows,), jnp.float32)

    def embed_source(self, ids: Int[Array, 'B S']) -> Float[Array, 'B S D']:
        """Source ids, before their positions."""
        embedding = self.target_embedding if self.config.tie_embeddings == 'all' else self.source_embedding
        return embedding(ids)


@dataclass(frozen=True)
class Family:
    """The part of `models.interface.Model` that does not differ between families; see there for what each promises.

    A family adds its Flax `module`, called as `module(batch, decoder_inputs) -> hidden`, whose parameters hold the
    tables named in `output_table`, and its decoding. Its cache is a dataclass with a `DecodeState` named `state`.
    """

    config: ModelConfig
    vocab_size: int
    start_id: int
    execution: ExecutionConfig = ExecutionConfig()

    @staticmethod
    def task_of(config: ModelConfig) -> Task:
        """What a model of this config is for."""
        return TRANSLATION

    @staticmethod
    def attention_uses(config: ModelConfig) -> dict[str, dict[str, Any]]:
        """Where a model of this config attends, by name, each with what the family knows of `attention.variant.Use`."""
        return {
            'encoder_self': {'decodes': False},
            'decoder_self': {'causal': True},
            'cross': {'cross': True},
        }

    @staticmethod
    def attention_config(config: ModelConfig, use: str) -> AttentionConfig:
        """The settings that this use of attention runs with."""
        return config.attention_of(use)

    @staticmethod
    def attention_length(config: ModelConfig, use: str, source_length: int, target_length: int) -> int:
        """The longest side of this use of attention on texts of these lengths."""
        lengths = {'encoder_self': (source_length,), 'decoder_self': (target_length,)}
        return max(lengths.get(use, (source_length, target_length)))

    @staticmethod
    def check(config: ModelConfig) -> None:
        """Checks what the family alone knows of a config. Raises `ConfigError`."""

    @property
    def task(self) -> Task:
        """What the model is for."""
        return self.task_of(self.config)

    @property
    def max_length(self) -> int:
        """The longest source or target, subwords with eos."""
        return self.config.max_length

    @property
    def module(self) -> nn.Module:
        """The Flax module that holds the parameters."""
        raise NotImplementedError

    def init(self, rng: PRNGKey) -> Params:
        return nn.unbox(self._boxed_init(rng))

    def logical_axes(self) -> Any:
        boxed = jax.eval_shape(self._boxed_init, jax.random.key(0))
        return jax.tree.map(
            tuple, nn.get_partition_spec(boxed), is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
        )

    def _boxed_init(self, rng: PRNGKey) -> Any:
        ones = jnp.ones((1, 1), jnp.int32)
        batch = Batch(ones, ones, ones, ones, 0 * ones, 0 * ones)
        # By itself Flax would ask for every collection, and so for weights of attention that has none.
        return self.module.init(rng, batch, ones, mutable=['params'])['params']

    def objective(self, batch: Batch, rngs: Key[Array, 'B']) -> Batch:
        return batch

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
        logits = jnp.einsum('...D,VD->...V', hidden, table.astype(hidden.dtype), preferred_element_type=jnp.float32)
        if bias is not None:
            logits += jnp.broadcast_to(bias, logits.shape)
        return logits[..., : self.vocab_size]

    def prefill(
        self, params: Params, tokens: Int[Array, 'B P'], lengths: Int[Array, 'B'], cache: Cache
    ) -> tuple[Float[Array, 'B P V'], Cache]:
        hidden, cache = self._read(params, tokens, lengths, tokens.shape[1], cache)
        return self.project(params, hidden), cache

    def decode_step(
        self, params: Params, tokens: Int[Array, 'B W'], cache: Cache
    ) -> tuple[Float[Array, 'B W V'], Cache]:
        hidden, cache = self._read(params, tokens, jnp.ones(tokens.shape[0], jnp.int32), 1, cache)
        return self.project(params, hidden), cache

    def _read(
        self, params: Params, tokens: Int[Array, 'B T'], lengths: Int[Array, 'B'], num_new: int, cache: Any
    ) -> tuple[Float[Array, 'B T D'], Any]:
        """Reads `num_new` slots of tokens for each hypothesis (several slots only while W = 1): their hidden states."""
        raise NotImplementedError

    def broadcast(self, cache: Cache, num_hypotheses: int) -> Cache:
        return dataclasses.replace(cache, state=kv_cache.broadcast(cache.state, num_hypotheses))

    def reorder(self, cache: Cache, parents: Int[Array, 'B W']) -> Cache:
        return dataclasses.replace(cache, state=kv_cache.reorder(cache.state, parents))

    def select(self, cache: Cache, sentences: Int[Array, 'C']) -> Cache:
        return jax.tree.map(lambda leaf: leaf[sentences] if leaf.ndim else leaf, cache)

    def grow(self, cache: Cache, max_length: int) -> Cache:
        return dataclasses.replace(cache, state=kv_cache.grow(cache.state, max_length))

    def _apply(self, params: Params, *args: Any, **options: Any) -> Any:
        return self.module.apply({'params': params}, *args, **options)
