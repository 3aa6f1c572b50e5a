"""A run folder on gs://, arrays and all, by the packages that reach Google Cloud Storage, against a stand-in for it."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec('gcsfs') is None, reason='the extra gcs is not installed')


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a process whose gs:// is the stand-in."""
    port = tmp_path / 'port'
    server = subprocess.Popen(
        [sys.executable, str(ROOT / 'tests/checkpoints/fake_bucket.py'), str(port)], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 30
    while not (port.exists() and port.read_text()):
        assert server.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    url = f'http://127.0.0.1:{port.read_text()}'
    names = {'STORAGE_EMULATOR_HOST': url, 'TENSORSTORE_GCS_HTTP_URL': url, 'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'none'}
    names |= {'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false', 'JAX_PLATFORMS': 'cpu', 'XDG_CACHE_HOME': str(tmp_path)}
    yield os.environ | names | {'PYTHONPATH': os.pathsep.join((str(ROOT), os.environ.get('PYTHONPATH', '')))}
    server.kill()
    server.wait()


def run_python(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


_SAVE = """
from etils import epath
from tests.checkpoints.toy_runs import Run, make_state
from transformer_jax.training.figure_files import TensorBoard

run = Run('gs://bucket/some/run', keep_newest=2)
for step in (10, 20, 30):
    run.store.save(step, make_state(step), {'seen': step}, score=-step, snapshot=step != 10)
run.store.wait()
assert run.store.steps() == [10, 20, 30], 'the best one stays too'
run.close()
board = TensorBoard(run.folder.path / 'tensorboard', 0, lambda: 0.0)
board.write({'event': 'train', 'step': 3, 'loss': 1.5})
board.close()
"""
_READ = """
import numpy as np
from etils import epath
from tests.checkpoints.toy_runs import Run, assert_same_bits, describe, make_state
from transformer_jax.checkpoints.average import average_run
from transformer_jax.checkpoints.store import read_parameters

url = 'gs://bucket/some/run'
run = Run(url, keep_newest=2)
abstract = describe(make_state())
step, state, extra = run.store.restore(abstract)
assert (step, extra, run.store.best(), run.store.snapshots()) == (30, {'seen': 30}, 10, [20, 30])
assert_same_bits(state, make_state(30))
average_run(url, last=2, out='gs://bucket/mean')
mean, _ = read_parameters('gs://bucket/mean', abstract.params)
two = [np.asarray(make_state(step).params['encoder']['kernel'], np.float64) for step in (20, 30)]
np.testing.assert_allclose(mean['encoder']['kernel'], np.mean(two, axis=0), rtol=1e-6)

objects = [path for path in (epath.Path(url) / 'checkpoints/step_00000030/arrays').glob('*/ocdbt.process_0/d/*')]
largest = max(objects, key=lambda path: path.stat().length)
data = bytearray(largest.read_bytes())
data[len(data) // 2] ^= 1
largest.write_bytes(bytes(data))
step, state, _ = run.store.restore(abstract)
assert step == 20, run.reports
assert any('step_00000030' in line for line in run.reports), run.reports
assert_same_bits(state, make_state(20))
assert 30 not in run.store.steps()
run.close()
assert len([path for path in (epath.Path(url) / 'tensorboard').iterdir()]) == 1
"""


def test_what_one_process_saved_another_restores_averages_and_finds_damaged(environment: dict[str, str]) -> None:
    run_python(_SAVE, environment)
    run_python(_READ, environment)


@pytest.mark.slow
def test_a_training_goes_on_there_and_its_model_translates(environment: dict[str, str]) -> None:
    run = 'gs://bucket/runs/copy'

    def call(*arguments: str, stdin: str = '') -> subprocess.CompletedProcess[str]:
        command = [sys.executable, '-m', 'transformer_jax', *arguments, '--run', run]
        done = subprocess.run(command, env=environment, input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done

    changes = ['--config.checkpoint.every_steps=5', '--config.evaluation.every_steps=none']
    call('train', '--config=configs/copy_tiny.py', '--config.train.steps=10', *changes)
    went_on = call('train', '--config.train.steps=15')
    assert 'resumes after step 10 of 15' in went_on.stderr
    assert 'failed' not in went_on.stderr, went_on.stderr
    assert len(call('translate', stdin='a b\nc\n').stdout.splitlines()) == 2
    assert 'exact match' in call('evaluate').stdout
