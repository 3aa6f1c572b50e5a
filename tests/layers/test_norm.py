"""The norm that TPU programs have against the loops and against the one that others have."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from tests import oracles
from transformer_jax.config import ModelConfig
from transformer_jax.layers.norm import KeptNorm
from transformer_jax.layers.residual import make_norm
from transformer_jax.models.stacks import REMAT_POLICIES
from transformer_jax.parallel.platform import compiling_for

D = 14
CONFIG = ModelConfig(d_model=D, norm_epsilon=0.3)


def make_case(norm: str) -> tuple[Any, Any, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The norm of each platform, parameters, inputs and a probe of the outputs."""
    rng = np.random.default_rng(0)
    config = dataclasses.replace(CONFIG, norm=norm)
    with compiling_for('tpu'):
        kept = make_norm(config, jnp.dtype('float32'))
    params = {'scale': rng.normal(size=D), 'bias': rng.normal(size=D)}
    if norm == 'rms_norm':
        del params['bias']
    inputs, probe = rng.normal(2.0, 3.0, (2, 3, D)), rng.normal(size=(2, 3, D))
    return kept, make_norm(config, jnp.dtype('float32')), params, inputs, probe


@pytest.mark.parametrize(('norm', 'loops'), [('layer_norm', oracles.layer_norm), ('rms_norm', oracles.rms_norm)])
def test_values_and_gradients(norm: str, loops: Any) -> None:
    kept, flax_norm, params, inputs, probe = make_case(norm)
    assert isinstance(kept, KeptNorm)
    assert not isinstance(flax_norm, KeptNorm)
    arguments = jax.tree.map(jnp.float32, (params, inputs))
    oracles.assert_close(kept.apply({'params': arguments[0]}, arguments[1]), loops(params, inputs, 0.3))
    actual, expected = (
        jax.grad(lambda params, x, module=module: (module.apply({'params': params}, x) * probe).sum(), argnums=(0, 1))(
            *arguments
        )
        for module in (kept, flax_norm)
    )
    jax.tree.map(lambda a, b: oracles.assert_close(a, b, 1e-5), actual, expected)


def test_both_declare_the_same_parameters() -> None:
    for norm in ('layer_norm', 'rms_norm'):
        kept, flax_norm, *_ = make_case(norm)
        mine, theirs = (
            jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((2, D))) for module in (kept, flax_norm)
        )
        assert jax.tree.structure(mine) == jax.tree.structure(theirs)
        assert jax.tree.leaves(mine) == jax.tree.leaves(theirs)


def test_rematerialisation_by_names_makes_no_moments_again() -> None:
    kept, _, params, inputs, _ = make_case('layer_norm')
    arguments = jax.tree.map(jnp.float32, (params, inputs))

    def count(policy: str) -> int:
        """Reciprocal square roots in the program of a gradient."""

        def loss(params: Any, x: Any) -> jax.Array:
            return (kept.apply({'params': params}, checkpoint_name(x * 2, 'stream')) ** 2).sum()

        rematerialised = jax.checkpoint(loss, policy=REMAT_POLICIES[policy])
        return str(jax.make_jaxpr(jax.grad(rematerialised, argnums=(0, 1)))(*arguments)).count('rsqrt')

    assert count('names') == 1
    assert count('full') == 2
