"""Two real processes join, start JAX together, and are told when one of them dies."""

import os
import subprocess
import sys
from pathlib import Path

from tests.training.test_two_processes import free_port

SCRIPT = """
import os, sys
from transformer_jax.config import HostsConfig
from transformer_jax.parallel.cluster import find_job
from transformer_jax.parallel.hosts import join

rank = int(sys.argv[2])
job = find_job(f'127.0.0.1:{sys.argv[1]}', 2, rank)
with join(job, HostsConfig(start_seconds=120), lambda error: (str(error), 1)) as hosts:
    import jax
    assert (jax.process_index(), jax.process_count()) == (hosts.index, hosts.count) == (rank, 2)
    assert hosts.gather('devices', len(jax.devices())) == [2, 2]
    print('met', flush=True)
    if rank == 1:
        os.kill(os.getpid(), 9)
    hosts.gather('never', None)
"""


def test_two_processes_meet_and_one_that_dies_is_named(tmp_path: Path) -> None:
    port = str(free_port())
    environment = os.environ | {'JAX_NUM_CPU_DEVICES': '1'}
    ranks = [
        subprocess.Popen(
            [sys.executable, '-c', SCRIPT, port, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300) for rank in ranks]
    assert ['met' in output for output, _ in said] == [True, True], said
    assert [rank.returncode for rank in ranks] == [1, -9], said
    assert f'pid {ranks[1].pid}) is lost: its connection closed' in said[0][1]
