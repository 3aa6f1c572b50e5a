"""Encoder and decoder layers, and stacks of them as one scanned module. Section 3.1, Figure 1."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.attention.mask import Mask
from transformer_jax.config import ExecutionConfig, ModelConfig
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.kv_cache import LayerState, Reading
from transformer_jax.layers.multihead import MultiHeadAttention
from transformer_jax.layers.residual import Residual, make_norm
from transformer_jax.position_terms import PositionTerms
from transformer_jax.shapes import Array, Float

REMAT_POLICIES = {
    'full': jax.checkpoint_policies.nothing_saveable,
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def make_attention(config: ModelConfig, use: str, dtype: jnp.dtype, *, causal: bool = False) -> MultiHeadAttention:
    """Attention in one of its uses: 'encoder_self', 'decoder_self' or 'cross'."""
    return MultiHeadAttention(
        config.attention_of(use),
        config.d_model,
        dtype,
        config.init_scale,
        scheme=None if use == 'cross' else config,
        causal=causal,
        max_length=config.max_length,
    )


def _make_feed_forward(config: ModelConfig, dtype: jnp.dtype) -> FeedForward:
    return FeedForward(config.d_ff, config.activation, config.activation_dropout_rate, dtype, config.init_scale)


class EncoderLayer(nn.Module):
    """Token mixing (the paper's self-attention), then feed-forward."""

    config: ModelConfig
    dtype: jnp.dtype

    def setup(self) -> None:
        config, dtype = self.config, self.dtype
        self.self_attention = make_attention(config, 'encoder_self', dtype)
        self.self_attention_residual = Residual(config, dtype)
        self.feed_forward = _make_feed_forward(config, dtype)
        self.feed_forward_residual = Residual(config, dtype)

    def __call__(
        self, inputs: Float[Array, 'B S D'], mask: Mask, terms: PositionTerms | None = None
    ) -> Float[Array, 'B S D']:
        x = self.self_attention_residual(inputs, lambda y: self.self_attention.mix(y, mask, terms))
        return self.feed_forward_residual(x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Causal token mixing (the paper's self-attention), cross-attention to the encoder's output, then feed-forward."""

    config: ModelConfig
    dtype: jnp.dtype

    def setup(self) -> None:
        config, dtype = self.config, self.dtype
        self.self_attention = make_attention(config, 'decoder_self', dtype, causal=True)
        self.self_attention_residual = Residual(config, dtype)
        self.cross_attention = make_attention(config, 'cross', dtype)
        self.cross_attention_residual = Residual(config, dtype)
        self.feed_forward = _make_feed_forward(config, dtype)
        self.feed_forward_residual = Residual(config, dtype)

    def __call__(
        self,
        inputs: Float[Array, 'B T D'],
        mask: Mask,
        memory: Float[Array, 'B S D'],
        memory_mask: Mask,
        terms: PositionTerms | None = None,
    ) -> Float[Array, 'B T D']:
        x = self.self_attention_residual(inputs, lambda y: self.self_attention.mix(y, mask, terms))
        x = self.cross_attention_residual(x, lambda y: self.cross_attention(y, memory, memory_mask))
        return self.feed_forward_residual(x, self.feed_forward)

    def project_memory(self, memory: Float[Array, 'B S D']) -> tuple[Array, Array]:
        """Cross keys and values, computed once a sentence."""
        return self.cross_attention.project_kv(memory)

    def init_state(self, batch: int, num_slots: int) -> LayerState:
        """What the layer keeps of the target read so far."""
        return self.self_attention.init_state(batch, num_slots)

    def step(
        self,
        inputs: Float[Array, 'B T D'],
        state: LayerState,
        reading: Reading,
        memory_kv: tuple[Array, Array],
        memory_mask: Mask,
        terms: PositionTerms | None = None,
    ) -> tuple[Float[Array, 'B T D'], LayerState]:
        """The layer on new rows only."""
        new_state = state

        def mix(y: Array) -> Array:
            nonlocal new_state
            mixed, new_state = self.self_attention.extend(y, state, reading, terms)
            return mixed

        x = self.self_attention_residual(inputs, mix)
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention.attend(y, *memory_kv, memory_mask, cached=True)
        )
        return self.feed_forward_residual(x, self.feed_forward), new_state


class Stack(nn.Module):
    """`num_layers` equal layers with their parameters stacked on a leading axis, then the final norm of pre-norm.

    `unroll` layers stand in the program a loop turn; the parameter tree is the same whatever it is.
    """

    layer: type[nn.Module]
    num_layers: int
    config: ModelConfig
    execution: ExecutionConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, inputs: Float[Array, 'B T D'], *context: Any) -> Float[Array, 'B T D']:
        layer: Any = self.layer
        if self.execution.remat != 'none':
            layer = nn.remat(layer, policy=REMAT_POLICIES[self.execution.remat], prevent_cse=False)

        def body(module: nn.Module, carry: Array, *context: Any) -> tuple[Array, None]:
            return module(carry, *context), None

        scanned = nn.scan(
            body,
            variable_axes={'params': 0},
            split_rngs={'params': True, 'dropout': True},
            in_axes=(nn.broadcast,) * len(context),  # pyright: ignore[reportArgumentType]
            length=self.num_layers,
            unroll=min(self.execution.unroll or self.num_layers, self.num_layers),
            metadata_params={nn.PARTITION_NAME: 'layers'},
        )
        x, _ = scanned(layer(self.config, self.dtype, name='layers'), inputs, *context)
        return make_norm(self.config, self.dtype, 'final_norm')(x) if self.config.norm_order == 'pre' else x
