"""Token ids of a split in memory-mapped files, made once for each (text, vocabulary) and reused at later starts."""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import numpy as np
import tqdm

from transformer_jax.data.batch import Pair
from transformer_jax.data.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformer_jax.data import Source

_FORMAT = 1  # raise it when the files change their meaning
_PAIRS_AT_ONCE = 8192
_CHECKED_AT_ONCE = 1 << 24  # ids
_SIDES = ('source', 'target')


class Prepared:
    """The ids of one split, without eos; pair i is pair i of the source. Opens a folder that `prepare` wrote.

    Raises `ValueError` for files that are damaged or hold an id outside the vocabulary.
    """

    def __init__(self, folder: str | Path, vocabulary: Vocabulary):
        self.folder = Path(folder)
        description = _read_description(self.folder)
        self.split: str = description['split']
        self.num_pairs: int = description['num_pairs']
        ids, offsets = [], []
        for side in _SIDES:
            starts = np.load(self.folder / f'{side}_offsets.npy', mmap_mode='r')
            path = self.folder / f'{side}_ids'
            dtype = np.dtype(description['dtype'])
            if len(starts) != self.num_pairs + 1 or path.stat().st_size != int(starts[-1]) * dtype.itemsize:
                raise ValueError(
                    f'{path} is damaged: it does not hold the ids it should; remove the folder to make it again'
                )
            # An empty file can not be mapped.
            ids.append(np.asarray(np.memmap(path, dtype, mode='r')) if starts[-1] else np.zeros(0, dtype))
            offsets.append(starts)
        self._source_ids, self._target_ids = ids
        self._source_offsets, self._target_offsets = offsets
        self.source_lengths = np.diff(self._source_offsets).astype(np.int32) + 1  # with eos
        self.target_lengths = np.diff(self._target_offsets).astype(np.int32) + 1  # with eos
        for side, flat, starts in zip(_SIDES, ids, offsets, strict=True):
            _check_range(f'{side} side of the {self.split} split', flat, starts, vocabulary)

    def source_ids(self, index: int) -> np.ndarray:
        """Ids of the source of pair `index`, without eos."""
        return self._source_ids[self._source_offsets[index] : self._source_offsets[index + 1]]

    def target_ids(self, index: int) -> np.ndarray:
        """Ids of the target of pair `index`, without eos."""
        return self._target_ids[self._target_offsets[index] : self._target_offsets[index + 1]]


def prepare(
    source: 'Source',
    split: str,
    vocabulary: Vocabulary,
    cache_dir: str | os.PathLike[str],
    *,
    progress: bool = True,
    report: Callable[[str], None] = print,
) -> Prepared:
    """Opens the ids of a split, encoding the text first when `cache_dir` has none for this text and this vocabulary.

    `cache_dir` must be on a local disk, since the files are memory-mapped. Several processes may share it: one encodes,
    the others wait. The folder appears whole or not at all. Raises `ValueError` for a split without pairs.
    """
    if '://' in str(cache_dir):
        raise ValueError(f'config.data.cache_dir is {str(cache_dir)!r}; it must be a folder on a local disk')
    cache = Path(cache_dir)
    key = hashlib.sha256(f'{_FORMAT} {source.fingerprint(split)} {vocabulary.fingerprint}'.encode()).hexdigest()[:20]
    folder = cache / f'{split}-{key}'
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache / f'.{folder.name}.lock'):
            if not folder.exists():
                writing = cache / f'.{folder.name}.writing'
                shutil.rmtree(writing, ignore_errors=True)  # what a killed process left; nobody else holds the lock
                try:
                    _write(writing, source, split, vocabulary, progress)
                except OSError as error:
                    error.filename = error.filename or str(writing)  # a full disk does not say which one
                    raise
                writing.replace(folder)
                _report_made(folder, report)
    return Prepared(folder, vocabulary)


def _write(folder: Path, source: 'Source', split: str, vocabulary: Vocabulary, progress: bool) -> None:
    folder.mkdir()
    dtype = np.dtype(np.uint16 if vocabulary.size <= 1 << 16 else np.int32)
    size = source.size(split)
    lengths: dict[str, list[np.ndarray]] = {side: [] for side in _SIDES}
    num_blank = 0
    with (
        (folder / 'source_ids').open('wb') as source_file,
        (folder / 'target_ids').open('wb') as target_file,
        # None: no bar where the output is no terminal
        tqdm.tqdm(total=size, desc=f'encoding {split}', unit=' pairs', disable=None if progress else True) as bar,
    ):
        for pairs in _read_chunks(source, split):
            encoded = (
                vocabulary.encode_source([pair.source for pair in pairs]),
                vocabulary.encode_target([pair.target for pair in pairs]),
            )
            for side, file, lines in zip(_SIDES, (source_file, target_file), encoded, strict=True):
                counts = np.fromiter(map(len, lines), np.int64, len(lines))
                ids = np.fromiter(itertools.chain.from_iterable(lines), np.int64)
                _check_encoded(f'{side} side of the {split} split', pairs[0].id, counts, ids, vocabulary)
                lengths[side].append(counts)
                file.write(ids.astype(dtype).tobytes())  # numpy's tofile loses ids on a full disk and says nothing
            num_blank += sum(not (inputs and targets) for inputs, targets in zip(*encoded, strict=True))
            bar.update(len(pairs))
    num_pairs = sum(map(len, lengths['source']))
    if num_pairs != size or not num_pairs:
        raise ValueError(f'the {split} split says it has {size:,} pairs and gave {num_pairs:,}')
    for side in _SIDES:
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths[side]))])
        np.save(folder / f'{side}_offsets.npy', offsets)
    description = {'split': split, 'num_pairs': num_pairs, 'dtype': dtype.name, 'num_blank': num_blank}
    (folder / 'description.json').write_text(json.dumps(description, indent=1) + '\n')


def _read_chunks(source: 'Source', split: str) -> Iterator[list[Pair]]:
    chunk: list[Pair] = []
    for index, pair in enumerate(source.read(split)):
        if pair.id != index:
            raise ValueError(f'pair {index} of the {split} split has the id {pair.id}; ids must be 0, 1, 2, ...')
        chunk.append(pair)
        if len(chunk) == _PAIRS_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _check_encoded(where: str, first: int, counts: np.ndarray, ids: np.ndarray, vocabulary: Vocabulary) -> None:
    """Before ids are narrowed to 16 bits: all inside the vocabulary, and none of the ids that are not text."""
    barred = [i for i in (vocabulary.pad_id, vocabulary.eos_id, vocabulary.bos_id) if i is not None]
    bad = np.flatnonzero((ids < 0) | (ids >= vocabulary.size) | np.isin(ids, barred))
    if len(bad):
        line = first + 1 + int(np.searchsorted(np.cumsum(counts), bad[0], side='right'))
        raise ValueError(
            f'line {line} of the {where} was encoded with the id {ids[bad[0]]}; ids of text are 0 to '
            f'{vocabulary.size - 1} without pad, bos and eos'
        )


def _check_range(where: str, ids: np.ndarray, offsets: np.ndarray, vocabulary: Vocabulary) -> None:
    if np.any(np.diff(offsets) < 0):
        raise ValueError(f'{where}: the prepared offsets are damaged; remove the folder to make them again')
    for start in range(0, len(ids), _CHECKED_AT_ONCE):
        part = ids[start : start + _CHECKED_AT_ONCE]
        bad = np.flatnonzero((part < 0) | (part >= vocabulary.size))
        if len(bad):
            position = start + int(bad[0])
            line = int(np.searchsorted(offsets, position, side='right'))
            raise ValueError(
                f'line {line} of the {where} has the prepared id {ids[position]}, outside the vocabulary of '
                f'{vocabulary.size}'
            )


def _read_description(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / 'description.json').read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f'{folder} holds no prepared ids: {error}; remove it to make them again') from error


def _report_made(folder: Path, report: Callable[[str], None]) -> None:
    description = _read_description(folder)
    counts = [int(np.load(folder / f'{side}_offsets.npy', mmap_mode='r')[-1]) for side in _SIDES]
    blank = f', {description["num_blank"]:,} of them with a blank side' if description['num_blank'] else ''
    report(
        f'prepared {description["split"]}: {description["num_pairs"]:,} pairs{blank}, {counts[0]:,} source and '
        f'{counts[1]:,} target tokens'
    )
