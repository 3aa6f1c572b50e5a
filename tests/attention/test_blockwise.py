"""Attention in blocks against float64 loops, and what blocks must not change."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests import oracles
from tests.attention import exact_cases as cases
from transformer_jax.attention.block_pairs import Blocks, find_pairs, pad_to_blocks
from transformer_jax.attention.blockwise import BLOCKWISE, choose_blocks
from transformer_jax.attention.dense import dense_attention
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options
from transformer_jax.checking import oracle
from transformer_jax.config import AttentionConfig

CASES = cases.COMMON | cases.FURTHER
blockwise = BLOCKWISE.function


def without_bias(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays.items() if name != 'bias'}


def test_the_loops_have_the_gradients_of_finite_differences() -> None:
    rng = np.random.default_rng(0)
    shapes = {'q': (1, 2, 2, 3), 'k': (1, 3, 1, 3), 'v': (1, 3, 1, 2), 'bias': (1, 2, 2, 3), 'd_output': (1, 2, 2, 2)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    seen = np.array([[[True, False, True], [True, True, True]]])
    gradients = cases.loops(arrays, seen)
    for name in ('q', 'k', 'v', 'bias'):

        def moved(at: np.ndarray, name: str = name) -> float:
            return float((cases.loops(arrays | {name: at}, seen)['output'] * arrays['d_output']).sum())

        oracles.assert_close(gradients[name], oracles.numeric_gradient(moved, arrays[name]), 1e-6)


@pytest.mark.parametrize('name', CASES)
def test_values_and_gradients_equal_the_loops(name: str) -> None:
    """Blocks of 7 divide neither length; half of the cases have a bias on the logits."""
    mask = CASES[name]()
    arrays = cases.make_arrays(mask)
    if name.startswith(('self', 'window', 'prefix')):
        arrays = without_bias(arrays)
    seen = cases.visible(mask)
    cases.assert_equal_loops(cases.compute(blockwise, mask, arrays, block_size=7), arrays, seen)


@pytest.mark.parametrize('num_kv_heads', [1, cases.N])
def test_key_value_heads_are_shared_by_groups(num_kv_heads: int) -> None:
    mask = cases.self_mask('padded', causal=True, aligned=True)
    arrays = without_bias(cases.make_arrays(mask, num_kv_heads=num_kv_heads))
    cases.assert_equal_loops(cases.compute(blockwise, mask, arrays, block_size=11), arrays, cases.visible(mask))


def test_bfloat16_stays_near() -> None:
    mask = cases.cross_mask('padded')
    arrays = cases.make_arrays(mask)
    computed = cases.compute(blockwise, mask, arrays, jnp.bfloat16, block_size=7)
    assert {x.dtype for x in (computed.output, *computed.gradients.values())} == {jnp.dtype('bfloat16')}
    cases.assert_equal_loops(computed, arrays, cases.visible(mask), 2e-2)


@pytest.mark.parametrize('name', ['cross packed', 'causal left-padded', 'globals'])
def test_what_nobody_looks_at_never_leaks(name: str) -> None:
    mask = CASES[name]()
    arrays, seen = cases.make_arrays(mask), cases.visible(mask)
    clean = cases.compute(blockwise, mask, arrays, block_size=7)
    for poison in (math.nan, math.inf, 1e30):
        poisoned = cases.compute(blockwise, mask, cases.dirty(mask, seen, arrays, poison), block_size=7)
        jax.tree.map(np.testing.assert_array_equal, poisoned, clean)


def test_a_huge_value_that_some_may_see_does_not_reach_the_others() -> None:
    mask = cases.self_mask('all', causal=True, aligned=True)
    arrays = without_bias(cases.make_arrays(mask))
    arrays['d_output'][:, 10:] = 0
    huge = arrays | {name: arrays[name].copy() for name in ('k', 'v')}
    huge['k'][:, 10:], huge['v'][:, 10:] = 1e30, 1e30
    clean, dirty = (cases.compute(blockwise, mask, x, block_size=7) for x in (arrays, huge))
    np.testing.assert_array_equal(dirty.output[:, :10], clean.output[:, :10])
    jax.tree.map(np.testing.assert_array_equal, dirty.gradients, clean.gradients)


@settings(deadline=None, max_examples=3)
@given(st.integers(1, 40), st.sampled_from(['causal packed', 'window, not aligned', 'cross padded', 'prefix']))
def test_block_size_changes_nothing(block_size: int, name: str) -> None:
    mask = CASES[name]()
    arrays = without_bias(cases.make_arrays(mask))
    results = [cases.compute(blockwise, mask, arrays, block_size=size) for size in (block_size, 64)]
    for ours, whole in zip(*map(jax.tree.leaves, results), strict=True):
        oracles.assert_close(ours, whole, 2e-6)


@pytest.mark.parametrize('length', [1, 63, 64, 65, 127, 128, 192, 320])
def test_lengths_around_whole_blocks_with_padding(length: int) -> None:
    real = max(1, length - 3)
    segments = jnp.asarray((np.arange(length) < real).astype(np.int32))[None].repeat(2, 0).at[0].set(1)
    positions = jnp.broadcast_to(jnp.arange(length), (2, length))
    mask = Mask(segments, segments, positions, positions, causal=True, aligned=True)
    arrays = without_bias(cases.make_arrays(mask, num_kv_heads=1))
    computed = cases.compute(blockwise, mask, arrays, block_size=64)
    if length <= 65:  # the loops would take long beyond
        cases.assert_equal_loops(computed, arrays, cases.visible(mask))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(computed))


@pytest.mark.parametrize('name', ['causal packed', 'key by key'])
def test_position_terms_and_their_parameters_are_as_in_dense(name: str) -> None:
    mask = CASES[name]()
    rng = np.random.default_rng(3)
    tables = {'keys': cases.H, 'values': cases.U, 'biases': cases.N}
    arrays = cases.make_arrays(mask) | {name: rng.normal(size=(7, width)) for name, width in tables.items()}
    arrays = {name: jnp.float32(array) for name, array in arrays.items()}

    def compute(function: Any) -> Any:
        def loss(arrays: dict[str, Any]) -> Any:
            terms = cases.ToyTerms(*(arrays[name] for name in tables), jnp.int32(3))
            options = Options(AttentionConfig(block_size=7), scale=0.3, bias=arrays['bias'], terms=terms)
            output = function(arrays['q'], arrays['k'], arrays['v'], mask, options)[0]
            return (output * arrays['d_output']).sum(), output

        return jax.jit(jax.grad(loss, has_aux=True))(arrays)

    for ours, expected in zip(*map(jax.tree.leaves, (compute(blockwise), compute(dense_attention))), strict=True):
        oracles.assert_close(ours, expected)


def test_rows_over_eight_devices_change_nothing() -> None:
    """With blocks that are skipped by what the rows hold, all of them together."""
    mask = jax.tree.map(lambda x: jnp.concatenate([x] * 4), cases.cross_mask('padded'))
    arrays = without_bias(cases.make_arrays(mask))
    expected = cases.compute(blockwise, mask, arrays, block_size=7)
    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec('data'))
    ours = cases.compute(blockwise, *jax.device_put((mask, arrays), rows), block_size=7)
    assert len(ours.output.sharding.device_set) == 8
    for one, other in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        oracles.assert_close(one, np.asarray(other), 1e-6)


def drop(q: Any, k: Any, v: Any, mask: Mask, key: Any, block_size: int | None = 7) -> jax.Array:
    options = Options(AttentionConfig(dropout_rate=0.3, block_size=block_size), scale=0.3, dropout_rng=key)
    return blockwise(q, k, v, mask, options)[0]


@functools.partial(jax.jit, static_argnums=4)
def dropped_weights(mask: Mask, q: Any, k: Any, key: Any, block_size: int = 7) -> jax.Array:
    """`[B, T, N, S]`, read off values that are the unit vectors."""
    units = jnp.broadcast_to(jnp.eye(k.shape[1])[None, :, None], (*k.shape[:3], k.shape[1]))
    return drop(q, k, units, mask, key, block_size)


def test_dropout_is_the_same_for_every_block_size_and_sharding() -> None:
    mask = cases.self_mask('padded', causal=True, aligned=True)
    mask = jax.tree.map(lambda x: jnp.concatenate([x] * 4), mask)
    arrays = cases.make_arrays(mask)
    q, k = jnp.float32(arrays['q']), jnp.float32(arrays['k'])
    expected = np.asarray(dropped_weights(mask, q, k, jax.random.key(5)))
    zeros = (expected == 0) & cases.visible(mask)[:, :, None, :]
    share = zeros.sum() / (cases.visible(mask).sum() * cases.N)
    assert 0.27 < share < 0.33
    assert not (zeros[0] == zeros[2]).all()  # rows alike are not dropped alike
    assert not (zeros[:, :, 0] == zeros[:, :, 1]).all()
    oracles.assert_close(dropped_weights(mask, q, k, jax.random.key(5), 64), expected, 1e-6)
    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec('data'))
    sharded = dropped_weights(*jax.device_put((mask, q, k), rows), jax.random.key(5))
    assert len(sharded.sharding.device_set) == 8
    oracles.assert_close(sharded, expected, 1e-6)
    assert not ((dropped_weights(mask, q, k, jax.random.key(6)) == 0) == (expected == 0)).all()


def test_dropout_keeps_the_mean_and_its_gradient_is_that_of_the_kept_weights() -> None:
    mask = cases.cross_mask('padded')
    arrays = {name: jnp.float32(array) for name, array in cases.make_arrays(mask, num_kv_heads=cases.N).items()}
    q, k, v = arrays['q'], arrays['k'], arrays['v']
    key = jax.random.key(1)
    factors = np.where(np.asarray(dropped_weights(mask, q, k, key)) == 0, 0, 1 / 0.7).transpose(0, 2, 1, 3)
    seen = cases.visible(mask)[:, None]

    def written_out(q: Any, k: Any, v: Any) -> jax.Array:
        logits = jnp.where(seen, jnp.einsum('BTNH,BSNH->BNTS', q, k) * 0.3, -1e9)
        weights = jnp.where(seen, jax.nn.softmax(logits, axis=-1), 0.0) * factors
        return (jnp.einsum('BNTS,BSNU->BTNU', weights, v) * arrays['d_output']).sum()

    def ours(q: Any, k: Any, v: Any) -> jax.Array:
        return (drop(q, k, v, mask, key) * arrays['d_output']).sum()

    gradients = [jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v) for loss in (ours, written_out)]
    for one, other in zip(*gradients, strict=True):
        oracles.assert_close(one, other)
    without = blockwise(q, k, v, mask, Options(AttentionConfig(), scale=0.3))[0]
    keys = jax.random.split(jax.random.key(0), 1000)
    many = jax.jit(jax.vmap(lambda key: drop(q, k, v, mask, key, None)))(keys)
    error = np.abs(many.mean(0) - without)
    assert (error < 5 * np.asarray(many).std(0) / math.sqrt(1000) + 1e-6).mean() > 0.99


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('blocks', [Blocks(5, 7), Blocks(8, 3)])
def test_no_pair_of_blocks_that_sees_anything_is_skipped(name: str, blocks: Blocks) -> None:
    mask = CASES[name]()
    pairs = find_pairs(pad_to_blocks(mask, blocks), blocks)
    visited = list(zip(*(np.asarray(x)[: int(pairs.count)].tolist() for x in pairs[:2]), strict=True))
    assert len(visited) == len(set(visited))
    needed = {(t // blocks.num_queries, s // blocks.num_keys) for _, t, s in np.argwhere(cases.visible(mask)).tolist()}
    assert needed <= set(visited)


@pytest.mark.parametrize('aligned', [True, False])
def test_pairs_beyond_the_mask_are_skipped(aligned: bool) -> None:
    """1,000 tokens in blocks of 10: a window of 21 reaches 3 blocks a row of blocks, half of all pairs are causal."""
    ones, positions = jnp.ones((1, 1000), jnp.int32), jnp.arange(1000)[None]

    def count(**rules: Any) -> Any:
        return find_pairs(Mask(ones, ones, positions, positions, aligned=aligned, **rules), Blocks(10, 10)).count

    counts = [count(causal=True), count(causal=True, window=(20, 0)), count(window=(20, 10))]
    assert [int(count) for count in counts] == [100 * 101 // 2, 3 * 100 - 3, 4 * 100 - 4]
    assert all(isinstance(count, int) == aligned for count in counts)  # known before the program runs
    assert int(count(window=(20, 20), num_global=1)) == 5 * 100 - 6 + 97 + 97  # the first block sees and is seen by all


def test_packed_segments_and_padding_are_skipped() -> None:
    segments = jnp.asarray(np.repeat([1, 2, 0, 3], 10)[None])
    positions = jnp.asarray(np.tile(np.arange(10), 4)[None])
    pairs = find_pairs(Mask(segments, segments, positions, positions), Blocks(10, 10))
    assert int(pairs.count) == 3
    assert np.asarray(pairs.q_blocks)[:3].tolist() == np.asarray(pairs.k_blocks)[:3].tolist() == [0, 1, 3]


def test_blocks_fit_the_work() -> None:
    ones = jnp.ones((1, 9000), jnp.int32)
    whole = Mask(ones, ones, ones, ones)
    assert choose_blocks(8, 9000, 9000, whole, None) == Blocks(256, 256)
    assert choose_blocks(512, 9000, 9000, whole, None) == Blocks(128, 128)
    assert choose_blocks(8, 9000, 9000, dataclasses.replace(whole, window=(99, 0)), None) == Blocks(128, 128)
    assert choose_blocks(8, 1, 300, whole, None) == Blocks(1, 256)
    assert choose_blocks(8, 9000, 9000, whole, 1000) == Blocks(1000, 1000)


def make_program(function: Any, length: int) -> Any:
    """Forward and backward, B=1, N=8, H=64, float32, compiled and not run."""
    heads, ids = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32), jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(q: Any, k: Any, v: Any, segments: Any, positions: Any) -> Any:
        mask = Mask(segments, segments, positions, positions, aligned=True)
        return function(q, k, v, mask, Options(AttentionConfig(), scale=0.125))[0].sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(heads, heads, heads, ids, ids).compile()


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    lengths = [1024, 4096, 8192, 16384]
    ours = [make_program(blockwise, length).memory_analysis().temp_size_in_bytes for length in lengths]
    for (shorter, before), (longer, after) in itertools.pairwise(zip(lengths, ours, strict=True)):
        assert after <= 2.2 ** math.log2(longer / shorter) * before
    dense = make_program(dense_attention, 8192).memory_analysis().temp_size_in_bytes
    assert ours[2] <= dense / 20


def test_a_loop_over_layers_with_remat() -> None:
    """In float64, so that three layers leave no rounding that a wrong gradient could hide in."""
    with jax.enable_x64(True):
        mask = cases.self_mask('padded', aligned=True)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(cases.B, cases.T, 2, 8)))
        options = Options(AttentionConfig(block_size=7), scale=0.3)

        def equation(q: Any, k: Any, v: Any, mask: Mask, options: Options) -> tuple[Any, None]:
            return oracle.dot(
                q * options.scale * 8**0.5, k, v, oracle.visible(mask), {}, AttentionConfig(head_dim=8)
            ), None

        def loss(function: Any, x: Any) -> Any:
            @jax.checkpoint
            def layer(x: Any, _: None) -> Any:
                return x + function(x, x, x, mask, options)[0], None

            return (jax.lax.scan(layer, x, length=3)[0] ** 2).sum()

        ours, expected = (jax.jit(jax.grad(lambda x, f=f: loss(f, x)))(x) for f in (blockwise, equation))
        assert ours.dtype == jnp.float64
        oracles.assert_close(ours, expected, 1e-12)


def test_weights_are_refused_with_what_has_them() -> None:
    x = jnp.zeros((1, 2, 1, 4))
    ones = jnp.ones((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="impl='dense' has"):
        blockwise(x, x, x, Mask(ones, ones, ones, ones), Options(AttentionConfig(), return_weights=True))
