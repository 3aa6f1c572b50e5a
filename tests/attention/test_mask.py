"""Masks as whole literal matrices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from tests import oracles
from transformer_jax.attention.api import attention
from transformer_jax.attention.mask import Mask
from transformer_jax.config import AttentionConfig


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


PREFIX = {'causal': True, 'k_prefix': row(1, 1, 1, 1, 0, 0) > 0}
WINDOWS = {
    'itself and two to each side': ((3,), {}, [
        'xxx...',
        'xxxx..',
        'xxxxx.',
        '.xxxxx',
        '..xxxx',
        '...xxx',
    ]),
    'two before and one after': ((3, 1), {}, [
        'xx....',
        'xxx...',
        'xxxx..',
        '.xxxx.',
        '..xxxx',
        '...xxx',
    ]),
    'two before and none after': ((3, 0), {}, [
        'x.....',
        'xx....',
        'xxx...',
        '.xxx..',
        '..xxx.',
        '...xxx',
    ]),
    'itself alone': ((1,), {}, [
        'x.....',
        '.x....',
        '..x...',
        '...x..',
        '....x.',
        '.....x',
    ]),
    'causal': ((3,), {'causal': True}, [
        'x.....',
        'xx....',
        'xxx...',
        '.xxx..',
        '..xxx.',
        '...xxx',
    ]),
    'causal, whatever is said of the right': ((2, 4), {'causal': True}, [
        'x.....',
        'xx....',
        '.xx...',
        '..xx..',
        '...xx.',
        '....xx',
    ]),
    'a prefix of four is seen as far as the window reaches': ((2,), PREFIX, [
        'xx....',
        'xxx...',
        '.xxx..',
        '..xx..',
        '...xx.',
        '....xx',
    ]),
    'a prefix of four and two to the right': ((2, 2), PREFIX, [
        'xxx...',
        'xxxx..',
        '.xxx..',
        '..xx..',
        '...xx.',
        '....xx',
    ]),
    'the first sees and is seen by all': ((2, 0, 1), {}, [
        'xxxxxx',
        'xx....',
        'xxx...',
        'x.xx..',
        'x..xx.',
        'x...xx',
    ]),
    'the first is seen by all later ones': ((2, None, 1), {'causal': True}, [
        'x.....',
        'xx....',
        'xxx...',
        'x.xx..',
        'x..xx.',
        'x...xx',
    ]),
}  # fmt: skip


@pytest.mark.parametrize('name', WINDOWS)
def test_a_window_as_a_matrix(name: str) -> None:
    window, rules, expected = WINDOWS[name]
    ones, positions = row(1, 1, 1, 1, 1, 1), row(0, 1, 2, 3, 4, 5)
    assert draw(Mask(ones, ones, positions, positions, **rules).within(*window)) == expected


def test_without_a_window_all_is_as_it_was() -> None:
    ones, positions = row(1, 1, 1), row(0, 1, 2)
    mask = Mask(ones, ones, positions, positions, causal=True)
    assert mask.within(None, 1, 2) == mask


@pytest.mark.parametrize(
    ('impl', 'causal', 'settings'),
    [
        ('dense', False, {}),
        ('dense', False, {'window_right': 0}),
        ('dense', True, {}),
        ('blockwise', False, {'window_right': 5}),
        ('blockwise', True, {'window_right': 1}),
        ('pallas', False, {'window_right': 1}),
    ],
)
def test_attention_sees_as_far_as_its_config_says(impl: str, causal: bool, settings: dict[str, Any]) -> None:
    """Itself and `window - 1` tokens before; `window_right` after, as many as before where it is not said."""
    length, num_heads, window = 11, 2, 3
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, length, num_heads, width)) for width in (5, 5, 7))
    right = 0 if causal else settings.get('window_right', window - 1)
    seen = np.zeros((1, length, length), bool)
    for t in range(length):
        for s in range(length):
            seen[0, t, s] = t - (window - 1) <= s <= t + right
    config = AttentionConfig(impl=impl, window=window, num_heads=num_heads, head_dim=5, value_dim=7, **settings)
    ones, positions = jnp.ones((1, length), jnp.int32), jnp.arange(length, dtype=jnp.int32)[None]
    mask = Mask(ones, ones, positions, positions, causal=causal, aligned=True)
    actual = jax.jit(lambda *arrays: attention(*arrays, mask, config))(*map(jnp.float32, (q, k, v)))
    oracles.assert_close(actual, oracles.attention(q, k, v, seen))


small_ids = st_numpy.arrays(np.int32, (2, 5), elements=st.integers(0, 3))


@settings(deadline=None)
@given(small_ids, small_ids, small_ids, small_ids, st.booleans())
def test_any_mask_is_the_loop_over_its_rules(
    q_segments: np.ndarray, k_segments: np.ndarray, q_positions: np.ndarray, k_positions: np.ndarray, causal: bool
) -> None:
    places = (q_segments, k_segments, q_positions, k_positions)
    mask = Mask(*map(jnp.asarray, places), causal=causal).materialize()
    np.testing.assert_array_equal(mask, oracles.visibility(*places, causal=causal))
