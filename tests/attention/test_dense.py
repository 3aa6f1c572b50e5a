"""Scaled dot-product attention against loops over the paper's equation 1, in values and gradients."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles
from tests.attention import exact_cases as cases
from transformer_jax.attention import VARIANTS
from transformer_jax.attention.api import attention, make_options
from transformer_jax.attention.dense import dense_attention, scores
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options
from transformer_jax.config import AttentionConfig

B, T, S, N, H, U = 2, 5, 7, 3, 11, 13
CONFIG = AttentionConfig()
EXACT = [key for key, variant in VARIANTS.items() if key[0] == 'dot' and 'cpu' in variant.supports]


def make_arrays(seed: int = 0, sizes: tuple[int, ...] = (B, T, S, N, H, U)) -> tuple[np.ndarray, ...]:
    b, t, s, n, h, u = sizes
    rng = np.random.default_rng(seed)
    return rng.normal(size=(b, t, n, h)), rng.normal(size=(b, s, n, h)), rng.normal(size=(b, s, n, u))


def make_mask(kind: str, t: int = T, s: int = S, batch: int = B) -> Mask:
    """Padding of other lengths on both sides, packed segments, causal, or everything visible."""
    ones = np.ones((batch, max(t, s)), np.int32)
    positions = np.broadcast_to(np.arange(max(t, s), dtype=np.int32), ones.shape)
    q_segments, k_segments = ones[:, :t].copy(), ones[:, :s].copy()
    q_positions, k_positions = positions[:, :t].copy(), positions[:, :s].copy()
    if kind in ('padding', 'causal'):
        for b in range(batch):
            q_segments[b, t - b :] = 0
            k_segments[b, s - 2 * b - 1 :] = 0
    if kind == 'segments':
        q_segments[:, 2:], k_segments[:, 3:] = 2, 2
        q_positions[:, 2:], k_positions[:, 3:] = q_positions[:, : t - 2], k_positions[:, : s - 3]
    places = (q_segments, k_segments, q_positions, k_positions)
    return Mask(*map(jnp.asarray, places), causal=kind == 'causal')


def visible(mask: Mask) -> np.ndarray:
    places = (mask.q_segments, mask.k_segments, mask.q_positions, mask.k_positions)
    return oracles.visibility(*map(np.asarray, places), causal=mask.causal)


def attend(arrays: Any, mask: Mask, variant: tuple[str, str] = ('dot', 'dense'), dtype: Any = jnp.float32) -> jax.Array:
    q, k, v = (jnp.asarray(array, dtype) for array in arrays)
    return attention(q, k, v, mask, AttentionConfig(kind=variant[0], impl=variant[1]))


@pytest.mark.parametrize('variant', EXACT)
@pytest.mark.parametrize('kind', ['all', 'padding', 'causal', 'segments'])
def test_values_equal_the_loops(variant: tuple[str, str], kind: str) -> None:
    arrays, mask = make_arrays(), make_mask(kind)
    oracles.assert_close(attend(arrays, mask, variant), oracles.attention(*arrays, visible(mask)))


@pytest.mark.parametrize('variant', EXACT)
@pytest.mark.parametrize('kind', ['all', 'padding', 'causal', 'segments'])
def test_gradients_equal_finite_differences_of_the_loops(variant: tuple[str, str], kind: str) -> None:
    arrays = make_arrays(1, (2, 3, 5, 2, 3, 4))
    mask = make_mask(kind, 3, 5)
    probe = np.random.default_rng(2).normal(size=(2, 3, 2, 4))

    def ours(q: Any, k: Any, v: Any) -> jax.Array:
        return (attend((q, k, v), mask, variant) * probe).sum()

    gradients = jax.grad(ours, argnums=(0, 1, 2))(*(jnp.float32(array) for array in arrays))
    for index, gradient in enumerate(gradients):

        def loops(moved: np.ndarray, index: int = index) -> float:
            changed = [moved if i == index else array for i, array in enumerate(arrays)]
            return float((oracles.attention(*changed, visible(mask)) * probe).sum())

        oracles.assert_close(gradient, oracles.numeric_gradient(loops, arrays[index]))


@pytest.mark.parametrize('name', [name for name in cases.COMMON if 'window' in name] + list(cases.FURTHER))
def test_windows_globals_prefixes_biases_and_shared_heads_equal_the_loops(name: str) -> None:
    """Values and gradients of it all, whatever stands where nobody looks."""
    mask = (cases.COMMON | cases.FURTHER)[name]()
    arrays, seen = cases.make_arrays(mask), cases.visible(mask)
    computed = cases.compute(dense_attention, mask, arrays)
    cases.assert_equal_loops(computed, arrays, seen)
    for poison in (math.nan, 1e30):
        poisoned = cases.compute(dense_attention, mask, cases.dirty(mask, seen, arrays, poison))
        jax.tree.map(np.testing.assert_array_equal, poisoned, computed)


@pytest.mark.parametrize('variant', EXACT)
def test_bfloat16_stays_near(variant: tuple[str, str]) -> None:
    arrays, mask = make_arrays(), make_mask('causal')
    actual = attend(arrays, mask, variant, jnp.bfloat16)
    assert actual.dtype == jnp.bfloat16
    oracles.assert_close(actual.astype(jnp.float32), oracles.attention(*arrays, visible(mask)), limit=2e-2)


def test_weights_are_those_of_the_loops() -> None:
    arrays, mask = make_arrays(), make_mask('padding')
    _, weights = dense_attention(*(jnp.float32(array) for array in arrays), mask, Options(CONFIG, scale=H**-0.5))
    expected = oracles.attention_and_weights(*arrays, visible(mask))[1]
    oracles.assert_close(weights, expected)
    assert (np.asarray(weights)[expected == 0] == 0).all()  # exact zeros where nothing is visible


@pytest.mark.parametrize('variant', EXACT)
def test_a_row_that_sees_nothing_yields_zeros_with_finite_gradients(variant: tuple[str, str]) -> None:
    mask = Mask(
        jnp.ones((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32).at[1].set(1),
        jnp.zeros((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32),
    )  # fmt: skip
    arrays = [jnp.float32(array) for array in make_arrays()]
    output = attend(arrays, mask, variant)
    assert (output[0] == 0).all()
    assert (output[1] != 0).all()
    gradients = jax.grad(lambda *a: attend(a, mask, variant).sum(), argnums=(0, 1, 2))(*arrays)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert (gradient[0] == 0).all()


@pytest.mark.parametrize('variant', EXACT)
@pytest.mark.parametrize('poison', [np.nan, np.inf, 1e30, -1e30])
@pytest.mark.parametrize('side', ['keys', 'queries'])
def test_what_stands_in_padding_never_leaks(variant: tuple[str, str], poison: float, side: str) -> None:
    mask = make_mask('padding')
    clean = [jnp.float32(array) for array in make_arrays()]
    q_pad, k_pad = (np.asarray(ids == 0)[..., None, None] for ids in (mask.q_segments, mask.k_segments))
    q, k, v = clean
    if side == 'keys':
        dirty = [q, jnp.where(k_pad, poison, k), jnp.where(k_pad, poison, v)]
    else:
        dirty = [jnp.where(q_pad, poison, q), k, v]
    real = np.asarray(mask.q_segments > 0)[..., None, None]

    def loss(arrays: Any) -> jax.Array:
        return jnp.where(real, attend(arrays, mask, variant), 0.0).sum()

    np.testing.assert_array_equal(
        np.where(real, attend(dirty, mask, variant), 0), np.where(real, attend(clean, mask, variant), 0)
    )
    for ours, expected in zip(jax.grad(loss)(dirty), jax.grad(loss)(clean), strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize('variant', EXACT)
def test_a_huge_value_in_the_future_does_not_reach_the_past(variant: tuple[str, str]) -> None:
    mask = make_mask('causal', T, T)
    clean = [jnp.float32(array) for array in make_arrays(0, (B, T, T, N, H, U))]
    dirty = [clean[0], clean[1].at[:, 3].set(1e30), clean[2].at[:, 3].set(1e30)]
    np.testing.assert_array_equal(attend(dirty, mask, variant)[:, :3], attend(clean, mask, variant)[:, :3])

    def loss(arrays: Any) -> jax.Array:
        return attend(arrays, mask, variant)[:, :3].sum()

    for ours, expected in zip(jax.grad(loss)(dirty), jax.grad(loss)(clean), strict=True):
        np.testing.assert_array_equal(ours[:, :3], expected[:, :3])


@pytest.mark.parametrize('variant', EXACT)
def test_causality_is_the_zero_pattern_of_the_jacobian(variant: tuple[str, str]) -> None:
    q, k, v = (jnp.float32(array) for array in make_arrays(0, (1, T, T, N, H, U)))
    ones, positions = jnp.ones((1, T), jnp.int32), jnp.arange(T)[None]
    mask = Mask(ones, ones, positions, positions, causal=True)
    jacobians = jax.jacobian(lambda k, v: attend((q, k, v), mask, variant), argnums=(0, 1))(k, v)
    for jacobian, what in zip(jacobians, ('keys', 'values'), strict=True):
        moved = np.abs(jacobian).sum(axis=(0, 2, 3, 4, 6, 7)) > 0
        expected = np.tril(np.ones((T, T), bool))
        if what == 'keys':
            expected[0, 0] = False  # the first token has one weight, which is 1 whatever its key
        np.testing.assert_array_equal(moved, expected)


@settings(deadline=None, max_examples=20)
@given(st.permutations(range(S)), st.integers(0, 100))
def test_permuting_keys_with_their_mask_changes_nothing(order: list[int], seed: int) -> None:
    q, k, v = make_arrays(seed)
    mask = make_mask('padding')
    moved = Mask(mask.q_segments, mask.k_segments[:, order], mask.q_positions, mask.k_positions[:, order])
    oracles.assert_close(attend((q, k[:, order], v[:, order]), moved), np.asarray(attend((q, k, v), mask)), 1e-5)


def test_permuting_tokens_permutes_the_output_of_self_attention_and_nothing_else() -> None:
    arrays = make_arrays(0, (B, T, T, N, H, U))
    order = [3, 0, 4, 1, 2]
    mask = make_mask('all', T, T)
    output = np.asarray(attend(arrays, mask))
    oracles.assert_close(attend([a[:, order] for a in arrays], mask), output[:, order], 1e-5)


def test_dropout_keeps_the_mean_and_needs_a_key() -> None:
    q, k, v = (jnp.float32(array) for array in make_arrays())
    mask = make_mask('all')
    config = AttentionConfig(kind='dot', impl='dense', dropout_rate=0.3)
    without = attention(q, k, v, mask, config)
    oracles.assert_close(without, oracles.attention(*make_arrays(), visible(mask)))
    outputs = jax.vmap(lambda key: attention(q, k, v, mask, config, dropout_rng=key))(
        jax.random.split(jax.random.key(0), 3000)
    )
    assert np.abs(outputs[0] - without).max() > 0.01
    error = np.abs(outputs.mean(axis=0) - without)
    assert (error < 5 * outputs.std(axis=0) / math.sqrt(3000) + 1e-6).mean() > 0.99


# The worked numbers of an introduction to the paper.


def test_the_score_of_two_vectors_is_scaled_by_the_root_of_their_width() -> None:
    """(3, 4) . (1, 2) = 11, scaled 11 / sqrt(2) = 7.78: seen in the weight against a key of score 0."""
    q = jnp.array([[[[3.0, 4.0]]]])
    k = jnp.array([[[[1.0, 2.0]], [[0.0, 0.0]]]])
    ones = jnp.ones((1, 2), jnp.int32)
    mask = Mask(ones[:, :1], ones, ones[:, :1], ones)
    _, weights = dense_attention(q, k, k, mask, Options(CONFIG, scale=2**-0.5))
    first, second = (float(weight) for weight in weights[0, 0, 0])
    assert round(math.log(first / second), 2) == 7.78


def test_scaling_brings_the_variance_of_scores_from_d_k_to_one() -> None:
    rng = np.random.default_rng(0)
    q, k = jnp.float32(rng.normal(size=(2, 2, 300, 3, 64)))
    found = np.asarray(scores(q, k))
    assert found.shape == (2, 3, 300, 300)
    assert found.var() == pytest.approx(64, rel=0.05)
    assert (found * make_options(q, AttentionConfig(head_dim=64)).scale).var() == pytest.approx(1, rel=0.05)
    assert make_options(q, AttentionConfig(head_dim=64, scale=None)).scale == 1


THREE = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[None, :, None]


def test_three_tokens_by_hand() -> None:
    v = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])[None, :, None]
    ones = jnp.ones((1, 3), jnp.int32)
    output, weights = dense_attention(THREE, THREE, v, Mask(ones, ones, ones, ones), Options(CONFIG, scale=2**-0.5))
    assert [round(float(weight), 3) for weight in weights[0, 0, 0]] == [0.401, 0.198, 0.401]
    assert round(float(weights[0, 0, 2, 2]), 3) == 0.503
    assert [round(float(value), 3) for value in output[0, 0, 0]] == [0.602, 0.398]
    np.testing.assert_allclose(output[0, :, 0].sum(axis=-1), 1.0, rtol=1e-6)  # on the segment between the values
    assert ((output >= 0) & (output <= 1)).all()


def test_causal_weights_are_lower_triangular_with_exact_zeros() -> None:
    q, k, v = (jnp.float32(array) for array in make_arrays(0, (1, 4, 4, 1, 3, 5)))
    ones, positions = jnp.ones((1, 4), jnp.int32), jnp.arange(4)[None]
    _, weights = dense_attention(
        q, k, v, Mask(ones, ones, positions, positions, causal=True), Options(CONFIG, scale=1.0)
    )
    weights = np.asarray(weights[0, 0])
    assert (weights[np.triu_indices(4, 1)] == 0).all()
    assert (weights[np.tril_indices(4)] > 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-6)


def test_unscaled_scores_of_wide_heads_leave_one_key_alone() -> None:
    rng = np.random.default_rng(1)
    q, k = jnp.float32(rng.normal(size=(1, 1, 1, 64))), jnp.float32(rng.normal(size=(1, 4, 1, 64)))
    ones = jnp.ones((1, 4), jnp.int32)
    mask = Mask(ones[:, :1], ones, ones[:, :1], ones)
    scaled = np.asarray(dense_attention(q, k, k, mask, Options(CONFIG, scale=1 / 8))[1][0, 0, 0])
    unscaled = np.asarray(dense_attention(q, k, k, mask, Options(CONFIG, scale=1.0))[1][0, 0, 0])
    assert (np.argsort(scaled) == np.argsort(unscaled)).all()
    assert unscaled.max() > 0.99
    assert (scaled * (1 - scaled) > 0.05).all()  # the slope of a softmax: every key still learns
