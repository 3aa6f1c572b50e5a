"""Masks as whole literal matrices."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from tests import oracles
from transformer_jax.attention.mask import Mask


def draw(mask: Mask) -> list[str]:
    """One string a query of the first batch row: `x` where it may see."""
    return [''.join('x' if cell else '.' for cell in row) for row in np.asarray(mask.materialize())[0]]


def row(*values: int) -> jnp.ndarray:
    return jnp.array([values], jnp.int32)


def test_causal_over_four_tokens() -> None:
    ones, positions = row(1, 1, 1, 1), row(0, 1, 2, 3)
    assert draw(Mask(ones, ones, positions, positions, causal=True)) == [
        'x...',
        'xx..',
        'xxx.',
        'xxxx',
    ]


def test_padding_sees_nothing_and_is_seen_by_nothing() -> None:
    segments, positions = row(1, 1, 1, 0, 0), row(0, 1, 2, 0, 0)
    assert draw(Mask(segments, segments, positions, positions)) == [
        'xxx..',
        'xxx..',
        'xxx..',
        '.....',
        '.....',
    ]


def test_packed_pairs_do_not_see_each_other() -> None:
    segments, positions = row(1, 1, 2, 2, 2, 0), row(0, 1, 0, 1, 2, 0)
    assert draw(Mask(segments, segments, positions, positions, causal=True)) == [
        'x.....',
        'xx....',
        '..x...',
        '..xx..',
        '..xxx.',
        '......',
    ]


def test_cross_attention_of_packed_pairs() -> None:
    mask = Mask(row(1, 2, 2, 3, 0), row(1, 1, 1, 2, 0, 0, 0), row(0, 0, 1, 0, 0), row(0, 1, 2, 0, 0, 0, 0))
    assert draw(mask) == [
        'xxx....',
        '...x...',
        '...x...',
        '.......',  # a target whose source is empty
        '.......',
    ]


def test_one_cached_query_sees_what_its_row_of_the_full_mask_shows() -> None:
    ones, positions = row(1, 1, 1, 1, 1), row(0, 1, 2, 3, 4)
    full = draw(Mask(ones, ones, positions, positions, causal=True))
    for position in range(5):
        written = jnp.where(positions <= position, 1, 0)  # slots not yet written are segment 0
        one = Mask(row(1), written, row(position), positions, causal=True)
        assert draw(one) == [full[position]]


def test_allowed_narrows_what_is_visible() -> None:
    ones, positions = row(1, 1, 1), row(0, 1, 2)
    allowed = jnp.array([[[True, True, True], [False, True, True], [True, False, True]]])
    assert draw(Mask(ones, ones, positions, positions, allowed, causal=True)) == [
        'x..',
        '.x.',
        'x.x',
    ]


small_ids = st_numpy.arrays(np.int32, (2, 5), elements=st.integers(0, 3))


@settings(deadline=None)
@given(small_ids, small_ids, small_ids, small_ids, st.booleans())
def test_any_mask_is_the_loop_over_its_rules(
    q_segments: np.ndarray, k_segments: np.ndarray, q_positions: np.ndarray, k_positions: np.ndarray, causal: bool
) -> None:
    places = (q_segments, k_segments, q_positions, k_positions)
    mask = Mask(*map(jnp.asarray, places), causal=causal).materialize()
    np.testing.assert_array_equal(mask, oracles.visibility(*places, causal=causal))
