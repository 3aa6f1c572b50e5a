"""The line between processes, its ends in threads of this one."""

import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from transformer_jax.parallel.hub import HostsError, Hub, Silence
from transformer_jax.parallel.link import Link


def connect_all(count: int, *, silence: float = 20.0) -> tuple[Hub, list[Link]]:
    hub = Hub(0, count, start_seconds=20, silence_seconds=silence)

    def connect(rank: int) -> Link:
        return Link.connect('127.0.0.1', hub.port, rank, count, start_seconds=20, silence_seconds=silence)

    with ThreadPoolExecutor(count) as pool:
        return hub, list(pool.map(connect, range(count)))


def wait_until(holds: Callable[[], Any], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, 'it did not come to pass'
        time.sleep(0.01)


def test_what_one_posts_all_take_by_topic_and_rank() -> None:
    hub, links = connect_all(3)
    for link in links:
        link.post('numbers', {'mine': 10 * link.rank})
    links[2].post('other', 'late')
    for link in links:
        assert link.take('numbers', range(3)) == {rank: {'mine': 10 * rank} for rank in range(3)}
        assert link.take('other', [2]) == {2: 'late'}
    assert socket.gethostname() in links[1].describe(2)
    for link in links:
        link.leave()
    hub.wait_for_others_to_go(10)
    hub.close()


def test_who_closes_without_leaving_is_lost_to_all_others_at_once() -> None:
    hub, links = connect_all(3)
    seen: list[tuple[int, int, str]] = []
    for link in links:
        link.on_lost = lambda rank, why, me=link.rank: seen.append((me, rank, why))
    links[1].leave()  # in order: nobody minds
    links[2]._line.close()
    waits: list[HostsError] = []

    def wait() -> None:
        try:
            links[0].take('never', [2])
        except HostsError as error:
            waits.append(error)

    threading.Thread(target=wait, daemon=True).start()
    wait_until(lambda: waits and (0, 2, 'its connection closed') in seen)
    assert re.fullmatch(r'process 2 \(host .*, pid .*\) is lost: its connection closed', str(waits[0]))
    assert not [one for one in seen if one[1] == 1]
    hub.close()


def test_a_silent_process_is_lost_and_one_that_beats_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, links = connect_all(3, silence=0.5)
    lost: list[tuple[int, str]] = []
    links[0].on_lost = lambda rank, why: lost.append((rank, why))
    time.sleep(1.2)
    assert lost == []
    send = type(links[1]._line).send
    monkeypatch.setattr(
        type(links[1]._line), 'send', lambda self, **message: self is links[1]._line or send(self, **message)
    )
    wait_until(lambda: lost)
    assert lost == [(1, 'it has given no sign of life for 0.5 s')]
    hub.close()


def test_a_silent_coordinator_is_lost_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, links = connect_all(2, silence=0.5)
    lost: list[int] = []
    links[1].on_lost = lambda rank, why: lost.append(rank)
    for line in hub._lines.values():
        monkeypatch.setattr(line, 'send', lambda **message: True)
    wait_until(lambda: lost)
    assert lost == [0]
    hub.close()


def test_seconds_in_which_this_process_was_stopped_do_not_count() -> None:
    now = [0.0]
    silence = Silence(1.0, lambda: now[0])
    for now[0] in (1.0, 2.0, 3600.0, 3601.0):
        seconds = silence.look()
    assert seconds == 5.0
    silence.heard()
    now[0] = 3602.5
    assert silence.look() == 1.5


def test_who_does_not_come_is_named_to_those_that_have_come() -> None:
    hub = Hub(0, 4, start_seconds=0.7, silence_seconds=5)
    with ThreadPoolExecutor(2) as pool:
        joining = [
            pool.submit(Link.connect, '127.0.0.1', hub.port, rank, 4, start_seconds=5, silence_seconds=5)
            for rank in (0, 2)
        ]
        for one in joining:
            with pytest.raises(HostsError, match=r'processes 1, 3 of 4 did not come within 0.7 s'):
                one.result()
    hub.close()


def test_a_coordinator_that_is_not_there_is_named_with_what_to_look_at() -> None:
    with socket.socket() as unused:
        unused.bind(('127.0.0.1', 0))
        port = unused.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(HostsError, match=rf'process 3 gets no answer .*127.0.0.1:{port}: Connection refused.*port'):
            Link.connect('127.0.0.1', port, 3, 4, start_seconds=1, silence_seconds=5)
        assert time.monotonic() - start < 5


def test_another_program_at_the_address_is_no_coordinator() -> None:
    def answer(server: socket.socket) -> None:
        with server.accept()[0] as connected:
            connected.sendall(b'SSH-2.0-server\r\n')

    with socket.create_server(('127.0.0.1', 0)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        with pytest.raises(HostsError, match='what answers there is no process 0'):
            Link.connect('127.0.0.1', server.getsockname()[1], 1, 2, start_seconds=2, silence_seconds=5)


def test_processes_must_agree_on_how_many_they_are() -> None:
    hub = Hub(0, 3, start_seconds=5, silence_seconds=5)
    with pytest.raises(HostsError, match='process 1 was started as one of 2, but process 0 as one of 3'):
        Link.connect('127.0.0.1', hub.port, 1, 2, start_seconds=2, silence_seconds=5)
    hub.close()


def test_a_second_process_of_the_same_number_is_refused() -> None:
    hub, links = connect_all(2)
    with pytest.raises(HostsError, match='another process 1 of that job is there already'):
        Link.connect('127.0.0.1', hub.port, 1, 2, start_seconds=0.5, silence_seconds=5)
    assert links[0].count == 2
    hub.close()


def test_a_port_in_use_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, 'sleep', lambda seconds: None)
    with socket.create_server(('', 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(HostsError, match=f'coordinator at port {port}: Address already in use'):
            Hub(port, 2, start_seconds=1, silence_seconds=1)
