"""Signals: the first is noted, and cuts only what says that it may be cut; the second ends the process."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest

from transformer_jax.parallel.hosts import Hosts
from transformer_jax.training.reporting import Stopwatch
from transformer_jax.training.stopping import STOP_SIGNALS, StallWatch, Stopped, StopRequest, pause


@pytest.mark.parametrize('number', STOP_SIGNALS)
def test_a_signal_is_noted_and_nothing_is_cut(number: int) -> None:
    reached = False
    with StopRequest() as stop:
        assert (stop.requested, stop.signal) == (False, None)
        os.kill(os.getpid(), number)
        reached = True
        assert (stop.requested, stop.signal) == (True, number)
    assert reached


def fail_within_a_request(handler: object) -> None:
    with contextlib.suppress(KeyError), StopRequest():
        assert signal.getsignal(signal.SIGTERM) != handler
        raise KeyError


def test_the_handlers_of_before_come_back_also_after_an_error() -> None:
    def mine(*arguments: object) -> None:
        pass

    before = signal.signal(signal.SIGTERM, mine)
    interrupts = signal.getsignal(signal.SIGINT)  # a job in the background starts with interrupts ignored
    try:
        fail_within_a_request(mine)
        assert signal.getsignal(signal.SIGTERM) == mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGINT) == interrupts


def test_a_stretch_that_may_be_cut_is_cut_at_once_and_by_nothing_swallowed() -> None:
    reached, cleaned = [], []

    def evaluate() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append('after the signal')
        except Exception:  # noqa: BLE001 - what a library might do
            reached.append('swallowed')
        finally:
            cleaned.append(True)

    with StopRequest() as stop:
        with pytest.raises(Stopped), stop.interruptible():
            evaluate()
        with pytest.raises(Stopped), stop.interruptible():
            reached.append('entered after a request')
    assert (reached, cleaned) == ([], [True])


def test_behind_such_a_stretch_nothing_is_cut() -> None:
    with StopRequest() as stop:
        with stop.interruptible():
            pass
        with pytest.raises(KeyError), stop.interruptible():
            raise KeyError
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT


@pytest.mark.parametrize(('number', 'code'), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_the_process_at_once(number: int, code: int) -> None:
    program = """
        import os, sys, time
        from transformer_jax.training.stopping import StopRequest
        with StopRequest() as stop:
            print('ready', flush=True)
            while not stop.requested:
                time.sleep(0.01)
            print('saving', flush=True)
            try:
                time.sleep(60)
            finally:
                print('not at once', flush=True)
    """
    process = subprocess.Popen([sys.executable, '-c', textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == 'ready\n'
    process.send_signal(number)
    assert process.stdout.readline() == 'saving\n'
    start = time.monotonic()
    process.send_signal(number)
    rest, _ = process.communicate(timeout=30)
    assert (process.returncode, rest) == (code, '')
    assert time.monotonic() - start < 10


class TwoHosts(Hosts):
    """As one of two processes sees them: the job stops at the third point, and what ends it is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.points = 2, 0
        self.ended: list[tuple[str, int]] = []
        self.asked: Callable[[], int | None] = lambda: None

    def watch_for_stop(self, asked: Callable[[], int | None]) -> None:
        self.asked = asked

    def stops_here(self) -> int | None:
        self.points += 1
        return 15 if self.points >= 3 else None

    def end(self, message: str, code: int = 1) -> Any:
        self.ended.append((message, code))


def test_of_several_processes_none_stops_before_all_do() -> None:
    hosts = TwoHosts()
    with StopRequest(hosts) as stop:
        with stop.interruptible():  # is not cut: the others would wait
            os.kill(os.getpid(), signal.SIGINT)
        assert hosts.asked() == signal.SIGINT
        assert not stop.requested
        assert [stop.due() for _ in range(4)] == [False, False, True, True]
        assert stop.signal == 15
        with pytest.raises(Stopped):
            pause(hosts)


def test_a_process_that_was_not_told_stops_with_the_others() -> None:
    with StopRequest(TwoHosts()) as stop:
        assert [stop.due() for _ in range(3)] == [False, False, True]
        assert stop.signal == 15


def test_pausing_alone_is_nothing() -> None:
    hosts = TwoHosts()
    hosts.count = 1
    for _ in range(5):
        pause(hosts)
    assert hosts.points == 0
    hosts.count = 2
    for _ in range(2):
        pause(hosts)
    with pytest.raises(Stopped):
        pause(hosts)


@pytest.mark.parametrize('activity', ['step', 'data'])
def test_an_update_that_hangs_ends_the_job_with_what_its_threads_are_at(activity: str, capfd: Any) -> None:
    stopwatch, hosts = Stopwatch(), TwoHosts()
    with StallWatch(stopwatch, 0.3, hosts, tick=0.02):
        for _ in range(20):  # many short ones are none
            with stopwatch.timing(activity):
                time.sleep(0.02)
        assert hosts.ended == []
        with stopwatch.timing(activity):
            deadline = time.monotonic() + 20
            while not hosts.ended and time.monotonic() < deadline:
                time.sleep(0.02)
    message, code = hosts.ended[0]
    assert 'for more than 0.3 s (config.execution.hosts.stall_seconds) in process 0' in message
    assert code == 1
    assert 'test_an_update_that_hangs' in capfd.readouterr().err


@pytest.mark.parametrize('activity', ['compile', 'evaluation', 'checkpoint', None])
def test_what_may_take_long_is_no_stall(activity: str | None) -> None:
    stopwatch, hosts = Stopwatch(), TwoHosts()
    block = stopwatch.timing(activity) if activity else contextlib.nullcontext()
    with StallWatch(stopwatch, 0.05, hosts, tick=0.02), block:
        time.sleep(0.3)
    with StallWatch(stopwatch, None, hosts, tick=0.02), stopwatch.timing('step'):
        time.sleep(0.2)
    assert hosts.ended == []
