"""Multi-head attention against loops over the paper's equations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from transformer_jax.attention.mask import Mask
from transformer_jax.config import AttentionConfig
from transformer_jax.layers.multihead import MultiHeadAttention

B, T, S, D, N, H, U = 2, 3, 5, 14, 3, 4, 7


def make_layer(**changes: Any) -> tuple[MultiHeadAttention, Any]:
    """The layer and parameters of which none is zero."""
    config = AttentionConfig(num_heads=N, head_dim=H, value_dim=U, **changes)
    layer = MultiHeadAttention(config, D, jnp.dtype('float32'))
    shapes = {
        'query': (D, N, H), 'key': (D, N, H), 'value': (D, N, U), 'output': (N, U, D),
    }  # fmt: skip
    biases = {'query': (N, H), 'key': (N, H), 'value': (N, U), 'output': (D,)}
    rng = np.random.default_rng(0)
    params = {name: {'kernel': rng.normal(size=shape) * 0.4} for name, shape in shapes.items()}
    if changes.get('use_bias'):
        for name, shape in biases.items():
            params[name]['bias'] = rng.normal(size=shape)
    return layer, params


def make_mask(*, causal: bool = False) -> tuple[Mask, np.ndarray]:
    q_segments, k_segments = np.ones((B, T), np.int32), np.ones((B, S), np.int32)
    k_segments[1, 3:] = 0
    q_positions, k_positions = (np.broadcast_to(np.arange(n, dtype=np.int32), (B, n)) for n in (T, S))
    places = (q_segments, k_segments, q_positions, k_positions)
    return Mask(*map(jnp.asarray, places), causal=causal), oracles.visibility(*places, causal=causal)


def to_float32(tree: Any) -> Any:
    return jax.tree.map(jnp.float32, tree)


@pytest.mark.parametrize('use_bias', [False, True])
def test_values_and_gradients_equal_the_loops(use_bias: bool) -> None:
    layer, params = make_layer(use_bias=use_bias)
    mask, visible = make_mask(causal=use_bias)
    rng = np.random.default_rng(1)
    inputs_q, inputs_kv, probe = rng.normal(size=(B, T, D)), rng.normal(size=(B, S, D)), rng.normal(size=(B, T, D))

    def run(params: Any, inputs_q: Any, inputs_kv: Any) -> jax.Array:
        return layer.apply({'params': params}, inputs_q, inputs_kv, mask)

    arguments = to_float32((params, inputs_q, inputs_kv))
    oracles.assert_close(jax.jit(run)(*arguments), oracles.multi_head(params, inputs_q, inputs_kv, visible))
    gradients = jax.jit(jax.grad(lambda *a: (run(*a) * probe).sum(), argnums=(0, 1, 2)))(*arguments)
    for name, own in gradients[0].items():
        for kind, gradient in own.items():

            def moved(array: np.ndarray, name: str = name, kind: str = kind) -> float:
                changed = params | {name: params[name] | {kind: array}}
                return float((oracles.multi_head(changed, inputs_q, inputs_kv, visible) * probe).sum())

            if (name, kind) == ('key', 'bias'):  # adds the same to every score of a query: exactly no effect
                assert np.abs(gradient).max() < 1e-5
                continue
            oracles.assert_close(gradient, oracles.numeric_gradient(moved, params[name][kind]), 2e-5)
    numeric_q = oracles.numeric_gradient(
        lambda x: float((oracles.multi_head(params, x, inputs_kv, visible) * probe).sum()), inputs_q
    )
    numeric_kv = oracles.numeric_gradient(
        lambda x: float((oracles.multi_head(params, inputs_q, x, visible) * probe).sum()), inputs_kv
    )
    oracles.assert_close(gradients[1], numeric_q, 2e-5)
    oracles.assert_close(gradients[2], numeric_kv, 2e-5)


def test_keys_and_values_made_earlier_give_the_same() -> None:
    layer, params = make_layer()
    variables = {'params': to_float32(params)}
    mask, _ = make_mask()
    rng = np.random.default_rng(1)
    inputs_q, inputs_kv = jnp.float32(rng.normal(size=(B, T, D))), jnp.float32(rng.normal(size=(B, S, D)))
    k, v = layer.apply(variables, inputs_kv, method='project_kv')
    assert k.shape == (B, S, N, H)
    assert v.shape == (B, S, N, U)
    at_once = layer.apply(variables, inputs_q, inputs_kv, mask)
    for t in range(T):
        one = Mask(mask.q_segments[:, t : t + 1], mask.k_segments, mask.q_positions[:, t : t + 1], mask.k_positions)
        output = layer.apply(variables, inputs_q[:, t : t + 1], k, v, one, method='attend')
        oracles.assert_close(output, at_once[:, t : t + 1], 1e-6)


def test_the_paper_has_no_biases_and_fresh_kernels_are_glorot_over_the_flat_matrix() -> None:
    config = AttentionConfig(num_heads=7, head_dim=11, value_dim=13)
    layer = MultiHeadAttention(config, 50, jnp.dtype('float32'))
    mask, _ = make_mask()
    inputs = jnp.zeros((B, S, 50))
    boxed = jax.jit(layer.init)(jax.random.key(0), inputs[:, :T], inputs, mask)['params']
    assert sorted(boxed) == ['key', 'output', 'query', 'value']
    assert all(sorted(own) == ['kernel'] for own in boxed.values())
    for name, width in {'query': 77, 'key': 77, 'value': 91, 'output': 91}.items():
        kernel = np.asarray(boxed[name]['kernel'].value)
        bound = (6 / (50 + width)) ** 0.5
        assert 0.97 * bound < np.abs(kernel).max() <= bound
        assert kernel.std() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_weight_dropout_draws_only_with_a_key() -> None:
    layer, params = make_layer(dropout_rate=0.5)
    variables = {'params': to_float32(params)}
    mask, visible = make_mask()
    rng = np.random.default_rng(1)
    inputs_q, inputs_kv = rng.normal(size=(B, T, D)), rng.normal(size=(B, S, D))
    arguments = to_float32((inputs_q, inputs_kv))
    oracles.assert_close(
        layer.apply(variables, *arguments, mask), oracles.multi_head(params, inputs_q, inputs_kv, visible)
    )
    first, second = (
        layer.apply(variables, *arguments, mask, rngs={'dropout': jax.random.key(seed)}) for seed in (0, 1)
    )
    assert np.abs(first - second).max() > 1e-2


def test_bfloat16_stays_near_and_parameters_stay_float32() -> None:
    exact, params = make_layer()
    layer = MultiHeadAttention(exact.config, D, jnp.dtype('bfloat16'))
    mask, visible = make_mask()
    rng = np.random.default_rng(1)
    inputs_q, inputs_kv = rng.normal(size=(B, T, D)), rng.normal(size=(B, S, D))
    arguments = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (inputs_q, inputs_kv))
    output = layer.apply({'params': to_float32(params)}, *arguments, mask)
    assert output.dtype == jnp.bfloat16
    expected = oracles.multi_head(params, inputs_q, inputs_kv, visible)
    oracles.assert_close(output.astype(jnp.float32), expected, limit=2e-2)
