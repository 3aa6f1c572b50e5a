"""Whether this process is one of several, and which: from flags, the environment, or the cluster it runs in."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformer_jax.config import ConfigError
from transformer_jax.parallel.hub import HostsError

ADDRESS, COUNT, INDEX = 'JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'


@dataclass(frozen=True)
class Job:
    """The place of this process among those of its job."""

    address: str  # host:port of process 0
    num_processes: int
    process_id: int
    local_device_ids: Sequence[int] | None = None  # of this host's devices, those of this process; None = all


def find_job(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: int = 300,
    environment: Mapping[str, str] = os.environ,
) -> Job | None:
    """The job that this process belongs to; None where it is the only one.

    What is not given comes from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, and what those lack from
    the cluster: Cloud TPU, SLURM, Kubernetes or Open MPI, as JAX detects them. `num_processes=1` asks for none of it.
    Raises `ConfigError` for half of a job, or where a cluster has started several processes and this one can't tell
    which it is: several that each take themselves for the only one would train several runs into one folder.
    """
    address = coordinator or environment.get(ADDRESS) or None
    count = _number(COUNT, environment) if num_processes is None else num_processes
    index = _number(INDEX, environment) if process_id is None else process_id
    _check(address, count, index)
    if count == 1:
        return None
    devices = None
    if None in (address, count, index):
        asked = not (address is None and count is None and index is None)
        address, count, index, devices = _detect(address, count, index, timeout_seconds, environment)
        _require_whole(address, count, index, environment, asked=asked)
        if address is None or count is None or index is None or count == 1:
            return None
        _check(address, count, index)
    assert address is not None
    assert count is not None
    assert index is not None
    return Job(address, count, index, devices)


def _check(address: str | None, count: int | None, index: int | None) -> None:
    if count is not None and count < 1:
        raise ConfigError(f'--num-processes is {count}; it must be at least 1')
    if index is not None and (index < 0 or (count is not None and index >= count)):
        most = '' if count is None else f', below --num-processes {count}'
        raise ConfigError(f'--process-id is {index}; processes are numbered from 0{most}')
    if address is not None:
        host, _, port = address.rpartition(':')
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f'--coordinator is {address!r}; it must be HOST:PORT, such as 10.0.0.1:8476')


def _number(name: str, environment: Mapping[str, str]) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f'the environment variable {name} is {text!r}; it must be a number') from None


def _detect(
    address: str | None, count: int | None, index: int | None, timeout_seconds: int, environment: Mapping[str, str]
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Fills in what the cluster knows, as `jax.distributed.initialize` would."""
    in_job = any(
        name in environment for name in ('JOB_COMPLETION_INDEX', 'TPU_WORKER_HOSTNAMES', 'TPU_PROCESS_ADDRESSES')
    )
    if 'KUBERNETES_SERVICE_HOST' in environment and not in_job:
        return address, count, index, None  # a pod by itself
    # JAX has no public name for this, and its public `initialize` fails where there is no cluster.
    from jax._src.clusters import ClusterEnv

    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # of a Kubernetes package that is missing: `_require_whole` says it
            address, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
                address, count, index, None, None, timeout_seconds
            )
    except Exception as error:
        raise HostsError(
            f'the cluster that this process runs in could not be asked for the other processes: {error}. Give '
            '--coordinator, --num-processes and --process-id, or --num-processes 1 for a run of this process alone'
        ) from error
    return address, count, index, None if _owns_host(environment) else devices


def _owns_host(environment: Mapping[str, str]) -> bool:
    """Whether all devices that this process sees are its own, though the cluster numbers the processes of a host."""
    tasks = environment.get('SLURM_STEP_TASKS_PER_NODE', '')  # such as 1(x2), or 8
    visible = environment.get('CUDA_VISIBLE_DEVICES', '')
    return tasks.split('(')[0] == '1' or (visible != '' and ',' not in visible)


def _require_whole(
    address: str | None, count: int | None, index: int | None, environment: Mapping[str, str], *, asked: bool
) -> None:
    remedy = 'give --coordinator HOST:PORT, --num-processes N and --process-id I'
    alone = 'or --num-processes 1 for a run of this process alone'
    missing = [
        flag
        for flag, value in (('--coordinator', address), ('--num-processes', count), ('--process-id', index))
        if value is None
    ]
    if asked and missing:
        raise ConfigError(
            f'{" and ".join(missing)} missing: a job of several processes needs all three, here or as {ADDRESS}, '
            f'{COUNT} and {INDEX}, and no cluster was found that knows them'
        )
    if not missing:
        return
    tasks = environment.get('SLURM_NTASKS', '1')
    if tasks.isdecimal() and int(tasks) > 1:
        raise ConfigError(
            f'SLURM has {tasks} tasks for this job (SLURM_NTASKS), but this process is none that srun started. '
            f'Start it with srun, {remedy}, {alone}'
        )
    if 'JOB_COMPLETION_INDEX' in environment:
        raise ConfigError(
            f'this is pod {environment["JOB_COMPLETION_INDEX"]} of an indexed Kubernetes Job, whose other pods are not '
            f'known: {remedy}, install the Python package kubernetes, which finds them, {alone}'
        )
