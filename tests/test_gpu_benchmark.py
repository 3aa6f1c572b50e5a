"""The logic of tests/benchmarks/gpu_training.py, which no other test runs: its FLOPs, its tries, its table."""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

PATH = Path(__file__).parent / 'benchmarks' / 'gpu_training.py'
RESULT = {'rows': 3, 'seconds': [0.5, 0.25, 0.1], 'parameters': 7, 'device': 'NVIDIA L4', 'version': 'jax 9'}


@pytest.fixture(scope='module')
def benchmark():
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location('gpu_training', PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def options(**changes):
    given = {'peer_python': 'PEER', 'minutes': 8.0, 'rounds': 3, 'seconds': 1.0, 'change': [], 'tiny': True}
    return argparse.Namespace(**given | {'peak_tflops': None} | changes)


def test_flops_are_those_of_each_product(benchmark):
    rows, t, d, ff, v, layers = 3, 8, 32, 64, 90, 2
    products = [(rows * t, d, v)]
    for _ in range(layers):
        self_attention = [(rows * t, d, d)] * 4 + [(rows * t, d, t), (rows * t, t, d)]
        feed_forward = [(rows * t, d, ff), (rows * t, ff, d)]
        products += (self_attention + feed_forward) + (2 * self_attention + feed_forward)
    expected = 3 * sum(2 * m * k * n for m, k, n in products)
    assert benchmark.count_flops(benchmark.SIZES['tiny'], rows) == expected


def test_a_try_that_does_not_fit_is_followed_by_a_smaller_one(benchmark, monkeypatch, capsys):
    calls = []

    def run(command, **_):
        rows = int(command[command.index('--rows') + 1])
        calls.append((command[0], rows))
        if rows > 128:
            return subprocess.CompletedProcess(command, 1, '', 'E0000 RESOURCE_EXHAUSTED: Out of memory while\n')
        return subprocess.CompletedProcess(command, 0, f'a warning\n{json.dumps(RESULT | {"rows": rows})}\n', '')

    monkeypatch.setattr(benchmark.subprocess, 'run', run)
    result = benchmark.measure('PyTorch', 'big', options(), time.monotonic() + 100)
    assert result['rows'] == 128
    assert calls == [('PEER', 196), ('PEER', 160), ('PEER', 128)]
    assert 'PyTorch, big: 160 rows do not fit' in capsys.readouterr().out


def test_other_failures_and_the_end_of_the_time_become_rows(benchmark, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, '', 'Traceback\nModuleNotFoundError: No module named torch\n')
    monkeypatch.setattr(benchmark.subprocess, 'run', lambda *_, **__: failed)
    result = benchmark.measure('PyTorch', 'base', options(), time.monotonic() + 100)
    assert result == {'failed': 'ModuleNotFoundError: No module named torch'}
    late = benchmark.measure('ours', 'base', options(), time.monotonic() - 1)
    assert late == {'failed': 'not begun, 8 minutes are over'}
    assert 'No module named torch' in benchmark.describe('PyTorch', 'base', result, None, None)


def test_the_table_gives_tokens_utilisation_and_ratio(benchmark):
    ours, peer = RESULT, RESULT | {'seconds': [0.5]}
    peak = benchmark.find_peak('NVIDIA L4')
    assert peak == 121e12
    assert benchmark.find_peak('NVIDIA H100 PCIe') == 756e12
    assert benchmark.find_peak('a new card') is None
    share = benchmark.count_flops(benchmark.SIZES['tiny'], 3) / 0.5 / 1e7
    expected = f'| PyTorch | tiny | 3 x 8 | 500.0 (500.0 to 500.0) | 48 | {share:.1%} | 2.00 |'
    assert benchmark.describe('PyTorch', 'tiny', peer, 1e7, ours) == expected


def test_systems_with_different_models_are_not_compared(benchmark, monkeypatch):
    counts = iter([7, 8, 7])
    monkeypatch.setattr(benchmark, 'measure', lambda *_: RESULT | {'parameters': next(counts)})
    with pytest.raises(RuntimeError, match=r'different models, of \[7, 8\] parameters'):
        benchmark.run(options())


@pytest.mark.slow
def test_it_runs_on_a_cpu():
    command = [sys.executable, str(PATH), '--tiny', '--rounds', '2']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [
        line for line in done.stdout.splitlines() if line.startswith(('| ours | tiny | 3 x 8', '| plain Flax | tiny'))
    ]
    assert len(rows) == 2
