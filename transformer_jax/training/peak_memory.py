"""The most memory a training has taken, on the host and on its devices."""

import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import jax


def measure_peak_memory(before: Mapping[str, int | None] | None = None) -> dict[str, int | None]:
    """Bytes at the peak of this process so far, or `before`, of an earlier start of the run, where that was more.

    `device_bytes` is of this process's fullest device, None where devices have no memory of their own.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    known = [one['peak_bytes_in_use'] for one in stats if one and 'peak_bytes_in_use' in one]
    now = {'host_bytes': _host_bytes(), 'device_bytes': max(known, default=None)}
    before = before or {}
    return {
        name: max((value for value in (peak, before.get(name)) if value is not None), default=None)
        for name, peak in now.items()
    }


def _host_bytes() -> int:
    status = Path('/proc/self/status')
    if status.exists():  # unlike the other figure it holds nothing of the process that began this one
        for line in status.read_text().splitlines():
            if line.startswith('VmHWM:'):
                return 1024 * int(line.split()[1])
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == 'darwin' else 1024 * largest
