"""Queries, keys and values side by side in one array against the three by themselves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.pallas_tpu import RowKernel, packed_attention, row_attention
from transformer_jax.config import AttentionConfig
from transformer_jax.layers.multihead import MultiHeadAttention
from transformer_jax.parallel.platform import compiling_for

B, T = 2, 7


def draw(*shape: int) -> jax.Array:
    return jnp.float32(np.random.default_rng(len(shape)).normal(size=shape))


@pytest.mark.parametrize(('num_heads', 'width', 'right'), [(4, 32, 0), (1, 128, None)])
def test_the_kernel_takes_and_makes_them_side_by_side(num_heads: int, width: int, right: int | None) -> None:
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1] * 7])
    ids = segments, jnp.where(segments > 0, segments, -1)
    kernel = RowKernel(num_heads, 0.3, None, right, True)
    qkv, probe = draw(B, T, 3 * num_heads * width), draw(B, T, num_heads, width)

    def packed(qkv: jax.Array) -> jax.Array:
        return (packed_attention(kernel, qkv, *ids).reshape(probe.shape) * probe).sum()

    def apart(qkv: jax.Array) -> jax.Array:
        parts = (part.reshape(probe.shape) for part in jnp.split(qkv, 3, axis=-1))
        return (row_attention(kernel, *parts, *ids) * probe).sum()

    jax.tree.map(oracles.assert_close, jax.value_and_grad(packed)(qkv), jax.value_and_grad(apart)(qkv))


@pytest.mark.parametrize('is_packed', [True, False])
@pytest.mark.parametrize(('num_heads', 'width', 'right'), [(4, 32, 0), (1, 128, None)])
def test_the_kernel_takes_the_product_that_follows(
    num_heads: int, width: int, right: int | None, is_packed: bool
) -> None:
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1] * 7])
    ids = segments, jnp.where(segments > 0, segments, -1)
    kernel = RowKernel(num_heads, 0.3, None, right, True)
    qkv, matrix, probe = draw(B, T, 3 * num_heads * width), draw(num_heads * width, 11), draw(B, T, 11)

    def attend(qkv: jax.Array, *projection: jax.Array) -> jax.Array:
        if is_packed:
            return packed_attention(kernel, qkv, *ids, *projection)
        parts = (part.reshape(B, T, num_heads, width) for part in jnp.split(qkv, 3, axis=-1))
        return row_attention(kernel, *parts, *ids, *projection)

    def at_once(qkv: jax.Array, matrix: jax.Array) -> jax.Array:
        return (attend(qkv, matrix) * probe).sum()

    def one_after_the_other(qkv: jax.Array, matrix: jax.Array) -> jax.Array:
        return ((attend(qkv).reshape(B, T, -1) @ matrix) * probe).sum()

    actual, expected = (jax.value_and_grad(f, (0, 1))(qkv, matrix) for f in (at_once, one_after_the_other))
    jax.tree.map(oracles.assert_close, actual, expected)


@pytest.mark.parametrize(('num_heads', 'head_dim'), [(4, 32), (3, 5)], ids=['whole lanes', 'by other kernels'])
def test_the_layer_for_a_tpu_equals_that_for_others(num_heads: int, head_dim: int) -> None:
    width = 11
    layer = MultiHeadAttention(AttentionConfig(num_heads=num_heads, head_dim=head_dim), width, jnp.dtype('float32'))
    segments = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1] * 7])
    positions = jnp.array([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
    mask = Mask(segments, segments, positions, positions, causal=True, aligned=True)
    inputs, probe = draw(B, T, width), draw(B, T, width) * (segments > 0)[..., None]
    params = layer.init(jax.random.key(0), inputs, inputs, mask)

    def run(params: Any, inputs: jax.Array) -> jax.Array:
        return (layer.apply(params, inputs, inputs, mask) * probe).sum()

    expected = jax.value_and_grad(run, argnums=(0, 1))(params, inputs)
    with compiling_for('tpu'):
        program = str(jax.make_jaxpr(run)(params, inputs))
        actual = jax.value_and_grad(run, argnums=(0, 1))(params, inputs)
    assert program.count('concatenate') >= 1
    jax.tree.map(lambda a, b: oracles.assert_close(a, b, 1e-5), actual, expected)
