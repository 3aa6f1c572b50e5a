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


class Normalised(NamedTuple):
    """Rows that a norm has yet to scale and shift, which `finish` does.

    Layers hand them to each other so: a rematerialised stack then keeps the rows once, and not before and after it.
    """

    rows: Float[Array, '... D']
    scale: Float[Array, 'D']
    bias: Float[Array, 'D'] | None


Rows = Float[Array, '... D'] | Normalised


def finish(x: Rows) -> Float[Array, '... D']:
    """The rows with their scale and bias; others as they are."""
    if not isinstance(x, Normalised):
        return x
    rows = x.rows.astype(jnp.float32)
    outputs = rows * jnp.broadcast_to(x.scale, rows.shape)
    return (outputs if x.bias is None else outputs + jnp.broadcast_to(x.bias, rows.shape)).astype(x.rows.dtype)


class KeptNorm(nn.Module):
    """Layer norm, or with `centred` off RMS norm; the parameters are those of Flax's modules. Moments in float32."""

    centred: bool
    epsilon: float
    dtype: jnp.dtype

    def __call__(self, inputs: Float[Array, '... D']) -> Float[Array, '... D']:
        return finish(self.normalise(inputs))

    @nn.compact
    def normalise(self, inputs: Float[Array, '... D']) -> Normalised:
        """Without scale and bias, so that a caller that keeps the rows keeps them once."""
        partitioned: Any = nn.with_logical_partitioning
        width = inputs.shape[-1:]
        scale = self.param('scale', partitioned(nn.initializers.ones_init(), ('embed',)), width, jnp.float32)
        bias = None
        if self.centred:
            bias = self.param('bias', partitioned(nn.initializers.zeros_init(), ('embed',)), width, jnp.float32)
        static = _Static(self.centred, self.epsilon, jnp.dtype(self.dtype), inputs.dtype)
        return Normalised(_normalise(static, inputs), scale, bias)


class _Static(NamedTuple):
    centred: bool
    epsilon: float
    dtype: jnp.dtype  # of what is kept and of the outputs
    inputs_dtype: jnp.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalise(static: _Static, inputs: Array) -> Array:
    return _forward(static, inputs)[0]


def _forward(static: _Static, inputs: Array) -> tuple[Array, tuple[Array, ...]]:
    centred, epsilon, dtype, _ = static
    rows = inputs.astype(jnp.float32)
    mean = rows.mean(-1, keepdims=True) if centred else jnp.zeros((*rows.shape[:-1], 1))
    variance = jnp.maximum((rows * rows).mean(-1, keepdims=True) - mean * mean, 0)
    # One number a row: kept without the last axis, which would fill one lane of 128.
    inverse = checkpoint_name(jax.lax.rsqrt(variance + epsilon)[..., 0], 'normalised')
    normalised = checkpoint_name(((rows - mean) * inverse[..., None]).astype(dtype), 'normalised')
    return normalised, (normalised, inverse)


def _backward(static: _Static, kept: tuple[Array, ...], d_outputs: Array) -> tuple[Array]:
    normalised, inverse = kept
    rows, d_rows = normalised.astype(jnp.float32), d_outputs.astype(jnp.float32)
    d_inputs = d_rows - rows * (d_rows * rows).mean(-1, keepdims=True)
    if static.centred:
        d_inputs -= d_rows.mean(-1, keepdims=True)
    return ((d_inputs * inverse[..., None]).astype(static.inputs_dtype),)


_normalise.defvjp(_forward, _backward)
