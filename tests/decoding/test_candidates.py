"""The best continuations against a sort of all of them, ties among them, and the branch that looks at blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.decoding import candidates
from transformer_jax.decoding.candidates import Specials, forbid, log_normalizer, top_candidates


def sort_all(logits: np.ndarray, offsets: np.ndarray, count: int) -> list[list[tuple[float, int, int]]]:
    """The `count` best of each sentence: by value, then by lower hypothesis, then by lower token."""
    B, W, V = logits.shape
    rows = []
    for b in range(B):
        found = [(float(logits[b, w, v] + offsets[b, w]), w, v) for w in range(W) for v in range(V)]
        rows.append(sorted(found, key=lambda one: (-one[0], one[1], one[2]))[:count])
    return rows


def as_rows(values, parents, tokens) -> list[list[tuple[float, int, int]]]:
    return [
        [(float(value), int(parent), int(token)) for value, parent, token in zip(*row, strict=True)]
        for row in zip(np.asarray(values), np.asarray(parents), np.asarray(tokens), strict=True)
    ]


@given(seed=st.integers(0, 2**31), num_values=st.integers(1, 5), count=st.integers(1, 14))
def test_the_best_are_those_of_a_sort_with_ties_by_hypothesis_and_token(seed, num_values, count):
    rng = np.random.default_rng(seed)
    logits = rng.integers(num_values, size=(3, 2, 7)).astype(np.float32)  # few values: most of them are ties
    offsets = rng.integers(num_values, size=(3, 2)).astype(np.float32)
    found = top_candidates(jnp.asarray(logits), jnp.asarray(offsets), count)
    assert as_rows(*found) == sort_all(logits, offsets, count)


def test_where_fewer_are_left_the_rest_is_nothing():
    logits = jnp.asarray([[[0.0, -jnp.inf, 2.0]], [[-jnp.inf] * 3]])
    values, _, tokens = top_candidates(logits, jnp.zeros((2, 1)), 5)
    assert values.tolist() == [[2.0, 0.0, -np.inf, -np.inf, -np.inf], [-np.inf] * 5]
    assert tokens[0, :2].tolist() == [2, 0]


# Above 2,048 candidates; not divisible by the blocks of 64, and exactly so.
SHAPES = [(3, 5, 443), (2, 1, 2049), (2, 4, 576), (1, 7, 2111)]


@pytest.mark.parametrize(('B', 'W', 'V'), SHAPES)
@pytest.mark.parametrize(('num_values', 'share'), [(3, 0.7), (3, 0.02), (40, 0.7), (None, 0.7), (None, 0.01)])
def test_looking_at_blocks_changes_nothing(B, W, V, num_values, share, monkeypatch):
    rng = np.random.default_rng(B + V)
    draw = rng.normal if num_values is None else lambda size: rng.integers(num_values, size=size)
    logits, offsets = (jnp.asarray(draw(size=size), jnp.float32) for size in ((B, W, V), (B, W)))
    # All below 0, which fills nothing up; where few are left, equal ones stand in blocks of unequal maxima.
    logits = jnp.where(jnp.asarray(rng.random((B, W, V)) < share), logits - 50.0, -jnp.inf)
    looked = []
    in_blocks = candidates._top_in_blocks
    monkeypatch.setattr(candidates, '_top_in_blocks', lambda *given: looked.append(given) or in_blocks(*given))
    for count in (1, W, 2 * W + 1):
        found = top_candidates(logits, offsets, count)
        values, indices = jax.lax.top_k((logits + offsets[..., None]).reshape(B, W * V), count)
        assert as_rows(*found) == as_rows(values, indices // V, indices % V)
        assert as_rows(*found) == sort_all(np.asarray(logits), np.asarray(offsets), count)
    assert len(looked) == 3


def test_blocks_are_left_alone_when_they_would_hold_nearly_all(monkeypatch):
    monkeypatch.setattr(candidates, '_top_in_blocks', lambda *given: pytest.fail('looked at blocks'))
    top_candidates(jnp.zeros((1, 2, 1024)), jnp.zeros((1, 2)), 3)  # few candidates
    top_candidates(jnp.zeros((1, 2, 1600)), jnp.zeros((1, 2)), 50)  # many are asked for


def test_the_normaliser_counts_what_is_forbidden_too_and_holds_for_great_logits():
    logits = np.random.default_rng(0).normal(size=(2, 3, 17))
    expected = np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(log_normalizer(jnp.asarray(logits, jnp.float32)), expected, rtol=1e-6)
    np.testing.assert_allclose(log_normalizer(jnp.asarray(logits + 3e4, jnp.float32)), expected + 3e4, rtol=1e-6)


def test_forbidden_ids_never_come_and_eos_not_before_it_may():
    logits = jnp.ones((2, 3, 7))
    allowed = forbid(logits, Specials(eos_id=4, forbidden_ids=(0, 5)), jnp.asarray([True, False]))
    assert np.isfinite(allowed[0]).tolist() == [[False, True, True, True, True, False, True]] * 3
    assert np.isfinite(allowed[1]).tolist() == [[False, True, True, True, False, False, True]] * 3
    assert set(np.asarray(allowed)[np.isfinite(allowed)]) == {1.0}
