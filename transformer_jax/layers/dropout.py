"""Dropout with cheap random bits."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer_jax.shapes import Array


class Dropout(nn.Module):
    """Zeroes each element with probability `rate` and scales the rest, when the call has a 'dropout' key.

    Draws 16 bits an element, half of what a float32 uniform takes, so the rate is exact to 1 / 65,536.
    """

    rate: float

    def __call__(self, inputs: Array) -> Array:
        if self.rate == 0.0 or not self.has_rng('dropout'):
            return inputs
        return dropout(inputs, self.rate, self.make_rng('dropout'))


def dropout(inputs: Array, rate: float, rng: jax.Array) -> Array:
    """The function under `Dropout`; its expectation is `inputs` exactly."""
    levels = 2**16
    kept = round((1 - rate) * levels)
    keep = jax.random.bits(rng, inputs.shape, jnp.uint16) < kept
    return jnp.where(keep, inputs * (levels / kept), 0).astype(inputs.dtype)
