"""Shaw's relative attention against its definition: a vector for every pair of a query and a key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.positions import toy_schemes
from tests.positions.toy_schemes import B, H, N, S, T, U, make, random_heads
from transformer_jax.positions.shaw import ShawTerms

CLIP = 3


def attend(q, k, v, keys, values, visible, q_positions, k_positions) -> np.ndarray:
    """softmax(q_i . (k_j + a_ij^K) / sqrt(d)) (v_j + a_ij^V), each a_ij found on its own."""
    outputs = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, t, n in np.ndindex(q.shape[:3]):
        seen = [s for s in range(k.shape[1]) if visible[b, t, s]]
        rows = [min(max(k_positions[b, s] - q_positions[b, t], -CLIP), CLIP) + CLIP for s in seen]
        scores = [
            q[b, t, n] @ (k[b, s, n] + keys[row]) / np.sqrt(q.shape[-1]) for s, row in zip(seen, rows, strict=True)
        ]
        weights = np.exp(np.asarray(scores) - max(scores))
        for weight, s, row in zip(weights / weights.sum(), seen, rows, strict=True):
            outputs[b, t, n] += weight * (v[b, s, n] + values[row])
    return outputs


def layout(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions of queries and keys, and who sees whom: plain, padded on either side, or two texts in a row."""
    index = np.broadcast_to(np.arange(S), (B, S))
    starts = {'plain': [0, 0], 'left padding': [4, 1], 'right padding': [0, 0], 'packed': [0, 0]}[kind]
    positions = np.maximum(index - np.asarray(starts)[:, None], 0)
    segments = (index >= np.asarray(starts)[:, None]).astype(int)
    if kind == 'right padding':
        segments = (index < np.asarray([S - 3, S - 1])[:, None]).astype(int)
    if kind == 'packed':
        segments, positions = 1 + (index >= 5), np.where(index >= 5, index - 5, index)
    q_positions, q_segments = positions[:, -T:], segments[:, -T:]
    visible = oracles.visibility(q_segments, segments, q_positions, positions, causal=True)
    return q_positions, positions, visible


@pytest.mark.parametrize('kind', ['plain', 'left padding', 'right padding', 'packed'])
def test_attention_equals_the_definition_in_values_and_gradients(kind: str) -> None:
    toy, heads = make('shaw', causal=True), random_heads(0)
    q_positions, k_positions, visible = layout(kind)
    real = visible.any(-1)[:, :, None, None]
    upstream = np.random.default_rng(1).normal(size=(B, T, N, U)) * real
    shown = visible | ~visible.any(-1, keepdims=True)  # rows of padding see anything, and count for nothing

    def loss(terms: ShawTerms, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = toy._replace(terms=terms)
        output = toy_schemes.attend(own, q, k, v, jnp.asarray(q_positions), jnp.asarray(k_positions), shown)
        return (output * upstream).sum(), output

    assert isinstance(toy.terms, ShawTerms)
    (terms_gradient, *gradients), output = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(toy.terms, *heads)
    arrays = [np.asarray(a, np.float64) for a in (*heads, toy.terms.keys, toy.terms.values)]
    places = shown, q_positions, k_positions
    oracles.assert_close(output * real, attend(*arrays, *places) * real)
    if kind == 'packed':  # the slow part, once
        for i, gradient in ((0, gradients[0]), (3, terms_gradient.keys), (4, terms_gradient.values)):

            def numeric(change: np.ndarray, i: int = i) -> float:
                moved = [*arrays[:i], arrays[i] + change, *arrays[i + 1 :]]
                return float((attend(*moved, *places) * upstream).sum())

            for flat in np.random.default_rng(i).choice(arrays[i].size, 5, replace=False):
                place = np.unravel_index(flat, arrays[i].shape)
                change = np.zeros_like(arrays[i])
                change[place] = 1e-5
                np.testing.assert_allclose(gradient[place], (numeric(change) - numeric(-change)) / 2e-5, atol=2e-5)


def test_offsets_beyond_the_clip_count_as_the_clip() -> None:
    terms = ShawTerms(jnp.arange(7.0)[:, None], jnp.arange(7.0)[:, None])
    score = terms.score_term(
        jnp.ones((1, 1, 1, 1)), jnp.asarray([[50]]), jnp.asarray([[0, 47, 48, 50, 52, 53, 54, 999]])
    )
    assert score.ravel().tolist() == [0, 0, 1, 3, 5, 6, 6, 6]


def test_no_vector_for_each_pair_is_ever_held() -> None:
    length, width = 128, 64
    terms = ShawTerms(jnp.ones((7, width)), jnp.ones((7, width)))
    positions = jnp.arange(length)[None]

    def loss(terms: ShawTerms, q: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(terms.score_term(q, positions, positions))
        return (terms.output_term(weights, positions, positions) ** 2).sum()

    program = jax.jit(jax.grad(loss, (0, 1))).lower(terms, jnp.ones((1, length, 1, width))).compile()
    assert program.memory_analysis().temp_size_in_bytes < length * length * width * 4 / 4


def test_d_v_may_differ_from_d_k() -> None:
    toy = make('shaw')
    assert isinstance(toy.terms, ShawTerms)
    assert toy.terms.keys.shape == (2 * CLIP + 1, H)
    assert toy.terms.values.shape == (2 * CLIP + 1, U)
