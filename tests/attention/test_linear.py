"""Linear attention against loops over its definition; chunks, packing, decoding with a state, and memory."""

import dataclasses
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
from transformer_jax.attention.performer import PERFORMER
from transformer_jax.attention.variant import Options, Variant
from transformer_jax.config import AttentionConfig

N, K, H, U = 4, 2, 3, 5
CONFIG = AttentionConfig(kind='linear', num_heads=N, num_kv_heads=K, head_dim=H, value_dim=U, block_size=2)

LAYOUTS = {
    'causal, right padding': make_mask(comparing.RIGHT_PADDED, comparing.RIGHT_PADDED, causal=True, aligned=True),
    'causal, left padding': make_mask(comparing.LEFT_PADDED, comparing.LEFT_PADDED, causal=True, aligned=True),
    'causal, packed': make_mask(comparing.PACKED, comparing.PACKED, causal=True, aligned=True),
    'causal, packed, not aligned': make_mask(comparing.PACKED, comparing.PACKED, causal=True),
    'causal, other lengths': make_mask(comparing.SHORT_PACKED, comparing.PACKED, causal=True),
    'self': make_mask(comparing.RIGHT_PADDED, comparing.RIGHT_PADDED),
    'cross': make_mask(comparing.SHORT_PADDED, comparing.RIGHT_PADDED),
    'cross, packed': make_mask(comparing.SHORT_PACKED, comparing.PACKED),
    'cross, a row of padding': make_mask(comparing.NOBODY, comparing.LEFT_PADDED),
}


def feature(x: float) -> float:
    return x + 1 if x > 0 else math.exp(x)


def loops(arrays: comparing.Arrays, seen: np.ndarray) -> np.ndarray:
    """Sum of phi(q) . phi(k) v over the sum of phi(q) . phi(k), over the keys that are seen."""
    q, k, v = arrays['q'], arrays['k'], arrays['v']
    output = np.zeros((*q.shape[:3], v.shape[-1]))
    phi_q, phi_k = np.vectorize(feature)(q), np.vectorize(feature)(k)
    for b, t, n in np.ndindex(q.shape[:3]):
        head = n // (q.shape[2] // k.shape[2])
        total = 0.0
        for s in range(k.shape[1]):
            if seen[b, t, s]:
                weight = np.dot(phi_q[b, t, n], phi_k[b, s, head])
                output[b, t, n] += weight * v[b, s, head]
                total += weight
        output[b, t, n] /= total or 1.0
    return output


def attend(q: Any, k: Any, v: Any, mask: Mask, config: AttentionConfig = CONFIG) -> jax.Array:
    return LINEAR.function(q, k, v, mask, Options(config))[0]


@pytest.mark.parametrize('layout', LAYOUTS)
def test_values_and_gradients_equal_the_loops(layout: str) -> None:
    mask = LAYOUTS[layout]
    arrays = make_arrays(0, mask, N, K, H, U)
    seen = comparing.visible(mask)
    comparing.assert_equals_loops(
        lambda a: attend(a['q'], a['k'], a['v'], mask), lambda a: loops(a, seen), arrays, seen
    )


@pytest.mark.parametrize('aligned', [True, False])
def test_causality_is_the_zero_pattern_of_the_jacobian(aligned: bool) -> None:
    mask = make_mask([[1] * 7], [[1] * 7], causal=True, aligned=aligned)
    q, k, v = (jnp.float32(array) for array in make_arrays(0, mask, N, K, H, U).values())
    jacobians = jax.jit(jax.jacobian(lambda k, v: attend(q, k, v, mask), argnums=(0, 1)))(k, v)
    for jacobian, what in zip(jacobians, ('keys', 'values'), strict=True):
        size = np.abs(jacobian).sum(axis=(0, 2, 3, 4, 6, 7))
        expected = np.tril(np.ones((7, 7), bool))
        assert (size[~expected] == 0).all()
        if what == 'keys':
            expected[0, 0] = False  # the first token has one weight, which is 1 whatever its key
        assert (size[expected] > 1e-4).all()


def test_a_huge_value_in_the_future_does_not_reach_the_past() -> None:
    mask = LAYOUTS['causal, right padding']
    clean = [jnp.float32(array) for array in make_arrays(0, mask, N, K, H, U).values()]
    dirty = [clean[0], clean[1].at[:, 4].set(1e30), clean[2].at[:, 4].set(1e30)]

    @jax.jit
    def compute(arrays: Any) -> Any:
        return jax.value_and_grad(lambda a: attend(*a, mask, CONFIG)[:, :4].sum())(arrays)

    (ours, our_gradients), (expected, gradients) = compute(dirty), compute(clean)
    np.testing.assert_array_equal(ours, expected)
    for one, other in zip(our_gradients, gradients, strict=True):
        np.testing.assert_array_equal(one[:, :4], other[:, :4])


@pytest.mark.parametrize('size', [1, 3, 9])
def test_the_chunk_size_changes_nothing(size: int) -> None:
    mask = LAYOUTS['causal, packed']
    arrays = [jnp.float32(array) for array in make_arrays(3, mask, N, K, H, U).values()]
    config = dataclasses.replace(CONFIG, block_size=size)
    actual = jax.jit(lambda *a: attend(*a, mask, config))(*arrays)
    oracles.assert_close(actual, loops(make_arrays(3, mask, N, K, H, U), comparing.visible(mask)))


def test_bfloat16_is_summed_in_float32() -> None:
    mask = make_mask([[1] * 7], [[1] * 7], causal=True, aligned=True)
    arrays = make_arrays(0, mask, N, K, H, U)
    rounded = {name: np.float64(jnp.bfloat16(array)) for name, array in arrays.items()}
    output = jax.jit(lambda *a: attend(*a, mask))(*(jnp.bfloat16(array) for array in arrays.values()))
    assert output.dtype == jnp.bfloat16
    # Of the inputs as rounded: only the rounding of the output is left.
    oracles.assert_close(output.astype(jnp.float32), loops(rounded, comparing.visible(mask)), limit=4e-3)


@pytest.mark.parametrize('size', [2, 128])
def test_decoding_with_a_state_equals_the_full_pass(size: int) -> None:
    config = dataclasses.replace(CONFIG, block_size=size)
    mask = make_mask([[1] * 6] * 2, [[1] * 6] * 2, causal=True, aligned=True)
    arrays = make_arrays(4, mask, N, K, H, U)
    comparing.assert_decoding_equals(LINEAR, config, arrays, loops(arrays, comparing.visible(mask)))


@pytest.mark.parametrize(
    ('variant', 'length'),
    [
        pytest.param(LINEAR, 1024, id='linear'),
        pytest.param(LINEAR, 4096, id='linear, long', marks=pytest.mark.slow),
        pytest.param(PERFORMER, 4096, id='performer, long', marks=pytest.mark.slow),
    ],
)
def test_memory_of_the_backward_pass_grows_as_the_length(variant: Variant, length: int) -> None:
    """And holds no state of every position, `[T, F, U]` a head."""
    config = AttentionConfig(num_heads=2, head_dim=64)

    def temporary_memory(length: int) -> int:
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        rows = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)

        def loss(q: Any, k: Any, v: Any, segments: Any, positions: Any) -> jax.Array:
            mask = Mask(segments, segments, positions, positions, causal=True, aligned=True)
            return (variant.function(q, k, v, mask, Options(config, scale=1 / 8))[0] ** 2).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(rows, rows, rows, ids, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary_memory(length), temporary_memory(2 * length)
    assert long <= 2.2 * short
    assert long < 2 * length * 2 * 64 * 64 * 4 / 4  # a quarter of one state a position


def test_layers_in_a_loop_that_recomputes_them_learn_the_same() -> None:
    """A mask that is traced as part of a scanned and recomputed layer reaches the backward pass."""
    mask = make_mask([[1, 1, 1, 0]], [[1, 1, 1, 0]])
    rows = make_arrays(5, mask, 2, 2, 2, 2)['q']

    @jax.jit
    def looped(rows: jax.Array, mask: Mask) -> jax.Array:
        step = jax.checkpoint(lambda x, _: (x + attend(x, x[:, :, ::-1], x, mask), None))
        return jax.grad(lambda x: (jax.lax.scan(step, x, None, 2)[0] ** 2).sum())(rows)

    def written_out(x: np.ndarray) -> float:
        for _ in range(2):
            x = x + loops({'q': x, 'k': x[:, :, ::-1], 'v': x}, comparing.visible(mask))
        return (x**2).sum()

    oracles.assert_close(looped(jnp.float32(rows), mask), oracles.numeric_gradient(written_out, rows))


def test_what_it_can_not_do_is_refused() -> None:
    mask = make_mask(comparing.RIGHT_PADDED, comparing.RIGHT_PADDED, causal=True)
    q, k, v = (jnp.float32(array) for array in make_arrays(0, mask, N, K, H, U).values())
    assert not {'window', 'globals', 'prefix', 'bias', 'positions', 'dropout', 'weights'} & LINEAR.supports
    with pytest.raises(ValueError, match='does not support window'):
        attend(q, k, v, mask.within(3))
    with pytest.raises(ValueError, match='bias'):
        LINEAR.function(q, k, v, mask, Options(CONFIG, bias=jnp.zeros((2, N, 7, 7))))
    with pytest.raises(ValueError, match='weights'):
        LINEAR.function(q, k, v, mask, Options(CONFIG, return_weights=True))
