"""Recurrent cells and layers against loops over their equations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from transformer_jax.attention.mask import Mask
from transformer_jax.config import RecurrenceConfig
from transformer_jax.layers import kv_cache
from transformer_jax.layers.recurrence import CELLS, Recurrence, segment_starts

B, T, D = 3, 7, 5
# Two segments and padding at the end; padding first; padding inside and a third segment.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 2, 3, 3, 0]], np.int32)


def make_layer(cell: str, *, causal: bool, dtype: str = 'float32') -> tuple[Recurrence, Any]:
    """The layer, and parameters of which none is zero."""
    layer = Recurrence(RecurrenceConfig(cell=cell), D, jnp.dtype(dtype), causal)
    gates, rng = CELLS[cell].num_gates, np.random.default_rng(0)
    shapes = {'input_kernel': (D, gates, D), 'recurrent_kernel': (D, gates, D), 'bias': (gates, D)}
    params: Any = {
        direction: {name: rng.normal(size=shape) * 0.5 for name, shape in shapes.items()}
        for direction in (['forward'] if causal else ['forward', 'backward'])
    }
    if not causal:
        params['output'] = {'kernel': rng.normal(size=(2 * D, D))}
    return layer, params


def make_mask(segments: np.ndarray) -> Mask:
    positions = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    return Mask(jnp.asarray(segments), jnp.asarray(segments), positions, positions, aligned=True)


def to_float32(tree: Any) -> Any:
    return jax.tree.map(jnp.float32, tree)


@pytest.mark.parametrize('causal', [True, False])
@pytest.mark.parametrize('cell', CELLS)
def test_values_and_gradients_equal_the_loops(cell: str, causal: bool) -> None:
    layer, params = make_layer(cell, causal=causal)
    rng = np.random.default_rng(1)
    inputs, probe = rng.normal(size=(B, T, D)), rng.normal(size=(B, T, D)) * (SEGMENTS > 0)[..., None]

    def run(params: Any, inputs: Any) -> jax.Array:
        return layer.apply({'params': params}, inputs, make_mask(SEGMENTS), method='mix')

    def loss(params: Any, inputs: Any) -> tuple[jax.Array, jax.Array]:
        outputs = run(params, inputs)
        return (outputs * probe).sum(), outputs

    arguments = to_float32((params, inputs))
    gradients, outputs = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(*arguments)
    real = SEGMENTS > 0
    oracles.assert_close(np.asarray(outputs)[real], oracles.recurrence(cell, params, inputs, SEGMENTS)[real])
    leaves, tree = jax.tree.flatten((params, inputs))
    for index, gradient in enumerate(jax.tree.leaves(gradients)):
        direction = rng.choice([-1.0, 1.0], size=gradient.shape)

        def moved(step: float, index: int = index, direction: np.ndarray = direction) -> float:
            changed = [leaf + step * direction if i == index else leaf for i, leaf in enumerate(leaves)]
            own, inputs = jax.tree.unflatten(tree, changed)
            return float((oracles.recurrence(cell, own, inputs, SEGMENTS) * probe).sum())

        expected = (moved(1e-6) - moved(-1e-6)) / 2e-6
        assert abs((np.float64(gradient) * direction).sum() - expected) <= 1e-5 * np.abs(gradient).sum()


def test_a_segment_starts_where_it_is_first_read() -> None:
    forwards = [[1, 0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 1, 1, 0, 0]]
    backwards = [[0, 0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1], [0, 1, 0, 1, 0, 1, 0]]
    np.testing.assert_array_equal(segment_starts(jnp.asarray(SEGMENTS)), forwards)
    np.testing.assert_array_equal(segment_starts(jnp.asarray(SEGMENTS), reverse=True), backwards)


@pytest.mark.parametrize('causal', [True, False])
def test_padding_may_hold_anything(causal: bool) -> None:
    layer, params = make_layer('gru', causal=causal)
    real = (SEGMENTS > 0)[..., None]
    inputs = np.random.default_rng(2).normal(size=(B, T, D))

    def loss(params: Any, inputs: Any) -> tuple[jax.Array, jax.Array]:
        outputs = layer.apply({'params': params}, inputs, make_mask(SEGMENTS), method='mix')
        return jnp.where(real, outputs, 0).sum(), outputs

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    expected = run(*to_float32((params, inputs)))
    spoiled = run(*to_float32((params, np.where(real, inputs, np.nan))))
    jax.tree.map(np.testing.assert_array_equal, spoiled, expected)


@pytest.mark.parametrize('causal', [True, False])
def test_what_a_row_depends_on(causal: bool) -> None:
    """The zero pattern of the Jacobian."""
    layer, params = make_layer('lstm', causal=causal)
    inputs = jnp.float32(np.random.default_rng(3).normal(size=(B, T, D)))

    def run(inputs: jax.Array) -> jax.Array:
        return layer.apply({'params': to_float32(params)}, inputs, make_mask(SEGMENTS), method='mix')

    jacobian = np.abs(jax.jit(jax.jacobian(run))(inputs)).sum(axis=(2, 5))
    moved = np.stack([jacobian[b, :, b] for b in range(B)]) > 0
    positions = np.broadcast_to(np.arange(T), (B, T))
    visible = oracles.visibility(SEGMENTS, SEGMENTS, positions, positions, causal=causal)
    real = SEGMENTS > 0
    np.testing.assert_array_equal(moved[real], visible[real])


@pytest.mark.parametrize('cell', CELLS)
def test_reading_in_pieces_equals_reading_at_once(cell: str) -> None:
    """A prefix of another length in each row, then three hypotheses a row with one subword at a time."""
    layer, params = make_layer(cell, causal=True)
    params = to_float32(params)
    lengths, width, steps = np.array([4, 1, 2], np.int32), 3, 2
    rng = np.random.default_rng(4)
    prefix, more = rng.normal(size=(B, 4, D)), rng.normal(size=(steps, B, width, D))

    def extend(rows: np.ndarray, lengths: np.ndarray, num_new: int, past: Any, state: Any) -> Any:
        past, reading = kv_cache.read(past, jnp.zeros(rows.shape[:2], int), jnp.asarray(lengths), num_new, 99)
        return past, *layer.apply({'params': params}, jnp.float32(rows), state, reading, method='extend')

    state = layer.apply({'params': params}, B, 8, method='init_state')
    past, outputs, state = extend(prefix, lengths, 4, kv_cache.empty_past(B, 8), state)
    results = [[[outputs[b, : lengths[b]]] for _ in range(width)] for b in range(B)]
    decode = kv_cache.broadcast(kv_cache.DecodeState(past, (state,)), width)
    past, (state,) = decode.past, decode.layers
    for rows in more:
        past, outputs, state = extend(rows, np.ones(B, np.int32), 1, past, state)
        for b, w in np.ndindex(B, width):
            results[b][w].append(outputs[b, w : w + 1])
    for b, w in np.ndindex(B, width):
        whole = np.concatenate([prefix[b, : lengths[b]], more[:, b, w]])[None]
        expected = oracles.read_recurrently(
            cell, oracles.to_float64(params)['forward'], whole, np.ones(whole.shape[:2]), reverse=False
        )
        oracles.assert_close(np.concatenate(results[b][w])[None], expected)


def test_a_new_layer_keeps_what_it_reads() -> None:
    layer, _ = make_layer('lstm', causal=False)
    inputs = jnp.ones((1, 2, D))
    params = layer.init(jax.random.key(0), inputs, make_mask(np.ones((1, 2), np.int32)), method='mix')['params']
    own = jax.tree.map(lambda box: box.unbox(), params, is_leaf=lambda box: hasattr(box, 'unbox'))
    np.testing.assert_array_equal(own['forward']['bias'], np.eye(4)[1][:, None] * np.ones(D))
    for gate in range(4):
        kernel = np.asarray(own['backward']['recurrent_kernel'])[:, gate]
        np.testing.assert_allclose(kernel @ kernel.T, np.eye(D), atol=1e-6)


def test_bfloat16_keeps_its_state_in_float32() -> None:
    layer, params = make_layer('lstm', causal=True, dtype='bfloat16')
    assert {leaf.dtype for leaf in jax.tree.leaves(layer.init_state(2, 3))} == {jnp.dtype('float32')}
    inputs = jnp.float32(np.random.default_rng(5).normal(size=(B, T, D)))
    outputs = layer.apply({'params': to_float32(params)}, inputs, make_mask(SEGMENTS), method='mix')
    assert outputs.dtype == jnp.bfloat16
    real = SEGMENTS > 0
    oracles.assert_close(np.asarray(outputs)[real], oracles.recurrence('lstm', params, inputs, SEGMENTS)[real], 2e-2)


def test_a_prefix_that_sees_both_ways_is_refused() -> None:
    layer, params = make_layer('rnn', causal=True)
    segments = jnp.asarray(SEGMENTS)
    mask = Mask(segments, segments, segments, segments, k_prefix=segments > 0, causal=True)
    with pytest.raises(ValueError, match='no prefix'):
        layer.apply({'params': to_float32(params)}, jnp.ones((B, T, D)), mask, method='mix')
