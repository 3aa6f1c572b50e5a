"""The mesh, placing batches on it, and what each process feeds."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from transformer_jax.config import ConfigError, MeshConfig
from transformer_jax.data.batch import Batch
from transformer_jax.parallel import mesh as mesh_module
from transformer_jax.parallel.mesh import (
    AXES,
    batch_sharding,
    make_mesh,
    num_data_shards,
    place_batch,
    replicated,
    rows_of_process,
)


def make_batch(rows: int, length: int = 3) -> Batch:
    rng = np.random.default_rng(0)
    return Batch(*[rng.integers(0, 99, (rows, length * (1 + i % 2))).astype(np.int32) for i in range(6)])


@pytest.mark.parametrize('count', [1, 2, 3, 8])
def test_none_takes_every_device(count: int) -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:count])
    assert mesh.axis_names == AXES == ('data', 'fsdp', 'model', 'sequence')
    assert tuple(mesh.shape.values()) == (count, 1, 1, 1)
    assert num_data_shards(mesh) == count
    assert mesh.axis_types == (AxisType.Auto,) * 4


def test_none_takes_what_the_others_leave() -> None:
    mesh = make_mesh(MeshConfig(fsdp=2, sequence=2))
    assert tuple(mesh.shape.values()) == (2, 2, 1, 2)
    assert num_data_shards(mesh) == 4
    assert list(mesh.devices.flat) == jax.devices()


def test_the_default_is_all_devices() -> None:
    assert list(make_mesh(MeshConfig(data=8)).devices.flat) == jax.devices()


@pytest.mark.parametrize('data', [1, 3, 16])
def test_a_mesh_that_does_not_fit_says_what_would(data: int) -> None:
    asked = rf'config\.execution\.mesh is data {data} x fsdp 1 x model 1 x sequence 1'
    with pytest.raises(ConfigError, match=rf'{asked}.*8 devices.*data=8.* fits; data=None'):
        make_mesh(MeshConfig(data=data))


@pytest.mark.parametrize(
    ('config', 'fits'),
    [
        (MeshConfig(model=3), 'model=1 or 2 or 4 or 8 fits'),
        (MeshConfig(fsdp=2, model=8), 'fsdp=1, or model=1 or 2 or 4 fits'),
        (MeshConfig(data=2, fsdp=2, sequence=4), 'data=1, or fsdp=1, or sequence=2 fits'),
        (MeshConfig(fsdp=3, model=5), 'each is one of 1, 2, 4, 8; data=None'),
    ],
)
def test_the_error_names_the_sizes_that_fit_beside_the_others(config: MeshConfig, fits: str) -> None:
    with pytest.raises(ConfigError, match=fits):
        make_mesh(config)


def test_what_the_error_names_does_fit() -> None:
    for sizes in itertools.product([None, 1, 2, 3], [1, 2, 3], [1, 4], [1, 2]):
        config = MeshConfig(*sizes)
        try:
            make_mesh(config)
        except ConfigError as error:
            for part in str(error).split('as they are, ')[1:]:
                for choice in part.split(' fits')[0].split(', or '):
                    axis, ways = choice.split('=')
                    for one in ways.split(' or '):
                        make_mesh(dataclasses.replace(config, **{axis: int(one)}))


@pytest.mark.parametrize('count', [1, 2, 4, 8])
def test_rows_of_a_batch_lie_over_the_devices_in_order(count: int) -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:count])
    batch = make_batch(16)
    placed = place_batch(batch, mesh)
    assert isinstance(placed, Batch)
    for host, array in zip(batch, placed, strict=True):
        assert array.sharding == batch_sharding(mesh)
        np.testing.assert_array_equal(array, host)
        rows = 16 // count
        for index, (device, shard) in enumerate(zip(mesh.devices.flat, array.addressable_shards, strict=True)):
            assert shard.device == device
            np.testing.assert_array_equal(shard.data, host[index * rows : (index + 1) * rows])


def test_rows_lie_over_data_and_fsdp_and_columns_over_sequence() -> None:
    mesh = make_mesh(MeshConfig(fsdp=2, sequence=2))
    batch = make_batch(4, length=6)
    for host, array in zip(batch, place_batch(batch, mesh), strict=True):
        half = host.shape[1] // 2
        for shard in array.addressable_shards:
            data, fsdp, _, part = np.argwhere(mesh.devices == shard.device)[0]
            row = 2 * data + fsdp
            np.testing.assert_array_equal(shard.data, host[row : row + 1, part * half : (part + 1) * half])


@pytest.mark.parametrize(('rows', 'fits'), [(13, '8 or 16'), (3, '8')])
def test_rows_that_do_not_split_evenly_are_refused(rows: int, fits: str) -> None:
    with pytest.raises(ValueError, match=rf'batch\.inputs has {rows} rows.*8 ways.*; {fits} would fit'):
        place_batch(make_batch(rows), make_mesh(MeshConfig()))


def test_columns_that_do_not_split_evenly_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"batch\.inputs has 7 columns.*4 ways of mesh axis 'sequence'.*; 4 or 8 would"
    ):
        place_batch(make_batch(8, length=7), make_mesh(MeshConfig(sequence=4)))


def test_a_replicated_array_is_whole_on_every_device() -> None:
    mesh = make_mesh(MeshConfig())
    array = jax.device_put(np.arange(15.0).reshape(3, 5), replicated(mesh))
    assert [shard.data.shape for shard in array.addressable_shards] == [(3, 5)] * 8


@dataclasses.dataclass(frozen=True)
class Device:
    """One of a process of four."""

    id: int

    @property
    def process_index(self) -> int:
        return self.id // 4


@pytest.mark.parametrize(
    ('sizes', 'expected'),
    [
        ((8, 1, 1, 1), [(0, 2), (1, 2)]),
        ((2, 2, 2, 1), [(0, 2), (1, 2)]),
        ((2, 1, 4, 1), [(0, 2), (1, 2)]),
        ((1, 1, 4, 2), [(0, 1), (0, 1)]),  # both hold all rows
        ((1, 2, 1, 4), [(0, 2), (1, 2)]),
    ],
)
def test_processes_feed_the_rows_that_lie_on_their_devices(
    sizes: tuple[int, ...], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = np.array([Device(index) for index in range(8)], object).reshape(sizes)
    mesh: Any = type('Stand', (), {'devices': devices, 'shape': dict(zip(AXES, sizes, strict=True))})()
    found = []
    for process in range(2):
        monkeypatch.setattr(mesh_module.jax, 'process_index', lambda process=process: process)
        found.append(rows_of_process(mesh))
    assert found == expected


def test_rows_that_straddle_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = np.array([Device(index) for index in range(12)], object).reshape(2, 1, 6, 1)
    mesh: Any = type('Stand', (), {'devices': devices, 'shape': dict(zip(AXES, devices.shape, strict=True))})()
    mesh.local_devices = list(devices.flat[:4])
    monkeypatch.setattr(mesh_module.jax, 'process_index', lambda: 1)
    with pytest.raises(ConfigError, match='model x sequence must divide the 4 devices of a process'):
        rows_of_process(mesh)


def test_one_process_feeds_all_rows() -> None:
    mesh: Mesh = make_mesh(MeshConfig(model=4))
    assert rows_of_process(mesh) == (0, 1)
