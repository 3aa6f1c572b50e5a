"""Layouts of queries and keys, and how an attention function is compared with numpy loops: values and gradients."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import oracles
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options, Variant
from transformer_jax.config import AttentionConfig

Arrays = dict[str, np.ndarray]

# Segments of queries and of keys, row by row; 0 is padding. Positions count from 0 in each segment.
ALL = [[1, 1, 1, 1, 1, 1, 1]] * 2
RIGHT_PADDED = [[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0]]
LEFT_PADDED = [[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]]
PACKED = [[1, 1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 2, 0, 0]]
SHORT_PADDED = [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
SHORT_PACKED = [[1, 1, 2, 3, 3], [2, 2, 2, 4, 0]]  # in row 1 the keys lack segment 4 and the queries lack segment 1
NOBODY = [[0, 0, 0, 0, 0], [1, 1, 1, 0, 0]]


def make_mask(queries: list[list[int]], keys: list[list[int]], *, causal: bool = False, aligned: bool = False) -> Mask:
    """The mask of these segments."""

    def count(segments: list[list[int]]) -> np.ndarray:
        positions = [[row[:place].count(segment) for place, segment in enumerate(row)] for row in segments]
        return np.array(positions, np.int32)

    places = (np.array(queries, np.int32), np.array(keys, np.int32), count(queries), count(keys))
    return Mask(*map(jnp.asarray, places), causal=causal, aligned=aligned)


def visible(mask: Mask) -> np.ndarray:
    """What the mask lets be seen, from the loops; without a window or prefix."""
    places = (mask.q_segments, mask.k_segments, mask.q_positions, mask.k_positions)
    return oracles.visibility(*map(np.asarray, places), causal=mask.causal)


def make_arrays(seed: int, mask: Mask, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int) -> Arrays:
    """Random q, k and v of the mask's lengths."""
    rng = np.random.default_rng(seed)
    (batch, num_queries), num_keys = mask.q_segments.shape, mask.k_segments.shape[1]
    return {
        'q': rng.normal(size=(batch, num_queries, num_heads, head_dim)),
        'k': rng.normal(size=(batch, num_keys, num_kv_heads, head_dim)),
        'v': rng.normal(size=(batch, num_keys, num_kv_heads, value_dim)),
    }


def assert_equals_loops(
    attend: Callable[[dict[str, jax.Array]], jax.Array],
    loops: Callable[[Arrays], np.ndarray],
    arrays: Arrays,
    seen: np.ndarray,
    limit: float = 5e-6,
) -> None:
    """Output, and the gradient of every array for a random sum of the output, equal those of the float64 loops.

    A query that sees nothing yields exact zeros; NaN and 1e30 in such a query's slot, and in a key's and value's that
    nobody sees, change no bit of any output or gradient.
    """
    expected = loops(arrays)
    probe = np.random.default_rng(99).normal(size=expected.shape)

    @jax.jit
    def compute(arrays: dict[str, jax.Array]) -> Any:
        def loss(arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            output = attend(arrays)
            return (output * jnp.float32(probe)).sum(), output

        return jax.grad(loss, has_aux=True)(arrays)

    clean = {name: jnp.float32(array) for name, array in arrays.items()}
    gradients, output = compute(clean)
    oracles.assert_close(output, expected, limit)
    for name, array in arrays.items():

        def moved(at: np.ndarray, name: str = name) -> float:
            return float((loops({**arrays, name: at}) * probe).sum())

        oracles.assert_close(gradients[name], oracles.numeric_gradient(moved, array), limit)
    looks, shows = seen.any(axis=2)[..., None, None], seen.any(axis=1)[..., None, None]
    assert (np.where(looks, 0, output) == 0).all()
    for poison in (np.nan, 1e30):
        dirty = {'q': (looks, clean['q']), 'k': (shows, clean['k']), 'v': (shows, clean['v'])}
        poisoned = compute({**clean, **{name: jnp.where(use, rows, poison) for name, (use, rows) in dirty.items()}})
        jax.tree.map(np.testing.assert_array_equal, poisoned, (gradients, output))


def assert_decoding_equals(variant: Variant, config: AttentionConfig, arrays: Arrays, expected: np.ndarray) -> None:
    """A prefill with padding behind, before and between, another block of rows, then single steps; 6 rows in all.

    Every row of output is as expected of the full pass, whatever stands in padding, and the state keeps its size.
    """
    blocks = [[[1, 1, 1, 1, 0], [0, 1, 0, 0, 0]], [[0, 1], [1, 1]], [[1], [1]], [[0], [1]], [[0], [1]]]
    assert variant.running is not None
    options = Options(config, scale=config.head_dim**-0.5)
    extend = jax.jit(functools.partial(variant.running.extend, options=options))
    state = variant.running.init(2, config, jnp.float32)
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    assert all(shape[0] == 2 for shape in shapes)
    read = [0, 0]
    for block in blocks:
        holds = np.array(block, bool)
        places = [(b, t, read[b] + int(holds[b, :t].sum())) for b, t in zip(*np.nonzero(holds), strict=True)]
        rows = {}
        for name in 'qkv':
            rows[name] = np.full((*holds.shape, *arrays[name].shape[2:]), np.nan, np.float32)
            for b, t, place in places:
                rows[name][b, t] = arrays[name][b, place]
        output, state = extend(state, rows['q'], rows['k'], rows['v'], holds)
        assert [leaf.shape for leaf in jax.tree.leaves(state)] == shapes
        for b, t, place in places:
            oracles.assert_close(output[b, t], expected[b, place], 1e-5)
        read = [read[b] + int(holds[b].sum()) for b in range(2)]
    assert read == [6, 6]
