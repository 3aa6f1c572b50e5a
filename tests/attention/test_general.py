"""Luong's `general` score against loops: dot-product attention of moved queries."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles
from tests.attention import comparing
from tests.attention.comparing import make_arrays, make_mask
from transformer_jax.attention.blockwise import BLOCKWISE
from transformer_jax.attention.dense import DENSE
from transformer_jax.attention.general import GENERAL, GENERAL_BLOCKWISE
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options, Variant
from transformer_jax.config import AttentionConfig

N, K, H, U = 4, 2, 3, 5
CONFIG = AttentionConfig(kind='general', num_heads=N, num_kv_heads=K, head_dim=H, value_dim=U, block_size=2)

LAYOUTS = {
    'causal, packed': make_mask(comparing.PACKED, comparing.PACKED, causal=True, aligned=True),
    'cross, packed': make_mask([[1, 1, 2, 3, 3], [2, 2, 2, 2, 0]], comparing.PACKED),
    'cross, a row of padding': make_mask(comparing.NOBODY, comparing.LEFT_PADDED),
}


def loops(arrays: comparing.Arrays, seen: np.ndarray, scale: float) -> np.ndarray:
    """softmax(q W k scale) v."""
    moved = np.stack([arrays['q'][:, :, n] @ arrays['query_map'][n] for n in range(N)], axis=2)
    k, v = (np.repeat(arrays[name], N // K, axis=2) for name in 'kv')
    return oracles.attention(moved * scale * math.sqrt(H), k, v, seen)  # the loops divide by sqrt(d_k)


def attend(arrays: dict[str, Any], variant: Variant, mask: Mask, scale: float) -> jax.Array:
    options = Options(CONFIG, scale, {'query_map': arrays['query_map']})
    return variant.function(arrays['q'], arrays['k'], arrays['v'], mask, options)[0]


def with_map(seed: int, mask: Mask) -> comparing.Arrays:
    return {
        **make_arrays(seed, mask, N, K, H, U),
        'query_map': np.random.default_rng(seed + 100).normal(size=(N, H, H)),
    }


@pytest.mark.parametrize(
    ('variant', 'layout', 'scale'),
    [
        (GENERAL, 'causal, packed', 1.0),
        (GENERAL, 'cross, packed', H**-0.5),
        (GENERAL_BLOCKWISE, 'causal, packed', H**-0.5),
        (GENERAL_BLOCKWISE, 'cross, a row of padding', 1.0),
    ],
)
def test_values_and_gradients_equal_the_loops(variant: Variant, layout: str, scale: float) -> None:
    mask = LAYOUTS[layout]
    seen = comparing.visible(mask)
    comparing.assert_equals_loops(
        lambda a: attend(a, variant, mask, scale), lambda a: loops(a, seen, scale), with_map(0, mask), seen
    )


def test_it_supports_what_the_dot_product_does_but_turned_rows_and_has_d_k_squared_parameters_a_head() -> None:
    assert GENERAL.supports == DENSE.supports - {'rotary'}
    assert GENERAL_BLOCKWISE.supports == BLOCKWISE.supports - {'rotary'}
    for variant in (GENERAL, GENERAL_BLOCKWISE):
        assert variant.parameters is not None
        parameters = variant.parameters(AttentionConfig(num_heads=5, num_kv_heads=1, head_dim=7), 8)
        assert sum(math.prod(one.shape) for one in parameters.values()) == 5 * 7 * 7
        values = parameters['query_map'].initializer(jax.random.key(0), (5, 7, 7), jnp.float32)
        assert float(values.std()) == pytest.approx(math.sqrt(2 / 14), rel=0.2)
