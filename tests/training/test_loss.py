"""The training loss: no padding, no split of a batch and no sharding changes it or its gradient."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.models.tiny import START, V, make_batch, make_model, make_params
from transformer_jax.config import MeshConfig, TrainConfig
from transformer_jax.parallel.mesh import make_mesh, place_batch, replicated
from transformer_jax.training.loss import loss_sum

SOURCES, TARGETS = [7, 4, 1, 6, 2, 3, 5, 7], [6, 2, 6, 1, 1, 3, 4, 2]
CONFIG = TrainConfig(loss_block_tokens=5)


@functools.partial(jax.jit, static_argnames=('config', 'mesh'))
def compute(params: Any, batch: Any, *, config: TrainConfig = CONFIG, mesh: Any = None) -> Any:
    """((loss, nll), gradients)."""

    def loss(params: Any) -> Any:
        return loss_sum(make_model(), params, batch, config, dropout_rng=None, mesh=mesh)

    return jax.value_and_grad(loss, has_aux=True)(params)


def assert_equal(actual: Any, expected: Any, limit: float = 5e-6) -> None:
    jax.tree.map(lambda a, b: oracles.assert_close(a, b, limit), actual, expected)


@functools.cache
def reference() -> Any:
    return compute(make_params(make_model()), make_batch(SOURCES, TARGETS))


def test_it_equals_the_loops_over_the_whole_model() -> None:
    params, batch = make_params(make_model()), make_batch(SOURCES, TARGETS)
    logits = oracles.Transformer(params, make_model().config, START).logits(batch)
    loss, nll = oracles.cross_entropy(logits, batch.targets, batch.target_segment_ids > 0, 0.1)
    assert float(reference()[0][0]) == pytest.approx(loss, rel=5e-6)
    assert float(reference()[0][1]) == pytest.approx(nll, rel=5e-6)


@pytest.mark.parametrize('pads', [pytest.param(1, marks=pytest.mark.slow), 50])
def test_pad_columns_change_nothing(pads: int) -> None:
    batch = make_batch(SOURCES, TARGETS, pads=(pads, pads))
    assert_equal(compute(make_params(make_model()), batch), reference())


def test_rows_of_padding_change_nothing() -> None:
    batch = jax.tree.map(lambda rows: np.pad(rows, ((0, 3), (0, 0))), make_batch(SOURCES, TARGETS))
    assert_equal(compute(make_params(make_model()), batch), reference())


@pytest.mark.parametrize('cut', [1, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_of_unequal_size_add_up_to_the_whole(cut: int) -> None:
    params, batch = make_params(make_model()), make_batch(SOURCES, TARGETS)
    first = compute(params, jax.tree.map(lambda rows: rows[:cut], batch))
    second = compute(params, jax.tree.map(lambda rows: rows[cut:], batch))
    assert_equal(jax.tree.map(jnp.add, first, second), reference())


@pytest.mark.slow  # tests/parallel has a whole update on a mixed mesh
@pytest.mark.parametrize('count', [2, 8])
def test_sharding_changes_nothing(count: int) -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:count])
    params = jax.device_put(make_params(make_model()), replicated(mesh))
    assert_equal(compute(params, place_batch(make_batch(SOURCES, TARGETS), mesh), mesh=mesh), reference())


def test_smoothing_is_in_the_loss_and_not_in_the_likelihood() -> None:
    params, batch = make_params(make_model()), make_batch(SOURCES, TARGETS)
    (loss, nll), _ = compute(params, batch, config=TrainConfig(label_smoothing=0.0))
    assert float(loss) == pytest.approx(float(nll), rel=1e-6)
    assert float(nll) == pytest.approx(float(reference()[0][1]), rel=1e-6)
    assert abs(float(reference()[0][0]) / float(nll) - 1) > 1e-3


def test_a_poisoned_parameter_makes_the_loss_non_finite() -> None:
    """The guard against bad updates looks at the loss and the gradient norm: neither may hide a NaN."""
    params = make_params(make_model())
    params = params | {'target_embedding': {'table': params['target_embedding']['table'].at[V - 1, 0].set(jnp.nan)}}
    (loss, _), gradients = compute(params, make_batch(SOURCES, TARGETS))
    assert not np.isfinite(loss)
    assert any(not np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
