"""The update as it is compiled: which arrays it takes and gives, where they lie, and what it may overwrite.

Training calls it and `plan` compiles it for machines that are not here, so it is said once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from transformer_jax.config import Config
from transformer_jax.data.batch import Batch
from transformer_jax.models.interface import Model
from transformer_jax.parallel.chips import find_chip
from transformer_jax.parallel.mesh import batch_sharding, replicated
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.schedule import make_schedule
from transformer_jax.training.state import TrainState, abstract_state, state_shardings
from transformer_jax.training.step import make_train_step


class Update(NamedTuple):
    """One update of a run on a mesh."""

    jitted: Any  # (state, micro-batches) -> (state, metrics); the state is donated
    optimizer: optax.GradientTransformation
    state: TrainState  # shapes, dtypes and shardings
    batch: jax.sharding.NamedSharding  # of every array of a micro-batch


def make_update(config: Config, model: Model, mesh: jax.sharding.Mesh) -> Update:
    """The update that `config` asks for. Nothing is computed and no parameter is drawn."""
    schedule = make_schedule(config.optimizer.schedule, config.model.d_model, config.train.steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    step = make_train_step(model, optimizer, schedule, config.train, seed=config.seed, mesh=mesh)
    abstract = abstract_state(model, optimizer, with_average=config.train.ema_decay is not None)
    shardings = state_shardings(model, optimizer, abstract, mesh)
    batch = batch_sharding(mesh)
    jitted = jax.jit(
        step,
        in_shardings=(shardings, batch),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
        compiler_options=_compiler_options(mesh),
    )
    state = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), abstract, shardings
    )
    return Update(jitted, optimizer, state, batch)


def _compiler_options(mesh: jax.sharding.Mesh) -> dict[str, str] | None:
    chip = find_chip(mesh.devices.flat[0].device_kind)
    if chip is None or chip.scoped_vmem_kib is None:
        return None
    return {'xla_tpu_scoped_vmem_limit_kib': str(chip.scoped_vmem_kib)}


def abstract_batch(
    rows: int, source_length: int, target_length: int, sharding: jax.sharding.NamedSharding | None
) -> Batch:
    """The shapes of one global micro-batch."""

    def side(length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding)

    return Batch(*(side(length) for _ in range(3) for length in (source_length, target_length)))
