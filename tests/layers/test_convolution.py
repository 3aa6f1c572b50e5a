"""Convolutions against loops over their definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from transformer_jax.attention.mask import Mask
from transformer_jax.config import ConvolutionConfig
from transformer_jax.layers import kv_cache
from transformer_jax.layers.convolution import Convolution, dilation_of

B, T, D = 2, 11, 5
# Two segments and padding at the end; padding first.
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]], np.int32)

CASES = [
    {'width': 3, 'dilation': 1, 'causal': True},
    {'width': 3, 'dilation': 1, 'causal': False},
    {'width': 3, 'dilation': 2, 'causal': True, 'gated': True},
    {'width': 4, 'dilation': 1, 'causal': False, 'gated': True},
    {'width': 2, 'dilation': 3, 'causal': True, 'separable': True},
    {'width': 5, 'dilation': 2, 'causal': False, 'separable': True, 'gated': True},
    {'width': 3, 'dilation': 20, 'causal': False},
]


def make_layer(
    width: int, dilation: int, *, causal: bool, gated: bool = False, separable: bool = False, growth: int = 1
) -> tuple[Convolution, Any]:
    config = ConvolutionConfig(kernel_width=width, dilation=dilation, separable=separable, dilation_growth=growth)
    layer = Convolution(config, D, jnp.dtype('float32'), causal, gated)
    outputs = D * (1 + gated)
    shapes = {'depthwise': (width, D), 'pointwise': (D, outputs)} if separable else {'kernel': (width, D, outputs)}
    rng = np.random.default_rng(0)
    return layer, {name: rng.normal(size=shape) for name, shape in (shapes | {'bias': (outputs,)}).items()}


def make_mask(segments: np.ndarray) -> Mask:
    positions = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    return Mask(jnp.asarray(segments), jnp.asarray(segments), positions, positions, aligned=True)


def to_float32(tree: Any) -> Any:
    return jax.tree.map(jnp.float32, tree)


@pytest.mark.parametrize('case', CASES, ids=str)
def test_values_and_gradients_equal_the_loops(case: dict[str, Any]) -> None:
    layer, params = make_layer(**case)
    options = {'causal': case['causal'], 'gated': case.get('gated', False)}
    rng = np.random.default_rng(1)
    real = SEGMENTS > 0
    inputs, probe = rng.normal(size=(B, T, D)), rng.normal(size=(B, T, D)) * real[..., None]

    def loss(params: Any, inputs: Any) -> tuple[jax.Array, jax.Array]:
        outputs = layer.apply({'params': params}, inputs, make_mask(SEGMENTS), method='mix')
        return (outputs * probe).sum(), outputs

    gradients, outputs = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(*to_float32((params, inputs)))
    expected = oracles.convolution(params, inputs, SEGMENTS, case['dilation'], **options)
    oracles.assert_close(np.asarray(outputs)[real], expected[real])

    def in_loops(params: Any, inputs: np.ndarray) -> float:
        return float((oracles.convolution(params, inputs, SEGMENTS, case['dilation'], **options) * probe).sum())

    for name, own in {**params, 'inputs': inputs}.items():
        direction = rng.normal(size=own.shape)

        def moved(step: float, name: str = name, direction: np.ndarray = direction) -> float:
            if name == 'inputs':
                return in_loops(params, inputs + step * direction)
            return in_loops({**params, name: params[name] + step * direction}, inputs)

        gradient = np.float64(gradients[1] if name == 'inputs' else gradients[0][name])
        slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
        assert abs((gradient * direction).sum() - slope) <= 1e-5 * np.abs(gradient * direction).sum() + 1e-9


def test_padding_may_hold_anything() -> None:
    layer, params = make_layer(3, 2, causal=False, gated=True)
    real = (SEGMENTS > 0)[..., None]
    inputs = np.random.default_rng(2).normal(size=(B, T, D))

    def loss(params: Any, inputs: Any) -> tuple[jax.Array, jax.Array]:
        outputs = layer.apply({'params': params}, inputs, make_mask(SEGMENTS), method='mix')
        return jnp.where(real, outputs, 0).sum(), outputs

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    expected = run(*to_float32((params, inputs)))
    jax.tree.map(np.testing.assert_array_equal, run(*to_float32((params, np.where(real, inputs, np.nan)))), expected)


@pytest.mark.parametrize('causal', [True, False])
def test_what_a_row_depends_on(causal: bool) -> None:
    """The zero pattern of the Jacobian, as whole matrices."""
    layer, params = make_layer(3, 2, causal=causal)
    segments = np.array([[1, 1, 1, 1, 1, 2, 2]], np.int32)

    def run(inputs: jax.Array) -> jax.Array:
        return layer.apply({'params': to_float32(params)}, inputs, make_mask(segments), method='mix')

    moved = np.abs(jax.jacobian(run)(jnp.ones((1, 7, D)))).sum(axis=(0, 2, 3, 5)) > 0
    past = [
        [1, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 0, 0],
        [1, 0, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]
    around = [
        [1, 0, 1, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 0, 0],
        [1, 0, 1, 0, 1, 0, 0],
        [0, 1, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]
    np.testing.assert_array_equal(moved, past if causal else around)


def test_the_dilation_grows_by_layer() -> None:
    layer, params = make_layer(3, 1, causal=True, growth=2)
    inputs = np.random.default_rng(3).normal(size=(B, T, D))
    run = jax.jit(
        lambda index: layer.apply(
            {'params': to_float32(params)}, jnp.float32(inputs), make_mask(SEGMENTS), index=index, method='mix'
        )
    )
    real = SEGMENTS > 0
    for index, dilation in enumerate([1, 2, 4, 8, 16]):
        assert dilation_of(layer.config, index) == dilation
        expected = oracles.convolution(params, inputs, SEGMENTS, dilation, causal=True)
        oracles.assert_close(np.asarray(run(index))[real], expected[real])
    with pytest.raises(ValueError, match='must be told its index'):
        layer.apply({'params': to_float32(params)}, jnp.float32(inputs), make_mask(SEGMENTS), method='mix')


@pytest.mark.parametrize('case', [case for case in CASES if case['causal']], ids=str)
def test_reading_in_pieces_equals_reading_at_once(case: dict[str, Any]) -> None:
    """A prefix of another length in each row, then three hypotheses a row with one subword at a time."""
    layer, params = make_layer(**case)
    lengths, width, steps = np.array([5, 2], np.int32), 3, 4
    rng = np.random.default_rng(4)
    prefix, more = rng.normal(size=(B, 5, D)), rng.normal(size=(steps, B, width, D))

    def extend(rows: np.ndarray, lengths: np.ndarray, num_new: int, past: Any, state: Any) -> Any:
        past, reading = kv_cache.read(past, jnp.zeros(rows.shape[:2], int), jnp.asarray(lengths), num_new, 99)
        return past, *layer.apply({'params': to_float32(params)}, jnp.float32(rows), state, reading, method='extend')

    state = layer.apply({'params': to_float32(params)}, B, 9, method='init_state')
    past, outputs, state = extend(prefix, lengths, 5, kv_cache.empty_past(B, 9), state)
    results = [[[outputs[b, : lengths[b]]] for _ in range(width)] for b in range(B)]
    decode = kv_cache.broadcast(kv_cache.DecodeState(past, (state,)), width)
    past, (state,) = decode.past, decode.layers
    for rows in more:
        past, outputs, state = extend(rows, np.ones(B, np.int32), 1, past, state)
        for b, w in np.ndindex(B, width):
            results[b][w].append(outputs[b, w : w + 1])
    for b, w in np.ndindex(B, width):
        whole = np.concatenate([prefix[b, : lengths[b]], more[:, b, w]])[None]
        segments = np.ones(whole.shape[:2], np.int32)
        gated = case.get('gated', False)
        expected = oracles.convolution(params, whole, segments, case['dilation'], causal=True, gated=gated)
        oracles.assert_close(np.concatenate(results[b][w])[None], expected)


def test_rows_that_do_not_lie_side_by_side_are_refused() -> None:
    layer, params = make_layer(3, 1, causal=True)
    segments = jnp.asarray(SEGMENTS)
    with pytest.raises(ValueError, match='side by side'):
        layer.apply(
            {'params': to_float32(params)},
            jnp.ones((B, T, D)),
            Mask(segments, segments, segments, segments),
            method='mix',
        )
