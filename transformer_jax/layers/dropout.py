"""Dropout with cheap random bits."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import NamedSharding

from transformer_jax.parallel.platform import target_platform
from transformer_jax.parallel.rules import activation_spec, ambient_mesh
from transformer_jax.shapes import Array, PRNGKey

_LEVELS = 2**16  # 16 bits an element, half of what a float32 uniform takes: the rate is exact to 1 / 65,536
_AXES = ('batch', 'length')  # logical axes, of which the trailing ones that are not named are whole


class Dropout(nn.Module):
    """Zeroes each element with probability `rate` and scales the rest, when the call has a 'dropout' key."""

    rate: float
    logical_axes: tuple[str | None, ...] = _AXES  # of the inputs; see `parallel.rules`

    def __call__(self, inputs: Array) -> Array:
        if self.rate == 0.0 or not self.has_rng('dropout'):
            return inputs
        return dropout(inputs, self.rate, self.make_rng('dropout'), self.logical_axes)


def dropout(inputs: Array, rate: float, rng: PRNGKey, logical_axes: tuple[str | None, ...] = _AXES) -> Array:
    """The function under `Dropout`; its expectation is `inputs` exactly."""
    kept = round((1 - rate) * _LEVELS)
    bits = _random_bits(rng, inputs.shape, logical_axes)
    return jnp.where(bits < kept, inputs * (_LEVELS / kept), 0).astype(inputs.dtype)


def _random_bits(rng: PRNGKey, shape: tuple[int, ...], logical_axes: tuple[str | None, ...]) -> Array:
    """Random uint16 for an array that lies on the current mesh as its logical axes say.

    Threefry bits are the same under every sharding and are left to the compiler. The faster generators can't be split,
    so each shard draws its own under a key of its own: other masks on other meshes, the same on the same one.
    """
    mesh = ambient_mesh()
    if str(jax.random.key_impl(rng)) == 'threefry2x32':
        return jax.random.bits(rng, shape, jnp.uint16)
    if mesh is None:
        return _draw(rng, shape)
    spec = activation_spec(shape, (*logical_axes, *(None,) * (len(shape) - len(logical_axes))), mesh)
    own_shape = NamedSharding(mesh, spec).shard_shape(shape)
    split_by = tuple(axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry))

    if not split_by:
        return _draw(rng, shape)

    def draw(rng: PRNGKey) -> Array:
        # Devices that hold the same shard draw the same bits.
        return _draw(jax.random.fold_in(rng, jax.lax.axis_index(split_by)), own_shape)

    return jax.shard_map(draw, in_specs=jax.P(), out_specs=spec, check_vma=False)(rng)


def _draw(rng: PRNGKey, shape: tuple[int, ...]) -> Array:
    """Random uint16 by a generator of 32 bits, of which XLA would throw half away, except on TPU."""
    if target_platform() == 'tpu':
        return jax.random.bits(rng, shape, jnp.uint16)
    size = math.prod(shape)
    words = jax.random.bits(rng, ((size + 1) // 2,), jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[:size].reshape(shape)
