"""Dropout: its rate, its mean, and that it is off without a key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.layers.dropout import Dropout, dropout

GENERATORS = pytest.mark.parametrize('prng', ['threefry2x32', 'rbg'])


@GENERATORS
@pytest.mark.parametrize('rate', [0.1, 0.3, 0.9])
def test_each_element_is_dropped_at_the_rate_and_the_rest_is_scaled(rate: float, prng: str) -> None:
    n = 199_999
    output = np.asarray(dropout(jnp.full((n,), 3.0), rate, jax.random.key(0, impl=prng)))
    dropped = (output == 0).mean()
    assert dropped == pytest.approx(rate, abs=5 * (rate * (1 - rate) / n) ** 0.5)
    np.testing.assert_allclose(output[output != 0], 3 / (1 - rate), rtol=2e-4)


@GENERATORS
def test_elements_are_dropped_independently(prng: str) -> None:
    kept = np.asarray(dropout(jnp.ones((400, 500)), 0.3, jax.random.key(1, impl=prng))) != 0
    for axis in (0, 1):
        spread = kept.mean(axis=axis).std()
        assert spread == pytest.approx((0.3 * 0.7 / kept.shape[axis]) ** 0.5, rel=0.15)
    neighbours = (kept[:, 1:] & kept[:, :-1]).mean()
    assert neighbours == pytest.approx(0.49, abs=0.01)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_the_dtype_stays(dtype: jnp.dtype) -> None:
    assert dropout(jnp.ones((5, 7), dtype), 0.5, jax.random.key(0)).dtype == dtype


def test_gradients_pass_where_elements_are_kept() -> None:
    x = jnp.arange(1.0, 102.0)
    output, gradient = jax.value_and_grad(lambda x: dropout(x, 0.5, jax.random.key(0)).sum())(x)
    kept = np.asarray(dropout(x, 0.5, jax.random.key(0))) / np.asarray(x)
    np.testing.assert_allclose(gradient, kept, rtol=1e-6)
    assert np.isfinite(output)


def test_the_module_is_off_without_a_key_or_a_rate() -> None:
    x = jnp.ones((3, 5))
    np.testing.assert_array_equal(Dropout(0.5).apply({}, x), x)
    np.testing.assert_array_equal(Dropout(0.0).apply({}, x, rngs={'dropout': jax.random.key(0)}), x)
    assert (np.asarray(Dropout(0.5).apply({}, x, rngs={'dropout': jax.random.key(0)})) == 0).any()
