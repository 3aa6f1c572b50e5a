"""Visibility: which query may see which key, computed from positions and segments, never from array indices."""

import dataclasses
from dataclasses import dataclass

import jax

from transformer_jax.shapes import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """True = may attend. A query sees the keys of its own segment; segment 0 is padding, which sees and shows nothing.

    `causal` also hides keys of a later position. `allowed` narrows further, key by key (a beam's hypotheses see only
    their own ancestors). Materialised late, so that a cached one-row query and a full forward pass agree.
    """

    q_segments: Int[Array, 'B T']
    k_segments: Int[Array, 'B S']
    q_positions: Int[Array, 'B T']
    k_positions: Int[Array, 'B S']
    allowed: Bool[Array, 'B T S'] | None = None
    causal: bool = dataclasses.field(default=False, metadata={'static': True})

    def materialize(self) -> Bool[Array, 'B T S']:
        """The whole mask."""
        mask = self.q_segments[:, :, None] == self.k_segments[:, None, :]
        mask &= self.k_segments[:, None, :] > 0
        if self.causal:
            mask &= self.k_positions[:, None, :] <= self.q_positions[:, :, None]
        if self.allowed is not None:
            mask &= self.allowed
        return mask
