"""The state of a run: its average, its choice between old and new, and where its arrays lie."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.models.tiny import make_model
from tests.oracles import assert_close
from transformer_jax.config import MeshConfig, OptimizerConfig
from transformer_jax.parallel.mesh import DATA, make_mesh
from transformer_jax.parallel.rules import RULES
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.state import abstract_state, advance_average, choose, make_state, state_shardings


def make_params(seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {'kernel': jnp.float32(draw.normal(size=(3, 5))), 'scale': jnp.float32(draw.normal(size=7))}


def test_the_average_starts_as_a_copy_of_the_parameters() -> None:
    params = make_params(0)
    state = make_state(params, optax.adam(0.1), with_average=True)
    for copy, leaf in zip(jax.tree.leaves(state.average), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(copy, leaf)
        assert copy.unsafe_buffer_pointer() != leaf.unsafe_buffer_pointer()  # one buffer can't be donated twice
    assert state.evaluation_params() is state.average
    assert (int(state.step), int(state.bad_in_row), int(state.bad_total)) == (0, 0, 0)


def test_without_an_average_the_parameters_are_evaluated() -> None:
    state = make_state(make_params(0), optax.adam(0.1), with_average=False)
    assert state.average is None
    assert state.evaluation_params() is state.params


@pytest.mark.parametrize('decay', [0.05, 0.3, 0.999])
def test_the_average_against_a_loop(decay: float) -> None:
    average = expected = make_params(0)
    expected = jax.tree.map(np.float64, expected)
    for step in range(7):
        params = make_params(step + 1)
        average = advance_average(average, params, jnp.int32(step), decay)
        d = min(decay, (step + 1) / (step + 10))
        expected = jax.tree.map(lambda old, new: d * old + (1 - d) * np.float64(new), expected, params)  # noqa: B023
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), average, expected)


def test_the_average_of_what_stays_is_that_to_the_last_bit() -> None:
    params = make_params(0)
    average = advance_average(params, params, jnp.int32(12345), 0.9999)
    jax.tree.map(np.testing.assert_array_equal, average, params)


@pytest.mark.parametrize('good', [True, False])
def test_choose_takes_all_or_nothing(good: bool) -> None:
    optimizer = optax.adam(0.1)
    old, new = (make_state(make_params(seed), optimizer, with_average=True) for seed in (0, 1))
    new = jax.tree.map(lambda leaf: leaf + 3 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf + 1, new)
    old = jax.tree.map(lambda leaf: leaf + 2 if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf, old)
    chosen = choose(jnp.bool(good), new, old)
    expected = new if good else old
    for name in ('step', 'params', 'optimizer', 'average'):
        jax.tree.map(np.testing.assert_array_equal, getattr(chosen, name), getattr(expected, name))
    assert int(chosen.bad_in_row) == (0 if good else 3)
    assert int(chosen.bad_total) == (2 if good else 3)


def test_a_value_that_is_not_finite_is_not_chosen() -> None:
    old = make_state(make_params(0), optax.adam(0.1), with_average=False)
    new = jax.tree.map(lambda leaf: leaf * np.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, old)
    jax.tree.map(np.testing.assert_array_equal, choose(jnp.bool(False), new, old).params, old.params)


@pytest.mark.parametrize('name', ['adam', 'lion', 'adafactor'])
def test_what_belongs_to_a_parameter_lies_where_it_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, 'mlp', DATA)
    model = make_model(d_ff=16)
    optimizer = make_optimizer(OptimizerConfig(name=name), lambda count: 0.1)
    mesh = make_mesh(MeshConfig())
    abstract = abstract_state(model, optimizer, with_average=True)
    shardings = state_shardings(model, optimizer, abstract, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(abstract)
    params = dict(jax.tree_util.tree_leaves_with_path(shardings.params))
    sizes = dict(jax.tree_util.tree_leaves_with_path(abstract.params))
    split = [path for path, sharding in params.items() if DATA in sharding.spec]
    assert 0 < len(split) < len(params)
    assert shardings.average == shardings.params
    leaves = jax.tree_util.tree_leaves_with_path(shardings.optimizer)
    shapes = jax.tree.leaves(abstract.optimizer)
    beside = 0
    for (path, sharding), shape in zip(leaves, shapes, strict=True):
        own = [where for where in params if path[-len(where) :] == where]
        if own and sizes[own[0]].shape == shape.shape:
            beside += not sharding.is_fully_replicated
            assert sharding == params[own[0]]
        else:
            assert sharding.is_fully_replicated
    assert beside == len(split) * {'adam': 2, 'lion': 1, 'adafactor': 1}[name]
    assert shardings.step.is_fully_replicated
