"""Processes that die or run out of disk while they save leave a run that goes on."""

import json
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.checkpoints.test_store import load_step
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.checkpoints.store import Store
from transformer_jax.config import CheckpointConfig

PRELUDE = """
import sys
import jax.numpy as jnp
from transformer_jax.checkpoints.digests import CheckpointError
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.checkpoints.store import Store
from transformer_jax.config import CheckpointConfig

def make(step, size=15):
    return {'params': {'kernel': jnp.full((3, size // 3), step, jnp.float32)}, 'step': jnp.int32(step)}

folder = RunFolder.start(sys.argv[1], {}, lambda old, new: [])
store = Store(folder, CheckpointConfig(), report=lambda line: print('report', line, flush=True))
"""

SAVE_FOR_EVER = """
import itertools
for step in itertools.count((store.latest() or 0) + 1):
    store.save(step, make(step), {}, score=-float(step), snapshot=True)
    print('saving', step, flush=True)
"""

FILL_THE_DISK = """
import json, resource
store.save(1, make(1), {})
store.wait()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
result = {}
try:
    store.save(2, make(2, 300_000), {})
    store.save(3, make(3, 300_000), {})
except CheckpointError as error:
    result['error'] = str(error)
result['after'] = store.latest()
result['left'] = [path.name for path in folder.checkpoints.iterdir()]
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
store.save(4, make(4), {})
store.close()
result['steps'] = store.steps()
print('result', json.dumps(result))
"""


def run_child(script: str, folder: Path) -> subprocess.Popen:
    command = [sys.executable, '-c', PRELUDE + textwrap.dedent(script), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill_while_saving(folder: Path, delay: float) -> int:
    """Kills a run `delay` seconds after its third save began; the highest step whose save had surely ended."""
    child = run_child(SAVE_FOR_EVER, folder)
    assert child.stdout is not None
    try:
        begun = 0
        first = None
        for line in child.stdout:
            if line.startswith('saving'):
                begun = int(line.split()[1])
                first = first or begun
                if begun == first + 2:
                    break
        time.sleep(delay)
    finally:
        child.kill()
        rest, errors = child.communicate()
    assert child.returncode == -signal.SIGKILL, errors
    begun = max([begun, *(int(line.split()[1]) for line in rest.splitlines() if line.startswith('saving'))])
    return begun - 1  # a save begins when the one before is visible


def check_goes_on(folder: Path, finished: int) -> None:
    reports: list[str] = []
    reader = Store(RunFolder.open(folder), CheckpointConfig(), report=reports.append)
    assert (reader.latest() or 0) >= finished
    assert reports == [], 'what is unfinished is no damage'
    unfinished = [path.name for path in folder.rglob('step_*') if not path.name.removeprefix('step_').isdigit()]
    assert len(unfinished) <= 2, 'one being written, one being deleted'
    with RunFolder.start(folder, {}, lambda old, new: []) as owned, Store(owned, CheckpointConfig()) as store:
        step, value = load_step(store)
        assert step == value >= finished
        assert store.best() == 1, 'the first has the best score'
        assert all(path.name.removeprefix('step_').isdigit() for path in folder.rglob('step_*'))
        assert len(store.steps()) <= 3


def test_a_run_killed_while_it_saves_goes_on_from_its_last_checkpoint(tmp_path):
    for delay in (0.0, 0.07):
        check_goes_on(tmp_path, kill_while_saving(tmp_path, delay))


@pytest.mark.slow
def test_twenty_kills_lose_no_finished_checkpoint(tmp_path):
    draw = random.Random(7)
    for _ in range(20):
        check_goes_on(tmp_path, kill_while_saving(tmp_path, draw.uniform(0, 0.3)))


def test_a_full_disk_is_loud_and_the_run_goes_on_when_there_is_space(tmp_path):
    child = run_child(FILL_THE_DISK, tmp_path)
    output, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    result = json.loads(next(line for line in output.splitlines() if line.startswith('result'))[7:])
    assert 'saving step 2' in result['error']
    assert result['after'] == 1
    assert result['steps'] == [4]
    assert result['error'] == f'saving step 2 in {tmp_path} failed: File too large. Earlier checkpoints are untouched'
    assert result['left'] == ['step_00000001']
    assert 'Traceback' not in errors
