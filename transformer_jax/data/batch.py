"""What the model is fed: one batch of token ids with the segments and positions that say what belongs together."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Pair(NamedTuple):
    """One sentence pair as text. `id` is stable: it is the line or example number within its split."""

    id: int
    source: str
    target: str
    info: Mapping[str, Any] | None = None  # what only the built-in task knows: phenomena, gold alignment, gold links


class Batch(NamedTuple):
    """Token ids, numpy on the host and jax inside the step; a pytree.

    Segment 0 is padding. Unpacked, a row holds one pair in segment 1; packed, pair j of a row has segment j + 1 on both
    sides, and `positions` restart at 0 with every segment. Both sides end with eos. The decoder's inputs are `targets`
    shifted right within each segment, with the start id at position 0 (see `models.family.shift_right`).
    """

    inputs: Any  # int32 [B, S]
    targets: Any  # int32 [B, T]
    input_segment_ids: Any  # int32 [B, S]
    target_segment_ids: Any  # int32 [B, T]
    input_positions: Any  # int32 [B, S]
    target_positions: Any  # int32 [B, T]

    @property
    def num_target_tokens(self):
        """Real target tokens, eos included."""
        return (self.target_segment_ids > 0).sum()


class HostBatch(NamedTuple):
    """A batch with what the step does not need: which pairs it holds, by id, in row order (then segment order)."""

    batch: Batch
    pair_ids: np.ndarray  # int64 [number of real pairs]
