"""The position-wise feed-forward layer. Section 3.3."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from transformer_jax.layers.dropout import Dropout
from transformer_jax.parallel.rules import constrain
from transformer_jax.shapes import Array, Float

_HIDDEN = ('batch', 'length', 'mlp')  # logical axes of the hidden layer
ACTIVATIONS = {
    'relu': jax.nn.relu,
    'gelu': functools.partial(jax.nn.gelu, approximate=False),
    'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
    'swish': jax.nn.swish,
    'swiglu': jax.nn.swish,
}


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2; with 'swiglu' the hidden layer is swish(x W_1 + b_1) * (x W_3 + b_3)."""

    d_ff: int
    activation: str
    dropout_rate: float
    dtype: jnp.dtype
    init_scale: float = 1.0  # variance of the first kernels, times Glorot's

    @nn.compact
    def __call__(self, inputs: Float[Array, 'B T D']) -> Float[Array, 'B T D']:
        hidden = ACTIVATIONS[self.activation](self._expand('expand', inputs))
        if self.activation == 'swiglu':
            hidden = hidden * self._expand('gate', inputs)
        hidden = Dropout(self.dropout_rate, _HIDDEN)(constrain(hidden, *_HIDDEN))
        return self._dense('contract', inputs.shape[-1], ('mlp', 'embed'))(hidden)

    def _expand(self, name: str, inputs: Float[Array, 'B T D']) -> Float[Array, 'B T F']:
        return checkpoint_name(self._dense(name, self.d_ff, ('embed', 'mlp'))(inputs), 'hidden')

    def _dense(self, name: str, width: int, axes: tuple[str, str]) -> nn.Dense:
        glorot = nn.initializers.variance_scaling(self.init_scale, 'fan_avg', 'uniform')
        return nn.Dense(
            width,
            dtype=self.dtype,
            kernel_init=nn.with_logical_partitioning(glorot, axes),
            bias_init=nn.with_logical_partitioning(nn.initializers.zeros_init(), axes[1:]),
            name=name,
        )
