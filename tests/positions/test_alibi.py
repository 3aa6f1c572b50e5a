"""ALiBi's slopes and biases against what the paper says."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from transformer_jax.positions.alibi import AlibiTerms, slopes


def test_eight_heads_have_the_slopes_of_the_paper() -> None:
    assert slopes(8).tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def test_sixteen_heads_put_geometric_means_between() -> None:
    assert slopes(16)[0] == pytest.approx(2**-0.5)
    np.testing.assert_allclose(slopes(16)[1:] / slopes(16)[:-1], 2**-0.5)


@pytest.mark.parametrize(
    ('num_heads', 'logarithms'),
    [
        (1, [-8]),
        (2, [-4, -8]),
        (3, [-4, -8, -2]),
        (6, [-2, -4, -6, -8, -1, -3]),
        (12, [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5]),
    ],
)
def test_other_counts_take_every_other_slope_of_twice_the_power(num_heads: int, logarithms: list[float]) -> None:
    np.testing.assert_allclose(np.log2(slopes(num_heads)), logarithms)


def test_the_bias_is_a_slope_times_the_distance_to_either_side() -> None:
    rng = np.random.default_rng(0)
    q_positions, k_positions = rng.integers(0, 3000, (2, 7)), rng.integers(0, 3000, (2, 11))
    expected = np.zeros((2, 3, 7, 11))
    for b, n, t, s in np.ndindex(expected.shape):
        expected[b, n, t, s] = -(2.0 ** [-4, -8, -2][n]) * abs(int(q_positions[b, t]) - int(k_positions[b, s]))
    oracles.assert_close(AlibiTerms(3).bias(jnp.asarray(q_positions), jnp.asarray(k_positions)), expected, 1e-6)


def test_a_worked_row() -> None:
    row = AlibiTerms(8).bias(jnp.asarray([[3]]), jnp.arange(6)[None])[0, 1, 0]
    assert row.tolist() == [-0.75, -0.5, -0.25, 0, -0.25, -0.5]
