"""The device mesh, where a batch lies on it, and which of its rows a process feeds."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.config import ConfigError, MeshConfig

DATA = 'data'  # splits the rows of a batch
FSDP = 'fsdp'  # splits the rows of a batch as well, and the width of every parameter
MODEL = 'model'  # splits heads, feed-forward layers and the vocabulary
SEQUENCE = 'sequence'  # splits the length of a batch
AXES = (DATA, FSDP, MODEL, SEQUENCE)  # of every mesh, outermost first; neighbouring devices differ in the last
ROWS = (DATA, FSDP)  # the mesh axes over which the rows of a batch lie


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with all of `AXES` over all `devices`; the default is every device of every process.

    Axes are of type Auto: Linen modules fail on the Explicit axes that JAX makes by default. Raises `ConfigError` when
    the sizes don't fit.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {axis: getattr(config, axis) for axis in AXES}
    others = math.prod(size for size in sizes.values() if size is not None)
    if config.data is None and len(devices) % others == 0:
        sizes[DATA] = len(devices) // others
    if None in sizes.values() or math.prod(sizes.values()) != len(devices):
        raise ConfigError(_say_what_fits(config, sizes, len(devices), devices[0].platform))
    return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _say_what_fits(config: MeshConfig, sizes: dict[str, int | None], num_devices: int, platform: str) -> str:
    asked = ' x '.join(f'{axis} {size}' for axis, size in sizes.items())
    fits = []
    for axis, size in sizes.items():
        rest = math.prod(other or 1 for name, other in sizes.items() if name != axis)
        if num_devices % rest == 0 and size is not None:
            room = num_devices // rest
            choices = [ways for ways in range(1, room + 1) if room % ways == 0] if config.data is None else [room]
            fits.append(f'{axis}={" or ".join(map(str, choices))}')
    known = f'{"; with the others as they are, " + ", or ".join(fits) + " fits" if fits else ""}'
    divisors = ', '.join(str(ways) for ways in range(1, num_devices + 1) if num_devices % ways == 0)
    return (
        f'config.execution.mesh is {asked}, but there are {num_devices} devices ({platform}): the product of the four '
        f'must be {num_devices}, so that each is one of {divisors}{known}; data=None takes what the others leave'
    )


def num_data_shards(mesh: Mesh | AbstractMesh) -> int:
    """Into how many parts the rows of a global batch are split."""
    return math.prod(mesh.shape.get(axis, 1) for axis in ROWS)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of `[rows, length, ...]`: rows over `ROWS`, the length over `SEQUENCE`."""
    return NamedSharding(mesh, PartitionSpec(ROWS, SEQUENCE))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows_of_process(mesh: Mesh) -> tuple[int, int]:
    """Which of how many equal parts of a batch's rows this process feeds: `(index, count)`.

    Processes that share rows, because the other axes reach over several, feed the same part. Raises `ConfigError` when
    the rows of a process are not one such part.
    """
    parts: dict[int, set[int]] = {}
    by_rows = mesh.devices.reshape(num_data_shards(mesh), -1)
    for shard, devices in enumerate(by_rows):
        for device in devices:
            parts.setdefault(device.process_index, set()).add(shard)
    own = parts[jax.process_index()]
    count, left = divmod(len(by_rows), len(own))
    ordered = sorted({min(part): part for part in parts.values()}.items())
    even = [set(range(index * len(own), (index + 1) * len(own))) for index in range(count)]
    if left or [part for _, part in ordered] != even or any(part not in even for part in parts.values()):
        raise ConfigError(
            f'config.execution.mesh is {dict(mesh.shape)}: its rows are not split evenly by process; model x sequence '
            f'must divide the {len(mesh.local_devices)} devices of a process, or be a multiple of them'
        )
    return min(own) // len(own), count


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """A pytree of this process's numpy rows, `[rows, length, ...]`, as global arrays that lie as `batch_sharding` says.

    Every process passes as many rows, whole, those that `rows_of_process` names. Raises `ValueError` when the rows
    can't be split evenly over this process's devices, or the length over the mesh axis `sequence`.
    """
    index, count = rows_of_process(mesh)
    shards, sequence = num_data_shards(mesh) // count, mesh.shape[SEQUENCE]
    sharding = batch_sharding(mesh)

    def place(path: Any, array: np.ndarray) -> jax.Array:
        name, (rows, length, *rest) = f'batch{jax.tree_util.keystr(path)}', array.shape
        _require_even(name, rows, 'rows', shards, f'mesh axes {ROWS}')
        _require_even(name, length, 'columns', sequence, f'mesh axis {SEQUENCE!r}')
        first = index * rows

        def shard(where: Any) -> np.ndarray:
            start, stop, _ = where[0].indices(rows * count)
            return array[start - first : stop - first, where[1]]

        return jax.make_array_from_callback((rows * count, length, *rest), sharding, shard)

    return jax.tree_util.tree_map_with_path(place, batch)


def _require_even(name: str, size: int, what: str, ways: int, over: str) -> None:
    if size % ways == 0:
        return
    lower = size - size % ways
    raise ValueError(
        f'{name} has {size} {what}, which the {ways} ways of {over} can not split evenly; '
        f'{f"{lower} or " if lower else ""}{lower + ways} would fit'
    )
