"""Dropout with cheap random bits."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from transformer_jax.parallel.mesh import DATA
from transformer_jax.shapes import Array, PRNGKey

_LEVELS = 2**16  # 16 bits an element, half of what a float32 uniform takes: the rate is exact to 1 / 65,536


class Dropout(nn.Module):
    """Zeroes each element with probability `rate` and scales the rest, when the call has a 'dropout' key."""

    rate: float

    def __call__(self, inputs: Array) -> Array:
        if self.rate == 0.0 or not self.has_rng('dropout'):
            return inputs
        return dropout(inputs, self.rate, self.make_rng('dropout'))


def dropout(inputs: Array, rate: float, rng: PRNGKey) -> Array:
    """The function under `Dropout`; its expectation is `inputs` exactly."""
    kept = round((1 - rate) * _LEVELS)
    return jnp.where(_random_bits(rng, inputs.shape) < kept, inputs * (_LEVELS / kept), 0).astype(inputs.dtype)


def _random_bits(rng: PRNGKey, shape: tuple[int, ...]) -> Array:
    """Random uint16 for an array whose first axis may lie over the data axis of the current mesh.

    Threefry bits are the same under every sharding and are left to the compiler. The faster generators can't be split,
    so each shard draws its own under a key of its own: other masks on other meshes, the same on the same one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape[DATA] == 1 or str(jax.random.key_impl(rng)) == 'threefry2x32':
        return jax.random.bits(rng, shape, jnp.uint16)
    rows = shape[0] // mesh.shape[DATA]

    def draw(rng: PRNGKey) -> Array:
        return jax.random.bits(jax.random.fold_in(rng, jax.lax.axis_index(DATA)), (rows, *shape[1:]), jnp.uint16)

    return jax.shard_map(draw, in_specs=PartitionSpec(), out_specs=PartitionSpec(DATA), check_vma=False)(rng)
