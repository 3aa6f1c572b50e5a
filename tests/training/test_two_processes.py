"""Two processes train one run: cut, killed, stalled, told to stop, or started wrongly."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from transformer_jax.decoding.opened_run import open_run

LAST = 40
CONFIG = """
from tests.commands.test_train import CHANGES
from transformer_jax.config import Config
from transformer_jax.overlay import overlay, to_config_dict

MORE = {
    'train.steps': LAST,
    'data.batch_tokens': 99,  # 16 rows, whether 2, 4 or 8 devices share them
    'train.prng': 'threefry2x32',
    'checkpoint.every_steps': 10,
    'logging.every_steps': 2,
    'execution.hosts.silence_seconds': 15,
}

def get_config(arg=None):
    return to_config_dict(overlay(Config(), CHANGES | MORE))
"""
ROOT = Path(__file__).parent.parent.parent


class Process(NamedTuple):
    popen: subprocess.Popen
    log: Path

    def end(self, seconds: float = 900) -> tuple[int, str]:
        """The exit code and all that it said."""
        return self.popen.wait(seconds), self.log.read_text()


Start = Callable[..., list[Process]]


@pytest.fixture(scope='module')
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config file, and the programs that were compiled before."""
    folder = tmp_path_factory.mktemp('shared')
    (folder / 'config.py').write_text(CONFIG.replace('LAST', str(LAST)))
    return folder


@pytest.fixture(scope='module')
def start(shared: Path) -> Iterator[Start]:
    started: list[Process] = []

    def start(run: Path, *arguments: str, num_processes: int = 2, devices: int = 2, only: Any = None) -> list[Process]:
        """Starts the verb `train`; arguments with {rank} in them differ by process."""
        port = str(free_port())
        environment = os.environ | {
            'JAX_NUM_CPU_DEVICES': str(devices),
            'JAX_COMPILATION_CACHE_DIR': str(shared / 'cache'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'PYTHONPATH': str(ROOT),
        }
        processes = []
        for rank in range(num_processes) if only is None else only:
            command = [sys.executable, '-m', 'transformer_jax', 'train', f'--config={shared / "config.py"}']
            command += ['--run', str(run), *(argument.format(rank=rank) for argument in arguments)]
            if num_processes > 1:
                command += ['--coordinator', f'127.0.0.1:{port}', '--num-processes', str(num_processes)]
                command += ['--process-id', str(rank)]
            log = shared / f'log_{len(started)}_{rank}'
            with log.open('w') as output:
                popen = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            processes.append(Process(popen, log))
            started.append(processes[-1])
        return processes

    yield start
    for process in started:
        if process.popen.poll() is None:
            process.popen.send_signal(signal.SIGCONT)
            process.popen.kill()
            process.popen.wait()


@pytest.fixture(scope='module')
def uncut(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp('uncut') / 'run'
    for process in start(run):
        code, said = process.end()
        assert code == 0, said
    return run


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def wait_for_step(run: Path, step: int, processes: list[Process], seconds: float = 900) -> None:
    """Returns when the run has said that it did this update."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        lines = (run / 'metrics.jsonl').read_text().splitlines() if (run / 'metrics.jsonl').exists() else []
        records = [json.loads(line) for line in lines if line.endswith('}')]
        if any(record['event'] == 'train' and record['step'] >= step for record in records):
            return
        for process in processes:
            assert process.popen.poll() is None, process.log.read_text()
        time.sleep(0.02)
    raise AssertionError('the run did not come so far')


def weights(run: Path) -> dict[str, np.ndarray]:
    params, known = open_run(run, {}).load_params('latest')
    assert known['step'] == LAST
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}


def assert_same_weights(run: Path, other: Path, *, exact: bool = True) -> None:
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        if exact:
            np.testing.assert_array_equal(array, theirs[name], name)
        else:  # other shards sum in another order, and Adam takes a step of full size where the sum is next to 0
            assert np.abs(array - theirs[name]).mean() < 3e-6, name


def finish(start: Start, run: Path, *arguments: str, **options: Any) -> None:
    for process in start(run, *arguments, **options):
        code, said = process.end()
        assert code == 0, said


@pytest.mark.slow
def test_one_told_to_stop_stops_both_at_one_step_and_the_rest_may_run_anywhere(
    start: Start, uncut: Path, tmp_path: Path
) -> None:
    run = tmp_path / 'run'
    processes = start(run)
    wait_for_step(run, 12, processes)
    processes[1].popen.send_signal(signal.SIGTERM)
    ends = [process.end(60) for process in processes]
    assert [code for code, _ in ends] == [143, 143], ends
    stopped = int(ends[0][1].split('stopped by a signal after step ')[1].split(',')[0])
    assert 12 <= stopped < LAST
    assert (run / 'checkpoints' / f'step_{stopped:08}').exists()
    for name in ('alone', 'wide', 'narrow'):
        subprocess.run(['cp', '-r', str(run), str(tmp_path / name)], check=True)
    finish(start, run)
    assert_same_weights(run, uncut)
    finish(start, tmp_path / 'alone', num_processes=1, devices=2)
    finish(start, tmp_path / 'wide', num_processes=1, devices=8)
    finish(start, tmp_path / 'narrow', devices=1)
    for name in ('alone', 'wide', 'narrow'):
        assert_same_weights(tmp_path / name, uncut, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize('killed', [0, 1])
def test_a_killed_process_ends_the_other_and_the_relaunch_is_as_uncut(
    start: Start, uncut: Path, tmp_path: Path, killed: int
) -> None:
    run = tmp_path / 'run'
    processes = start(run)
    wait_for_step(run, 14, processes)
    processes[killed].popen.kill()
    begin = time.monotonic()
    code, said = processes[1 - killed].end(60)
    assert time.monotonic() - begin < 60
    assert code == 1
    assert f'process {killed} (host {socket.gethostname()}, pid {processes[killed].popen.pid}) is lost' in said
    starts = json.loads((run / 'record.json').read_text())['starts']
    assert sum(starts[-1]['shares'].values()) == pytest.approx(1)
    finish(start, run)
    assert_same_weights(run, uncut)
    starts = json.loads((run / 'record.json').read_text())['starts']
    assert [one['from_step'] for one in starts] in ([0, 10], [0, 20], [0, 30])  # that of the last checkpoint
    assert starts[1]['to_step'] == LAST


@pytest.mark.slow
@pytest.mark.parametrize('stopped', [0, 1])
def test_a_process_that_stands_still_ends_the_other_by_name(start: Start, tmp_path: Path, stopped: int) -> None:
    run = tmp_path / 'run'
    processes = start(run)
    wait_for_step(run, 4, processes)
    processes[stopped].popen.send_signal(signal.SIGSTOP)
    code, said = processes[1 - stopped].end(60)
    assert code == 1
    assert f'process {stopped} (host' in said
    assert 'is lost: it has given no sign of life for 15 s' in said
    processes[stopped].popen.send_signal(signal.SIGCONT)
    code, said = processes[stopped].end(60)
    assert code != 0


@pytest.mark.slow
def test_two_processes_translate_and_score_as_one(start: Start, tmp_path: Path) -> None:
    more = ['--config.evaluation.bleu=true', '--config.data.copying.num_validation=301', '--config.train.steps=8']
    more += ['--config.decoding.batch_size=16', '--config.decoding.method=greedy']
    finish(start, tmp_path / 'two', *more, devices=1)
    finish(start, tmp_path / 'one', *more, num_processes=1)
    found = []
    for run in ('one', 'two'):
        lines = (tmp_path / run / 'metrics.jsonl').read_text().splitlines()
        (record,) = [one for one in map(json.loads, lines) if one['event'] == 'evaluation']
        found.append({name: value for name, value in record.items() if isinstance(value, (int, float))})
    assert found[0]['num_pairs'] == 301
    assert 'sacreBLEU' in found[0]
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.slow
def test_a_process_of_another_config_is_named_with_the_field(start: Start, tmp_path: Path) -> None:
    ends = [process.end() for process in start(tmp_path / 'run', '--config.optimizer.beta2=0.9{rank}')]
    for code, said in ends:
        assert code == 2
        assert 'process 1 (host' in said
        assert 'config.optimizer.beta2 is 0.91, not 0.9' in said
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_what_fails_in_preparation_ends_both(start: Start, tmp_path: Path) -> None:
    ends = [process.end() for process in start(tmp_path / 'run', '--config.vocabulary.size=999')]
    for code, said in ends:
        assert code == 2
        assert 'config.vocabulary.size is 999' in said
    assert 'process 0' in ends[1][1]


@pytest.mark.slow
@pytest.mark.parametrize(('rank', 'message'), [(0, 'process 1 of 2 did not come within 3 s'), (1, 'gets no answer')])
def test_one_that_waits_in_vain_ends_in_time_and_says_for_whom(
    start: Start, tmp_path: Path, rank: int, message: str
) -> None:
    alone = start(tmp_path / 'run', '--config.execution.hosts.start_seconds=3', only=[rank])[0]
    code, said = alone.end(60)
    assert code == 1
    assert message in said
    assert '127.0.0.1:' in said
