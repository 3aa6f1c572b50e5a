"""The verb `plan`: compiles a run's own programs for devices that need not be here, and says what they take."""

from typing import Any, NamedTuple

import jax

from transformer_jax import models
from transformer_jax.config import Config
from transformer_jax.models.interface import Model
from transformer_jax.parallel.plan import Plan, compile_program
from transformer_jax.parallel.platform import compiling_for
from transformer_jax.parallel.targets import Target
from transformer_jax.training.update import abstract_batch, make_update


class Shape(NamedTuple):
    """Rows of a global batch, and slots of each of them."""

    rows: int
    source_length: int
    target_length: int


def build_model(config: Config, *, vocab_size: int | None = None, start_id: int = 0) -> Model:
    """The model before there is a vocabulary: of the size that the config asks for, which is all that shapes need."""
    size = config.vocabulary.size if vocab_size is None else vocab_size
    return models.build(config.model, vocab_size=size, start_id=start_id, execution=config.execution)


def plan_training(config: Config, target: Target, mesh: jax.sharding.Mesh, shape: Shape) -> Plan:
    """The update that training runs, `config.train.accumulation` micro-batches of this shape, compiled."""
    with compiling_for(target.platform):
        update = make_update(config, build_model(config), mesh)
    batch: Any = abstract_batch(*shape, update.batch)
    return compile_program(update.jitted, (update.state, (batch,) * config.train.accumulation), target, mesh)
