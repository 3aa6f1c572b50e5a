"""One process's end of the line between the processes of a job."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformer_jax.parallel.hub import GREETING, HostsError, Line, Silence, tick_of

_RETRY_SECONDS = 0.3


class Link:
    """One process's end of the line. Made by `connect`, which returns when all processes have come.

    What others post is kept by topic and rank. `on_lost(rank, why)` and `on_post(topic, rank, value)` are called in a
    thread of the link.
    """

    def __init__(self, line: Line, rank: int, members: list[list[Any]], silence_seconds: float) -> None:
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
            line = Line(_dial(host, port, rank, deadline))
            # The hub's own limit ends the wait for processes that don't come; this one is for what is no hub.
            line.limit_waiting(start_seconds + 5)
            line.send(hello=GREETING, rank=rank, count=count, member=member)
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

    def take(self, topic: str, ranks: Iterable[int]) -> dict[int, Any]:
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
