"""Parallel text from files: one sentence a line, two files or one TSV a split, plain or gzip.

A line ends at LF and nowhere else. A CR before the LF is taken off, any other CR becomes a space, a byte order mark at
the start of a file is taken off; all are counted and reported. Every other character stays as it is.
"""

import dataclasses
import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from etils import epath

from transformer_jax.config import ConfigError, TextFilesConfig
from transformer_jax.data.batch import Pair

SPLITS = ('train', 'validation', 'test')
_GZIP_START = b'\x1f\x8b'
_BYTE_ORDER_MARK = b'\xef\xbb\xbf'


class FileScan(NamedTuple):
    """What one pass over a file found. `digest` is of its content, unpacked."""

    num_lines: int
    digest: str
    num_crlf: int
    num_lone_cr: int
    num_blank: int
    has_byte_order_mark: bool


class TextFilesSource:
    """The pairs of the files that `config` names; pair i is line i (from 0) of both sides.

    A split's files are scanned once, when first asked for: unequal line counts, text that is no UTF-8, files that are
    missing, unreadable, damaged or empty raise `ValueError` with the file's name.
    """

    def __init__(self, config: TextFilesConfig, *, report: Callable[[str], None] = print):
        self._files = check_files_named(config)
        self._report = report
        self._scans: dict[str, tuple[FileScan, ...]] = {}

    def splits(self) -> tuple[str, ...]:
        return tuple(self._files)

    def size(self, split: str) -> int:
        return self._scan(split)[0].num_lines

    def read(self, split: str) -> Iterator[Pair]:
        self._scan(split)  # all errors come before the first pair
        paths = self._files[split]
        if len(paths) == 1:
            for index, line in enumerate(read_lines(paths[0])):
                source, target = _split_columns(paths[0], index, line)
                yield Pair(index, source, target)
            return
        for index, (source, target) in enumerate(zip(*map(read_lines, paths), strict=True)):
            yield Pair(index, source, target)

    def fingerprint(self, split: str) -> str:
        return hashlib.sha256(' '.join(scan.digest for scan in self._scan(split)).encode()).hexdigest()

    def contents(self, split: str) -> dict[str, str]:
        """Digests of the files' content, unpacked, by the paths that the config names."""
        scans = self._scan(split)
        return {path: scan.digest for path, scan in zip(self._files[split], scans, strict=True)}

    def _scan(self, split: str) -> tuple[FileScan, ...]:
        if split not in self._files:
            raise ValueError(f'there are no files for the split {split!r}; there are {", ".join(self._files)}')
        if split not in self._scans:
            paths = self._files[split]
            scans = tuple(scan_file(path, tab_separated=len(paths) == 1) for path in paths)
            if len({scan.num_lines for scan in scans}) > 1:
                counts = ' but '.join(f'{p} has {s.num_lines:,} lines' for p, s in zip(paths, scans, strict=True))
                raise ValueError(f'{counts}: line n of both must belong together, so the counts must be equal')
            for path, scan in zip(paths, scans, strict=True):
                for note in _describe_changes(scan):
                    self._report(f'{path}: {note}')
            self._scans[split] = scans
        return self._scans[split]


def check_files_named(config: TextFilesConfig) -> dict[str, tuple[str, ...]]:
    """The files of each split, two of text or one TSV. Raises `ConfigError` when they don't make a split."""
    files: dict[str, tuple[str, ...]] = {}
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for split in SPLITS:
        source, target, tsv = (values[f'{split}_{part}'] for part in ('source', 'target', 'tsv'))
        prefix = f'config.data.text_files.{split}'
        if tsv is not None and (source is not None or target is not None):
            raise ConfigError(f'{prefix}_tsv is {tsv!r}, so {prefix}_source and {prefix}_target must be None')
        if (source is None) != (target is None):
            missing, given = ('source', 'target') if source is None else ('target', 'source')
            raise ConfigError(f'{prefix}_{given} is given, but {prefix}_{missing} is None; both are needed')
        if tsv is not None:
            files[split] = (tsv,)
        elif source is not None and target is not None:
            files[split] = (source, target)
    if not files:
        raise ConfigError(
            'config.data.text_files names no file; give train_source and train_target, or train_tsv, '
            'and the same for validation and test'
        )
    return files


def read_lines(path: str) -> Iterator[str]:
    """The lines of a UTF-8 text file, plain or gzip, as the module says. Raises `ValueError` naming file and line."""
    for index, line in enumerate(_read_raw_lines(path)):
        yield _clean(_decode(path, index, line))


def scan_file(path: str, *, tab_separated: bool = False) -> FileScan:
    """Reads a file once: counts, digest, and every error that reading it later could meet."""
    digest = hashlib.sha256()
    num_lines = num_crlf = num_lone_cr = num_blank = 0
    has_mark = False
    for index, raw in enumerate(_read_raw_lines(path, keep_mark=True)):
        digest.update(raw)
        if index == 0 and raw.startswith(_BYTE_ORDER_MARK):
            has_mark = True
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        crlf = raw.endswith((b'\r\n', b'\r'))
        num_crlf += crlf
        num_lone_cr += raw.count(b'\r') - crlf
        num_lines += 1
        text = _clean(_decode(path, index, raw))
        num_blank += not text.strip()
        if tab_separated:
            _split_columns(path, index, text)
    if num_blank == num_lines:
        raise ValueError(f'{path} is empty: it has {num_lines:,} lines and no text')
    return FileScan(num_lines, digest.hexdigest(), num_crlf, num_lone_cr, num_blank, has_mark)


def _read_raw_lines(path: str, *, keep_mark: bool = False) -> Iterator[bytes]:
    try:
        with epath.Path(path).open('rb') as file:
            start = file.read(2)
            file.seek(0)
            lines: Iterable[bytes] = (
                gzip.GzipFile(fileobj=file) if start == _GZIP_START or path.endswith('.gz') else file
            )
            for index, line in enumerate(lines):  # binary files end a line at LF alone
                yield line.removeprefix(_BYTE_ORDER_MARK) if index == 0 and not keep_mark else line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, 'strerror', None) or error
        raise ValueError(f'{path} can not be read: {reason}') from error


def _decode(path: str, index: int, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f'{path} line {index + 1}: not UTF-8 at byte {error.start} of the line') from error


def _clean(line: str) -> str:
    return line.removesuffix('\n').removesuffix('\r').replace('\r', ' ')


def _split_columns(path: str, index: int, line: str) -> tuple[str, str]:
    columns = line.split('\t')
    if len(columns) != 2:
        raise ValueError(f'{path} line {index + 1}: {len(columns)} columns; a line must be source, one tab and target')
    return columns[0], columns[1]


def _describe_changes(scan: FileScan) -> Iterator[str]:
    if scan.has_byte_order_mark:
        yield 'byte order mark at the start taken off'
    if scan.num_crlf:
        yield f'{scan.num_crlf:,} lines end in CR LF; the CR was taken off'
    if scan.num_lone_cr:
        yield f'{scan.num_lone_cr:,} CRs inside lines became spaces'
    if scan.num_blank:
        yield f'{scan.num_blank:,} of {scan.num_lines:,} lines are blank; they are kept'
