"""T5's buckets and biases against the published formula."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from transformer_jax.positions.t5 import T5Terms, offset_buckets


def bucket(offset: int, num_buckets: int, max_distance: int, *, causal: bool) -> int:
    """The formula as published, for one offset of a key from its query; a boundary counts as reached."""
    first, distance = 0, max(-offset, 0)
    if not causal:
        num_buckets //= 2
        first, distance = num_buckets * (offset > 0), abs(offset)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    ratio = math.log(distance / exact) / math.log(max_distance / exact)
    return first + min(exact + int(ratio * (num_buckets - exact) + 1e-9), num_buckets - 1)


SIZES = [(32, 128), (10, 23), (6, 7), (4, 3), (14, 100), (64, 1000)]
MODES = pytest.mark.parametrize('causal', [False, True], ids=['both sides', 'causal'])


@MODES
@pytest.mark.parametrize(('num_buckets', 'max_distance'), SIZES)
def test_buckets_are_those_of_the_formula(num_buckets: int, max_distance: int, causal: bool) -> None:
    expected = [bucket(o, num_buckets, max_distance, causal=causal) for o in range(-max_distance, max_distance + 1)]
    assert offset_buckets(num_buckets, max_distance, causal=causal).tolist() == expected


def test_known_buckets() -> None:
    both, causal = offset_buckets(32, 128, causal=False), offset_buckets(32, 128, causal=True)
    offsets = [-128, -91, -90, -64, -32, -16, -8, -7, -1, 0, 1, 7, 8, 16, 32, 64, 128]
    assert [both[o + 128] for o in offsets] == [15, 15, 14, 14, 12, 10, 8, 7, 1, 0, 17, 23, 24, 26, 28, 30, 31]
    assert [causal[o + 128] for o in offsets] == [31, 29, 29, 26, 21, 16, 8, 7, 1, 0, 0, 0, 0, 0, 0, 0, 0]


@MODES
def test_biases_and_their_gradient_equal_the_loops(causal: bool) -> None:
    rng = np.random.default_rng(0)
    table, upstream = rng.normal(size=(10, 3)), rng.normal(size=(2, 3, 7, 11))
    q_positions, k_positions = rng.integers(0, 61, (2, 7)), rng.integers(0, 61, (2, 11))

    def biases(table: np.ndarray) -> np.ndarray:
        out = np.zeros((2, 3, 7, 11))
        for b, n, t, s in np.ndindex(out.shape):
            out[b, n, t, s] = table[bucket(k_positions[b, s] - q_positions[b, t], 10, 23, causal=causal), n]
        return out

    def bias(table: jax.Array) -> jax.Array:
        return T5Terms(table, 23, causal).bias(jnp.asarray(q_positions), jnp.asarray(k_positions))

    oracles.assert_close(bias(jnp.asarray(table, jnp.float32)), biases(table), 1e-6)
    gradient = jax.grad(lambda table: (bias(table) * upstream).sum())(jnp.asarray(table, jnp.float32))
    oracles.assert_close(gradient, oracles.numeric_gradient(lambda table: (biases(table) * upstream).sum(), table))


@MODES
def test_beyond_max_distance_all_share_the_last_bucket(causal: bool) -> None:
    terms = T5Terms(jnp.arange(10.0)[:, None], 23, causal)
    at = jnp.asarray([[0, 4976, 4977, 5000, 5023, 5024, 90_000]])
    biases = terms.bias(jnp.asarray([[5000]]), at).ravel().tolist()
    assert biases == ([9, 9, 9, 0, 0, 0, 0] if causal else [4, 4, 4, 0, 9, 9, 9])
