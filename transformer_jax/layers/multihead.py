"""Multi-head attention. Section 3.2.2."""

import math
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.attention.api import attention
from transformer_jax.attention.mask import Mask
from transformer_jax.config import AttentionConfig
from transformer_jax.shapes import Array, Float

_AXES_IN = ('embed', 'heads', 'head_dim')


class MultiHeadAttention(nn.Module):
    """Concat(head_1 .. head_N) W^O with head_i = Attention(Q W^Q_i, K W^K_i, V W^V_i); self- and cross-attention.

    The pieces are methods of their own so that decoding can keep keys and values: `project_kv` once a key, then
    `attend` for each new query.
    """

    config: AttentionConfig
    d_model: int
    dtype: jnp.dtype
    init_scale: float = 1.0  # variance of the first kernels, times Glorot's

    def setup(self) -> None:
        config = self.config
        value_dim = config.value_dim or config.head_dim
        heads_in, bias = (config.num_heads, config.head_dim), config.use_bias
        scale = self.init_scale
        self.query = _Projection((self.d_model,), heads_in, _AXES_IN, bias, self.dtype, scale)
        self.key = _Projection((self.d_model,), heads_in, _AXES_IN, bias, self.dtype, scale)
        self.value = _Projection((self.d_model,), (config.num_heads, value_dim), _AXES_IN, bias, self.dtype, scale)
        axes_out = ('heads', 'head_dim', 'embed')
        self.output = _Projection((config.num_heads, value_dim), (self.d_model,), axes_out, bias, self.dtype, scale)

    def __call__(
        self, inputs_q: Float[Array, 'B T D'], inputs_kv: Float[Array, 'B S D'], mask: Mask
    ) -> Float[Array, 'B T D']:
        """Attends from every row of `inputs_q` to the rows of `inputs_kv` that `mask` lets it see."""
        return self.attend(inputs_q, *self.project_kv(inputs_kv), mask)

    def project_kv(self, inputs_kv: Float[Array, 'B S D']) -> tuple[Float[Array, 'B S N H'], Float[Array, 'B S N U']]:
        """Keys and values of these rows."""
        return self.key(inputs_kv), self.value(inputs_kv)

    def attend(
        self, inputs_q: Float[Array, 'B T D'], k: Float[Array, 'B S N H'], v: Float[Array, 'B S N U'], mask: Mask
    ) -> Float[Array, 'B T D']:
        """Attends from these rows to keys and values made earlier."""
        use_dropout = self.config.dropout_rate > 0 and self.has_rng('dropout')
        rng = self.make_rng('dropout') if use_dropout else None
        return self.output(attention(self.query(inputs_q), k, v, mask, self.config, dropout_rng=rng))


class _Projection(nn.Module):
    """A linear map between groups of axes, as one matrix product; uniform as Glorot's over the flattened matrix."""

    axes_in: tuple[int, ...]
    axes_out: tuple[int, ...]
    logical_axes: tuple[str, ...]
    use_bias: bool
    dtype: jnp.dtype
    init_scale: float

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        shape = (*self.axes_in, *self.axes_out)
        num_in = len(self.axes_in)
        glorot = nn.initializers.variance_scaling(
            self.init_scale,
            'fan_avg',
            'uniform',
            in_axis=tuple(range(num_in)),
            out_axis=tuple(range(num_in, len(shape))),
        )
        partitioned: Any = nn.with_logical_partitioning  # whose stub says that `param` returns the box
        kernel = self.param('kernel', partitioned(glorot, self.logical_axes), shape, jnp.float32)
        lead = inputs.shape[: inputs.ndim - num_in]
        width_in = kernel.size // math.prod(self.axes_out)
        outputs = inputs.reshape(*lead, width_in).astype(self.dtype) @ kernel.reshape(width_in, -1).astype(self.dtype)
        outputs = outputs.reshape(*lead, *self.axes_out)
        if self.use_bias:
            zeros = partitioned(nn.initializers.zeros_init(), self.logical_axes[num_in:])
            bias = self.param('bias', zeros, self.axes_out, jnp.float32)
            outputs += jnp.expand_dims(bias.astype(self.dtype), tuple(range(len(lead))))
        return outputs
