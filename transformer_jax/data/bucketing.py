"""Buckets: a few fixed batch shapes chosen from the lengths, and the order of an epoch. Pure functions, numpy only.

A bucket of (source length, target length, rows) holds pairs that fit both lengths; `rows * target_length` stays within
the token budget. Padding is 1 - real tokens / (source slots + target slots), the empty rows of batches that the epoch's
end leaves unfilled included.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import ConfigError

_CANDIDATES = 48  # lengths a side that a bucket may end at
_RESTARTS = 8  # of the search, from a disturbed result
_POLISHED = 3


class Bucket(NamedTuple):
    source_length: int
    target_length: int
    rows: int

    @property
    def row_slots(self) -> int:
        """Token slots of one row, both sides."""
        return self.source_length + self.target_length


class EpochPlan(NamedTuple):
    """The groups of batches of an epoch in order.

    Group g has bucket `buckets[g]` and the pairs `pairs[starts[g]:starts[g + 1]]`, at most `group * rows` of them.
    """

    pairs: np.ndarray
    starts: np.ndarray
    buckets: np.ndarray


def choose_buckets(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    batch_tokens: int,
    num_buckets: int,
    rows_multiple: int,
    max_length: int,
    group: int = 1,
) -> tuple[Bucket, ...]:
    """At most `num_buckets` buckets of little padding for pairs of these lengths (with eos, at most `max_length`).

    `rows` is the largest multiple of `rows_multiple` that the budget allows (or, for a single bucket, that the pairs
    fill). A descent from equal shares of the target tokens, restarted a few times with fixed numbers: near the optimum,
    not always at it; seconds at most. Raises `ConfigError` when the budget can't hold `rows_multiple` rows of
    `max_length`.
    """
    if rows_multiple * max_length > batch_tokens:
        raise budget_error(batch_tokens, rows_multiple, max_length)
    if not len(source_lengths) or max(np.max(source_lengths), np.max(target_lengths)) > max_length:
        raise ValueError(f'bucketing needs at least one pair, and none longer than {max_length}')
    cells = _Cells(source_lengths, target_lengths, batch_tokens, rows_multiple, group)
    found = [cells.reduce_slots(_start_limits(cells, count)) for count in range(1, num_buckets + 1)]
    rng = np.random.default_rng(0)
    found += [cells.reduce_slots(_disturb(cells, found[-1], rng)) for _ in range(_RESTARTS)]
    # More buckets waste fewer slots inside rows and leave more rows unfilled at the end of an epoch.
    promising = sorted(found, key=cells.cost)[:_POLISHED]
    limits = min((_polish(cells, limits) for limits in promising), key=cells.cost)
    return _drop_unused(cells, limits, rows_multiple, group)


def budget_error(batch_tokens: int, rows_multiple: int, max_length: int) -> ConfigError:
    """What to raise when the budget holds no batch of the longest pairs."""
    return ConfigError(
        f'config.data.batch_tokens is {batch_tokens}, but {rows_multiple} rows (one for each data shard) of '
        f'config.data.max_length {max_length} take {rows_multiple * max_length}; raise the budget to that, lower '
        'max_length, or use fewer shards'
    )


def assign_buckets(source_lengths: np.ndarray, target_lengths: np.ndarray, buckets: Sequence[Bucket]) -> np.ndarray:
    """For each pair the index of the bucket with the fewest slots that it fits. Raises `ValueError` when none fits."""
    assigned = np.full(len(source_lengths), -1)
    for index in sorted(range(len(buckets)), key=lambda i: buckets[i].row_slots, reverse=True):
        bucket = buckets[index]
        assigned[(source_lengths <= bucket.source_length) & (target_lengths <= bucket.target_length)] = index
    if len(unfit := np.flatnonzero(assigned < 0)):
        raise ValueError(
            f'pair {unfit[0]} of lengths {source_lengths[unfit[0]]} and {target_lengths[unfit[0]]} fits no bucket'
        )
    return assigned


def move_leftovers(buckets: Sequence[Bucket], counts: Sequence[int], group: int = 1) -> list[tuple[int, int, int]]:
    """How many pairs of which bucket ride in which other one so that the epoch's end leaves few rows unfilled.

    `counts` are pairs by bucket; returns moves `(from, to, pairs)`, to be made in that order. A bucket's remainder goes
    where its pairs fit and where it costs fewer slots than a batch of its own.
    """
    counts = list(counts)
    capacity = [bucket.rows * group for bucket in buckets]
    slots = [size * bucket.row_slots for size, bucket in zip(capacity, buckets, strict=True)]
    moves = []
    for i in sorted(range(len(buckets)), key=lambda i: buckets[i].row_slots):
        remainder = counts[i] % capacity[i]
        if not remainder:
            continue
        best, best_cost = i, slots[i]
        for j, bucket in enumerate(buckets):
            fits = bucket.source_length >= buckets[i].source_length and bucket.target_length >= buckets[i].target_length
            if j == i or not fits or bucket.row_slots == buckets[i].row_slots:
                continue
            more = -(-(counts[j] + remainder) // capacity[j]) - -(-counts[j] // capacity[j])
            if more * slots[j] < best_cost:
                best, best_cost = j, more * slots[j]
        if best != i:
            moves.append((i, best, remainder))
            counts[i] -= remainder
            counts[best] += remainder
    return moves


def plan_epoch(assigned: np.ndarray, buckets: Sequence[Bucket], *, seed: int, epoch: int, group: int = 1) -> EpochPlan:
    """The batches of one epoch, every pair once; `group` batches in a row share a bucket.

    A pure function of its arguments. The number of groups is the same in every epoch; which pairs stand together and
    the order of the groups differ.
    """
    rng = np.random.default_rng((seed, epoch))
    members = [rng.permutation(np.flatnonzero(assigned == index)) for index in range(len(buckets))]
    for i, j, count in move_leftovers(buckets, [len(pairs) for pairs in members], group):
        members[j] = np.concatenate([members[j], members[i][-count:]])
        members[i] = members[i][:-count]
    groups, group_buckets = [], []
    for index, (pairs, bucket) in enumerate(zip(members, buckets, strict=True)):
        # Moved pairs are shuffled in, so that no batch is made of them alone.
        chunks = _split(rng.permutation(pairs), bucket.rows * group)
        groups += chunks
        group_buckets += [index] * len(chunks)
    order = rng.permutation(len(groups))
    pairs = np.concatenate([groups[i] for i in order])
    starts = np.concatenate([[0], np.cumsum([len(groups[i]) for i in order])])
    return EpochPlan(pairs, starts, np.asarray(group_buckets)[order])


def padding(plan: EpochPlan, buckets: Sequence[Bucket], real_tokens: int, group: int = 1) -> float:
    """1 - real / (source slots + target slots) over the whole plan."""
    rows = [bucket.rows * group * bucket.row_slots for bucket in buckets]
    return 1 - real_tokens / sum(rows[index] for index in plan.buckets)


def _split(pairs: np.ndarray, capacity: int) -> list[np.ndarray]:
    """As few chunks as possible. The last one takes what is left, so that all others are full."""
    return [pairs[start : start + capacity] for start in range(0, len(pairs), capacity)]


def round_up(count: Any, multiple: int) -> Any:
    """The least multiple that is not below; of a number or of each number of an array."""
    return -(-count // multiple) * multiple


class _Cells:
    """The histogram of (source, target) lengths, each rounded up to a candidate limit, and the cost of limits on it."""

    def __init__(self, source_lengths, target_lengths, batch_tokens: int, rows_multiple: int, group: int):
        self.candidates = [_choose_candidates(lengths) for lengths in (source_lengths, target_lengths)]
        source, target = (
            values[np.searchsorted(values, lengths)]
            for values, lengths in zip(self.candidates, (source_lengths, target_lengths), strict=True)
        )
        cells, self.counts = np.unique(np.stack([source, target], 1), axis=0, return_counts=True)
        self.sources, self.targets = cells[:, 0], cells[:, 1]
        self._budget = batch_tokens
        self._multiple = rows_multiple
        self._group = group

    def buckets(self, limits: np.ndarray) -> list[Bucket]:
        return [Bucket(int(s), int(t), self._budget // int(t) // self._multiple * self._multiple) for s, t in limits]

    def assign(self, limits: np.ndarray) -> np.ndarray:
        fits = (self.sources <= limits[:, :1]) & (self.targets <= limits[:, 1:])
        return np.argmin(np.where(fits, limits.sum(1, keepdims=True), np.inf), axis=0)

    def count_pairs(self, limits: np.ndarray) -> list[int]:
        """Pairs by bucket after `move_leftovers`."""
        counts = np.bincount(self.assign(limits), weights=self.counts, minlength=len(limits)).astype(int).tolist()
        for i, j, count in move_leftovers(self.buckets(limits), counts, self._group):
            counts[i] -= count
            counts[j] += count
        return counts

    def cost(self, limits: np.ndarray) -> int:
        """Slots of an epoch, unfilled rows included."""
        total = 0
        for bucket, count in zip(self.buckets(limits), self.count_pairs(limits), strict=True):
            total += round_up(count, bucket.rows * self._group) * bucket.row_slots
        return total

    def reduce_slots(self, limits: np.ndarray) -> np.ndarray:
        """Moves both limits of one bucket at a time to where filled rows take fewest slots, until no move helps."""
        best = self._filled_slots(limits).sum()
        improved = True
        while improved:
            improved = False
            for row in range(len(limits) - 1):
                without = self._filled_slots(np.delete(limits, row, axis=0)) // self.counts
                saved, place = self._best_saving(without)
                if saved and (cost := (without * self.counts).sum() - saved) < best:
                    limits = limits.copy()
                    limits[row] = place
                    best, improved = cost, True
        return limits

    def _filled_slots(self, limits: np.ndarray) -> np.ndarray:
        return limits.sum(1)[self.assign(limits)] * self.counts

    def _best_saving(self, slots: np.ndarray) -> tuple[int, tuple[int, int]]:
        """The bucket that saves most when pairs of each cell now take `slots` a row: (slots saved, its limits)."""
        best, place = 0, (0, 0)
        targets = self.candidates[1]
        for source in self.candidates[0]:
            fits = self.sources <= source
            gain = np.maximum(slots[fits] - (source + targets)[:, None], 0) * self.counts[fits]
            saved = (gain * (self.targets[fits] <= targets[:, None])).sum(1)
            if saved.max() > best:
                best, place = int(saved.max()), (int(source), int(targets[saved.argmax()]))
        return best, place


def _choose_candidates(lengths: np.ndarray) -> np.ndarray:
    values = np.unique(lengths)
    if len(values) <= _CANDIDATES:
        return values
    shares = np.linspace(0, 1, _CANDIDATES // 2)
    # Half of the candidates by share of the pairs and half by value: the tail matters as well.
    return np.unique(np.concatenate([np.quantile(of, shares, method='higher') for of in (lengths, values)]))


def _start_limits(cells: _Cells, num_buckets: int) -> np.ndarray:
    """Equal shares of the target tokens; each source limit is what nearly all pairs of that share need."""
    order = np.argsort(cells.targets, kind='stable')
    tokens = np.cumsum((cells.targets * cells.counts)[order])
    limits = []
    for share in range(1, num_buckets + 1):
        position = np.searchsorted(tokens, tokens[-1] * share / num_buckets)
        target = cells.targets[order][min(position, len(order) - 1)]
        inside = cells.targets <= target
        source = np.quantile(np.repeat(cells.sources[inside], cells.counts[inside]), 0.97, method='higher')
        limits.append((source, target))
    limits[-1] = (cells.sources.max(), cells.targets.max())
    return np.asarray(limits)


def _disturb(cells: _Cells, limits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Two buckets (but the last) get random limits."""
    disturbed = limits.copy()
    for row in rng.permutation(len(limits) - 1)[:2]:
        disturbed[row] = [rng.choice(values) for values in cells.candidates]
    return disturbed


def _polish(cells: _Cells, limits: np.ndarray) -> np.ndarray:
    """Moves one limit at a time to the candidate of least true cost until no move helps. The last bucket holds all."""
    best = cells.cost(limits)
    improved = True
    while improved:
        improved = False
        for row, side in np.ndindex(len(limits) - 1, 2):
            for value in cells.candidates[side]:
                trial = limits.copy()
                trial[row, side] = value
                if (cost := cells.cost(trial)) < best:
                    limits, best, improved = trial, cost, True
    return limits


def _drop_unused(cells: _Cells, limits: np.ndarray, rows_multiple: int, group: int) -> tuple[Bucket, ...]:
    """The buckets that keep pairs after `move_leftovers`, ascending."""
    while True:
        buckets, counts = cells.buckets(limits), cells.count_pairs(limits)
        kept = np.asarray(counts) > 0
        if kept.all():
            break
        limits = limits[kept]
    if len(buckets) == 1:  # fewer pairs than one batch holds
        rows = round_up(round_up(counts[0], group) // group, rows_multiple)
        return (buckets[0]._replace(rows=min(buckets[0].rows, rows)),)
    return tuple(sorted(buckets, key=lambda bucket: (bucket.row_slots, bucket)))
