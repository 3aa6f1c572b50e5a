"""Which blocks of queries may see which blocks of keys: what lets an implementation skip the others."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.mask import Mask
from transformer_jax.shapes import Array, Bool, Int

_SCORES_AT_ONCE = 2**21  # of all rows and heads together: 8 MiB in float32
_LEAST_BLOCK, _GREATEST_BLOCK = 128, 256


class Blocks(NamedTuple):
    """How many queries and how many keys a block holds."""

    num_queries: int
    num_keys: int


def choose_blocks(
    rows: int,
    num_queries: int,
    num_keys: int,
    mask: Mask,
    block_size: int | None,
    most_scores: int = _SCORES_AT_ONCE,
) -> Blocks:
    """Block sizes where `rows` rows and heads are computed together.

    `block_size` None = by what caches hold and by `most_scores`, those of one pair of blocks in all rows and heads.
    """
    if block_size is None:
        block_size = _GREATEST_BLOCK
        while block_size > _LEAST_BLOCK and rows * block_size**2 > min(most_scores, _SCORES_AT_ONCE):
            block_size //= 2
        if mask.window is not None:  # a block much wider than the window is mostly hidden
            while block_size > _LEAST_BLOCK and block_size > sum(mask.window) + 1:
                block_size //= 2
    return Blocks(min(block_size, num_queries), min(block_size, num_keys))


class Pairs(NamedTuple):
    """The first `count` entries name a block of queries and a block of keys each, by the block of queries.

    `count` is a plain number where the mask says by index alone what may be skipped; otherwise it is traced.
    """

    q_blocks: Any
    k_blocks: Any
    count: Any

    def fold(self, body: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """`carry = body(carry, q_block, k_block)` over the pairs, one after the other."""
        if isinstance(self.count, int) and self.count <= 1:
            return body(carry, int(self.q_blocks[0]), int(self.k_blocks[0])) if self.count else carry
        q_blocks, k_blocks = jnp.asarray(self.q_blocks, jnp.int32), jnp.asarray(self.k_blocks, jnp.int32)
        return jax.lax.fori_loop(0, self.count, lambda i, carry: body(carry, q_blocks[i], k_blocks[i]), carry)


def find_pairs(mask: Mask, blocks: Blocks) -> Pairs:
    """The pairs of blocks in which some query may see some key, and perhaps a few more; never one less.

    The mask must be whole blocks long (`pad_to_blocks`). An aligned mask that is causal or has a window, and nothing
    that reaches beyond either, is read by index: the count is known before the program runs. Any other is read by the
    segments and positions that its blocks span: O(T + S) and one comparison a pair.
    """
    num_q, num_k = mask.q_segments.shape[1] // blocks.num_queries, mask.k_segments.shape[1] // blocks.num_keys
    if num_q == num_k == 1:
        return Pairs((0,), (0,), 1)
    if _is_known_by_index(mask):
        q_blocks, k_blocks = np.nonzero(_near_by_index(mask, blocks, num_q, num_k))
        return Pairs(q_blocks, k_blocks, len(q_blocks))
    return find_seen_pairs(mask, blocks)


def find_seen_pairs(mask: Mask, blocks: Blocks) -> Pairs:
    """The same by segments and positions alone, whatever the indices mean: nothing is run where nothing may be seen."""
    table = _may_see_by_span(mask, blocks)
    q_blocks, k_blocks = jnp.nonzero(table, size=table.size, fill_value=0)
    return Pairs(q_blocks, k_blocks, table.sum())


def pad_to_blocks(mask: Mask, blocks: Blocks) -> Mask:
    """The mask with padding behind, so that its lengths are whole blocks."""

    def pad(array: Array | None, *sizes: int) -> Any:
        if array is None:
            return None
        widths = [(0, -length % size) for length, size in zip(array.shape[1:], sizes, strict=True)]
        return jnp.pad(array, [(0, 0), *widths])

    return dataclasses.replace(
        mask,
        q_segments=pad(mask.q_segments, blocks.num_queries),
        k_segments=pad(mask.k_segments, blocks.num_keys),
        q_positions=pad(mask.q_positions, blocks.num_queries),
        k_positions=pad(mask.k_positions, blocks.num_keys),
        allowed=pad(mask.allowed, blocks.num_queries, blocks.num_keys),
        k_prefix=pad(mask.k_prefix, blocks.num_keys),
    )


def _is_known_by_index(mask: Mask) -> bool:
    if not mask.aligned or mask.num_global:
        return False
    return mask.window is not None or (mask.causal and mask.k_prefix is None)


def _near_by_index(mask: Mask, blocks: Blocks, num_q: int, num_k: int) -> np.ndarray:
    """`[num_q, num_k]`: in an aligned mask the distance of two positions is that of their indices."""
    q_first, k_first = np.arange(num_q)[:, None] * blocks.num_queries, np.arange(num_k)[None] * blocks.num_keys
    q_last, k_last = q_first + blocks.num_queries - 1, k_first + blocks.num_keys - 1
    near = np.ones((num_q, num_k), bool)
    if mask.causal and mask.k_prefix is None:
        near &= k_first <= q_last
    if mask.window is not None:
        left, right = mask.window
        near &= (q_first - k_last <= left) & (k_first - q_last <= right)
    return near


class _Span(NamedTuple):
    """The least and greatest segment and position of the real slots of each block, `[B, blocks]`."""

    first_segment: Array
    last_segment: Array
    first_position: Array
    last_position: Array


def _span(segments: Int[Array, 'B T'], positions: Int[Array, 'B T'], size: int) -> _Span:
    segments, positions = (array.reshape(array.shape[0], -1, size) for array in (segments, positions))
    real, most = segments > 0, jnp.iinfo(jnp.int32).max // 2
    low = [jnp.where(real, array, most).min(-1) for array in (segments, positions)]
    high = [jnp.where(real, array, -most).max(-1) for array in (segments, positions)]
    return _Span(low[0], high[0], low[1], high[1])


def _may_see_by_span(mask: Mask, blocks: Blocks) -> Bool[Array, 'P R']:
    """`[blocks of queries, blocks of keys]`, over all rows of the batch."""
    q = _Span(*(a[:, :, None] for a in _span(mask.q_segments, mask.q_positions, blocks.num_queries)))
    k = _Span(*(a[:, None, :] for a in _span(mask.k_segments, mask.k_positions, blocks.num_keys)))
    table = (q.first_segment <= k.last_segment) & (k.first_segment <= q.last_segment)
    if mask.causal:
        in_order = k.first_position <= q.last_position
        if mask.k_prefix is not None:
            batch = mask.k_prefix.shape[0]
            in_order |= mask.k_prefix.reshape(batch, 1, -1, blocks.num_keys).any(-1)
        table &= in_order
    if mask.window is not None:
        left, right = mask.window
        near = (q.first_position - k.last_position <= left) & (k.first_position - q.last_position <= right)
        if mask.num_global:
            near |= (q.first_position < mask.num_global) | (k.first_position < mask.num_global)
        table &= near
    if mask.allowed is not None:
        batch, num_q = mask.allowed.shape[0], mask.allowed.shape[1] // blocks.num_queries
        table &= mask.allowed.reshape(batch, num_q, blocks.num_queries, -1, blocks.num_keys).any((2, 4))
    return table.any(0)
