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


@pytest.mark.parametrize('bar', BARS, ids=lambda bar: f'{bar.size} {bar.rows}x{bar.length}')
def test_cycles_and_memory_of_the_update(bar: Bar) -> None:
    names = ('JAX_PLATFORMS', 'JAX_NUM_CPU_DEVICES', 'XLA_FLAGS')  # of the simulated mesh of other tests
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [
            sys.executable, '-m', 'transformer_jax', 'plan', '--json',
            f'--config=configs/wmt14_en_de.py:size={bar.size}', '--topology=v5e:2x2', '--mesh=data=1',
            f'--batch={bar.rows}', f'--length={bar.length}', '--config.model.max_length=512',
            '--config.model.compute_dtype=bfloat16', f'--config.execution.remat={bar.remat}',
        ],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found['estimated_cycles'] <= bar.cycles
    assert found['temporary_bytes'] <= bar.temporary_bytes
    assert found['kernel_cycles'] <= found['estimated_cycles'] / 4
    assert found['flops'] > 3e12  # of a whole update
