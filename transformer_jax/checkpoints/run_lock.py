"""The lock of a run folder: one live writer, whom another process can name."""

import json
import os
import socket
import time
from typing import Any

from etils import epath

from transformer_jax import files
from transformer_jax.config import ConfigError


class RunFolderError(ConfigError):
    """A folder that can't be used as this run's; the message names what it holds and what to do."""


def take_lock(path: epath.Path) -> Any:
    """Takes the lock and says in owner.json who holds it. Raises RunFolderError naming the process that has it."""
    import filelock

    lock = filelock.FileLock(path / 'run.lock', thread_local=False)
    owner = path / 'owner.json'
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise RunFolderError(f'{path} is in use by another live run ({_describe_owner(owner)})') from error
    files.write_json(owner, {'pid': os.getpid(), 'host': socket.gethostname(), 'since': now()})
    return lock


def _describe_owner(owner: epath.Path) -> str:
    for _ in range(5):  # the other one may have taken the lock a moment ago
        try:
            entry = json.loads(owner.read_text())
            return f'process {entry["pid"]} on {entry["host"]} since {entry["since"]}'
        except (OSError, ValueError, KeyError):
            time.sleep(0.05)
    return 'its process is unknown'


def now() -> str:
    """The time of day, to the second, with its zone."""
    return time.strftime('%Y-%m-%dT%H:%M:%S%z')
