"""The data mesh and placing batches on it."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from transformer_jax.config import ConfigError, MeshConfig
from transformer_jax.data.batch import Batch
from transformer_jax.parallel.mesh import batch_sharding, make_mesh, num_data_shards, place_batch, replicated


def make_batch(rows: int) -> Batch:
    rng = np.random.default_rng(0)
    return Batch(*[rng.integers(0, 99, (rows, 3 + 2 * (i % 2))).astype(np.int32) for i in range(6)])


@pytest.mark.parametrize('count', [1, 2, 3, 8])
def test_none_takes_every_device(count: int) -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:count])
    assert mesh.shape == {'data': count}
    assert num_data_shards(mesh) == count
    assert mesh.axis_types == (AxisType.Auto,)


def test_the_default_is_all_devices() -> None:
    assert list(make_mesh(MeshConfig(data=8)).devices.flat) == jax.devices()


@pytest.mark.parametrize('data', [1, 3, 16])
def test_a_mesh_that_does_not_fit_says_what_would(data: int) -> None:
    with pytest.raises(ConfigError, match=rf'config\.execution\.mesh\.data is {data}.*8 devices.*8 fits.*None'):
        make_mesh(MeshConfig(data=data))


@pytest.mark.parametrize('count', [1, 2, 4, 8])
def test_rows_of_a_batch_lie_over_the_devices_in_order(count: int) -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:count])
    batch = make_batch(16)
    placed = place_batch(batch, mesh)
    assert isinstance(placed, Batch)
    for host, array in zip(batch, placed, strict=True):
        assert array.sharding == batch_sharding(mesh)
        np.testing.assert_array_equal(array, host)
        for device, shard in zip(mesh.devices.flat, array.addressable_shards, strict=True):
            assert shard.device == device
        rows = 16 // count
        for index, shard in enumerate(array.addressable_shards):
            np.testing.assert_array_equal(shard.data, host[index * rows : (index + 1) * rows])


@pytest.mark.parametrize(('rows', 'fits'), [(13, '8 or 16'), (3, '8')])
def test_rows_that_do_not_split_evenly_are_refused(rows: int, fits: str) -> None:
    with pytest.raises(ValueError, match=rf'batch\.inputs has {rows} rows.*8 devices.*; {fits} would fit'):
        place_batch(make_batch(rows), make_mesh(MeshConfig()))


def test_a_replicated_array_is_whole_on_every_device() -> None:
    mesh = make_mesh(MeshConfig())
    array = jax.device_put(np.arange(15.0).reshape(3, 5), replicated(mesh))
    assert [shard.data.shape for shard in array.addressable_shards] == [(3, 5)] * 8
