"""A training state saved on one mesh is read onto any other that can hold it, bit for bit."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.parallel.meshed import make_model, make_optimizers, num_devices
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.checkpoints.store import Store
from transformer_jax.config import AttentionConfig, CheckpointConfig, ConfigError, MeshConfig
from transformer_jax.parallel.mesh import make_mesh
from transformer_jax.training.state import abstract_state, check_mesh, state_shardings

MODEL = make_model()
WRITTEN = MeshConfig(data=1, fsdp=8)
READ = [
    MeshConfig(data=1),
    MeshConfig(data=2),
    MeshConfig(data=1, fsdp=4),
    MeshConfig(data=1, model=8),  # FSDP to TP
    MeshConfig(data=2, fsdp=2, model=2),
]


def placed(config: MeshConfig) -> tuple[Any, Any]:
    """The shapes of the state of a run with Adafactor and an average, and where it lies on a mesh."""
    mesh = make_mesh(config, jax.devices()[: num_devices(config)])
    optimizer = make_optimizers('adafactor')[0]
    abstract = abstract_state(MODEL, optimizer, with_average=True)
    return abstract, state_shardings(MODEL, optimizer, abstract, mesh)


@pytest.fixture(scope='module')
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp('runs') / 'run'
    abstract, shardings = placed(WRITTEN)
    draw = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: (9 * draw.normal(size=leaf.shape)).astype(leaf.dtype), abstract)
    with RunFolder.start(path, {}, lambda old, new: []) as folder, Store(folder, CheckpointConfig()) as store:
        store.save(3, jax.tree.map(jax.device_put, state, shardings), {}, snapshot=True)
        store.wait()
    return path, state


@pytest.mark.parametrize('config', READ)
def test_a_state_comes_back_on_another_mesh(config: MeshConfig, saved: tuple[Path, Any]) -> None:
    path, state = saved
    abstract, shardings = placed(config)
    target = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), abstract, shardings
    )
    with Store(RunFolder.open(path), CheckpointConfig()) as store:
        _, found, _ = store.restore(target)
        params, _ = store.restore_params(jax.eval_shape(MODEL.init, jax.random.key(0)), part='average')

    def require(ours: Any, theirs: Any, where: Any) -> None:
        assert ours.sharding.is_equivalent_to(where, ours.ndim)
        assert ours.dtype == jnp.asarray(theirs).dtype
        np.testing.assert_array_equal(ours, theirs)

    jax.tree.map(require, found, state, shardings)
    jax.tree.map(np.testing.assert_array_equal, params, state.average)  # to translate with, on one device


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        (MeshConfig(data=1, fsdp=3), r"axis 'embed' of size 16 .* 3 ways of mesh axis 'fsdp'.*mesh\.fsdp=1 or 2"),
        (MeshConfig(data=1, model=6), r"parameter .*: axis 'heads' of size 8 .*6 ways of mesh axis 'model'.*6 or 12"),
    ],
)
def test_a_mesh_that_can_not_hold_it_is_refused_by_name(config: MeshConfig, message: str) -> None:
    mesh = make_mesh(config, jax.devices()[: num_devices(config)])
    with pytest.raises(ConfigError, match=message):
        check_mesh(make_model(vocab_pad_multiple=6), mesh)


def test_a_vocabulary_that_does_not_divide_is_refused_unless_the_config_pads_it() -> None:
    mesh = make_mesh(MeshConfig(data=1, model=4), jax.devices()[:4])
    refused = r"table: axis 'vocab' of size 23 is .*4 ways.*20 or 24.*mesh\.model=1; .*vocab_pad_multiple=4 .* to 24"
    with pytest.raises(ConfigError, match=refused):
        check_mesh(make_model(vocab_pad_multiple=1), mesh)
    check_mesh(make_model(vocab_pad_multiple=4), mesh)


def test_fewer_key_value_heads_than_ways_are_refused() -> None:
    few = make_model(attention=AttentionConfig(num_heads=8, head_dim=7, num_kv_heads=2))
    mesh = make_mesh(MeshConfig(data=1, model=4), jax.devices()[:4])
    with pytest.raises(ConfigError, match=r"key/kernel: axis 'kv_heads' of size 2 .*a size of 4 .*model=1 or 2"):
        check_mesh(few, mesh)
