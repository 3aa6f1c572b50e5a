"""RoPE against rotations written out in loops, and how far it reaches."""

import cmath

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles
from transformer_jax.config import ModelConfig
from transformer_jax.positions import rope

H = 10


def turn(x: np.ndarray, positions: np.ndarray, base: float, scaling: float) -> np.ndarray:
    """Each pair (x[i], x[i + H/2]) as a complex number times e^(i angle)."""
    turned, half = np.zeros(x.shape), x.shape[-1] // 2
    for b, t, n in np.ndindex(x.shape[:3]):
        for i in range(half):
            angle = positions[b, t] / scaling / base ** (2 * i / x.shape[-1])
            number = complex(x[b, t, n, i], x[b, t, n, i + half]) * cmath.exp(1j * angle)
            turned[b, t, n, i], turned[b, t, n, i + half] = number.real, number.imag
    return turned


@pytest.mark.parametrize(('base', 'scaling'), [(10_000.0, 1.0), (997.0, 1.0), (10_000.0, 4.0), (500_000.0, 0.5)])
def test_heads_are_turned_as_the_loops_turn_them(base: float, scaling: float) -> None:
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(2, 7, 3, H)), rng.integers(0, 61, (2, 7))
    config = ModelConfig(positions='rope', rope_base=base, rope_scaling=scaling)
    turned = rope.on_heads(config, jnp.asarray(x, jnp.float32), jnp.asarray(positions))
    oracles.assert_close(turned, turn(x, positions, base, scaling))


def test_gradients_turn_back() -> None:
    rng = np.random.default_rng(1)
    x, upstream = rng.normal(size=(2, 3, 1, H)), rng.normal(size=(2, 3, 1, H))
    positions, config = np.asarray([[0, 1, 2], [40, 7, 19]]), ModelConfig(rope_base=997.0)
    gradient = jax.grad(lambda x: (rope.on_heads(config, x, jnp.asarray(positions)) * upstream).sum())
    expected = oracles.numeric_gradient(lambda x: (turn(x, positions, 997.0, 1.0) * upstream).sum(), x)
    oracles.assert_close(gradient(jnp.asarray(x, jnp.float32)), expected)


@settings(max_examples=20)
@given(q=st.integers(0, 4000), k=st.integers(0, 4000), shift=st.integers(0, 4000))
def test_a_product_depends_on_the_offset_alone_and_lengths_stay(q: int, k: int, shift: int) -> None:
    rng, config = np.random.default_rng(2), ModelConfig()
    x, y = (jnp.asarray(rng.normal(size=(1, 1, 1, H)), jnp.float32) for _ in range(2))

    def product(q: int, k: int) -> jax.Array:
        return (rope.on_heads(config, x, jnp.asarray([[q]])) * rope.on_heads(config, y, jnp.asarray([[k]]))).sum()

    np.testing.assert_allclose(product(q + shift, k + shift), product(q, k), atol=5e-3)
    length = jnp.linalg.norm(rope.on_heads(config, x, jnp.asarray([[q]])))
    np.testing.assert_allclose(length, jnp.linalg.norm(x), rtol=1e-6)


def test_scaling_by_two_reads_twice_the_positions_at_the_same_angles() -> None:
    x = jnp.asarray(np.random.default_rng(3).normal(size=(1, 31, 2, H)), jnp.float32)
    near = rope.on_heads(ModelConfig(), x, jnp.arange(31)[None])
    far = rope.on_heads(ModelConfig(rope_scaling=2.0), x, 2 * jnp.arange(31)[None])
    oracles.assert_close(far, near, 1e-6)


def test_positions_far_beyond_max_length_are_turned_too() -> None:
    x = np.random.default_rng(4).normal(size=(1, 3, 1, H))
    positions = np.asarray([[255, 256, 20_011]])
    turned = rope.on_heads(ModelConfig(max_length=256), jnp.asarray(x, jnp.float32), jnp.asarray(positions))
    oracles.assert_close(turned, turn(x, positions, 10_000.0, 1.0), 2e-3)


def test_bfloat16_heads_are_turned_by_float32_angles() -> None:
    x = jnp.asarray(np.random.default_rng(5).normal(size=(1, 3, 1, H)), jnp.bfloat16)
    positions = np.asarray([[1001, 1002, 1003]])
    turned = rope.on_heads(ModelConfig(), x, jnp.asarray(positions))
    assert turned.dtype == jnp.bfloat16
    oracles.assert_close(turned, turn(np.asarray(x, np.float64), positions, 10_000.0, 1.0), 5e-3)
