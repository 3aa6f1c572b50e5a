"""Visibility: which query may see which key, computed from positions and segments, never from array indices."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from transformer_jax.shapes import Array, Bool, Int


def _static(default: Any) -> Any:
    return dataclasses.field(default=default, metadata={'static': True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """True = may attend. A query sees the keys of its own segment; segment 0 is padding, which sees and shows nothing.

    The rules below only ever hide more of a segment:

    - `causal` hides keys of a later position, except those in `k_prefix` (prefix-LM);
    - `window` (left, right) hides keys more than `left` positions before or `right` after the query, except that the
      first `num_global` positions of a segment see and are seen whatever the distance (Longformer);
    - `allowed` hides key by key (a beam's hypotheses see only their own ancestors).

    Materialised late, whole or one block at a time, so that a cached one-row query and a full forward pass agree.
    `aligned` says that inside a segment index and position differ by a constant, the same for queries and keys, so that
    blocks may be skipped by index.
    """

    q_segments: Int[Array, 'B T']
    k_segments: Int[Array, 'B S']
    q_positions: Int[Array, 'B T']
    k_positions: Int[Array, 'B S']
    allowed: Bool[Array, 'B T S'] | None = None
    k_prefix: Bool[Array, 'B S'] | None = None
    causal: bool = _static(False)
    window: tuple[int, int] | None = _static(None)
    num_global: int = _static(0)
    aligned: bool = _static(False)

    def materialize(self) -> Bool[Array, 'B T S']:
        """The whole mask."""
        k_segments = self.k_segments[:, None, :]
        q_positions, k_positions = self.q_positions[:, :, None], self.k_positions[:, None, :]
        mask = (self.q_segments[:, :, None] == k_segments) & (k_segments > 0)
        if self.causal:
            in_order = k_positions <= q_positions
            mask &= in_order if self.k_prefix is None else in_order | self.k_prefix[:, None, :]
        if self.window is not None:
            left, right = self.window
            near = (q_positions - k_positions <= left) & (k_positions - q_positions <= right)
            if self.num_global:
                near |= (q_positions < self.num_global) | (k_positions < self.num_global)
            mask &= near
        if self.allowed is not None:
            mask &= self.allowed
        return mask

    def block(self, q_start: Any, num_queries: int, k_start: Any, num_keys: int) -> 'Mask':
        """The mask of `num_queries` queries from index `q_start` and `num_keys` keys from `k_start`, maybe traced.

        The block must lie inside the arrays: a start beyond is moved back, as `jax.lax.dynamic_slice` does.
        """

        def cut(array: Array | None, start: Any, size: int, axis: int = 1) -> Any:
            return None if array is None else jax.lax.dynamic_slice_in_dim(array, start, size, axis)

        return dataclasses.replace(
            self,
            q_segments=cut(self.q_segments, q_start, num_queries),
            k_segments=cut(self.k_segments, k_start, num_keys),
            q_positions=cut(self.q_positions, q_start, num_queries),
            k_positions=cut(self.k_positions, k_start, num_keys),
            allowed=cut(cut(self.allowed, q_start, num_queries), k_start, num_keys, axis=2),
            k_prefix=cut(self.k_prefix, k_start, num_keys),
        )

    def within(self, window: int | None, window_right: int | None = None, num_global: int | None = None) -> 'Mask':
        """This mask narrowed to a sliding window: `window - 1` positions to the left, `window_right` to the right.

        None as `window_right` = as far as to the left. A causal mask shows nothing to the right whatever it is.
        """
        if window is None:
            return self
        right = window - 1 if window_right is None else window_right
        return dataclasses.replace(
            self, window=(window - 1, 0 if self.causal and self.k_prefix is None else right), num_global=num_global or 0
        )
