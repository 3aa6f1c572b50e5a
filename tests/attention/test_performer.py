"""Random features against loops over their definition, and against the softmax that they estimate."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.attention import comparing
from tests.attention.comparing import make_arrays, make_mask
from transformer_jax.attention.linear import LINEAR
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.performer import PERFORMER, draw_directions
from transformer_jax.attention.variant import Options
from transformer_jax.config import AttentionConfig

N, K, H, U, F = 2, 1, 3, 2, 7
CONFIG = AttentionConfig(
    kind='performer', num_heads=N, num_kv_heads=K, head_dim=H, value_dim=U, num_features=F, feature_seed=7, block_size=2
)
CAUSAL = make_mask([[1] * 6] * 2, [[1] * 6] * 2, causal=True, aligned=True)

LAYOUTS = {
    'causal, packed': make_mask(comparing.PACKED, comparing.PACKED, causal=True, aligned=True),
    'self': make_mask(comparing.RIGHT_PADDED, comparing.RIGHT_PADDED),
}


def loops(arrays: comparing.Arrays, seen: np.ndarray, config: AttentionConfig = CONFIG) -> np.ndarray:
    """Sum of phi(q) . phi(k) v over the sum of phi(q) . phi(k), phi(x)_f = exp(w_f x - |x|^2 / 2) / sqrt(F)."""
    q, k, v = (arrays[name] for name in 'qkv')
    directions = draw_directions(config.num_features, q.shape[-1], config.feature_seed)

    def features(row: np.ndarray) -> np.ndarray:
        x = row / q.shape[-1] ** 0.25
        return np.array([math.exp(np.dot(w, x) - np.dot(x, x) / 2) for w in directions]) / math.sqrt(len(directions))

    output = np.zeros((*q.shape[:3], v.shape[-1]))
    of_q, of_k = np.apply_along_axis(features, -1, q), np.apply_along_axis(features, -1, k)
    for b, t, n in np.ndindex(q.shape[:3]):
        head = n // (q.shape[2] // k.shape[2])
        weights = {s: np.dot(of_q[b, t, n], of_k[b, s, head]) for s in range(k.shape[1]) if seen[b, t, s]}
        for s, weight in weights.items():
            output[b, t, n] += weight / sum(weights.values()) * v[b, s, head]
    return output


def attend(q: Any, k: Any, v: Any, mask: Mask, config: AttentionConfig = CONFIG) -> jax.Array:
    return PERFORMER.function(q, k, v, mask, Options(config, scale=q.shape[-1] ** -0.5))[0]


@pytest.mark.parametrize('layout', LAYOUTS)
def test_values_and_gradients_equal_the_loops(layout: str) -> None:
    mask = LAYOUTS[layout]
    arrays, seen = make_arrays(0, mask, N, K, H, U), comparing.visible(mask)
    comparing.assert_equals_loops(
        lambda a: attend(a['q'], a['k'], a['v'], mask), lambda a: loops(a, seen), arrays, seen
    )


@pytest.mark.parametrize('layout', LAYOUTS)
def test_bfloat16_stays_near(layout: str) -> None:
    """Of the arrays as rounded."""
    mask = LAYOUTS[layout]
    arrays, seen = make_arrays(0, mask, N, K, H, U), comparing.visible(mask)
    arrays = {name: np.float64(jnp.bfloat16(array)) for name, array in arrays.items()}
    output = jax.jit(lambda *a: attend(*a, mask))(*(jnp.bfloat16(array) for array in arrays.values()))
    assert output.dtype == jnp.bfloat16
    oracles.assert_close(np.float32(output), loops(arrays, seen), 2e-2)


def stretched(arrays: comparing.Arrays) -> comparing.Arrays:
    """Keys of very unlike lengths: their features differ by many powers of ten, both ways along the row."""
    lengths = np.array([6.0, 0.1, 9.0, 0.1, 1.0, 12.0])[None, :, None, None]
    return {**arrays, 'k': arrays['k'] * lengths}


def test_features_of_very_unlike_sizes_neither_overflow_nor_vanish() -> None:
    arrays = stretched(make_arrays(1, CAUSAL, N, K, H, U))
    actual = jax.jit(lambda *a: attend(*a, CAUSAL))(*(jnp.float32(array) for array in arrays.values()))
    oracles.assert_close(actual, loops(arrays, comparing.visible(CAUSAL)), 3e-5)


def test_decoding_with_a_state_equals_the_full_pass() -> None:
    arrays = make_arrays(2, CAUSAL, N, K, H, U)
    comparing.assert_decoding_equals(PERFORMER, CONFIG, arrays, loops(arrays, comparing.visible(CAUSAL)))


def test_decoding_stabilises_as_the_full_pass_does() -> None:
    arrays = stretched(make_arrays(1, CAUSAL, N, K, H, U))
    full = jax.jit(lambda *a: attend(*a, CAUSAL))(*(jnp.float32(array) for array in arrays.values()))
    comparing.assert_decoding_equals(PERFORMER, CONFIG, arrays, np.asarray(full))


def test_a_huge_value_in_the_future_does_not_reach_the_past() -> None:
    clean = [jnp.float32(array) for array in make_arrays(0, CAUSAL, N, K, H, U).values()]
    dirty = [clean[0], clean[1].at[:, 3].set(1e30), clean[2].at[:, 3].set(1e30)]

    @jax.jit
    def compute(arrays: Any) -> Any:
        return jax.value_and_grad(lambda a: attend(*a, CAUSAL)[:, :3].sum())(arrays)

    (ours, our_gradients), (expected, gradients) = compute(dirty), compute(clean)
    np.testing.assert_array_equal(ours, expected)
    for one, other in zip(our_gradients, gradients, strict=True):
        np.testing.assert_array_equal(one[:, :3], other[:, :3])


def test_directions_are_orthogonal_in_blocks_and_come_in_opposite_pairs() -> None:
    directions = draw_directions(23, 5, 0)
    assert directions.shape == (23, 5)
    for start in range(0, 20, 5):
        block = directions[start : start + 5]
        products = block @ block.T
        np.testing.assert_allclose(products - np.diag(np.diag(products)), 0, atol=1e-12)
        assert (np.diag(products) > 0).all()
    np.testing.assert_array_equal(directions[5:10], -directions[:5])
    np.testing.assert_array_equal(directions[15:20], -directions[10:15])
    assert np.abs(directions[10:15] - directions[:5]).max() > 0.1


def test_each_direction_is_standard_normal() -> None:
    drawn = np.stack([draw_directions(6, 3, seed) for seed in range(4000)])  # one of each place in its block, and pairs
    for place in range(6):
        np.testing.assert_allclose(drawn[:, place].mean(axis=0), 0, atol=0.08)
        np.testing.assert_allclose(np.cov(drawn[:, place].T), np.eye(3), atol=0.12)
    lengths = (drawn[:, 0] ** 2).sum(axis=1)  # chi-squared of 3 degrees: mean 3, variance 6
    assert lengths.mean() == pytest.approx(3, abs=0.2)
    assert lengths.var() == pytest.approx(6, rel=0.2)


def test_products_of_features_average_to_the_exponential() -> None:
    """Without bias: the mean over seeds of phi(q) . phi(k) is exp(q . k / sqrt(d_k))."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 5, 4)) * 0.7
    x, y = q / 4**0.25, k / 4**0.25
    estimates = []
    for seed in range(2000):
        directions = draw_directions(8, 4, seed)
        of_q = np.exp(x @ directions.T - (x**2).sum(axis=1, keepdims=True) / 2)
        of_k = np.exp(y @ directions.T - (y**2).sum(axis=1, keepdims=True) / 2)
        estimates.append((of_q * of_k).mean(axis=1))
    error = np.mean(estimates, axis=0) - np.exp((q * k).sum(axis=1) / 2)
    assert (np.abs(error) < 4 * np.std(estimates, axis=0) / math.sqrt(2000)).all()


def errors_by_features(size: float) -> tuple[dict[int, float], comparing.Arrays]:
    """|estimate - softmax| / |softmax|, mean of 10 seeds, of rows with d_k = 64 normal components of this size."""
    mask = make_mask([[1] * 7], [[1] * 11])
    arrays = make_arrays(0, mask, 1, 1, 64, 13)
    arrays = {**arrays, 'q': arrays['q'] * size, 'k': arrays['k'] * size}
    seen = comparing.visible(mask)
    expected = oracles.attention(*arrays.values(), seen)
    errors = {}
    for num_features in (64, 256):
        configs = [AttentionConfig(num_features=num_features, feature_seed=seed) for seed in range(10)]
        estimates = [loops(arrays, seen, config) for config in configs]
        errors[num_features] = np.mean([np.linalg.norm(one - expected) for one in estimates]) / np.linalg.norm(expected)
    ours = jax.jit(lambda *a: attend(*a, mask, configs[-1]))(*(jnp.float32(array) for array in arrays.values()))
    oracles.assert_close(ours, estimates[-1], 2e-5)
    return errors, arrays


@pytest.mark.parametrize('size', [0.2, 0.35])
def test_the_error_against_softmax_falls_by_half_from_64_to_256_features(size: float) -> None:
    """At the paper's d_k = 64, for rows of up to 0.35 a component: |x|^2 = size^2 sqrt(d_k) is then at most 1."""
    errors, _ = errors_by_features(size)
    assert errors[64] < 0.4
    assert errors[256] <= errors[64] / 2


def test_rows_of_unit_components_need_more_features_than_that() -> None:
    """The variance of an estimated exp(x y) is about exp(|x + y|^2) of its square over F, and |x + y|^2 is 16 here."""
    errors, arrays = errors_by_features(1.0)
    both = (np.square(arrays['q']).sum(-1).mean() + np.square(arrays['k']).sum(-1).mean()) / 8
    assert both == pytest.approx(16, rel=0.1)
    assert errors[256] > 0.8 * errors[64] > 0.8


def test_another_seed_draws_other_directions_and_the_same_seed_the_same() -> None:
    first, other = draw_directions(11, 3, 7).copy(), draw_directions(11, 3, 8)
    draw_directions.cache_clear()
    np.testing.assert_array_equal(draw_directions(11, 3, 7), first)
    assert np.abs(first - other).min() > 1e-3


def test_it_declares_itself_an_approximation() -> None:
    assert not PERFORMER.exact
    assert LINEAR.exact
    assert PERFORMER.supports == LINEAR.supports | {'rotary'}
