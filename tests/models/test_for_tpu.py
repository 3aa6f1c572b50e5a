"""The program that a TPU gets of a whole model, run here, against the one that other devices get."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.models.tiny import V, make_batch, make_model, make_params
from transformer_jax.config import AttentionConfig, ExecutionConfig
from transformer_jax.parallel.platform import compiling_for

WHOLE_LANES = AttentionConfig(num_heads=4, head_dim=32)  # which the kernel for short rows takes
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    'paper': ('paper', {'attention': WHOLE_LANES}),
    'narrow heads': ('paper', {}),
    'pre-norm': ('rms-norm, swiglu', {}),
    'rms': ('paper', {'norm': 'rms_norm', 'attention': WHOLE_LANES}),
    'decoder-only': ('paper', {'family': 'decoder_only', 'attention': WHOLE_LANES, 'num_encoder_layers': 0}),
    'encoder-only': ('paper', {'family': 'encoder_only', 'attention': AttentionConfig(num_heads=3, head_dim=5)}),
    'convolutional': ('paper', {'family': 'convolutional', 'attention': AttentionConfig()}),
}


@pytest.mark.parametrize('unroll', [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize('case', CASES)
def test_values_and_gradients(case: str, unroll: int) -> None:
    variant, changes = CASES[case]
    execution = ExecutionConfig(unroll=unroll, remat='names')
    model = make_model(variant, execution=execution, **changes)
    params = make_params(model)
    batch = jax.tree.map(jnp.asarray, make_batch([7, 4, 1], [5, 2, 6], pads=(2, 1)))
    if not model.task.translates:
        batch = model.objective(batch, jax.random.split(jax.random.key(0), 3))
    probe = np.random.default_rng(1).normal(size=(*batch.targets.shape, V))
    probe = jnp.float32(probe * (batch.target_segment_ids > 0)[..., None])

    def make_program() -> Any:
        """A function that was not traced before."""

        def loss(params: Any) -> jax.Array:
            return (model.project(params, model.hidden(params, batch)) * probe).sum()

        return jax.jit(jax.value_and_grad(loss))

    expected = make_program()(params)
    with compiling_for('tpu'):
        traced = make_program().trace(params)
    actual = traced.lower(lowering_platforms=('cpu',)).compile()(params)
    norms = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(expected[1])))
    oracles.assert_close(actual[0], expected[0], 1e-5)
    for mine, theirs in zip(*map(jax.tree.leaves, (actual[1], expected[1])), strict=True):
        assert float(jnp.abs(mine - theirs).max()) <= 5e-6 * norms
