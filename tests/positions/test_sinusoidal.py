"""Sinusoids against the formula, and the numbers and properties that make them work."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from transformer_jax.config import ModelConfig
from transformer_jax.positions.sinusoidal import on_embedding, sinusoids


def test_the_interleaved_table_is_the_formula() -> None:
    oracles.assert_close(sinusoids(101, 14), oracles.sinusoids(101, 14), 1e-6)


def test_known_values() -> None:
    table = sinusoids(2, 512)
    assert table[0, :2].tolist() == [0.0, 1.0]
    assert [round(float(x), 2) for x in table[1, :2]] == [0.84, 0.54]
    hundred = sinusoids(2, 8)[1, 4:6]  # 10000^(4/8) = 100
    assert [round(float(x), 2) for x in hundred] == [0.01, 1.0]


def test_the_concatenated_table_holds_the_same_columns() -> None:
    expected = oracles.sinusoids(19, 14)
    oracles.assert_close(
        sinusoids(19, 14, 'concatenated'), np.concatenate([expected[:, ::2], expected[:, 1::2]], axis=1), 1e-6
    )


@pytest.mark.parametrize('offset', [1, 7, 40])
def test_a_shift_is_one_linear_map_whatever_the_position(offset: int) -> None:
    table = sinusoids(160, 14)
    rotation = np.zeros((14, 14))
    for i in range(7):
        angle = offset / 10_000 ** (2 * i / 14)
        turn = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = turn
    np.testing.assert_allclose(table[:100] @ rotation, table[offset : 100 + offset], atol=1e-5)


def test_the_shared_table_can_not_be_changed() -> None:
    with pytest.raises(ValueError, match='read-only'):
        sinusoids(5, 4)[0] = 1.0


def test_positions_read_their_rows_in_any_layout() -> None:
    config = ModelConfig(d_model=14, max_length=19, sinusoid_layout='tensor2tensor')
    positions = np.asarray([[3, 18, 0], [1, 1, 2]])
    read = on_embedding(config, {}, jnp.asarray(positions))
    np.testing.assert_array_equal(read, sinusoids(19, 14, 'tensor2tensor')[positions])
    interleaved = on_embedding(ModelConfig(d_model=14, max_length=19), {}, jnp.asarray(positions))
    oracles.assert_close(interleaved, oracles.sinusoids(19, 14)[positions], 1e-6)
