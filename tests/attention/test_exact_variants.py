"""What fused and blocked attention gets wrong elsewhere: mixed precision, broadcast biases, 64-bit mode."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from transformer_jax.attention import VARIANTS
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options
from transformer_jax.config import AttentionConfig

B, N, T, S, H, U = 2, 3, 5, 7, 11, 13
ON_CPU = {impl: one for (kind, impl), one in VARIANTS.items() if kind == 'dot' and 'cpu' in one.supports}


def make_case(dtype):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((B, T, N, H), (B, S, N, H), (B, S, N, U)))
    q_segments, k_segments = jnp.ones((B, T), jnp.int32), jnp.ones((B, S), jnp.int32).at[1, 4:].set(0)
    places = (jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (B, length)) for length in (T, S))
    return (q, k, v), Mask(q_segments, k_segments, *places), rng


def attend(variant, arrays, mask, bias):
    return variant.function(*arrays, mask, Options(AttentionConfig(block_size=3), scale=H**-0.5, bias=bias))[0]


@pytest.mark.parametrize('impl', ON_CPU)
def test_a_float32_bias_beside_bfloat16_rows(impl):
    arrays, mask, rng = make_case(jnp.bfloat16)
    bias = jnp.float32(rng.normal(size=(B, N, T, S)))
    probe = rng.normal(size=(B, T, N, U))

    def loss(arrays, bias):
        return (attend(ON_CPU[impl], arrays, mask, bias).astype(jnp.float32) * probe).sum()

    exact = jax.grad(loss, argnums=(0, 1))(tuple(x.astype(jnp.float32) for x in arrays), bias)
    for ours, expected in zip(
        jax.tree.leaves(jax.grad(loss, argnums=(0, 1))(arrays, bias)), jax.tree.leaves(exact), strict=True
    ):
        ours, expected = np.float32(ours), np.asarray(expected)
        assert np.isfinite(ours).all()
        assert np.abs(ours - expected).max() <= 2e-2 * np.abs(expected).max()


@pytest.mark.parametrize('impl', ON_CPU)
@pytest.mark.parametrize('shape', [(B, 1, 1, S), (1, 1, T, S), (B, 1, T, S), (1, N, T, S), (B, N, T, S)], ids=str)
def test_every_broadcastable_bias_is_the_whole_one(impl, shape):
    arrays, mask, rng = make_case(jnp.float32)
    bias = jnp.float32(rng.normal(size=shape))
    whole = jnp.broadcast_to(bias, (B, N, T, S))
    expected = attend(ON_CPU['dense'], arrays, mask, whole)
    np.testing.assert_allclose(attend(ON_CPU[impl], arrays, mask, bias), expected, rtol=2e-5, atol=2e-6)

    def loss(bias):
        return jnp.square(attend(ON_CPU[impl], arrays, mask, bias)).sum()

    gradient = jax.grad(loss)(bias)
    assert gradient.shape == shape
    summed = jax.grad(lambda whole: jnp.square(attend(ON_CPU['dense'], arrays, mask, whole)).sum())(whole)
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    np.testing.assert_allclose(gradient, summed.sum(axis=axes, keepdims=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('impl', ON_CPU)
def test_64_bit_mode_computes_in_64_bits(impl):
    with jax.enable_x64(True):
        arrays, mask, rng = make_case(jnp.float64)
        bias = jnp.asarray(rng.normal(size=(1, N, T, S)))
        output = attend(ON_CPU[impl], arrays, mask, bias)
        assert output.dtype == jnp.float64
        q, k, v = (np.asarray(array) for array in arrays)
        expected = np.zeros((B, T, N, U))
        for b, t, n in np.ndindex(B, T, N):
            keys = range(4 if b == 1 else S)
            powers = np.array([math.exp(q[b, t, n] @ k[b, s, n] / math.sqrt(H) + bias[0, n, t, s]) for s in keys])
            expected[b, t, n] = powers @ v[b, keys, n] / powers.sum()
        # The softmax of `dense` is in float32 whatever the inputs.
        oracles.assert_close(output, expected, 5e-7 if impl == 'dense' else 1e-14)
