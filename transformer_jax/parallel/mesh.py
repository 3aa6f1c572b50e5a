"""The device mesh and where a batch lies on it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.config import ConfigError, MeshConfig

DATA = 'data'  # the mesh axis that splits the rows of a batch


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all `devices`; the default is every device of every process.

    Axes are of type Auto: Linen modules fail on the Explicit axes that JAX makes by default. Raises `ConfigError` when
    the sizes don't fit.
    """
    devices = jax.devices() if devices is None else list(devices)
    data = len(devices) if config.data is None else config.data
    if data != len(devices):
        raise ConfigError(
            f'config.execution.mesh.data is {data}, but there are {len(devices)} devices '
            f'({devices[0].platform}); {len(devices)} fits, and so does None, which takes them all'
        )
    return Mesh(np.asarray(devices), (DATA,), axis_types=(AxisType.Auto,))


def num_data_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a global batch are split."""
    return mesh.shape[DATA]


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over the data axis, every other axis whole."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """A pytree of this process's numpy rows as global arrays whose rows lie over the data axis.

    Every process passes the same number of rows; theirs follow each other in process order. Raises `ValueError` when
    the rows can't be split evenly over this process's devices.
    """
    shards = len(mesh.local_devices)
    for path, array in jax.tree_util.tree_leaves_with_path(batch):
        if array.shape[0] % shards:
            lower = array.shape[0] - array.shape[0] % shards
            raise ValueError(
                f'batch{jax.tree_util.keystr(path)} has {array.shape[0]} rows, which {shards} devices of mesh axis '
                f'{DATA!r} can not split evenly; {f"{lower} or " if lower else ""}{lower + shards} would fit'
            )
    return jax.make_array_from_process_local_data(batch_sharding(mesh), batch)
