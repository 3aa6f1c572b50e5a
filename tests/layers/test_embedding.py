"""Token embeddings: scaling, padded rows, and gradients that gather every use of a token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.layers.embedding import Embedding, padded_rows

CONFIG = ModelConfig(d_model=6)
IDS = jnp.array([[3, 0, 3], [10, 2, 3]])


def make_table() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(11, 6)).astype(np.float32)


@pytest.mark.parametrize('scaled', [True, False])
def test_a_lookup_is_a_row_of_the_table_times_the_root_of_the_width(scaled: bool) -> None:
    module = Embedding(dataclasses.replace(CONFIG, scale_embedding=scaled), 11, jnp.dtype('float32'))
    output = module.apply({'params': {'table': jnp.asarray(make_table())}}, IDS)
    np.testing.assert_allclose(output, make_table()[np.asarray(IDS)] * (6**0.5 if scaled else 1), rtol=1e-6)


def test_the_gradient_adds_up_over_the_uses_of_a_token() -> None:
    module = Embedding(CONFIG, 11, jnp.dtype('float32'))
    gradient = jax.grad(lambda table: module.apply({'params': {'table': table}}, IDS).sum())(jnp.asarray(make_table()))
    uses = np.bincount(np.asarray(IDS).ravel(), minlength=11)
    np.testing.assert_allclose(gradient, uses[:, None] * 6**0.5 * np.ones((11, 6)), rtol=1e-6)


@pytest.mark.parametrize(('size', 'multiple', 'rows'), [(11, 1, 11), (11, 8, 16), (16, 8, 16), (17, 8, 24)])
def test_rows_are_padded_to_a_multiple(size: int, multiple: int, rows: int) -> None:
    assert padded_rows(size, multiple) == rows
    module = Embedding(dataclasses.replace(CONFIG, vocab_pad_multiple=multiple), size, jnp.dtype('float32'))
    shapes = jax.eval_shape(module.init, jax.random.key(0), IDS)
    assert jax.tree.leaves(shapes)[0].shape == (rows, 6)
