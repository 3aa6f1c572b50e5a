"""The devices that a program is compiled for: those of a TPU slice that is elsewhere, or of this machine."""

import importlib.util
import os
from collections.abc import MutableMapping, Sequence
from math import prod
from typing import Any, NamedTuple

from transformer_jax.config import ConfigError
from transformer_jax.parallel.chips import TOPOLOGIES, Chip, find_chip

# What keeps the TPU compiler from looking for a TPU machine around it, from locking others out, and from its log.
_QUIET_COMPILER = {
    'JAX_PLATFORMS': 'cpu',
    'TPU_SKIP_MDS_QUERY': '1',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_WORKER_ID': '0',
    'TPU_LOG_DIR': 'disabled',
    'TF_CPP_MIN_LOG_LEVEL': '3',
}


class Target(NamedTuple):
    """Where a program is to run."""

    name: str  # 'v5e:4x4', 'cpu:8'
    devices: tuple[Any, ...]
    chip: Chip | None  # None: not in the table

    @property
    def platform(self) -> str:
        return self.devices[0].platform if self.devices[0].platform != 'cuda' else 'gpu'

    @property
    def memory(self) -> int | None:
        """Bytes a device; None where nothing tells."""
        if self.chip is not None and self.chip.memory is not None:
            return self.chip.memory
        if self.platform == 'cpu':
            return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // len(self.devices)
        return (self.devices[0].memory_stats() or {}).get('bytes_limit')


def prepare_environment(environment: MutableMapping[str, str], topology: str | None, devices: str | None) -> None:
    """Sets what JAX reads when it is first imported. Raises `ConfigError` for names of no topology or devices."""
    if topology is not None:
        check_topology(topology)
        environment.update(_QUIET_COMPILER)
    elif devices is not None:
        platform, count = parse_devices(devices)
        environment['JAX_PLATFORMS'] = 'cpu' if platform == 'cpu' else 'cuda,cpu'
        if platform == 'cpu':
            environment['JAX_NUM_CPU_DEVICES'] = str(count)


def check_topology(name: str) -> None:
    """Refuses a slice that there is not, and a machine without the TPU compiler."""
    generation, _, shape = name.partition(':')
    if shape not in TOPOLOGIES.get(generation, ()):
        known = '; '.join(f'{own}: {", ".join(shapes)}' for own, shapes in TOPOLOGIES.items())
        raise ConfigError(f'--topology is {name!r}; it must be GENERATION:SHAPE, as v5e:4x4, with one of {known}')
    if importlib.util.find_spec('libtpu') is None:
        raise ConfigError(
            f"--topology {name} needs the TPU compiler, libtpu, which is not installed: pip install '.[tpu]' here, or "
            "'transformer-jax[tpu]'; no TPU is needed"
        )


def parse_devices(name: str) -> tuple[str, int]:
    """'cpu:8' as ('cpu', 8)."""
    platform, _, count = name.partition(':')
    if platform not in ('cpu', 'gpu') or not count.isdigit() or not int(count):
        raise ConfigError(f'--devices is {name!r}; it must be cpu:N or gpu:N with a number from 1, as cpu:8 or gpu:1')
    return platform, int(count)


def open_topology(name: str) -> Target:
    """A TPU slice, known to the compiler alone."""
    from jax.experimental import topologies

    check_topology(name)
    devices = topologies.get_topology_desc(platform='tpu', topology_name=name).devices
    return Target(name, tuple(devices), find_chip(devices[0].device_kind))


def open_devices(name: str) -> Target:
    """Devices of this machine. Raises `ConfigError` when it has fewer."""
    import jax

    platform, count = parse_devices(name)
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise ConfigError(f'--devices is {name!r}, but JAX finds no {platform} on this machine: {error}') from None
    if len(devices) < count:
        raise ConfigError(f'--devices is {name!r}, but this machine has {len(devices)} of them')
    return Target(name, tuple(devices[:count]), find_chip('cpu' if platform == 'cpu' else devices[0].device_kind))


def first_devices(target: Target, count: int) -> Sequence[Any]:
    """The first devices of a target, for a mesh of `count`.

    The compiler takes the chips of one whole host of a larger slice for a slice of their own, whose chips it numbers
    anew: they are asked for as that slice. Raises `ConfigError` for more than there are.
    """
    if count > len(target.devices):
        raise ConfigError(
            f'the mesh takes {count} devices, but {target.name} has {len(target.devices)}; a smaller mesh uses its '
            'first ones'
        )
    first = target.devices[:count]
    if target.platform != 'tpu' or count == len(target.devices):
        return first
    hosts = {device.process_index for device in first}
    if len(hosts) > 1 or count != sum(device.process_index in hosts for device in target.devices):
        return first
    generation, _, whole = target.name.partition(':')
    sides = [max(device.coords[axis] for device in first) + 1 for axis in range(len(whole.split('x')))]
    shape = 'x'.join(map(str, sides))
    return open_topology(f'{generation}:{shape}').devices if prod(sides) == count else first
