"""The line between the processes of a job: a hub in process 0 passes every message on to all and says who is lost.

Plain TCP, one JSON object a line. The hub is there before JAX starts, so that a process that never comes can be named,
and needs no device, so that one that hangs inside a collective can be told about.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

GREETING = 'transformer-jax'
_LONGEST_LINE = 1 << 26


class HostsError(RuntimeError):
    """The processes of a job can't work together; the message names the process and what to look at."""


class Silence:
    """Seconds without a sign of life, not counting those in which this process itself was stopped or starved."""

    def __init__(self, tick: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = 2 * tick, clock
        self._last, self._seconds = clock(), 0.0

    def heard(self) -> None:
        """Starts anew."""
        self._seconds = 0.0

    def look(self) -> float:
        """Seconds since the last `heard`; to be called about once a tick."""
        now = self._clock()
        self._seconds += min(now - self._last, self._most)
        self._last = now
        return self._seconds


class Line:
    """A socket as a sequence of JSON objects."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._reader, self._lock = connected, connected.makefile('rb'), threading.Lock()

    def send(self, **message: Any) -> bool:
        """False when the other end is gone."""
        try:
            with self._lock:
                self._socket.sendall(json.dumps(message).encode() + b'\n')
        except OSError:
            return False
        return True

    def limit_waiting(self, seconds: float | None) -> None:
        """The longest that sending or receiving one thing may take."""
        self._socket.settimeout(seconds)

    def receive(self) -> Iterator[dict[str, Any]]:
        """What comes, until the other end closes or sends what is no message."""
        with contextlib.suppress(OSError, ValueError):
            while line := self._reader.readline(_LONGEST_LINE):
                message = json.loads(line)
                if not isinstance(message, dict):
                    return
                yield message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError, ValueError):
            self._reader.close()  # which holds the socket open


class Hub:
    """Passes messages among `count` processes once all have come, and tells the others when one is lost.

    A process is lost if it closes its connection without leaving, or sends nothing for `silence_seconds`. One that has
    not come within `start_seconds` is named to all that have.
    """

    def __init__(self, port: int, count: int, *, start_seconds: float, silence_seconds: float) -> None:
        self._count, self._start_seconds, self._silence_seconds = count, start_seconds, silence_seconds
        self._tick = tick_of(silence_seconds)
        self._listener = _listen(port)
        self.port: int = self._listener.getsockname()[1]
        self._lines: dict[int, Line] = {}
        self._members: dict[int, list[Any]] = {}
        self._silences: dict[int, Silence] = {}
        self._gone: set[int] = set()
        self._started = False
        self._changed = threading.Condition()
        for work in (self._accept, self._watch):
            threading.Thread(target=work, name='hub', daemon=True).start()

    def wait_for_others_to_go(self, seconds: float) -> None:
        """Returns when every process but 0 has left or is lost, at the latest after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._gone | {0} >= set(range(self._count)), seconds)

    def close(self) -> None:
        self._listener.close()
        for line in list(self._lines.values()):
            line.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(Line(connected),), name='hub', daemon=True).start()

    def _serve(self, line: Line) -> None:
        messages = line.receive()
        rank = self._admit(line, next(messages, {}))
        if rank is None:
            line.close()
            return
        for message in messages:
            self._silences[rank].heard()
            if 'post' in message:
                topic, value = message['post']
                self._tell(post=[topic, rank, value])
            elif 'leave' in message:
                break
            else:
                line.send(beat=True)
        else:
            self._lose(rank, 'its connection closed')
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()
        line.close()

    def _admit(self, line: Line, hello: dict[str, Any]) -> int | None:
        if hello.get('hello') != GREETING:
            return None
        rank, count = hello['rank'], hello['count']
        with self._changed:
            if count != self._count:
                text = f'process {rank} was started as one of {count}, but process 0 as one of {self._count}'
                line.send(refused=text)
            elif self._started or (rank in self._lines and rank not in self._gone):
                line.send(busy=True)  # a job that is being replaced may hold the port a little longer
            else:
                self._lines[rank], self._members[rank] = line, hello['member']
                self._silences[rank] = Silence(self._tick)
                self._gone.discard(rank)
                self._started = len(self._members.keys() - self._gone) == self._count
                if self._started:
                    members = [self._members[rank] for rank in range(self._count)]
                    for other in self._lines.values():
                        other.send(welcome=members)
                return rank
        return None

    def _watch(self) -> None:
        waited = Silence(self._tick)
        while True:
            time.sleep(self._tick)
            if not self._started:
                if waited.look() > self._start_seconds:
                    self._refuse_start()
                    self._listener.close()
                    return
                continue
            for rank, silence in list(self._silences.items()):
                if silence.look() > self._silence_seconds and rank not in self._gone:
                    self._lose(rank, f'it has given no sign of life for {self._silence_seconds:g} s')

    def _refuse_start(self) -> None:
        missing = [rank for rank in range(self._count) if rank not in self._members or rank in self._gone]
        self._tell(
            refused=f'{_name_processes(missing)} of {self._count} did not come within {self._start_seconds:g} s '
            '(config.execution.hosts.start_seconds). Were they started, do they have the same coordinator address, '
            'and does no firewall lie between?'
        )

    def _lose(self, rank: int, why: str) -> None:
        with self._changed:
            known = rank in self._gone
            self._gone.add(rank)
            self._changed.notify_all()
        if self._started and not known:
            self._tell(lost=[rank, why])

    def _tell(self, **message: Any) -> None:
        for line in list(self._lines.values()):
            line.send(**message)


def tick_of(silence_seconds: float) -> float:
    """How often signs of life are given and looked for."""
    return min(max(silence_seconds / 20, 0.02), 1.0)


def _name_processes(ranks: list[int]) -> str:
    """Their numbers in words, the first few of many."""
    if len(ranks) == 1:
        return f'process {ranks[0]}'
    shown = ', '.join(map(str, ranks[:8])) + (', ...' if len(ranks) > 8 else '')
    return f'processes {shown}'


def _listen(port: int) -> socket.socket:
    """A listening socket on every address of this host; a process that is just ending may hold the port a moment."""
    dual = socket.has_dualstack_ipv6()
    for attempt in range(20):
        try:
            if dual:
                return socket.create_server(('', port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
            return socket.create_server(('', port), backlog=512)
        except OSError as error:
            if attempt == 19:
                raise HostsError(
                    f'process 0 can not be the coordinator at port {port}: {error.strerror}. Is another job running '
                    'there? Give another port'
                ) from error
            time.sleep(0.5)
    raise AssertionError
