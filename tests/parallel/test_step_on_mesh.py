"""An update on any mesh is that of one device."""

import pytest

from tests.parallel.meshed import assert_equal, make_model, update
from transformer_jax.config import MeshConfig

MESHES = {
    'data8': MeshConfig(data=8),
    'fsdp2': MeshConfig(data=1, fsdp=2),
    'fsdp4': MeshConfig(data=1, fsdp=4),
    'fsdp8': MeshConfig(data=1, fsdp=8),
    'model2': MeshConfig(data=1, model=2),
    'model4': MeshConfig(data=1, model=4),
    'model8': MeshConfig(data=1, model=8),
    'sequence2': MeshConfig(data=1, sequence=2),
    'sequence8': MeshConfig(data=1, sequence=8),
    'fsdp2model2': MeshConfig(data=1, fsdp=2, model=2),
    'data2fsdp2model2': MeshConfig(data=2, fsdp=2, model=2),
    'data2sequence4': MeshConfig(data=2, sequence=4),
    'fsdp2model2sequence2': MeshConfig(data=1, fsdp=2, model=2, sequence=2),
    'data4model2': MeshConfig(data=4, model=2),
}
FAST = ('data2fsdp2model2',)


def num_devices(config: MeshConfig) -> int:
    return (config.data or 1) * config.fsdp * config.model * config.sequence


@pytest.mark.parametrize(
    'name', [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MESHES]
)
def test_an_update_on_a_mesh_is_that_of_one_device(name: str) -> None:
    config = MESHES[name]
    model = make_model()
    assert_equal(update(model, config, num_devices(config)), update(model, MeshConfig(), 1))
