"""Optimizers against numpy loops written from their papers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.config import ConfigError, OptimizerConfig
from transformer_jax.training.optimizer import OPTIMIZERS, decayed, make_optimizer

RATES = np.array([0.3, 0.1, 0.05, 0.2])


def schedule(count: Any) -> Any:
    return jnp.asarray(RATES, jnp.float32)[count]


def make_tree(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        'layers': {'kernel': rng.normal(size=(3, 5, 7)), 'bias': rng.normal(size=(3, 7))},
        'norm': {'scale': rng.normal(size=(11,))},
    }


def run(config: OptimizerConfig, steps: int = 4) -> dict[str, Any]:
    optimizer = make_optimizer(config, schedule)
    params = jax.tree.map(jnp.float32, make_tree(0))
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = jax.jit(optimizer.update)(jax.tree.map(jnp.float32, make_tree(step + 1)), state, params)
        params = optax.apply_updates(params, updates)
    return params


def loop(update: Any, *, decay: float = 0.0, steps: int = 4) -> dict[str, Any]:
    """Runs `update(gradient, memory, step) -> direction` on each array, with decoupled decay on the kernel alone."""

    def one(path: Any, array: np.ndarray) -> np.ndarray:
        memory: dict[str, Any] = {}
        rate_of_decay = decay if path[-1].key == 'kernel' else 0.0
        for step in range(steps):
            gradient = make_tree(step + 1)
            for part in path:
                gradient = gradient[part.key]
            array = array - RATES[step] * (update(gradient, memory, step + 1) + rate_of_decay * array)
        return array

    return jax.tree_util.tree_map_with_path(one, make_tree(0))


def adam(gradient: np.ndarray, memory: dict[str, Any], step: int) -> np.ndarray:
    memory['m'] = 0.9 * memory.get('m', 0.0) + 0.1 * gradient
    memory['v'] = 0.98 * memory.get('v', 0.0) + 0.02 * gradient**2
    m, v = memory['m'] / (1 - 0.9**step), memory['v'] / (1 - 0.98**step)
    return m / (np.sqrt(v) + 1e-9)


def lion(gradient: np.ndarray, memory: dict[str, Any], step: int) -> np.ndarray:
    del step
    momentum = memory.get('m', np.zeros_like(gradient))
    memory['m'] = 0.98 * momentum + 0.02 * gradient
    return np.sign(0.9 * momentum + 0.1 * gradient)


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5), actual, expected)


def test_adam_is_the_papers() -> None:
    assert_close(run(OptimizerConfig()), loop(adam))


def test_adamw_decays_kernels_but_neither_scales_nor_biases() -> None:
    assert_close(run(OptimizerConfig(name='adamw', weight_decay=0.37)), loop(adam, decay=0.37))


def test_lion_is_the_sign_of_its_momentum() -> None:
    assert_close(run(OptimizerConfig(name='lion')), loop(lion))
    assert_close(run(OptimizerConfig(name='lion', weight_decay=0.37)), loop(lion, decay=0.37))


def test_adafactor_learns_and_factors_its_memory() -> None:
    config = OptimizerConfig(name='adafactor')
    optimizer = make_optimizer(config, lambda count: 0.1)
    target = np.random.default_rng(0).normal(size=(3, 128, 131)).astype(np.float32)
    params = {'kernel': jnp.ones((3, 128, 131))}
    state = optimizer.init(params)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 3 * 2 * (128 + 131)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        gradients = jax.tree.map(lambda p: p - target, params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    before = float(jnp.square(params['kernel'] - target).mean())
    for _ in range(60):
        params, state = step(params, state)
    assert float(jnp.square(params['kernel'] - target).mean()) < 0.1 * before


def test_clipping_scales_the_gradient_by_its_global_norm() -> None:
    gradient = make_tree(1)
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
    config = OptimizerConfig(name='lion', clip_norm=float(norm / 4))
    optimizer = make_optimizer(config, lambda count: 1.0)
    params = jax.tree.map(jnp.float32, make_tree(0))
    _, state = optimizer.update(jax.tree.map(jnp.float32, gradient), optimizer.init(params), params)
    momentum = jax.tree.leaves(optax.tree.get(state, 'mu'))
    for actual, leaf in zip(momentum, jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(actual, 0.02 * leaf / 4, rtol=1e-5)


@pytest.mark.parametrize('name', list(OPTIMIZERS))
def test_by_default_nothing_is_clipped(name: str) -> None:
    weight_decay = 0.1 if name == 'adamw' else None
    optimizer = make_optimizer(OptimizerConfig(name=name, weight_decay=weight_decay), schedule)
    state = optimizer.init(jax.tree.map(jnp.float32, make_tree(0)))
    chained = make_optimizer(OptimizerConfig(name=name, weight_decay=weight_decay, clip_norm=1.0), schedule)
    assert jax.tree.structure(state) != jax.tree.structure(chained.init(jax.tree.map(jnp.float32, make_tree(0))))


def test_what_is_decayed() -> None:
    assert decayed(make_tree(0)) == {'layers': {'kernel': True, 'bias': False}, 'norm': {'scale': False}}


def test_norm_scales_move_at_a_small_rate() -> None:
    """A scale near 1 kept in bfloat16 would swallow updates of 1e-5; float32 parameters move by all of them."""
    optimizer = make_optimizer(OptimizerConfig(), lambda count: 1e-5)
    params = {'scale': jnp.ones((5,), jnp.float32)}
    state = optimizer.init(params)
    for _ in range(200):
        updates, state = optimizer.update({'scale': jnp.ones((5,))}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(1.0 - params['scale'], 200 * 1e-5, rtol=0.02)


@pytest.mark.parametrize(
    ('changes', 'field', 'hint'),
    [
        ({'name': 'adafactor', 'beta1': 0.8}, 'beta1', "'adam', 'adamw', 'lion'"),
        ({'name': 'lion', 'epsilon': 1e-6}, 'epsilon', "'adam', 'adamw'"),
        ({'name': 'adam', 'weight_decay': 0.1}, 'weight_decay', "'adamw', 'lion'"),
        ({'name': 'adamw'}, 'weight_decay', 'adam'),
        ({'name': 'sgd'}, 'name', 'adafactor'),
    ],
)
def test_fields_that_make_no_sense_together_are_named(changes: dict, field: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf'config\.optimizer\.{field} is .*{hint}'):
        make_optimizer(OptimizerConfig(**changes), schedule)


@pytest.mark.parametrize('name', ['adam', 'adamw'])
def test_a_gradient_the_size_of_epsilon_moves_half_as_far(name: str) -> None:
    config = OptimizerConfig(name=name, epsilon=1e-5, weight_decay=1e-30 if name == 'adamw' else None)
    optimizer = make_optimizer(config, lambda count: 1.0)
    params = {'kernel': jnp.ones((3,))}
    updates, _ = optimizer.update({'kernel': jnp.full((3,), 1e-5)}, optimizer.init(params), params)
    np.testing.assert_allclose(updates['kernel'], -0.5, rtol=1e-4)
