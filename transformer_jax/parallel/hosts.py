"""The processes of one job, on one host or many: who they are, that they agree, and that none is left waiting.

Nothing here is started for a single process. A job of several begins with `join`, before JAX touches a device.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from transformer_jax.config import ConfigError, HostsConfig
from transformer_jax.parallel.cluster import Job
from transformer_jax.parallel.hub import HostsError, Hub
from transformer_jax.parallel.link import Link

_FAILED = 1
_GRACE_SECONDS = 3.0  # in which the others learn why a process ends, and this one whether another is the cause
_SHOWN = 5  # differences that an error lists

Explain = Callable[[BaseException], tuple[str, int]]


def join(job: Job | None, config: HostsConfig, explain: Explain) -> 'Hosts':
    """Meets the other processes and starts `jax.distributed`; a job of one process starts nothing.

    `explain` gives the message and the exit code of an error that ends this process. Raises `HostsError` when not all
    come within `config.start_seconds`.
    """
    if job is None:
        return Hosts()
    limits = {'start_seconds': config.start_seconds, 'silence_seconds': config.silence_seconds}
    host, _, port = job.address.rpartition(':')
    hub = Hub(int(port), job.num_processes, **limits) if job.process_id == 0 else None
    where = ('localhost', hub.port) if hub else (host.strip('[]'), int(port))
    link = Link.connect(*where, job.process_id, job.num_processes, address=job.address, **limits)
    hosts = Hosts(link, hub, explain)
    hosts.start_jax(host, job, config)
    return hosts


class Hosts:
    """The processes of the job as one of them sees them. Without arguments: the only one.

    As a context manager it ends the job for all when its block fails: the others say which process failed, and why.
    """

    def __init__(self, link: Link | None = None, hub: Hub | None = None, explain: Explain | None = None) -> None:
        self.index, self.count = (0, 1) if link is None else (link.rank, link.count)
        self._link, self._hub = link, hub
        self._explain = explain or (lambda error: (str(error), _FAILED))
        self._uses: dict[str, int] = {}
        self._ending = threading.Lock()
        self._stop = _StopAgreement(self.count)
        if link is not None:
            link.on_lost, link.on_post, link.on_tick = self._on_lost, self._on_post, self._on_tick

    @property
    def primary(self) -> bool:
        """Whether this is the process that writes what is not an array."""
        return self.index == 0

    def start_jax(self, host: str, job: Job, config: HostsConfig) -> None:
        """Starts `jax.distributed` on a free port of process 0, behind the limits that hold here."""
        import jax

        # Its handler would take SIGTERM from the one of the training loop.
        jax.config.update('jax_enable_preemption_service', False)
        service_port = self.gather('service port', _free_port() if self.primary else None)[0]
        jax.distributed.initialize(
            f'{host}:{service_port}',
            num_processes=self.count,
            process_id=self.index,
            local_device_ids=job.local_device_ids,
            cluster_detection_method='deactivate',
            initialization_timeout=config.start_seconds,
            # Its own watch ends a process without a word of ours, so it comes second.
            heartbeat_timeout_seconds=2 * config.silence_seconds,
            shutdown_timeout_seconds=config.silence_seconds,
        )

    def gather(self, topic: str, value: Any) -> list[Any]:
        """The values of all processes by their numbers, known to all; every process calls this alike. JSON values."""
        if self._link is None:
            return [value]
        name = self._name(topic)
        self._link.post(name, value)
        posts = self._link.take(name, range(self.count))
        return [posts[rank] for rank in range(self.count)]

    @contextlib.contextmanager
    def primary_first(self, what: str) -> Iterator[None]:
        """The block runs in process 0, then in the others, which find done what that one did."""
        if self._link is None:
            yield
            return
        name = self._name(what)
        if not self.primary:
            self._link.take(name, [0])
        yield
        if self.primary:
            self._link.post(name, True)

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Refuses to go on when a process has other facts than process 0. Raises `ConfigError` in all of them.

        Facts are JSON values by name; mappings among them are compared entry by entry.
        """
        if self._link is None:
            return
        name = self._name('facts')
        flat = {key: repr(value) for key, value in _flatten(facts)}
        if self.primary:
            self._link.post(name, flat)
        expected = self._link.take(name, [0])[0]
        differing = sorted(key for key in {*flat, *expected} if flat.get(key) != expected.get(key))
        found = [f'{key} is {flat.get(key, "missing")}, not {expected.get(key, "missing")}' for key in differing]
        more = [f'and {len(found) - _SHOWN} more'] if len(found) > _SHOWN else []
        rows = self.gather('differences', found[:_SHOWN] + more)
        if not any(rows):
            return
        described = [f'  {self._link.describe(rank)}: {"; ".join(row)}' for rank, row in enumerate(rows) if row]
        raise ConfigError(
            f'the processes of this job differ from {self._link.describe(0)}; start all with the same command, files '
            'and packages:\n' + '\n'.join(described)
        )

    def watch_for_stop(self, asked: Callable[[], int | None]) -> None:
        """From now on a signal that `asked` gives in one process stops all of them, by `stops_here`."""
        self._stop.asked = asked

    def stops_here(self) -> int | None:
        """The signal that ends the job at this point, or None.

        Every process comes to the same points in the same order, however far ahead one of them is; all stop at one
        that none has passed.
        """
        return self._stop.pass_point()

    def end(self, message: str, code: int = _FAILED) -> NoReturn:
        """Ends this process and all others of the job, from any thread, whatever the main thread is waiting for."""
        if self._link is not None:
            self._link.post('end', [code, message])
            self._link.leave()
        self._exit(message, code)

    def __enter__(self) -> 'Hosts':
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._link is None:
            return
        if error is None:
            self._leave()
            return
        message, code = self._explain(error)
        # The loss of another process shows here as an error of the collective that it was needed for.
        if not isinstance(error, HostsError):
            threading.Event().wait(0 if isinstance(error, ConfigError) else _GRACE_SECONDS)
        self.end(message, code)

    def _leave(self) -> None:
        """Goes when all are ready to go, so that nobody waits for one that has gone."""
        assert self._link is not None
        self.gather('leave', None)
        self._link.leave()
        if self._hub is not None:
            self._hub.wait_for_others_to_go(_GRACE_SECONDS)

    def _exit(self, message: str, code: int) -> NoReturn:
        with self._ending:  # never given back: only one thread says why
            print(message, file=sys.stderr, flush=True)
            if self._hub is not None:
                self._hub.wait_for_others_to_go(_GRACE_SECONDS)
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            # Python's own exit would wait for the others in JAX's.
            os._exit(code)

    def _on_lost(self, rank: int, why: str) -> None:
        assert self._link is not None
        self._exit(f'{self._link.describe(rank)} is lost: {why}. This job ends; the same command goes on with it', 1)

    def _on_post(self, topic: str, rank: int, value: Any) -> None:
        assert self._link is not None
        if topic == 'end' and rank != self.index:
            code, message = value
            self._link.leave()
            self._exit(f'{self._link.describe(rank)} has failed, so this one ends too: {message}', code)
        elif topic == 'stop':
            self._link.post('stop at', self._stop.hold())
        elif topic == 'stop at':
            self._stop.propose(rank, *value)

    def _on_tick(self) -> None:
        assert self._link is not None
        if self._stop.asks_first():
            self._link.post('stop', None)

    def _name(self, topic: str) -> str:
        """A name for this use of a topic; the same in every process, since all use it in the same order."""
        self._uses[topic] = self._uses.get(topic, 0) + 1
        return f'{topic} {self._uses[topic]}'


class _StopAgreement:
    """At which point all processes stop: one after the furthest that any has passed when they were asked."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._passed = 0
        self._held = self._said = False
        self._proposals: dict[int, tuple[int, int | None]] = {}
        self.asked: Callable[[], int | None] = lambda: None

    def pass_point(self) -> int | None:
        if self._count == 1:
            return self.asked()
        with self._changed:
            # Held only while the watching threads of all processes exchange how far each is.
            self._changed.wait_for(lambda: not self._held)
            self._passed += 1
            if not self._agreed or self._passed <= max(passed for passed, _ in self._proposals.values()):
                return None
            return next(number for _, (_, number) in sorted(self._proposals.items()) if number is not None)

    def asks_first(self) -> bool:
        """Whether this process has been asked to stop since the last look, and nobody has before."""
        with self._changed:
            if self._said or self.asked() is None:
                return False
            self._said = True
            return True

    def hold(self) -> tuple[int, int | None]:
        """Lets no further point be passed; returns how many were, and the signal that came here."""
        with self._changed:
            self._held, self._said = not self._agreed, True
            return self._passed, self.asked()

    def propose(self, rank: int, passed: int, number: int | None) -> None:
        with self._changed:
            self._proposals.setdefault(rank, (passed, number))
            if self._agreed:
                self._held = False
                self._changed.notify_all()

    @property
    def _agreed(self) -> bool:
        return len(self._proposals) == self._count


def _flatten(facts: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f'{prefix}{key}.')
        else:
            yield f'{prefix}{key}', value


def _free_port() -> int:
    import socket

    with socket.create_server(('', 0)) as probe:
        return probe.getsockname()[1]
