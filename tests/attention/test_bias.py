"""A bias on the logits: -inf hides what it stands at, whole rows too, and any shape that broadcasts is the whole one.

For every kind and implementation that takes one on CPU, through `attention`, against loops; and round a ring.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.attention.comparing import visible
from tests.attention.test_ring import make_ring
from transformer_jax.attention import VARIANTS
from transformer_jax.attention.api import attention
from transformer_jax.attention.mask import Mask
from transformer_jax.config import AttentionConfig

B, T, S, N, K, H, U, A = 2, 5, 7, 4, 2, 3, 2, 11
KEYS = [key for key, one in VARIANTS.items() if {'bias', 'cpu'} <= one.supports]
SHAPES = [(B, 1, 1, S), (1, 1, T, S), (1, N, 1, S), (B, 1, T, S), (1, N, T, S), (B, N, T, S)]
Arrays = dict[str, np.ndarray]


def make_mask(kind: str) -> Mask:
    """Everything visible, or padding of other lengths on both sides."""
    q_segments, k_segments = np.ones((B, T), np.int32), np.ones((B, S), np.int32)
    if kind == 'padded':
        q_segments[1, 3:], k_segments[0, 5:], k_segments[1, :2] = 0, 0, 0
    positions = (np.broadcast_to(np.arange(length, dtype=np.int32), (B, length)) for length in (T, S))
    return Mask(*map(jnp.asarray, (q_segments, k_segments, *positions)))


def make_config(key: tuple[str, str]) -> AttentionConfig:
    return AttentionConfig(
        kind=key[0], impl=key[1], num_heads=N, num_kv_heads=K, head_dim=H, value_dim=U, score_dim=A, block_size=3
    )


def make_arrays(key: tuple[str, str]) -> Arrays:
    """Random q, k and v, and the parameters of the kind."""
    rng = np.random.default_rng(0)
    shapes = {'q': (B, T, N, H), 'k': (B, S, K, H), 'v': (B, S, K, U)}
    if own := VARIANTS[key].parameters:
        shapes |= {name: one.shape for name, one in own(make_config(key), S).items()}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def score_and_gradients(
    kind: str, arrays: Arrays, q: np.ndarray, k: np.ndarray, head: tuple[int, int]
) -> tuple[float, np.ndarray, np.ndarray, Arrays]:
    """One score, its gradients by the query and the key, and those by the parts of the parameters of these heads."""
    n, kv = head
    if kind in ('dot', 'general'):
        w = arrays['query_map'][n] if kind == 'general' else np.eye(H)
        scale = 1 / math.sqrt(H)
        return q @ w @ k * scale, w @ k * scale, q @ w * scale, {'query_map': np.outer(q, k) * scale}
    if kind == 'additive':
        of_q, of_k = arrays['query_map'][n], arrays['key_map'][kv]
    else:
        of_q, of_k = arrays['joint_map'][n, :H], arrays['joint_map'][n, H:]
    hidden = np.tanh(q @ of_q + k @ of_k)
    change = arrays['score'][n] * (1 - hidden**2)
    maps = {'query_map': np.outer(q, change), 'key_map': np.outer(k, change)}
    maps['joint_map'] = np.concatenate([maps['query_map'], maps['key_map']])
    return arrays['score'][n] @ hidden, of_q @ change, of_k @ change, maps | {'score': hidden}


def loops(kind: str, arrays: Arrays, bias: np.ndarray, seen: np.ndarray, probe: np.ndarray) -> tuple[Arrays, Any]:
    """The gradients of sum(output * probe), one pair at a time, and the output. A bias of -inf hides."""
    q, k, v = (arrays[name] for name in 'qkv')
    gradients = {name: np.zeros_like(array) for name, array in arrays.items()} | {'bias': np.zeros((B, N, T, S))}
    output = np.zeros((B, T, N, U))
    bias = np.broadcast_to(bias, (B, N, T, S))
    for b, t, n in np.ndindex(B, T, N):
        kv = n // (N // K)
        keys = [s for s in range(S) if seen[b, t, s] and bias[b, n, t, s] > -np.inf]
        if not keys:
            continue
        scored = [score_and_gradients(kind, arrays, q[b, t, n], k[b, s, kv], (n, kv)) for s in keys]
        powers = np.array([math.exp(one[0] + bias[b, n, t, s]) for one, s in zip(scored, keys, strict=True)])
        weights = powers / powers.sum()
        output[b, t, n] = weights @ v[b, keys, kv]
        d_weights = v[b, keys, kv] @ probe[b, t, n]
        for s, (_, of_q, of_k, of_maps), weight, own in zip(keys, scored, weights, d_weights, strict=True):
            change = weight * (own - weights @ d_weights)
            gradients['bias'][b, n, t, s] += change
            gradients['q'][b, t, n] += change * of_q
            gradients['k'][b, s, kv] += change * of_k
            gradients['v'][b, s, kv] += weight * probe[b, t, n]
            for name in arrays.keys() & of_maps:
                gradients[name][kv if name == 'key_map' else n] += change * of_maps[name]
    return gradients, output


@functools.partial(jax.jit, static_argnums=0)
def run(key: tuple[str, str], arrays: dict[str, Any], mask: Mask, probe: Any) -> Any:
    """Gradients and output by the public function."""

    def loss(arrays: dict[str, Any]) -> Any:
        q, k, v = (arrays[name] for name in 'qkv')
        output = attention(q, k, v, mask, make_config(key), params=arrays, bias=arrays['bias'])
        return (output * probe).sum(), output

    return jax.grad(loss, has_aux=True)(arrays)


def assert_equals_loops(key: tuple[str, str], mask: Mask, bias: np.ndarray) -> None:
    """With gradients of a bias summed over where it was broadcast."""
    arrays, probe = make_arrays(key), np.random.default_rng(1).normal(size=(B, T, N, U))
    expected, expected_output = loops(key[0], arrays, bias, visible(mask), probe)
    axes = tuple(axis for axis, size in enumerate(bias.shape) if size == 1)
    expected['bias'] = expected['bias'].sum(axis=axes, keepdims=True)
    wanted = {name: jnp.float32(array) for name, array in (arrays | {'bias': bias}).items()}
    gradients, output = run(key, wanted, mask, jnp.float32(probe))
    oracles.assert_close(output, expected_output)
    for name, gradient in gradients.items():
        oracles.assert_close(gradient, expected[name])


@pytest.mark.parametrize('kind', ['general', 'additive', 'concat'])
def test_the_loops_have_the_gradients_of_finite_differences(kind: str) -> None:
    key = (kind, 'dense')
    arrays, seen = make_arrays(key), visible(make_mask('padded'))
    bias, probe = np.random.default_rng(2).normal(size=(B, N, T, S)), np.ones((B, T, N, U))
    bias[:, :, :, 3] = -np.inf
    probe[..., 0] = 2
    gradients, _ = loops(kind, arrays, bias, seen, probe)
    rng = np.random.default_rng(3)
    for name in arrays:
        direction = rng.normal(size=arrays[name].shape)
        ends = (arrays | {name: arrays[name] + step * direction} for step in (1e-5, -1e-5))
        above, below = ((loops(kind, one, bias, seen, probe)[1] * probe).sum() for one in ends)
        assert (above - below) / 2e-5 == pytest.approx((gradients[name] * direction).sum(), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize('where', ['hidden slots', 'every third key', 'a whole row'])
@pytest.mark.parametrize('key', KEYS, ids='/'.join)
def test_minus_infinity_hides_and_leaves_no_nan(key: tuple[str, str], where: str) -> None:
    mask = make_mask('padded' if where == 'hidden slots' else 'all')
    bias = np.random.default_rng(4).normal(size=(B, N, T, S))
    if where == 'hidden slots':
        bias[~np.broadcast_to(visible(mask)[:, None], bias.shape)] = -np.inf
    elif where == 'every third key':
        bias[..., ::3] = -np.inf
    else:
        bias[1, 2, 3] = -np.inf
    assert_equals_loops(key, mask, bias)


@pytest.mark.parametrize(
    ('key', 'shape'),
    [
        pytest.param(
            key,
            shape,
            id=f'{"/".join(key)}, {shape}',
            marks=[] if shape == SHAPES[key[1] == 'dense'] else pytest.mark.slow,
        )
        for key in KEYS
        for shape in SHAPES
    ],
)
def test_every_bias_that_broadcasts_is_the_whole_one(key: tuple[str, str], shape: tuple[int, ...]) -> None:
    assert_equals_loops(key, make_mask('padded'), np.random.default_rng(5).normal(size=shape))


@pytest.mark.parametrize(
    ('key', 'shape'),
    [
        pytest.param((kind, 'blockwise'), shape, marks=[] if (kind, shape) == ('dot', SHAPES[1]) else pytest.mark.slow)
        for kind in ('dot', 'general')
        for shape in SHAPES
    ],
)
def test_round_a_ring_as_well(key: tuple[str, str], shape: tuple[int, ...]) -> None:
    """Shards of 2 queries and keys, of lengths that four devices do not divide; one column of the bias is -inf."""
    bias = np.random.default_rng(6).normal(size=shape)
    bias[..., 3] = -np.inf
    with jax.set_mesh(make_ring(1, 1, 1, 4)):
        assert_equals_loops(key, make_mask('padded'), bias)


def test_round_a_ring_a_row_that_a_bias_hides_gives_zeros() -> None:
    bias = np.random.default_rng(7).normal(size=(B, N, T, S))
    bias[0, 1, 2] = -np.inf
    with jax.set_mesh(make_ring(1, 1, 1, 4)):
        assert_equals_loops(('dot', 'blockwise'), make_mask('all'), bias)
