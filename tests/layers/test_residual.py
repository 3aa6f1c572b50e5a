"""Post- and pre-norm, layer norm and RMS norm."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from transformer_jax.config import ModelConfig
from transformer_jax.layers.residual import Residual, make_norm

D = 14
CONFIG = ModelConfig(d_model=D, dropout_rate=0.0)


def make_params(norm: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    params = {'scale': rng.normal(size=D), 'bias': rng.normal(size=D)}
    return params if norm == 'layer_norm' else {'scale': params['scale']}


@pytest.mark.parametrize(('norm', 'loops'), [('layer_norm', oracles.layer_norm), ('rms_norm', oracles.rms_norm)])
@pytest.mark.parametrize('epsilon', [1e-6, 0.5])
def test_norms_equal_their_formula(norm: str, loops, epsilon: float) -> None:
    params = make_params(norm)
    x = np.random.default_rng(1).normal(2.0, 3.0, (2, 3, D))
    module = make_norm(dataclasses.replace(CONFIG, norm=norm, norm_epsilon=epsilon), jnp.dtype('float32'))
    variables = {'params': {name: jnp.float32(array) for name, array in params.items()}}
    oracles.assert_close(module.apply(variables, jnp.float32(x)), loops(params, x, epsilon))


def test_a_norm_computes_its_moments_in_float32() -> None:
    """A mean taken in bfloat16 would be off by whole units here."""
    params = make_params('layer_norm')
    x = jnp.asarray(np.random.default_rng(1).normal(300.0, 2.0, (2, 3, D)), jnp.bfloat16)
    module = make_norm(CONFIG, jnp.dtype('bfloat16'))
    output = module.apply({'params': {name: jnp.float32(array) for name, array in params.items()}}, x)
    assert output.dtype == jnp.bfloat16
    expected = oracles.layer_norm(params, np.asarray(x, np.float64))
    oracles.assert_close(output.astype(jnp.float32), expected, limit=2e-2)


@pytest.mark.parametrize('order', ['post', 'pre'])
def test_the_place_of_the_norm(order: str) -> None:
    params = make_params('layer_norm')
    x = np.random.default_rng(1).normal(size=(2, 3, D))
    module = Residual(dataclasses.replace(CONFIG, norm_order=order), jnp.dtype('float32'))
    variables = {'params': {'norm': {name: jnp.float32(array) for name, array in params.items()}}}
    output = module.apply(variables, jnp.float32(x), lambda y: y**2 - 1)
    if order == 'post':
        expected = oracles.layer_norm(params, x + x**2 - 1)
    else:
        expected = x + oracles.layer_norm(params, x) ** 2 - 1
    oracles.assert_close(output, expected, 1e-5)
