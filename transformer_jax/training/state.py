"""All that one update changes."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.models.interface import Model, abstract_params
from transformer_jax.parallel.mesh import replicated
from transformer_jax.parallel.rules import sharding_tree
from transformer_jax.shapes import Array, Int, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A pytree of plain arrays. Random keys are derived from the run's seed and `step`, so they need no place here."""

    step: Int[Array, '']  # updates applied
    params: Params  # float32
    optimizer: optax.OptState
    average: Params | None  # exponential moving average of the parameters
    bad_in_row: Int[Array, '']  # updates skipped since the last good one
    bad_total: Int[Array, '']

    def evaluation_params(self) -> Params:
        """What evaluation and decoding use: the moving average where there is one."""
        return self.params if self.average is None else self.average


def make_state(params: Params, optimizer: optax.GradientTransformation, *, with_average: bool) -> TrainState:
    """The state before the first update."""
    average = jax.tree.map(jnp.copy, params) if with_average else None
    return TrainState(jnp.int32(0), params, optimizer.init(params), average, jnp.int32(0), jnp.int32(0))


def abstract_state(model: Model, optimizer: optax.GradientTransformation, *, with_average: bool) -> TrainState:
    """Shapes and dtypes of the state, computing nothing."""
    return jax.eval_shape(lambda: make_state(model.init(jax.random.key(0)), optimizer, with_average=with_average))


def check_mesh(model: Model, mesh: jax.sharding.Mesh) -> None:
    """Raises `ConfigError` naming the first parameter that the mesh can not split as the rules say."""
    sharding_tree(model.logical_axes(), abstract_params(model), mesh)


def state_shardings(
    model: Model, optimizer: optax.GradientTransformation, abstract: TrainState, mesh: jax.sharding.Mesh
) -> TrainState:
    """Where each array of the state lies: parameters by the rules table, and what follows a parameter along with it."""
    whole = replicated(mesh)
    params = sharding_tree(model.logical_axes(), abstract.params, mesh)

    def beside(leaf: jax.ShapeDtypeStruct, param: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
        if leaf.shape == param.shape:
            return sharding
        # Adafactor's statistics are means over one axis of a parameter: the other axes lie as they do there.
        spec = (*sharding.spec, *(None,) * (len(param.shape) - len(sharding.spec)))
        for axis in range(len(param.shape)):
            if leaf.shape == (*param.shape[:axis], *param.shape[axis + 1 :]):
                return NamedSharding(mesh, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))
        return whole  # a single number in the place of what the optimizer does not keep

    optimizer_state = optax.tree.map_params(
        optimizer, beside, abstract.optimizer, abstract.params, params, transform_non_params=lambda _: whole
    )
    average = None if abstract.average is None else params
    where: Any = whole  # a tree of shardings has the shape of a state, not its types
    return TrainState(where, params, optimizer_state, average, where, where)


def advance_average(average: Params, params: Params, step: Int[Array, ''], decay: float) -> Params:
    """One step of the moving average: average += (1 - d) (params - average).

    d is min(decay, (step + 1) / (step + 10)), so that a young average follows the parameters.
    """
    step = step.astype(jnp.float32)
    rate = 1 - jnp.minimum(decay, (step + 1) / (step + 10))
    return jax.tree.map(lambda old, new: old + rate * (new - old), average, params)


def choose(good: Array, new: TrainState, old: TrainState) -> TrainState:
    """`new` if the update was good; otherwise `old` with the skipped update counted."""
    chosen = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
    return dataclasses.replace(
        chosen,
        bad_in_row=jnp.where(good, 0, old.bad_in_row + 1),
        bad_total=jnp.where(good, old.bad_total, old.bad_total + 1),
    )
