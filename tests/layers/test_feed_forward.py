"""The position-wise layer against equation 2 and its alternatives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from tests import oracles
from transformer_jax.layers.feed_forward import ACTIVATIONS, FeedForward
from transformer_jax.models.stacks import REMAT_POLICIES

B, T, D, F = 2, 3, 5, 7


@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_values_and_gradients_equal_the_loops(activation: str) -> None:
    rng = np.random.default_rng(0)
    shapes = {'expand': (D, F), 'contract': (F, D)} | ({'gate': (D, F)} if activation == 'swiglu' else {})
    params = {
        name: {'kernel': rng.normal(size=shape), 'bias': rng.normal(size=shape[1])} for name, shape in shapes.items()
    }
    x, probe = rng.normal(size=(B, T, D)), rng.normal(size=(B, T, D))
    layer = FeedForward(F, activation, 0.0, jnp.dtype('float32'))

    def run(params: Any, x: Any) -> jax.Array:
        return layer.apply({'params': params}, x)

    arguments = jax.tree.map(jnp.float32, (params, x))
    oracles.assert_close(jax.jit(run)(*arguments), oracles.feed_forward(params, x, activation))
    gradients = jax.jit(jax.grad(lambda *a: (run(*a) * probe).sum(), argnums=(0, 1)))(*arguments)
    numeric_x = oracles.numeric_gradient(
        lambda x: float((oracles.feed_forward(params, x, activation) * probe).sum()), x
    )
    oracles.assert_close(gradients[1], numeric_x, 1e-5)
    for name, own in gradients[0].items():
        for kind, gradient in own.items():

            def moved(array: np.ndarray, name: str = name, kind: str = kind) -> float:
                changed = params | {name: params[name] | {kind: array}}
                return float((oracles.feed_forward(changed, x, activation) * probe).sum())

            oracles.assert_close(gradient, oracles.numeric_gradient(moved, params[name][kind]), 1e-5)


def test_its_parameters_are_those_of_the_oracle() -> None:
    layer = FeedForward(F, 'swiglu', 0.0, jnp.dtype('float32'))
    shapes = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((B, T, D)))['params']
    assert sorted(shapes) == ['contract', 'expand', 'gate']
    assert all(sorted(own) == ['bias', 'kernel'] for own in shapes.values())


def test_rematerialisation_makes_the_hidden_rows_again_where_they_are_not_kept() -> None:
    layer = FeedForward(17, 'relu', 0.0, jnp.dtype('float32'))
    inputs = jnp.ones((2, 3, 5))
    params = layer.init(jax.random.key(0), inputs)

    def count(policy: str) -> int:
        """Matrix products in the program of a gradient."""

        def loss(params: Any, x: Any) -> jax.Array:
            return (layer.apply(params, checkpoint_name(x * 2, 'stream')) ** 2).sum()

        rematerialised = jax.checkpoint(loss, policy=REMAT_POLICIES[policy])
        return str(jax.make_jaxpr(jax.grad(rematerialised, argnums=(0, 1)))(params, inputs)).count('dot_general[')

    assert count('narrow') == count('names') + 1
