"""The line between the processes of a job: a hub in process 0 passes every message on to all and says who is lost.

Plain TCP, one JSON object a line. The hub is there before JAX starts, so that a process that never comes can be named,
and needs no device, so that one that hangs inside a collective can be told about.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_GREETING = 'transformer-jax'
_LONGEST_LINE = 1 << 26
_RETRY_SECONDS = 0.3


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


class _Line:
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

    Lost is who closes its connection without leaving, or sends nothing for `silence_seconds`. Who has not come within
    `start_seconds` is named to all that have.
    """

    def __init__(self, port: int, count: int, *, start_seconds: float, silence_seconds: float) -> None:
        self._count, self._start_seconds, self._silence_seconds = count, start_seconds, silence_seconds
        self._tick = tick_of(silence_seconds)
        self._listener = _listen(port)
        self.port: int = self._listener.getsockname()[1]
        self._lines: dict[int, _Line] = {}
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
                threading.Thread(target=self._serve, args=(_Line(connected),), name='hub', daemon=True).start()

    def _serve(self, line: _Line) -> None:
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

    def _admit(self, line: _Line, hello: dict[str, Any]) -> int | None:
        if hello.get('hello') != _GREETING:
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
            refused=f'{name_processes(missing)} of {self._count} did not come within {self._start_seconds:g} s '
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


class Link:
    """One process's end of the line. Made by `connect`, which returns when all processes have come.

    What others post is kept by topic and rank. `on_lost(rank, why)` and `on_post(topic, rank, value)` are called in a
    thread of the link.
    """

    def __init__(self, line: _Line, rank: int, members: list[list[Any]], silence_seconds: float) -> None:
        self.rank, self.count = rank, len(members)
        self._line, self._members, self._silence_seconds = line, members, silence_seconds
        self._posts: dict[str, dict[int, Any]] = {}
        self._changed = threading.Condition()
        self._lost: str | None = None
        self._left = False
        self._silence = Silence(tick_of(silence_seconds))
        self.on_lost: Callable[[int, str], None] = lambda rank, why: None
        self.on_post: Callable[[str, int, Any], None] = lambda topic, rank, value: None
        self.on_tick: Callable[[], None] = lambda: None

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        rank: int,
        count: int,
        *,
        start_seconds: float,
        silence_seconds: float,
        address: str | None = None,
    ) -> 'Link':
        """Joins the job whose hub is at this place, `address` to people. Raises `HostsError` when not all come."""
        address, deadline = address or f'{host}:{port}', time.monotonic() + start_seconds
        member = [socket.gethostname(), os.getpid()]
        while True:
            line = _Line(_dial(host, port, rank, deadline))
            # The hub's own limit ends the wait for processes that don't come; this one is for what is no hub.
            line.limit_waiting(start_seconds + 5)
            line.send(hello=_GREETING, rank=rank, count=count, member=member)
            messages = line.receive()
            answer = next(messages, {})
            if 'busy' in answer and time.monotonic() < deadline:
                line.close()
                time.sleep(_RETRY_SECONDS)
                continue
            if 'welcome' in answer:
                line.limit_waiting(None)
                link = cls(line, rank, answer['welcome'], silence_seconds)
                threading.Thread(target=link._read, args=(messages,), name='link', daemon=True).start()
                threading.Thread(target=link._beat, name='link', daemon=True).start()
                return link
            line.close()
            if 'busy' in answer:
                reason = f'another process {rank} of that job is there already'
            else:
                reason = answer.get('refused', 'what answers there is no process 0 of this program')
            raise HostsError(f'process {rank} could not start with the coordinator at {address}: {reason}')

    def describe(self, rank: int) -> str:
        """A process by its number, host and process id."""
        host, pid = self._members[rank]
        return f'process {rank} (host {host}, pid {pid})'

    def post(self, topic: str, value: Any) -> None:
        """Tells every process, this one too."""
        self._line.send(post=[topic, value])

    def take(self, topic: str, ranks: Iterator[int] | list[int] | range) -> dict[int, Any]:
        """What these ranks post on a topic; waits, then forgets it. Raises `HostsError` when a process is lost."""
        wanted = set(ranks)
        with self._changed:
            self._changed.wait_for(lambda: self._lost or wanted <= self._posts.get(topic, {}).keys())
            if self._lost:
                raise HostsError(self._lost)
            return self._posts.pop(topic)

    def leave(self) -> None:
        """Says that this process goes; whoever goes without is lost."""
        self._left = True
        self._line.send(leave=True)
        self._line.close()

    def _read(self, messages: Iterator[dict[str, Any]]) -> None:
        for message in messages:
            self._silence.heard()
            if 'post' in message:
                topic, rank, value = message['post']
                with self._changed:
                    self._posts.setdefault(topic, {})[rank] = value
                    self._changed.notify_all()
                self.on_post(topic, rank, value)
            elif 'lost' in message:
                self._lose(*message['lost'])
        self._lose(0, 'its connection closed')
        self._line.close()

    def _beat(self) -> None:
        tick = tick_of(self._silence_seconds)
        while not self._left:
            self._line.send(beat=True)
            self.on_tick()
            time.sleep(tick)
            if self._silence.look() > self._silence_seconds:
                self._lose(0, f'it has given no sign of life for {self._silence_seconds:g} s')

    def _lose(self, rank: int, why: str) -> None:
        with self._changed:
            if self._left or self._lost:
                return
            self._lost = f'{self.describe(rank)} is lost: {why}'
            self._changed.notify_all()
        self.on_lost(rank, why)


def tick_of(silence_seconds: float) -> float:
    """How often signs of life are given and looked for."""
    return min(max(silence_seconds / 20, 0.02), 1.0)


def name_processes(ranks: list[int]) -> str:
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


def _dial(host: str, port: int, rank: int, deadline: float) -> socket.socket:
    """A connection to the hub, which may come up later than this process."""
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.1))
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise HostsError(
                    f'process {rank} gets no answer from the coordinator at {host}:{port}: {_explain(error)}. Does '
                    'process 0 run there, is the address the same for all, and is the port open?'
                ) from error
            time.sleep(_RETRY_SECONDS)


def _explain(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return 'no such host'
    if isinstance(error, TimeoutError):
        return 'it does not answer'
    return error.strerror or str(error)
