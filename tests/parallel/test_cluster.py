"""Which process of a job this is: what is given, what the environment says, and half a job refused."""

import re
from typing import Any

import pytest

from transformer_jax.config import ConfigError
from transformer_jax.parallel.cluster import Job, find_job

SLURM = {
    'SLURM_JOB_ID': '4097',
    'SLURM_STEP_NODELIST': 'node[07-08]',
    'SLURM_NTASKS': '16',
    'SLURM_PROCID': '11',
    'SLURM_LOCALID': '3',
    'SLURM_STEP_TASKS_PER_NODE': '8(x2)',
}
GIVEN = {
    'JAX_COORDINATOR_ADDRESS': '10.1.2.3:8476',
    'JAX_NUM_PROCESSES': '5',
    'JAX_PROCESS_ID': '3',
}


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`find_job` in an environment of these variables, which JAX's own detection reads too."""

    def find(environment: dict[str, str], *arguments: Any, **options: Any) -> Job | None:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return find_job(*arguments, **options)

    return find


def test_a_laptop_is_no_job(find: Any) -> None:
    assert find({}) is None


def test_flags_go_before_the_environment_and_that_before_the_cluster(find: Any) -> None:
    assert find(GIVEN) == Job('10.1.2.3:8476', 5, 3)
    assert find(GIVEN, 'host:99', 7, 6) == Job('host:99', 7, 6)
    assert find(SLURM | GIVEN, process_id=0) == Job('10.1.2.3:8476', 5, 0)
    assert find({}, '[::1]:99', 2, 1) == Job('[::1]:99', 2, 1)


def test_a_task_of_srun_is_found(find: Any) -> None:
    port = 4097 % 4096 + 65535 - 4095
    assert find(SLURM) == Job(f'node07:{port}', 16, 11, [3])
    # The tasks of a step may have a node, or a device, of their own: then none of what they see belongs to another.
    assert find(SLURM | {'SLURM_STEP_TASKS_PER_NODE': '1(x16)'}) == Job(f'node07:{port}', 16, 11)
    assert find(SLURM | {'CUDA_VISIBLE_DEVICES': '3'}) == Job(f'node07:{port}', 16, 11)
    assert find(SLURM, coordinator='other:7') == Job('other:7', 16, 11, [3])


def test_one_process_is_started_alone_whatever_the_cluster_says(find: Any) -> None:
    assert find(SLURM, num_processes=1) is None
    assert find(SLURM | {'SLURM_NTASKS': '1', 'SLURM_PROCID': '0'}) is None


@pytest.mark.parametrize(
    ('environment', 'arguments', 'message'),
    [
        ({}, {'num_processes': 2}, '--coordinator and --process-id missing'),
        ({}, {'coordinator': 'host:99'}, '--num-processes and --process-id missing'),
        ({'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '1'}, {}, '--coordinator missing'),
        ({}, {'process_id': 0}, '--coordinator and --num-processes missing'),
        ({'JAX_NUM_PROCESSES': 'two'}, {}, "JAX_NUM_PROCESSES is 'two'; it must be a number"),
        ({}, {'coordinator': 'host', 'num_processes': 2, 'process_id': 0}, "'host'; it must be HOST:PORT"),
        ({}, {'coordinator': 'host:70000', 'num_processes': 2, 'process_id': 0}, 'it must be HOST:PORT'),
        (GIVEN, {'process_id': 5}, '--process-id is 5; processes are numbered from 0, below --num-processes 5'),
        ({}, {'num_processes': 0}, '--num-processes is 0; it must be at least 1'),
        (
            {'SLURM_JOB_ID': '1', 'SLURM_NTASKS': '8'},
            {},
            'SLURM has 8 tasks for this job (SLURM_NTASKS), but this process is none that srun started',
        ),
        (
            {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '2'},
            {},
            'this is pod 2 of an indexed Kubernetes Job, whose other pods are not known',
        ),
    ],
)
def test_several_asked_for_are_never_one_silently(
    find: Any, environment: dict[str, str], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        find(environment, **arguments)
    if 'SLURM' in message or 'pod' in message:
        assert '--num-processes 1 for a run of this process alone' in str(refused.value)


def test_a_pod_by_itself_is_no_job(find: Any) -> None:
    assert find({'KUBERNETES_SERVICE_HOST': '10.0.0.1'}) is None
