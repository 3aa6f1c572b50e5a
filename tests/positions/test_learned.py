"""Learned positions: rows of a table, and no row for a position that has none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.positions.toy_schemes import D, make
from transformer_jax import config as config_module
from transformer_jax import positions as position_schemes
from transformer_jax.config import Config, ConfigError, DataConfig, ModelConfig
from transformer_jax.positions import learned

LENGTH = 61


def test_a_position_reads_its_row_and_its_row_alone_is_trained() -> None:
    toy = make('learned')
    table, positions = np.asarray(toy.embedding['table']), jnp.asarray([[0, 3, 3], [LENGTH - 1, 0, 17]])
    upstream = np.random.default_rng(1).normal(size=(2, 3, D)).astype(np.float32)
    read = position_schemes.on_embedding(toy.config, toy.embedding, positions)
    np.testing.assert_array_equal(read, table[np.asarray(positions)])
    gradient = jax.grad(lambda p: (position_schemes.on_embedding(toy.config, p, positions) * upstream).sum())
    expected = np.zeros_like(table)
    for b, t in np.ndindex(2, 3):
        expected[positions[b, t]] += upstream[b, t]
    np.testing.assert_allclose(gradient(toy.embedding)['table'], expected, atol=1e-6)


@pytest.mark.parametrize('name', ['learned', 'sinusoidal'])
@pytest.mark.parametrize('beyond', [LENGTH, LENGTH + 1, 10_000, -1])
def test_a_position_without_a_row_is_nan_and_no_other_row(name: str, beyond: int) -> None:
    toy = make(name)
    read = jax.jit(lambda positions: position_schemes.on_embedding(toy.config, toy.embedding, positions))
    got = np.asarray(read(jnp.asarray([[LENGTH - 1, beyond, 0]])))
    assert np.isnan(got[0, 1]).all()
    assert np.isfinite(got[0, [0, 2]]).all()


@pytest.mark.parametrize('name', ['learned', 'sinusoidal'])
def test_data_longer_than_the_table_is_refused(name: str) -> None:
    config = Config(model=ModelConfig(positions=name, max_length=64), data=DataConfig(max_length=64))
    config_module.check(config)
    with pytest.raises(ConfigError, match=r'config\.data\.max_length is 65, above config\.model\.max_length 64'):
        config_module.check(dataclasses.replace(config, data=DataConfig(max_length=65)))


def test_only_the_learned_table_ends_where_training_did() -> None:
    limits = {name: scheme.max_length for name, scheme in position_schemes.SCHEMES.items()}
    assert limits == {
        'none': None, 'sinusoidal': 'config', 'learned': 'table', 'shaw': None, 'rope': None, 't5': None, 'alibi': None,
    }  # fmt: skip


def test_rows_are_drawn_like_token_embeddings() -> None:
    (one,) = learned.parameters(ModelConfig(d_model=256, max_length=100)).values()
    drawn = one.initializer(jax.random.key(0), one.shape, jnp.float32)
    assert np.std(drawn) == pytest.approx(1 / 16, rel=0.05)
