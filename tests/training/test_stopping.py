"""Signals: the first is noted, and cuts only what says that it may be cut; the second ends the process."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from transformer_jax.training.stopping import STOP_SIGNALS, Stopped, StopRequest


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
    try:
        fail_within_a_request(mine)
        assert signal.getsignal(signal.SIGTERM) == mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


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
