"""The files a run's figures go to: JSON lines and TensorBoard, each given the same records."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from transformer_jax import files

# TensorBoard files are flushed at most this often: on an object store each flush uploads the whole file.
_FLUSH_SECONDS = 30.0

# What TensorBoard shows: the figures of these events, tagged with the event or, of an evaluation, with its split.
_CHARTED = ('train', 'evaluation')


class JsonLines:
    """One JSON object a line, appended, each on disk at once. Non-finite numbers, which JSON lacks, become null.

    Lines of updates beyond `start_step`, which a cut run wrote and this one will write again, are taken out first, so
    that each step stands once. An object store can't append: there the whole file is written again at each flush. Every
    method may raise `OSError`.
    """

    def __init__(self, path: epath.Path, start_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: Any = None
        before = path.read_text() if path.exists() else ''
        self._text = _take_out(before, start_step)
        if not files.is_local(path):
            return
        if self._text != before:
            files.write_whole(path, self._text)
        self._text = ''
        self._file = path.open('a')

    def write(self, record: Mapping[str, Any]) -> None:
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._append(json.dumps(clean, allow_nan=False) + '\n')

    def flush(self) -> None:
        if self._file is None:
            self._path.write_text(self._text)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()

    def _append(self, text: str) -> None:
        if self._file is None:
            self._text += text
        else:
            self._file.write(text)
            self._file.flush()


def read_figures(path: epath.PathLike) -> list[dict[str, Any]]:
    """The records of a file, each step once. Non-finite figures read as None.

    A last line torn by a kill is left out; anywhere else a bad line raises `ValueError` with its number.
    """
    lines = epath.Path(path).read_text().split('\n')
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line) if line else None
        if record is not None:
            records.append(record)
        elif line and number < len(lines):
            raise ValueError(f'{path}, line {number}: not a JSON record')
    return records


def _take_out(text: str, start_step: int) -> str:
    """The text without the lines of updates beyond `start_step`, and without a last line that a kill has torn."""
    kept = []
    for line in text.split('\n')[:-1]:
        record = _parse(line)
        if record is None or record.get('step', 0) <= start_step:  # what is no record is not ours to judge
            kept.append(f'{line}\n')
    return ''.join(kept)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class TensorBoard:
    """The numbers of the same records as TensorBoard scalars.

    Written in the caller's thread: the writer thread of `tensorboardX.SummaryWriter` dies of a full disk, and the next
    call then waits for ever. Every method may raise `OSError`.
    """

    def __init__(self, folder: epath.Path, start_step: int, clock: Callable[[], float]) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

        folder.mkdir(parents=True, exist_ok=True)
        resumes = folder.exists() and any(folder.iterdir())  # an object store has no empty folder
        self._clock, self._next_flush = clock, clock()
        # The process id keeps two starts within one second apart.
        self._events = EventsWriter(os.fspath(folder / 'events'), f'.{os.getpid()}')
        if resumes:  # hides what a cut run wrote beyond the step that this one resumes at
            self._events.write_event(Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, record: Mapping[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.summary import scalar

        if record['event'] not in _CHARTED:
            return
        group = record.get('split', record['event'])
        for name, value in record.items():
            if isinstance(value, int | float) and name != 'step':
                summary = scalar(f'{group}/{name}', value)
                self._events.write_event(Event(wall_time=time.time(), step=record['step'], summary=summary))
        if self._clock() >= self._next_flush:
            self.flush()

    def flush(self) -> None:
        self._next_flush = self._clock() + _FLUSH_SECONDS
        self._events.flush()

    def close(self) -> None:
        self._events.close()
