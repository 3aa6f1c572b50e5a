"""What ends a run early: signals, of which the first saves and the second does not, and an update that hangs."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from transformer_jax.parallel.hosts import Hosts
from transformer_jax.parallel.hub import Silence
from transformer_jax.training.reporting import Stopwatch

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """Raised inside a stretch that may be left at any point; not an `Exception`, so that nothing swallows it."""


class StopRequest:
    """Notes the first SIGTERM or SIGINT while used as a context manager, on the main thread.

    Of several processes each may be told alone; `due` stops all of them at the same point.
    """

    def __init__(self, hosts: Hosts | None = None) -> None:
        self.signal: int | None = None  # the one that the run stops for
        self._hosts = hosts or Hosts()
        self._noted: int | None = None
        self._may_interrupt = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> 'StopRequest':
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        self._hosts.watch_for_stop(lambda: self._noted)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def requested(self) -> bool:
        """Whether the run should save and end."""
        return self.signal is not None

    def due(self) -> bool:
        """Whether to stop at this point of the run, to which every process comes alike."""
        if self.signal is None:
            self.signal = self._hosts.stops_here()
        return self.requested

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A stretch that changes nothing and may be long: a request ends it by raising `Stopped`.

        Several processes must leave it at the same point, and do so by `pause`.
        """
        self._may_interrupt = self._hosts.count == 1
        try:
            if self.requested:
                raise Stopped
            yield
        finally:
            self._may_interrupt = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._noted is not None:
            os._exit(128 + number)
        self._noted = number
        if self._hosts.count == 1:
            self.signal = number
        if self._may_interrupt:
            raise Stopped


def pause(hosts: Hosts) -> None:
    """Raises `Stopped` when the run stops at this point of a long stretch, to which every process comes alike."""
    if hosts.count > 1 and hosts.stops_here() is not None:
        raise Stopped


class StallWatch:
    """Ends the job when one update, or its data, takes longer than `limit` seconds; None = no limit.

    A process that computes for ever, or waits for a file or for another process that does, gives signs of life all the
    while. Prints what every thread is at. Compiling, evaluating and saving have no limit here.
    """

    def __init__(self, stopwatch: Stopwatch, limit: float | None, hosts: Hosts, *, tick: float = 1.0) -> None:
        self._stopwatch, self._limit, self._hosts, self._tick = stopwatch, limit, hosts, tick
        self._done = threading.Event()

    def __enter__(self) -> 'StallWatch':
        if self._limit is not None:
            threading.Thread(target=self._watch, args=(self._limit,), name='stall watch', daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()

    def _watch(self, limit: float) -> None:
        silence, before = Silence(self._tick), None
        while not self._done.wait(self._tick):
            seconds, now = silence.look(), self._stopwatch.now_at()
            if now != before or now[0] not in _LIMITED:
                silence.heard()
            elif seconds > limit:
                faulthandler.dump_traceback(all_threads=True, file=sys.__stderr__ or sys.stderr)
                self._hosts.end(
                    f'{_LIMITED[now[0]]} for more than {limit:g} s (config.execution.hosts.stall_seconds) in process '
                    f'{self._hosts.index}; above is what each of its threads is at. The same command goes on from the '
                    'last checkpoint'
                )
            before = now


_LIMITED = {'step': 'one update has been running', 'data': 'the data of one update have been awaited'}
