"""What the update takes on one TPU chip, by the compiler's estimates; needs libtpu (the extra `tpu`)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed'),
]
ROOT = Path(__file__).parents[2]
GIB = 2**30


class Bar(NamedTuple):
    size: str
    rows: int
    length: int
    cycles: float  # at most, of all of the update
    temporary_bytes: float  # at most
    remat: str = 'names'


BARS = [
    Bar('base', 64, 128, 48e6, 1.5 * GIB),
    Bar('base', 32, 512, 150e6, 3 * GIB),
    Bar('big', 64, 128, 140e6, 3 * GIB, remat='narrow'),
]


def plan(size: str, rows: int, length: int, *flags: str) -> dict[str, Any]:
    names = ('JAX_PLATFORMS', 'JAX_NUM_CPU_DEVICES', 'XLA_FLAGS')  # of the simulated mesh of other tests
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [
            sys.executable, '-m', 'transformer_jax', 'plan', '--json',
            f'--config=configs/wmt14_en_de.py:size={size}', '--mesh=data=1', f'--batch={rows}', f'--length={length}',
            '--config.model.max_length=512', '--config.model.compute_dtype=bfloat16', *flags,
        ],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize('bar', BARS, ids=lambda bar: f'{bar.size} {bar.rows}x{bar.length}')
def test_cycles_and_memory_of_the_update(bar: Bar) -> None:
    found = plan(bar.size, bar.rows, bar.length, '--topology=v5e:2x2', f'--config.execution.remat={bar.remat}')
    assert found['estimated_cycles'] <= bar.cycles
    assert found['temporary_bytes'] <= bar.temporary_bytes
    assert found['kernel_cycles'] <= found['estimated_cycles'] / 4
    assert found['flops'] > 3e12  # of a whole update


@pytest.mark.parametrize('impl', ['pallas', 'blockwise'])
@pytest.mark.parametrize('topology', ['v5e:2x2', 'v6e:2x2'])
def test_the_update_of_base_compiles_with_either_implementation(topology: str, impl: str) -> None:
    flags = f'--topology={topology}', f'--config.model.attention.impl={impl}', '--config.execution.unroll=1'
    found = plan('base', 8, 512, *flags)
    assert (found['kernel_cycles'] > 0) == (impl == 'pallas')
    assert found['flops'] > 1e12  # of a whole update
