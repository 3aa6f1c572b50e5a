"""Encoder and decoder layers, and stacks of them as one scanned module. Section 3.1, Figure 1."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.attention.mask import Mask
from transformer_jax.config import ExecutionConfig, ModelConfig
from transformer_jax.layers.feed_forward import FeedForward
from transformer_jax.layers.multihead import MultiHeadAttention
from transformer_jax.layers.residual import Residual, make_norm
from transformer_jax.shapes import Array, Float

REMAT_POLICIES = {
    'full': jax.checkpoint_policies.nothing_saveable,
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    config: ModelConfig
    dtype: jnp.dtype

    def setup(self) -> None:
        config, dtype = self.config, self.dtype
        self.self_attention = MultiHeadAttention(
            config.encoder_self.over(config.attention), config.d_model, dtype, config.init_scale
        )
        self.self_attention_residual = Residual(config, dtype)
        self.feed_forward = FeedForward(
            config.d_ff, config.activation, config.activation_dropout_rate, dtype, config.init_scale
        )
        self.feed_forward_residual = Residual(config, dtype)

    def __call__(self, inputs: Float[Array, 'B S D'], mask: Mask) -> Float[Array, 'B S D']:
        x = self.self_attention_residual(inputs, lambda y: self.self_attention(y, y, mask))
        return self.feed_forward_residual(x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the encoder's output, then feed-forward."""

    config: ModelConfig
    dtype: jnp.dtype

    def setup(self) -> None:
        config, dtype = self.config, self.dtype
        self.self_attention = MultiHeadAttention(
            config.decoder_self.over(config.attention), config.d_model, dtype, config.init_scale
        )
        self.self_attention_residual = Residual(config, dtype)
        self.cross_attention = MultiHeadAttention(
            config.cross.over(config.attention), config.d_model, dtype, config.init_scale
        )
        self.cross_attention_residual = Residual(config, dtype)
        self.feed_forward = FeedForward(
            config.d_ff, config.activation, config.activation_dropout_rate, dtype, config.init_scale
        )
        self.feed_forward_residual = Residual(config, dtype)

    def __call__(
        self, inputs: Float[Array, 'B T D'], mask: Mask, memory: Float[Array, 'B S D'], memory_mask: Mask
    ) -> Float[Array, 'B T D']:
        x = self.self_attention_residual(inputs, lambda y: self.self_attention(y, y, mask))
        x = self.cross_attention_residual(x, lambda y: self.cross_attention(y, memory, memory_mask))
        return self.feed_forward_residual(x, self.feed_forward)

    def project_memory(self, memory: Float[Array, 'B S D']) -> tuple[Array, Array]:
        """Cross keys and values, computed once a sentence."""
        return self.cross_attention.project_kv(memory)

    def step(
        self, inputs: Float[Array, 'B T D'], extend: Any, memory_kv: tuple[Array, Array], memory_mask: Mask
    ) -> tuple[Float[Array, 'B T D'], Any]:
        """The layer on new rows only. `extend(k, v)` stores their keys and values; returns `(k, v, mask, stored)`."""
        stored = None

        def attend_to_past(y: Array) -> Array:
            nonlocal stored
            k, v, mask, stored = extend(*self.self_attention.project_kv(y))
            return self.self_attention.attend(y, k, v, mask)

        x = self.self_attention_residual(inputs, attend_to_past)
        x = self.cross_attention_residual(x, lambda y: self.cross_attention.attend(y, *memory_kv, memory_mask))
        return self.feed_forward_residual(x, self.feed_forward), stored


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
