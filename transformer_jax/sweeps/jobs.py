"""Child processes, a few at once: each job is commands one after another, and one that fails stops only its own job."""

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

_POLL_SECONDS = 0.1
_LAST_BYTES = 4096


@dataclass(frozen=True)
class Job:
    """The commands of one training, by what each does, and where their output goes."""

    name: str
    stages: Sequence[tuple[str, Sequence[str]]]
    log: epath.Path  # appended


@dataclass(frozen=True)
class Failure:
    """The command that a job failed at."""

    stage: str
    code: int  # negative: the signal that killed it

    def describe(self, log: epath.Path) -> str:
        """In one line, with the last words of the log."""
        how = f'killed by {signal.Signals(-self.code).name}' if self.code < 0 else f'exit code {self.code}'
        words = last_line(log)
        return f'{self.stage}: {how}' + (f': {words}' if words else '')


class Stop:
    """Notes SIGINT and SIGTERM while used as a context manager, on the main thread."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> 'Stop':
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, lambda number, frame: self.signals.append(number))
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def run_jobs(
    jobs: Iterator[Job],
    *,
    at_once: int,
    stop: Stop,
    on_end: Callable[[Job, Failure | None], None],
    on_wait: Callable[[], None] = lambda: None,
) -> list[Job]:
    """Runs the jobs and returns those that a signal stopped; no further one is then begun.

    The first signal is passed on as SIGTERM, upon which a training saves; a second one kills. `jobs` is asked for the
    next one only when there is room for it. `on_end` hears of each job that ended by itself, `on_wait` some times a
    second.
    """
    running: list[_Running] = []
    stopped: list[Job] = []
    passed_on = 0
    try:
        while True:
            while len(running) < at_once and not stop.signals:
                job = next(jobs, None)
                if job is None:
                    break
                running.append(_Running(job))
            if not running:
                return stopped
            time.sleep(_POLL_SECONDS)
            on_wait()
            if len(stop.signals) > passed_on:
                for one in running:
                    one.end(kill=passed_on > 0)
                passed_on = len(stop.signals)
            for one in list(running):
                if not one.is_done(go_on=not stop.signals):
                    continue
                running.remove(one)
                if stop.signals and one.failure is not None:
                    stopped.append(one.job)
                else:
                    on_end(one.job, one.failure)
    finally:
        for one in running:  # an error of our own leaves no child behind
            one.end(kill=True)


def last_line(log: epath.Path) -> str:
    """The last line of a log that says something; '' if there is none."""
    if not log.exists():
        return ''
    with log.open('rb') as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        text = file.read().decode('utf-8', 'replace')
    lines = [line.strip() for line in text.replace('\r', '\n').split('\n')]
    return next((line for line in reversed(lines) if line and not line.startswith('$ ')), '')


class _Running:
    """A job under way."""

    def __init__(self, job: Job) -> None:
        self.job, self.failure = job, None
        self._stages = iter(job.stages)
        self._process: subprocess.Popen | None = None
        self._stage = ''
        job.log.parent.mkdir(parents=True, exist_ok=True)
        self._begin_next()

    def is_done(self, *, go_on: bool) -> bool:
        """Looks after the process, and begins the next one if there is one and the job should `go_on`."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return False
            if code:
                self.failure = Failure(self._stage, code)
                return True
        if not go_on:
            following = next(self._stages, None)
            if following is not None:  # what has been done of the job is kept, but the job is not
                self.failure = Failure(following[0], -signal.SIGTERM)
            return True
        return not self._begin_next()

    def end(self, *, kill: bool) -> None:
        """Asks the process to end, or makes it."""
        if self._process is None or self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if kill:
                os.killpg(self._process.pid, signal.SIGKILL)  # and whatever it has begun
                self._process.wait()
            else:
                self._process.terminate()

    def _begin_next(self) -> bool:
        self._stage, command = next(self._stages, ('', None))
        if command is None:
            return False
        with self.job.log.open('ab') as log:
            log.write(f'$ {shlex.join(command)}\n'.encode())
            log.flush()
            # A session of its own: a terminal's Ctrl-C comes to it once, through us.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        return True
