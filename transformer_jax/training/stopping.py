"""Signals that ask a run to stop: the first one saves and ends the run, a second one ends it at once."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """Raised inside a stretch that may be left at any point; not an `Exception`, so that nothing swallows it."""


class StopRequest:
    """Notes the first SIGTERM or SIGINT while used as a context manager, on the main thread."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._may_interrupt = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> 'StopRequest':
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def requested(self) -> bool:
        """Whether the run should save and end."""
        return self.signal is not None

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A stretch that changes nothing and may be long: a request ends it by raising `Stopped`."""
        self._may_interrupt = True
        try:
            if self.requested:
                raise Stopped
            yield
        finally:
            self._may_interrupt = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested:
            os._exit(128 + number)
        self.signal = number
        if self._may_interrupt:
            raise Stopped
