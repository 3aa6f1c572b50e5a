"""Prepared ids to batches: endless for training, every pair once for evaluation.

The order of an epoch is a pure function of (seed, epoch), so the number of batches already used is the whole state.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax.config import ConfigError, DataConfig
from transformer_jax.data import bucketing, packing
from transformer_jax.data.batch import Batch, HostBatch
from transformer_jax.data.bucketing import Bucket
from transformer_jax.data.prepared import Prepared
from transformer_jax.data.vocabulary import Vocabulary

Ids = Sequence[int] | np.ndarray

_READ_THREADS = 2  # the numbers don't depend on it
_EPOCHS_KEPT = 2  # plans in memory: prefetching crosses from one epoch into the next


class TrainingBatches:
    """The training batches of one host: the same bucket on every host at every step, each with its own rows.

    `rows_multiple` is the number of data shards, and lengths are multiples of `length_multiple`; `group` consecutive
    batches share a bucket (gradient accumulation).
    Pairs longer than `config.max_length` are dropped, counted in `dropped` and reported. Raises `ConfigError` when no
    pair is left or the token budget is too small for the shards.
    """

    def __init__(
        self,
        prepared: Prepared,
        config: DataConfig,
        *,
        vocabulary: Vocabulary,
        seed: int,
        rows_multiple: int = 1,
        length_multiple: int = 1,
        group: int = 1,
        host_index: int = 0,
        num_hosts: int = 1,
        report: Callable[[str], None] = print,
    ):
        self._host = _Host(host_index, num_hosts, rows_multiple)
        self._prepared, self._vocabulary, self._prefetch = prepared, vocabulary, config.prefetch
        fits = np.maximum(prepared.source_lengths, prepared.target_lengths) <= config.max_length
        self._kept = np.flatnonzero(fits)
        self.dropped = prepared.num_pairs - len(self._kept)
        if self.dropped:
            report(
                f'{self.dropped:,} of {prepared.num_pairs:,} training pairs are longer than config.data.max_length '
                f'{config.max_length} (subwords with eos) and were dropped'
            )
        if not len(self._kept):
            raise ConfigError(f'no training pair is within config.data.max_length {config.max_length}')
        lengths = prepared.source_lengths[self._kept], prepared.target_lengths[self._kept]
        planner = _PackedPlanner if config.batching == 'packing' else _BucketPlanner
        self._planner = planner(lengths, config, seed, (rows_multiple, length_multiple), group)
        self.buckets: tuple[Bucket, ...] = self._planner.buckets
        self._plans: dict[int, list[_Rows]] = {}
        self._lock = threading.Lock()
        self._num_batches = len(self._plan(0))
        slots = sum(rows.bucket.rows * rows.bucket.row_slots for rows in self._plan(0))
        self.padding: float = 1 - int(lengths[0].sum() + lengths[1].sum()) / slots  # of all slots, of both sides

    def batches_in_epoch(self, epoch: int = 0) -> int:
        """Number of batches in an epoch: the same in every one."""
        del epoch
        return self._num_batches

    def locate(self, index: int) -> tuple[int, int]:
        """The epoch of batch `index` and its index within that epoch."""
        return divmod(index, self._num_batches)

    def batch(self, index: int) -> HostBatch:
        """Batch `index`, counted over all epochs: this host's rows of it."""
        epoch, within = self.locate(index)
        bucket, pairs, row_of = self._plan(epoch)[within]
        return _make_host_batch(self._prepared, self._vocabulary, bucket, self._kept[pairs], row_of, self._host)

    def iterate(self, start: int = 0) -> Generator[HostBatch, None, None]:
        """Batches `start`, `start + 1`, ... without end, `config.prefetch` of them made ahead by threads."""
        import grain

        dataset = grain.MapDataset.source(_BatchesFrom(self, start))
        options = grain.ReadOptions(num_threads=_READ_THREADS, prefetch_buffer_size=self._prefetch)
        batches = iter(dataset.to_iter_dataset(options))
        try:
            yield from batches
        finally:
            batches.close()

    def _plan(self, epoch: int) -> 'list[_Rows]':
        with self._lock:
            if epoch not in self._plans:
                if len(self._plans) == _EPOCHS_KEPT:
                    del self._plans[next(iter(self._plans))]
                self._plans[epoch] = self._planner.plan(epoch)
            return self._plans[epoch]


def evaluation_batches(
    prepared: Prepared,
    *,
    vocabulary: Vocabulary,
    batch_tokens: int,
    rows_multiple: int = 1,
    length_multiple: int = 1,
    max_pairs: int | None = None,
    host_index: int = 0,
    num_hosts: int = 1,
) -> Iterator[HostBatch]:
    """Every pair (or the first `max_pairs`) exactly once, whatever its length; the last rows of a shape may be empty.

    Both sides are padded to the same few lengths (8, 12, 16, 24, 32, 48, ...), so the number of shapes grows with the
    logarithm of the longest pair, and are multiples of `length_multiple`. A pair longer than `batch_tokens` still gets
    a batch.
    """
    host = _Host(host_index, num_hosts, rows_multiple)
    longest = np.maximum(prepared.source_lengths, prepared.target_lengths)[:max_pairs]
    padded = bucketing.round_up(np.minimum(_round_to_ladder(longest), longest.max()), length_multiple)
    for length in np.unique(padded):
        pairs = np.flatnonzero(padded == length)
        rows = max(batch_tokens // (int(length) * rows_multiple), 1) * rows_multiple
        rows = min(rows, -(-len(pairs) // rows_multiple) * rows_multiple)
        bucket = Bucket(int(length), int(length), rows)
        for start in range(0, len(pairs), rows):
            part = pairs[start : start + rows]
            yield _make_host_batch(prepared, vocabulary, bucket, part, np.arange(len(part)), host)


def batch_from_ids(
    source_ids: Sequence[Ids],
    target_ids: Sequence[Ids],
    *,
    vocabulary: Vocabulary,
    rows: int,
    source_length: int,
    target_length: int,
    row_of: Sequence[int] | np.ndarray | None = None,
) -> Batch:
    """A batch of these pairs: eos appended, the rest of the `rows` x length arrays padding (segment 0).

    `row_of` gives the row of each pair, ascending, for packed rows; `None` is one pair a row. Raises `ValueError` for
    more rows or longer rows than there is room for, and for ids outside the vocabulary.
    """
    if len(source_ids) != len(target_ids):
        raise ValueError(f'{len(source_ids)} sources and {len(target_ids)} targets; the counts must be equal')
    places = np.arange(len(source_ids)) if row_of is None else np.asarray(row_of, int)
    if len(places) and (places[-1] >= rows or np.any(np.diff(places) < 0)):
        raise ValueError(f'{len(places)} pairs in rows up to {places[-1]} do not fit {rows} rows in order')
    inputs = _lay_out('source', source_ids, places, rows, source_length, vocabulary)
    targets = _lay_out('target', target_ids, places, rows, target_length, vocabulary)
    return Batch(inputs[0], targets[0], inputs[1], targets[1], inputs[2], targets[2])


class _Rows(NamedTuple):
    """The pairs of one batch and the row of each, ascending."""

    bucket: Bucket
    pairs: np.ndarray
    row_of: np.ndarray


class _Host:
    """Which rows of a global batch are this host's."""

    def __init__(self, index: int, count: int, rows_multiple: int):
        if not 0 <= index < count or rows_multiple % count:
            raise ValueError(
                f'host {index} of {count} with rows in multiples of {rows_multiple}: the index must be below the '
                'number of hosts, and the multiple divisible by it'
            )
        self._index, self._count = index, count

    def rows(self, total: int) -> tuple[int, int]:
        """First and number of this host's rows."""
        return total // self._count * self._index, total // self._count


class _BucketPlanner:
    def __init__(
        self,
        lengths: tuple[np.ndarray, np.ndarray],
        config: DataConfig,
        seed: int,
        multiples: tuple[int, int],
        group: int,
    ):
        self.buckets = bucketing.choose_buckets(
            *(bucketing.round_up(side, multiples[1]) for side in lengths),
            batch_tokens=config.batch_tokens,
            num_buckets=config.num_buckets,
            rows_multiple=multiples[0],
            max_length=bucketing.round_up(config.max_length, multiples[1]),
            group=group,
        )
        self._assigned = bucketing.assign_buckets(*lengths, self.buckets)
        self._seed, self._group = seed, group

    def plan(self, epoch: int) -> list[_Rows]:
        plan = bucketing.plan_epoch(self._assigned, self.buckets, seed=self._seed, epoch=epoch, group=self._group)
        batches = []
        for index, start, end in zip(plan.buckets, plan.starts[:-1], plan.starts[1:], strict=True):
            for member in range(self._group):  # an unfilled group is spread over its batches
                pairs = plan.pairs[start + member : end : self._group]
                batches.append(_Rows(self.buckets[index], pairs, np.arange(len(pairs))))
        return batches


class _PackedPlanner:
    def __init__(
        self,
        lengths: tuple[np.ndarray, np.ndarray],
        config: DataConfig,
        seed: int,
        multiples: tuple[int, int],
        group: int,
    ):
        length = bucketing.round_up(config.max_length, multiples[1])
        rows = config.batch_tokens // length // multiples[0] * multiples[0]
        if not rows:
            raise bucketing.budget_error(config.batch_tokens, multiples[0], length)
        self.buckets = (Bucket(length, length, rows),)
        self._lengths, self._seed, self._group = lengths, seed, group
        self._packing = packing.pack_pairs(*lengths, max_length=length, seed=seed)

    def plan(self, epoch: int) -> list[_Rows]:
        packed = packing.reshuffle(self._packing, *self._lengths, seed=self._seed, epoch=epoch)
        bucket = self.buckets[0]
        batches = []
        for first in range(0, packed.num_rows, bucket.rows * self._group):
            last = min(first + bucket.rows * self._group, packed.num_rows)
            for member in range(self._group):
                rows = range(first + member, last, self._group)
                parts = [packed.pairs[packed.starts[row] : packed.starts[row + 1]] for row in rows]
                pairs = np.concatenate([packed.pairs[:0], *parts])
                batches.append(_Rows(bucket, pairs, np.repeat(np.arange(len(parts)), [len(part) for part in parts])))
        return batches


class _BatchesFrom:
    """The random-access source that grain reads: batch i of it is batch `start` + i of the run."""

    def __init__(self, batches: TrainingBatches, start: int):
        self._batches, self._start = batches, start

    def __len__(self) -> int:
        return 1 << 48  # without end, for any practical purpose

    def __getitem__(self, index: int) -> HostBatch:
        return self._batches.batch(self._start + int(index))


def _make_host_batch(
    prepared: Prepared, vocabulary: Vocabulary, bucket: Bucket, pairs: np.ndarray, row_of: np.ndarray, host: _Host
) -> HostBatch:
    first, rows = host.rows(bucket.rows)
    mine = (row_of >= first) & (row_of < first + rows)
    pairs, row_of = pairs[mine], row_of[mine] - first
    batch = batch_from_ids(
        [prepared.source_ids(pair) for pair in pairs],
        [prepared.target_ids(pair) for pair in pairs],
        vocabulary=vocabulary,
        rows=rows,
        source_length=bucket.source_length,
        target_length=bucket.target_length,
        row_of=row_of,
    )
    return HostBatch(batch, pairs.astype(np.int64))


def _lay_out(
    side: str, sequences: Sequence[Ids], row_of: np.ndarray, rows: int, length: int, vocabulary: Vocabulary
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, segment ids and positions of one side, int32 [rows, length]."""
    lengths = np.fromiter(map(len, sequences), int, len(sequences)) + 1
    ends = np.cumsum(lengths)
    offsets = np.repeat(ends - lengths, lengths)
    positions = np.arange(lengths.sum()) - offsets
    ids = np.full(lengths.sum(), vocabulary.eos_id)
    if len(sequences):
        ids[positions < np.repeat(lengths - 1, lengths)] = np.concatenate([np.asarray(s, int) for s in sequences])
    bad = np.flatnonzero((ids < 0) | (ids >= vocabulary.size))
    if len(bad):
        where = int(np.searchsorted(ends, bad[0], side='right'))
        raise ValueError(f'{side} {where} has the id {ids[bad[0]]}, outside the vocabulary of {vocabulary.size}')
    row_lengths = np.bincount(row_of, weights=lengths, minlength=rows).astype(int)
    if row_lengths.max() > length:
        row = int(row_lengths.argmax())
        raise ValueError(f'{side} row {row} needs {row_lengths[row]} slots with eos; there are {length}')
    # The segment of a pair is its place among those of its row, from 1.
    segments = np.arange(len(row_of)) - np.searchsorted(row_of, row_of) + 1
    filled = np.arange(length) < row_lengths[:, None]
    arrays = []
    for values, fill in ((ids, vocabulary.pad_id), (np.repeat(segments, lengths), 0), (positions, 0)):
        array = np.full((rows, length), fill, np.int32)
        array[filled] = values
        arrays.append(array)
    return arrays[0], arrays[1], arrays[2]


def _round_to_ladder(lengths: np.ndarray) -> np.ndarray:
    """Up to the next of 8, 12, 16, 24, 32, 48, 64, ..."""
    ladder = [8]
    while ladder[-1] < lengths.max():
        ladder.append(ladder[-1] * 3 // 2 if len(ladder) % 2 else ladder[-1] * 4 // 3)
    return np.asarray(ladder)[np.searchsorted(ladder, lengths)]
