"""Two processes save one checkpoint together."""

import socket
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import jax
folder, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update('jax_num_cpu_devices', 2)
jax.distributed.initialize(coordinator_address=f'127.0.0.1:{port}', num_processes=2, process_id=rank)
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from transformer_jax.checkpoints.arrays import NonFiniteError
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.checkpoints.store import Store
from transformer_jax.config import CheckpointConfig

mesh = jax.make_mesh((4,), ('data',), axis_types=(AxisType.Auto,))
values = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)

def place(array, spec):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])

if rank == 1:
    multihost_utils.sync_global_devices('started')
run = RunFolder.start(folder, {}, lambda old, new: [], primary=rank == 0)
if rank == 0:
    multihost_utils.sync_global_devices('started')
reports = []
store = Store(run, CheckpointConfig(), report=reports.append)
state = {'params': {'split': place(values, PartitionSpec('data')), 'whole': place(values[0], PartitionSpec())}}
for step in (1, 2):
    store.save(step, state, {'step': step}, snapshot=True)
store.wait()
assert (store.steps(), store.snapshots()) == ([2], [1, 2])
abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
step, found, extra = store.restore(abstract)
assert (step, extra) == (2, {'step': 2})
for name in ('split', 'whole'):
    for ours, theirs in zip(found['params'][name].addressable_shards, state['params'][name].addressable_shards):
        np.testing.assert_array_equal(ours.data, theirs.data)
poisoned = values.copy()
poisoned[7, 4] = np.nan  # held by the second process alone
try:
    store.save(3, {'params': {'split': place(poisoned, PartitionSpec('data')), 'whole': state['params']['whole']}}, {})
    raise SystemExit('a poisoned state was saved')
except NonFiniteError:
    pass
assert reports == [], reports
run.close()
"""


@pytest.mark.slow
def test_two_processes_write_and_read_one_checkpoint(tmp_path):
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, '-c', SCRIPT, str(tmp_path / 'run'), port]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=180)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
