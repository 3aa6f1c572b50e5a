"""Several processes agree, in threads of this one: no JAX, which comes after all have met."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.parallel.test_hub import connect_all
from transformer_jax.config import ConfigError
from transformer_jax.parallel.hosts import Hosts, _StopAgreement
from transformer_jax.parallel.hub import HostsError

Ended = list[tuple[int, str, int]]


class ExitError(BaseException):
    """What ending the process would be."""


class Threads(Hosts):
    """A process that is a thread: it ends by an exception."""

    def __init__(self, *arguments: Any, ended: Ended) -> None:
        super().__init__(*arguments)
        self._ended = ended

    def _exit(self, message: str, code: int) -> Any:
        self._ended.append((self.index, message, code))
        link = self._link
        assert link is not None
        with link._changed:  # a process that has ended waits no longer
            link._lost = message
            link._changed.notify_all()
        if threading.current_thread().name != 'link':
            raise ExitError


@pytest.fixture
def job() -> Iterator[Callable[[int], tuple[list[Hosts], Ended]]]:
    opened: list[tuple[Any, list[Any]]] = []

    def make(count: int) -> tuple[list[Hosts], Ended]:
        ended: Ended = []
        hub, links = connect_all(count)
        opened.append((hub, links))
        return [Threads(link, hub if link.rank == 0 else None, ended=ended) for link in links], ended

    yield make
    for hub, links in opened:
        for link in links:
            link.leave()
        hub.close()


def together(hosts: list[Hosts], do: Callable[[Hosts], Any]) -> list[Any]:
    """What each process returns or raises."""

    def one(host: Hosts) -> Any:
        try:
            return do(host)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(one, hosts))


def test_one_process_waits_for_nobody() -> None:
    with Hosts() as hosts:
        assert (hosts.index, hosts.count, hosts.primary) == (0, 1, True)
        assert hosts.gather('x', 3) == [3]
        with hosts.primary_first('x'):
            pass
        hosts.compare({'x': 1})
        assert hosts.stops_here() is None
        hosts.watch_for_stop(lambda: 15)
        assert hosts.stops_here() == 15


def test_values_are_gathered_again_and_again(job: Any) -> None:
    hosts, _ = job(3)
    for turn in range(5):
        found = together(hosts, lambda host, turn=turn: host.gather('values', [turn, host.index]))
        assert found == [[[turn, 0], [turn, 1], [turn, 2]]] * 3


def test_the_primary_goes_first_and_the_others_find_its_work(job: Any) -> None:
    hosts, _ = job(3)
    order: list[int] = []

    def work(host: Hosts) -> None:
        with host.primary_first('work'):
            if host.primary:
                time.sleep(0.2)
            order.append(host.index)

    together(hosts, work)
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]


def test_processes_that_agree_go_on_and_others_are_told_who_differs_in_what(job: Any) -> None:
    hosts, _ = job(3)
    assert together(hosts, lambda host: host.compare({'config': {'seed': 3}, 'texts': {'a': 'ff'}})) == [None] * 3

    def differ(host: Hosts) -> None:
        config: dict[str, Any] = {'seed': 3, 'train': {'steps': 100 + (host.index == 2)}}
        host.compare({'config': config, 'version': {'jax': '0.12' if host.index else '0.10'}})

    for error in together(hosts, differ):
        assert isinstance(error, ConfigError)
        rows = str(error).splitlines()
        assert len(rows) == 3
        assert 'process 1' in rows[1]
        assert "version.jax is '0.12', not '0.10'" in rows[1]
        assert 'seed' not in str(error)
        assert 'process 2' in rows[2]
        assert 'config.train.steps is 101, not 100' in rows[2]


def test_a_missing_fact_and_many_differences_are_listed_shortly(job: Any) -> None:
    hosts, _ = job(2)
    facts = {f'f{number}': number for number in range(9)}
    errors = together(
        hosts,
        lambda host: host.compare({k: v + host.index for k, v in facts.items()} | {'x': 1} if host.index else facts),
    )
    assert all(isinstance(error, ConfigError) for error in errors)
    assert str(errors[0]).endswith('and 5 more')
    errors = together(hosts, lambda host: host.compare({'x': 1} if host.primary else {}))
    assert 'x is missing, not 1' in str(errors[1])


@pytest.mark.parametrize('asked', [0, 1, 2])
def test_all_stop_at_one_point_that_none_has_passed(job: Any, asked: int) -> None:
    hosts, _ = job(3)
    signals: dict[int, int] = {}
    barrier = threading.Barrier(3)
    for host in hosts:
        host.watch_for_stop(lambda host=host: signals.get(host.index))

    def run(host: Hosts) -> tuple[int, int | None]:
        for point in range(1, 100_000):
            if (number := host.stops_here()) is not None:
                return point, number
            if point % 2 == 0:  # as a collective does: nobody is more than a step ahead
                barrier.wait(20)
            if point == 20 and host.index == asked:
                signals[asked] = 15
            time.sleep(0.002 * host.index)
        raise AssertionError('nobody stopped')

    ends = together(hosts, run)
    assert len(set(ends)) == 1, ends
    assert ends[0][0] > 20
    assert ends[0][1] == 15
    assert [host.stops_here() for host in hosts] == [15] * 3


def test_no_point_is_passed_while_all_say_how_far_they_are() -> None:
    agreement, passed = _StopAgreement(2), []
    assert [agreement.pass_point() for _ in range(3)] == [None] * 3
    assert agreement.hold() == (3, None)
    going_on = threading.Thread(target=lambda: passed.append(agreement.pass_point()), daemon=True)
    going_on.start()
    agreement.propose(0, 3, None)
    going_on.join(0.2)
    assert passed == []
    agreement.propose(1, 5, 15)  # the other one is ahead
    going_on.join(10)
    assert passed == [None]
    assert [agreement.pass_point() for _ in range(3)] == [None, 15, 15]


def test_two_are_asked_at_once_by_different_signals(job: Any) -> None:
    hosts, _ = job(3)
    for host in hosts[1:]:
        host.watch_for_stop(lambda host=host: 2 if host.index == 1 else 15)

    def run(host: Hosts) -> tuple[int, int | None]:
        for point in range(100_000):
            if (number := host.stops_here()) is not None:
                return point, number
            time.sleep(0.001)
        raise AssertionError

    ends = together(hosts, run)
    assert len(set(ends)) == 1, ends


def test_a_failure_ends_the_others_with_who_and_why(job: Any) -> None:
    hosts, ended = job(3)

    def run(host: Hosts) -> None:
        with host:
            if host.primary:
                raise ConfigError('the file x.en is missing')
            with host.primary_first('never'):
                raise AssertionError('the primary never was')

    errors = together(hosts, run)
    assert isinstance(errors[0], ExitError)
    deadline = time.monotonic() + 10
    while len(ended) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    by_rank = {rank: message for rank, message, _ in ended}
    assert by_rank[0] == 'the file x.en is missing'
    for rank in (1, 2):
        assert 'process 0 (host' in by_rank[rank]
        assert by_rank[rank].endswith('has failed, so this one ends too: the file x.en is missing')


def test_a_lost_process_ends_the_others_whatever_they_wait_for(job: Any) -> None:
    hosts, ended = job(3)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(host.gather, 'never', None) for host in hosts[:2]]
        hosts[2]._link._line.close()
        for one in waiting:
            assert isinstance(one.exception(10), (HostsError, ExitError))
    deadline = time.monotonic() + 10
    while len(ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {rank for rank, *_ in ended} >= {0, 1}
    for rank, message, code in ended:
        if rank < 2:
            assert message.startswith('process 2 (host ')
            assert code == 1


def test_all_leave_together(job: Any) -> None:
    hosts, ended = job(3)
    left: list[int] = []

    def run(host: Hosts) -> None:
        with host:
            time.sleep(0.1 * host.index)
            left.append(host.index)

    assert together(hosts, run) == [None] * 3
    assert sorted(left) == [0, 1, 2]
    assert ended == []
