"""Fused implementations over several blocks, at lengths around whole tiles, in values and gradients; and cuDNN's bias.

The kernels are interpreted on CPU, which is slow: most lengths are.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.attention import exact_cases as cases
from tests.attention.test_kernels import cudnn_by_xla, interpreted_rows, interpreted_splash, pallas
from transformer_jax.attention.cudnn import cudnn_attention
from transformer_jax.attention.dense import dense_attention
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options
from transformer_jax.config import AttentionConfig

B, H = 2, 64
FUNCTIONS = {'pallas': pallas, 'cudnn': cudnn_by_xla, 'splash': interpreted_splash, 'rows': interpreted_rows}
RULES: dict[str, dict[str, Any]] = {
    'all': {},
    'causal': {'causal': True},
    'causal window': {'causal': True, 'window': (37, 0)},
    'window': {'window': (19, 23)},
}


def make_mask(length: int, rules: dict[str, Any], seed: int = 0) -> Mask:
    """A row with padding of a random length before, and one with padding behind."""
    rng = np.random.default_rng([length, seed])
    segments = np.ones((B, length), np.int32)
    segments[0, : rng.integers(1, length // 3)] = 0
    segments[1, rng.integers(2 * length // 3, length) :] = 0
    positions = np.where(segments > 0, np.cumsum(segments, axis=1) - 1, 0).astype(np.int32)
    places = map(jnp.asarray, (segments, segments, positions, positions))
    return Mask(*places, aligned=True, **rules)


def make_arrays(length: int, num_heads: int, num_kv_heads: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    heads = {'q': num_heads, 'k': num_kv_heads, 'v': num_kv_heads, 'd_output': num_heads}
    return {name: rng.normal(size=(B, length, number, width)) for name, number in heads.items()}


def visible(mask: Mask) -> np.ndarray:
    """By the rules, whole matrices at once."""
    segments, positions = np.asarray(mask.q_segments), np.asarray(mask.q_positions)
    ahead = positions[:, None, :] - positions[:, :, None]
    seen = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] > 0)
    if mask.causal:
        seen &= ahead <= 0
    if mask.window is not None:
        seen &= (ahead >= -mask.window[0]) & (ahead <= mask.window[1])
    return seen


def whole_matrices(arrays: dict[str, np.ndarray], seen: np.ndarray, scale: float) -> dict[str, np.ndarray]:
    """The output, and the gradients of sum(output * d_output) by the chain rule, in float64."""
    q, d_output = arrays['q'], arrays['d_output']
    group = q.shape[2] // arrays['k'].shape[2]
    k, v = (np.repeat(arrays[name], group, axis=2) for name in 'kv')
    logits = np.where(seen[:, None], np.einsum('bqhd,bkhd->bhqk', q, k) * scale, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    powers = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = powers.sum(axis=-1, keepdims=True)
    weights = powers / np.where(total == 0, 1, total)
    d_weights = np.einsum('bqhd,bkhd->bhqk', d_output, v)
    d_logits = weights * (d_weights - (weights * d_weights).sum(axis=-1, keepdims=True)) * scale

    def of_key_heads(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(*rows.shape[:2], -1, group, rows.shape[-1]).sum(axis=3)

    return {
        'output': np.einsum('bhqk,bkhd->bqhd', weights, v),
        'q': np.einsum('bhqk,bkhd->bqhd', d_logits, k),
        'k': of_key_heads(np.einsum('bhqk,bqhd->bkhd', d_logits, q)),
        'v': of_key_heads(np.einsum('bhqk,bqhd->bkhd', weights, d_output)),
    }


def compute(function: Any, mask: Mask, arrays: dict[str, Any], dtype: Any = jnp.float32, **settings: Any) -> Any:
    """Output and gradients by name."""
    wanted = {name: jnp.asarray(array, dtype) for name, array in arrays.items() if name not in ('d_output', 'bias')}
    if 'bias' in arrays:
        wanted['bias'] = jnp.float32(arrays['bias'])
    probe = jnp.float32(arrays['d_output'])

    @jax.jit
    def run(wanted: dict[str, Any], mask: Mask) -> Any:
        def loss(wanted: dict[str, Any]) -> Any:
            q, k, v = (wanted[name] for name in 'qkv')
            options = Options(AttentionConfig(**settings), scale=q.shape[-1] ** -0.5, bias=wanted.get('bias'))
            output = function(q, k, v, mask, options)[0]
            return (output.astype(jnp.float32) * probe).sum(), output

        return jax.grad(loss, has_aux=True)(wanted)

    gradients, output = run(wanted, mask)
    return gradients | {'output': output}


def assert_equals_whole_matrices(function: Any, mask: Mask, arrays: dict[str, np.ndarray], **settings: Any) -> None:
    found = compute(function, mask, arrays, **settings)
    for name, expected in whole_matrices(arrays, visible(mask), arrays['q'].shape[-1] ** -0.5).items():
        oracles.assert_close(found[name], expected)


def test_the_whole_matrices_are_what_the_loops_compute() -> None:
    mask = cases.self_mask('padded', causal=True, window=(5, 0), aligned=True)
    arrays = {name: array for name, array in cases.make_arrays(mask).items() if name != 'bias'}
    expected = cases.loops(arrays, cases.visible(mask))
    for name, found in whole_matrices(arrays, visible(mask), cases.H**-0.5).items():
        oracles.assert_close(found, expected[name], 1e-12)


@pytest.mark.parametrize('rules', RULES)
def test_gpu_kernels_over_several_blocks(rules: str) -> None:
    """Five blocks of 16 a row: from the third on a window leaves out whole blocks before, and to the third behind."""
    mask = make_mask(73, RULES[rules])
    assert_equals_whole_matrices(pallas, mask, make_arrays(73, 2, 1, 11), block_size=16)


@pytest.mark.slow
@pytest.mark.parametrize('rules', RULES)
@pytest.mark.parametrize('length', [127, 128, 192, 320])
@pytest.mark.parametrize('name', FUNCTIONS)
def test_lengths_around_whole_tiles(name: str, length: int, rules: str) -> None:
    num_heads, num_kv_heads = (2, 2) if name == 'rows' else (2, 1)
    mask = make_mask(length, RULES[rules])
    assert_equals_whole_matrices(FUNCTIONS[name], mask, make_arrays(length, num_heads, num_kv_heads, H))


@pytest.mark.parametrize('length', [pytest.param(320, marks=pytest.mark.slow), 29])
@pytest.mark.parametrize('name', ['splash', 'rows'])
def test_what_tpu_kernels_must_not_see_never_leaks(name: str, length: int) -> None:
    """1e30 in what comes later and NaN in padding: not a bit of what is real before it changes."""
    mask, now = make_mask(length, {'causal': True}), length // 2
    clean = make_arrays(length, 2, 2, H)
    clean['d_output'][:, now:] = 0
    dirty = {name: array.copy() for name, array in clean.items()}
    padding = np.asarray(mask.q_segments) == 0
    for array in ('q', 'k', 'v'):
        if array != 'q':
            dirty[array][:, now:] = 1e30
        dirty[array][padding] = math.nan
    ours, expected = (compute(FUNCTIONS[name], mask, arrays) for arrays in (dirty, clean))
    assert all(np.abs(array[:, :now]).max() > 0.01 for array in expected.values())
    for array in ('output', 'q', 'k', 'v'):
        np.testing.assert_array_equal(ours[array][:, :now], expected[array][:, :now])


def make_biased(shape: tuple[int, ...]) -> tuple[Mask, dict[str, np.ndarray]]:
    mask = make_mask(29, {'causal': True})
    return mask, make_arrays(29, 2, 1, 16) | {'bias': np.random.default_rng(5).normal(size=shape)}


def test_cudnn_is_given_a_bias_in_the_bits_of_its_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def remember(q: Any, k: Any, v: Any, bias: Any, mask: Any, **settings: Any) -> Any:
        given.append((q.dtype, k.dtype, v.dtype, bias.dtype, mask.dtype, settings['implementation']))
        return jnp.zeros_like(q)

    monkeypatch.setattr(jax.nn, 'dot_product_attention', remember)
    for dtype in (jnp.bfloat16, jnp.float16):
        mask, arrays = make_biased((1, 2, 29, 29))
        q, k, v = (jnp.asarray(arrays[name], dtype) for name in 'qkv')
        cudnn_attention(q, k, v, mask, Options(AttentionConfig(), bias=jnp.float32(arrays['bias'])))
        assert given.pop() == (*(jnp.dtype(dtype),) * 4, jnp.dtype(bool), 'cudnn')


@pytest.mark.parametrize('shape', [(1, 2, 29, 29), (B, 1, 1, 29)])
def test_a_float32_bias_beside_bfloat16_rows_of_cudnn(shape: tuple[int, ...]) -> None:
    mask, arrays = make_biased(shape)
    ours = compute(cudnn_by_xla, mask, arrays, jnp.bfloat16)
    expected = compute(dense_attention, mask, {name: np.float32(jnp.bfloat16(x)) for name, x in arrays.items()})
    assert ours['output'].dtype == ours['q'].dtype == jnp.bfloat16
    assert ours['bias'].dtype == jnp.float32
    for name, one in ours.items():
        oracles.assert_close(np.float32(one), expected[name], 2e-2)
