"""Additive attention and `concat` against loops over the definition, at once and in blocks."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.attention import comparing
from tests.attention.comparing import make_arrays, make_mask
from transformer_jax.attention.additive import ADDITIVE, ADDITIVE_BLOCKWISE, CONCAT, CONCAT_BLOCKWISE
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options, Variant
from transformer_jax.config import AttentionConfig

N, K, H, U, A = 4, 2, 3, 2, 5
CONFIG = AttentionConfig(
    kind='additive', num_heads=N, num_kv_heads=K, head_dim=H, value_dim=U, score_dim=A, block_size=2
)
VARIANTS = {
    'additive': ADDITIVE, 'additive in blocks': ADDITIVE_BLOCKWISE,
    'concat': CONCAT, 'concat in blocks': CONCAT_BLOCKWISE,
}  # fmt: skip

LAYOUTS = {
    'causal, packed': make_mask(comparing.PACKED, comparing.PACKED, causal=True, aligned=True),
    'cross, packed': make_mask(comparing.SHORT_PACKED, comparing.PACKED),
    'cross, a row of padding': make_mask(comparing.NOBODY, comparing.LEFT_PADDED),
    'window': make_mask(comparing.LEFT_PADDED, comparing.LEFT_PADDED).within(2, None, 1),
}
CASES = [
    ('additive', 'cross, packed'), ('additive in blocks', 'causal, packed'), ('additive in blocks', 'cross, packed'),
    ('additive in blocks', 'cross, a row of padding'), ('additive in blocks', 'window'), ('concat', 'causal, packed'),
    ('concat in blocks', 'cross, packed'),
]  # fmt: skip


def loops_and_weights(arrays: comparing.Arrays, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax over the keys seen of v . tanh(W q + U k), or of v . tanh(W [q; k])."""
    q, k, v = (arrays[name] for name in 'qkv')
    output = np.zeros((*q.shape[:3], v.shape[-1]))
    weights = np.zeros((q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    for b, t, n in np.ndindex(q.shape[:3]):
        head = n // (q.shape[2] // k.shape[2])
        powers = {}
        for s in range(k.shape[1]):
            if not seen[b, t, s]:
                continue
            if 'joint_map' in arrays:
                inner = np.concatenate([q[b, t, n], k[b, s, head]]) @ arrays['joint_map'][n]
            else:
                inner = q[b, t, n] @ arrays['query_map'][n] + k[b, s, head] @ arrays['key_map'][head]
            powers[s] = math.exp(np.dot(arrays['score'][n], np.tanh(inner)))
        for s, power in powers.items():
            weights[b, n, t, s] = power / sum(powers.values())
            output[b, t, n] += weights[b, n, t, s] * v[b, s, head]
    return output, weights


def with_parameters(seed: int, variant: Variant, mask: Mask) -> comparing.Arrays:
    assert variant.parameters is not None
    rng = np.random.default_rng(seed + 100)
    drawn = {name: rng.normal(size=one.shape) for name, one in variant.parameters(CONFIG, 8).items()}
    return {**make_arrays(seed, mask, N, K, H, U), **drawn}


def attend(
    arrays: dict[str, Any], variant: Variant, mask: Mask, config: AttentionConfig = CONFIG, **options: Any
) -> Any:
    params = {name: array for name, array in arrays.items() if name not in ('q', 'k', 'v')}
    return variant.function(arrays['q'], arrays['k'], arrays['v'], mask, Options(config, 0.5, params, **options))


def float32(arrays: comparing.Arrays) -> dict[str, jax.Array]:
    return {name: jnp.float32(array) for name, array in arrays.items()}


@pytest.mark.parametrize(('name', 'layout'), CASES)
def test_values_and_gradients_equal_the_loops(name: str, layout: str) -> None:
    variant, mask = VARIANTS[name], LAYOUTS[layout]
    seen = np.asarray(mask.materialize()) if mask.window else comparing.visible(mask)
    comparing.assert_equals_loops(
        lambda a: attend(a, variant, mask)[0],
        lambda a: loops_and_weights(a, seen)[0],
        with_parameters(0, variant, mask),
        seen,
    )


@pytest.mark.parametrize('name', ['additive', 'concat in blocks'])
def test_weights_are_those_of_the_loops(name: str) -> None:
    mask = LAYOUTS['cross, packed']
    arrays = with_parameters(1, VARIANTS[name], mask)
    weights = jax.jit(lambda a: attend(a, VARIANTS[name], mask, return_weights=True)[1])(float32(arrays))
    expected = loops_and_weights(arrays, comparing.visible(mask))[1]
    oracles.assert_close(weights, expected)
    assert (np.asarray(weights)[expected == 0] == 0).all()


def test_causality_is_the_zero_pattern_of_the_jacobian() -> None:
    mask = make_mask([[1] * 5], [[1] * 5], causal=True, aligned=True)
    arrays = float32(with_parameters(0, ADDITIVE_BLOCKWISE, mask))
    jacobians = jax.jit(
        jax.jacobian(lambda k, v: attend({**arrays, 'k': k, 'v': v}, ADDITIVE_BLOCKWISE, mask)[0], argnums=(0, 1))
    )(arrays['k'], arrays['v'])
    for jacobian, what in zip(jacobians, ('keys', 'values'), strict=True):
        size = np.abs(jacobian).sum(axis=(0, 2, 3, 4, 6, 7))
        expected = np.tril(np.ones((5, 5), bool))
        if what == 'keys':
            expected[0, 0] = False  # the first token has one weight, which is 1 whatever its key
        assert (size[expected] > 1e-4).all()
        assert (size[~expected] == 0).all()


def test_rows_read_one_at_a_time_equal_the_whole() -> None:
    """As decoding does: one query against all keys, the later ones hidden by their positions."""
    mask = LAYOUTS['causal, packed']
    arrays = with_parameters(2, ADDITIVE, mask)
    whole = loops_and_weights(arrays, comparing.visible(mask))[0]
    arrays = float32(arrays)

    @jax.jit
    def read(q: jax.Array, start: jax.Array) -> jax.Array:
        return attend({**arrays, 'q': q}, ADDITIVE, dataclasses.replace(mask, aligned=False).block(start, 1, 0, 7))[0]

    rows = [read(arrays['q'][:, t : t + 1], t) for t in range(7)]
    oracles.assert_close(np.concatenate(rows, axis=1), whole, 1e-5)


@pytest.mark.parametrize('size', [1, 3, 64])
def test_the_block_size_changes_nothing(size: int) -> None:
    mask = LAYOUTS['cross, packed']
    arrays = with_parameters(3, ADDITIVE_BLOCKWISE, mask)
    config = dataclasses.replace(CONFIG, block_size=size)
    actual = jax.jit(lambda a: attend(a, ADDITIVE_BLOCKWISE, mask, config)[0])(float32(arrays))
    oracles.assert_close(actual, loops_and_weights(arrays, comparing.visible(mask))[0])


class ToyTerms(NamedTuple):
    """A bias, and products of the query with a table."""

    table: jax.Array  # N H S

    def bias(self, q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
        return jnp.broadcast_to((0.3 * (k_positions[:, None, None, :] - q_positions[:, None, :, None])), (2, N, 5, 7))

    def score_term(self, q: jax.Array, q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
        return jnp.einsum('BTNH,NHS->BNTS', q, self.table)

    def output_term(self, weights: jax.Array, q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.moveaxis(weights.sum(axis=3), 1, 2)[..., None], (2, 5, N, U))


def test_what_positions_and_a_bias_add_is_added_to_the_scores() -> None:
    mask = make_mask([[1] * 5] * 2, [[1] * 7] * 2)
    arrays = float32(with_parameters(4, ADDITIVE, mask))
    rng = np.random.default_rng(5)
    terms, bias = ToyTerms(jnp.float32(rng.normal(size=(N, H, 7)))), jnp.float32(rng.normal(size=(1, N, 5, 7)))
    plain = np.log(jax.jit(lambda a: attend(a, ADDITIVE, mask)[1])(arrays))
    positions = (mask.q_positions, mask.k_positions)
    own = np.asarray(terms.bias(*positions) + 0.5 * terms.score_term(arrays['q'], *positions) + bias)
    powers = np.exp(plain + own)
    expected = powers / powers.sum(axis=-1, keepdims=True)
    output, weights = jax.jit(lambda a: attend(a, ADDITIVE, mask, terms=terms, bias=bias))(arrays)
    oracles.assert_close(weights, expected)
    oracles.assert_close(output, np.einsum('bnts,bsnu->btnu', expected, np.repeat(arrays['v'], N // K, axis=2)) + 1)


@pytest.mark.parametrize('name', VARIANTS)
def test_a_head_has_2_d_k_d_a_plus_d_a_parameters(name: str) -> None:
    variant = VARIANTS[name]
    assert variant.parameters is not None
    parameters = variant.parameters(AttentionConfig(num_heads=3, head_dim=7, score_dim=11), 8)
    assert sum(math.prod(one.shape) for one in parameters.values()) == 3 * (2 * 7 * 11 + 11)
    assert all(len(one.shape) == len(one.logical_axes) for one in parameters.values())
    assert variant.parameters(AttentionConfig(num_heads=3, head_dim=7), 8)['score'].shape == (3, 7)  # d_a = d_k


@pytest.mark.parametrize('variant', [ADDITIVE, CONCAT])
def test_parameters_start_by_the_width_of_a_head_whatever_the_number_of_heads(variant: Variant) -> None:
    assert variant.parameters is not None
    spread = {'query_map': 2 / (7 + 11), 'key_map': 2 / (7 + 11), 'joint_map': 2 / (14 + 11), 'score': 1 / 11}
    for name, one in variant.parameters(AttentionConfig(num_heads=23, head_dim=7, score_dim=11), 8).items():
        values = one.initializer(jax.random.key(0), one.shape, jnp.float32)
        assert float(values.std()) == pytest.approx(math.sqrt(spread[name]), rel=0.15)


@pytest.mark.parametrize('variant', [ADDITIVE_BLOCKWISE, CONCAT_BLOCKWISE])
def test_blocks_never_hold_the_inner_layer_of_all_pairs(variant: Variant) -> None:
    assert variant.parameters is not None
    length, width, config = 512, 64, AttentionConfig(num_heads=2, head_dim=8, score_dim=64, block_size=32)
    rows = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    params = {n: jax.ShapeDtypeStruct(p.shape, jnp.float32) for n, p in variant.parameters(config, length).items()}
    segments = [[1] * length]
    mask = make_mask(segments, segments, causal=True, aligned=True)

    def loss(arrays: Any) -> jax.Array:
        return (attend(arrays, variant, mask, config)[0] ** 2).sum()

    compiled = jax.jit(jax.grad(loss)).lower({'q': rows, 'k': rows, 'v': rows, **params}).compile()
    whole = length * length * 2 * width * 4
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 6
