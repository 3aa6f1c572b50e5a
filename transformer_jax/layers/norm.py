"""Normalisation that keeps what it normalised for its backward pass, in the place of its inputs.

With the normalised rows at hand neither pass makes moments again: `remat=names` keeps them and makes all else from
them, at one multiplication an element. Their memory is that of the inputs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from transformer_jax.shapes import Array, Float


class KeptNorm(nn.Module):
    """Layer norm, or with `centred` off RMS norm; the parameters are those of Flax's modules. Moments in float32."""

    centred: bool
    epsilon: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, inputs: Float[Array, '... D']) -> Float[Array, '... D']:
        partitioned: Any = nn.with_logical_partitioning
        width = inputs.shape[-1:]
        scale = self.param('scale', partitioned(nn.initializers.ones_init(), ('embed',)), width, jnp.float32)
        bias = None
        if self.centred:
            bias = self.param('bias', partitioned(nn.initializers.zeros_init(), ('embed',)), width, jnp.float32)
        static = _Static(self.centred, self.epsilon, jnp.dtype(self.dtype), inputs.dtype)
        return _norm(static, inputs, scale, bias)


class _Static(NamedTuple):
    centred: bool
    epsilon: float
    dtype: jnp.dtype  # of what is kept and of the outputs
    inputs_dtype: jnp.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(static: _Static, inputs: Array, scale: Array, bias: Array | None) -> Array:
    return _forward(static, inputs, scale, bias)[0]


def _forward(static: _Static, inputs: Array, scale: Array, bias: Array | None) -> tuple[Array, tuple[Array, ...]]:
    centred, epsilon, dtype, _ = static
    rows = inputs.astype(jnp.float32)
    mean = rows.mean(-1, keepdims=True) if centred else jnp.zeros((*rows.shape[:-1], 1))
    variance = jnp.maximum((rows * rows).mean(-1, keepdims=True) - mean * mean, 0)
    # One number a row: kept without the last axis, which would fill one lane of 128.
    inverse = checkpoint_name(jax.lax.rsqrt(variance + epsilon)[..., 0], 'normalised')
    normalised = checkpoint_name(((rows - mean) * inverse[..., None]).astype(dtype), 'normalised')
    outputs = normalised.astype(jnp.float32) * jnp.broadcast_to(scale, rows.shape)
    outputs = outputs if bias is None else outputs + jnp.broadcast_to(bias, rows.shape)
    return outputs.astype(dtype), (normalised, inverse, scale)


def _backward(static: _Static, kept: tuple[Array, ...], d_outputs: Array) -> tuple[Array, Array, Array | None]:
    normalised, inverse, scale = kept
    rows, d_rows = normalised.astype(jnp.float32), d_outputs.astype(jnp.float32)
    d_rows *= jnp.broadcast_to(scale, rows.shape)
    d_inputs = d_rows - rows * (d_rows * rows).mean(-1, keepdims=True)
    if static.centred:
        d_inputs -= d_rows.mean(-1, keepdims=True)
    d_inputs = (d_inputs * inverse[..., None]).astype(static.inputs_dtype)
    d_outputs, all_rows = d_outputs.astype(jnp.float32), tuple(range(rows.ndim - 1))
    return d_inputs, (d_outputs * rows).sum(all_rows), d_outputs.sum(all_rows) if static.centred else None


_norm.defvjp(_forward, _backward)
