"""One update of a small model on a mesh, to be compared with that of one device."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from tests.models import tiny
from transformer_jax.config import (
    ExecutionConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from transformer_jax.data.batch import Batch
from transformer_jax.models import build
from transformer_jax.models.interface import Model
from transformer_jax.parallel.mesh import batch_sharding, make_mesh, place_batch, replicated, rows_of_process
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.schedule import make_schedule
from transformer_jax.training.state import TrainState, abstract_state, make_state, state_shardings
from transformer_jax.training.step import make_train_step

# Eight ways split every axis that a rule splits; 23 subwords are padded to 24.
CONFIG = dataclasses.replace(
    tiny.CONFIG,
    d_model=16,
    d_ff=40,
    num_encoder_layers=1,
    num_decoder_layers=2,
    vocab_pad_multiple=8,
    attention=dataclasses.replace(tiny.CONFIG.attention, num_heads=8, head_dim=7, value_dim=5),
    dropout_rate=0.2,
    activation_dropout_rate=0.2,
)
TRAIN = TrainConfig(prng='threefry2x32', loss_block_tokens=5, ema_decay=0.9)
# Shards of very unequal work: some rows hold next to nothing.
SOURCE_LENGTHS = [7, 1, 8, 1, 2, 3, 5, 7, 1, 1, 1, 1, 6, 8, 4, 2]
TARGET_LENGTHS = [15, 1, 2, 1, 9, 16, 1, 2, 1, 1, 1, 1, 11, 3, 7, 13]


class Update(NamedTuple):
    """What one update made, on the host, and how much of the state a device held."""

    loss: float
    gradients: Any
    state: TrainState
    whole: list[str]  # leaves of the state that every device holds whole
    bytes_a_device: int
    argument_bytes: int  # of the compiled program, a device
    text: str  # the program


def make_model(**changes: Any) -> Model:
    config: ModelConfig = dataclasses.replace(CONFIG, **changes)
    return build(config, vocab_size=tiny.V, start_id=tiny.START, execution=ExecutionConfig(unroll=1))


def make_batch(seed: int = 0) -> Batch:
    return tiny.make_batch(SOURCE_LENGTHS[seed:] + SOURCE_LENGTHS[:seed], TARGET_LENGTHS, seed)


def _keep_gradient() -> optax.GradientTransformation:
    """Passes the gradient on; its state is the gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda gradients, state, params: (gradients, gradients)
    )


def make_optimizers(name: str = 'adam') -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Adam with an epsilon that keeps its first update from being a mere sign, which rounding may turn."""
    schedule = make_schedule(ScheduleConfig(warmup_steps=3), 16, 100)
    options = {'epsilon': 0.1} if name == 'adam' else {}
    return optax.chain(_keep_gradient(), make_optimizer(OptimizerConfig(name=name, **options), schedule)), schedule


@functools.cache
def update(
    model: Model, mesh_config: MeshConfig, optimizer_name: str = 'adam', accumulation: int = 1, factor: float = 0.5
) -> Update:
    """The first update of a run on a mesh over as many devices as it takes, those of all processes.

    The parameters are those of other tests times `factor`: at half of them rounding moves a softmax less.
    """
    mesh = make_mesh(mesh_config, jax.devices()[: num_devices(mesh_config)])
    optimizer, schedule = make_optimizers(optimizer_name)
    params = jax.tree.map(lambda leaf: leaf * factor, tiny.make_params(model))
    start = jax.device_get(make_state(params, optimizer, with_average=True))
    with jax.set_mesh(mesh):
        abstract = abstract_state(model, optimizer, with_average=True)
        shardings = state_shardings(model, optimizer, abstract, mesh)
        step = jax.jit(
            make_train_step(model, optimizer, schedule, TRAIN, seed=11, mesh=mesh),
            in_shardings=(shardings, batch_sharding(mesh)),
            out_shardings=(shardings, replicated(mesh)),
            donate_argnums=0,
        )
        batches = tuple(place_batch(_own_rows(make_batch(seed), mesh), mesh) for seed in range(accumulation))
        state = jax.tree.map(lambda leaf, where: jax.device_put(leaf, where, may_alias=False), start, shardings)
        program = step.lower(state, batches).compile()
        state, metrics = program(state, batches)
    named = jax.tree_util.tree_leaves_with_path(state)
    whole = [jax.tree_util.keystr(path) for path, leaf in named if leaf.sharding.is_fully_replicated]
    first = mesh.local_devices[0]
    held = sum(shard.data.nbytes for _, leaf in named for shard in leaf.addressable_shards if shard.device == first)
    assert not int(metrics.bad_steps)
    if jax.process_count() > 1:
        state = multihost_utils.process_allgather(state, tiled=True)
    state = jax.device_get(state)
    memory: Any = program.memory_analysis()
    arguments, text = memory.argument_size_in_bytes, str(program.as_text())
    return Update(float(metrics.loss_sum), state.optimizer[0], state, whole, held, arguments, text)


def num_devices(config: MeshConfig) -> int:
    return (config.data or 1) * config.fsdp * config.model * config.sequence


def _own_rows(batch: Batch, mesh: jax.sharding.Mesh) -> Batch:
    """Those that this process feeds."""
    index, count = rows_of_process(mesh)
    return jax.tree.map(lambda rows: np.split(rows, count)[index], batch)


def assert_equal(actual: Update, expected: Update, limit: float = 5e-6) -> None:
    """Loss, and leaf by leaf gradients, parameters, optimizer state and average, each within its own norm."""
    assert abs(actual.loss / expected.loss - 1) < limit
    for part in ('gradients', 'state'):
        pairs = zip(
            jax.tree_util.tree_leaves_with_path(getattr(actual, part)),
            jax.tree.leaves(getattr(expected, part)),
            strict=True,
        )
        for (path, ours), theirs in pairs:
            name = jax.tree_util.keystr(path)
            error, size = (np.linalg.norm(np.float64(x).ravel()) for x in (ours - theirs, theirs))
            allowed = 2 * limit if '.nu[' in name else limit  # squares of the gradient
            assert error <= allowed * size, f'{part}{name}: {error / size:.1e}'
