"""Two processes of four devices make the update, the scores and the translations of one device."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.parallel.meshed import assert_equal, make_model, update
from tests.parallel.test_evaluation_on_mesh import evaluate
from transformer_jax.config import MeshConfig

ROOT = Path(__file__).parents[2]
MIXED = MeshConfig(data=2, fsdp=2, model=2)
# The last has both processes feed the same rows, each for its part of the vocabulary and the heads.
MESHES = [
    MeshConfig(data=8),
    MeshConfig(data=1, fsdp=8),
    MIXED,
    MeshConfig(data=2, sequence=4),
    MeshConfig(data=1, model=8),
]
START = """
import pathlib, pickle, sys
import jax
folder, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 4)
jax.distributed.initialize(coordinator_address=f'127.0.0.1:{port}', num_processes=2, process_id=rank)
assert jax.device_count() == 8
"""
UPDATES = """
from tests.parallel.meshed import make_model, update
from tests.parallel.test_two_processes import MESHES
model = make_model()
for index, config in enumerate(MESHES):
    found = update(model, config)
    with open(f'{folder}/{index}.{rank}.pickle', 'wb') as file:
        pickle.dump(found._replace(text=''), file)
"""


EVALUATION = """
from tests.parallel.test_evaluation_on_mesh import evaluate
from tests.parallel.test_two_processes import MIXED
found = evaluate(MIXED, pathlib.Path(folder) / str(rank))
with open(f'{folder}/{rank}.pickle', 'wb') as file:
    pickle.dump(found, file)
"""


def run(script: str, folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, '-c', START + script, str(folder), port]
    environment = {name: value for name, value in os.environ.items() if name != 'JAX_NUM_CPU_DEVICES'}
    environment['PYTHONPATH'] = str(ROOT)
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=1500)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


@pytest.mark.slow
def test_two_processes_make_the_update_of_one_device(tmp_path: Path) -> None:
    run(UPDATES, tmp_path)
    expected = update(make_model(), MeshConfig(data=1))
    for index, _ in enumerate(MESHES):
        for rank in range(2):
            assert_equal(pickle.loads((tmp_path / f'{index}.{rank}.pickle').read_bytes()), expected)


@pytest.mark.slow
def test_two_processes_score_and_translate_as_one_device_does(tmp_path: Path) -> None:
    run(EVALUATION, tmp_path)
    expected, lines = evaluate(None, tmp_path / 'one')
    for rank in range(2):
        found, lines_of_both = pickle.loads((tmp_path / f'{rank}.pickle').read_bytes())
        np.testing.assert_allclose(found.nll, expected.nll, rtol=1e-5)
        assert lines_of_both == lines
