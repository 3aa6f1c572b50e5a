"""Packing: several pairs a row, kept apart by segment ids; one batch shape, little padding. Pure functions."""

from typing import NamedTuple

import numpy as np

_OPEN_ROWS = 256  # rows that first fit looks at; older ones are closed, which bounds the time


class Packing(NamedTuple):
    """Row r holds the pairs `pairs[starts[r]:starts[r + 1]]`, in segment order."""

    pairs: np.ndarray
    starts: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.starts) - 1


def pack_pairs(source_lengths: np.ndarray, target_lengths: np.ndarray, *, max_length: int, seed: int) -> Packing:
    """First fit, in an order shuffled by `seed`: each pair goes to the first open row with room on both sides.

    Lengths count eos and are at most `max_length`. About 6 microseconds a pair.
    """
    if max(source_lengths.max(), target_lengths.max()) > max_length:
        raise ValueError(f'packing needs pairs of at most {max_length} on both sides')
    order = np.random.default_rng(seed).permutation(len(source_lengths))
    smallest = min(source_lengths.min(), target_lengths.min())
    free = np.zeros((0, 2), int)  # room left in the open rows, by side
    open_rows: list[list[int]] = []
    rows: list[list[int]] = []
    for pair in order:
        needed = (source_lengths[pair], target_lengths[pair])
        fits = (free[:, 0] >= needed[0]) & (free[:, 1] >= needed[1])
        if fits.any():
            place = int(fits.argmax())
        else:
            place = len(open_rows)
            open_rows.append([])
            free = np.concatenate([free, [[max_length, max_length]]])
        open_rows[place].append(int(pair))
        free[place] -= needed
        full = free[place].min() < smallest
        if full or len(open_rows) > _OPEN_ROWS:
            closed = place if full else 0
            rows.append(open_rows.pop(closed))
            free = np.delete(free, closed, axis=0)
    rows += open_rows
    return Packing(np.concatenate(rows), np.cumsum([0, *map(len, rows)]))


def reshuffle(
    packing: Packing, source_lengths: np.ndarray, target_lengths: np.ndarray, *, seed: int, epoch: int
) -> Packing:
    """The packing of one epoch: rows in another order, and pairs of equal lengths having changed places.

    So the number of rows is the same in every epoch, and neighbours still differ. A pure function of its arguments.
    """
    rng = np.random.default_rng((seed, epoch))
    pairs = packing.pairs
    shuffled = rng.permutation(len(pairs))
    by_length = np.lexsort((target_lengths[pairs], source_lengths[pairs]))
    shuffled_by_length = shuffled[np.lexsort((target_lengths[pairs[shuffled]], source_lengths[pairs[shuffled]]))]
    moved = np.empty_like(pairs)
    moved[by_length] = pairs[shuffled_by_length]
    order = rng.permutation(packing.num_rows)
    counts = np.diff(packing.starts)[order]
    starts = np.concatenate([[0], np.cumsum(counts)])
    within = np.arange(len(pairs)) - np.repeat(starts[:-1], counts)
    return Packing(moved[np.repeat(packing.starts[:-1][order], counts) + within], starts)
