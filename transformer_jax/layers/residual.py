"""How a sublayer is joined to the residual stream: post-norm as in the paper (section 5.4), or pre-norm."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from transformer_jax.config import ModelConfig
from transformer_jax.layers.dropout import Dropout
from transformer_jax.layers.norm import KeptNorm, Normalised, Rows, finish
from transformer_jax.parallel.platform import target_platform
from transformer_jax.parallel.rules import constrain
from transformer_jax.shapes import Array, Float


def make_norm(config: ModelConfig, dtype: jnp.dtype, name: str | None = None) -> nn.Module:
    """The normalisation the config names; scales (and biases) are float32, as are its sums."""
    if target_platform() == 'tpu':
        return KeptNorm(config.norm != 'rms_norm', config.norm_epsilon, dtype, name=name)
    partitioned = nn.with_logical_partitioning
    scale_init = partitioned(nn.initializers.ones_init(), ('embed',))
    if config.norm == 'rms_norm':
        return nn.RMSNorm(epsilon=config.norm_epsilon, dtype=dtype, scale_init=scale_init, name=name)
    bias_init = partitioned(nn.initializers.zeros_init(), ('embed',))
    return nn.LayerNorm(epsilon=config.norm_epsilon, dtype=dtype, scale_init=scale_init, bias_init=bias_init, name=name)


def open_rows(config: ModelConfig, rows: Float[Array, 'B T D']) -> Rows:
    """Rows in the form that `Residual.leave_open` gives them."""
    if target_platform() != 'tpu' or config.norm_order == 'pre':
        return rows
    width = rows.shape[-1:]
    return Normalised(rows, jnp.ones(width), None if config.norm == 'rms_norm' else jnp.zeros(width))


class Residual(nn.Module):
    """Norm(x + Dropout(Sublayer(x))), or x + Dropout(Sublayer(Norm(x))) with `norm_order='pre'`."""

    config: ModelConfig
    dtype: jnp.dtype

    def __call__(
        self, inputs: Float[Array, 'B T D'], sublayer: Callable[[Float[Array, 'B T D']], Float[Array, 'B T D']]
    ) -> Float[Array, 'B T D']:
        return finish(self.leave_open(inputs, sublayer))

    @nn.compact
    def leave_open(
        self, inputs: Float[Array, 'B T D'], sublayer: Callable[[Float[Array, 'B T D']], Float[Array, 'B T D']]
    ) -> Rows:
        """The same, but the last step of a norm that is a `KeptNorm` is left to the caller."""
        norm, drop = make_norm(self.config, self.dtype, 'norm'), Dropout(self.config.dropout_rate)
        if self.config.norm_order == 'pre':
            return checkpoint_name(inputs + drop(self._lay_out(sublayer(norm(inputs)))), 'stream')
        stream = checkpoint_name(inputs + drop(self._lay_out(sublayer(inputs))), 'stream')
        return norm.normalise(stream) if isinstance(norm, KeptNorm) else norm(stream)

    @staticmethod
    def _lay_out(outputs: Float[Array, 'B T D']) -> Float[Array, 'B T D']:
        """On a mesh the rows stay where they are, and weights come to them."""
        return constrain(outputs, 'batch', 'length', None)
