"""One update as a pure function: gradients of a sum, divided by the global token count, applied if they are finite."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from transformer_jax.config import TrainConfig
from transformer_jax.data.batch import Batch
from transformer_jax.models.interface import Model, abstract_params
from transformer_jax.parallel.rules import sharding_tree
from transformer_jax.shapes import Array, Float, Key, Params, PRNGKey
from transformer_jax.training.loss import loss_sum
from transformer_jax.training.metrics import Metrics, count_slots, count_targets, step_metrics
from transformer_jax.training.state import TrainState, advance_average, choose

Step = Callable[[TrainState, tuple[Batch, ...]], tuple[TrainState, Metrics]]


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    config: TrainConfig,
    *,
    seed: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Step:
    """The update `(state, micro-batches of one shape) -> (state, metrics)`, not yet jitted.

    The loss is a sum over the tokens to predict and its gradient is divided by their number once, after all
    micro-batches, so accumulation and sharding change nothing. An update whose loss or gradient is not finite is
    skipped and counted. On a `mesh` gradients lie where their parameters do, as soon as they are made.
    """
    place = _placing(model, mesh)

    def step(state: TrainState, micro_batches: tuple[Batch, ...]) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(jax.random.key(seed, impl=config.prng), state.step)
        (loss, nll), gradients, counts = _accumulate(model, state.params, micro_batches, config, rng, mesh, place)
        tokens = jnp.maximum(counts['target_tokens'], 1)
        gradients = jax.tree.map(lambda g: g / tokens, gradients)
        norm = optax.tree.norm(gradients)
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & (counts['target_tokens'] > 0)
        updated = _apply(state, optimizer, gradients, config.ema_decay)
        metrics = step_metrics(
            loss_sum=loss, nll_sum=nll, counts=counts, gradient_norm=norm, learning_rate=schedule(state.step), good=good
        )
        return choose(good, updated, state), metrics

    return step


def _placing(model: Model, mesh: jax.sharding.Mesh | None) -> Callable[[Params], Params]:
    """Lays gradients as the parameters lie, so that no device holds more of them than it updates."""
    if mesh is None or mesh.size == 1:
        return lambda gradients: gradients
    shardings = sharding_tree(model.logical_axes(), abstract_params(model), mesh)
    return lambda gradients: jax.lax.with_sharding_constraint(gradients, shardings)


def _apply(
    state: TrainState, optimizer: optax.GradientTransformation, gradients: Params, ema_decay: float | None
) -> TrainState:
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    average = state.average
    if ema_decay is not None:
        average = advance_average(average, params, state.step, ema_decay)
    return dataclasses.replace(state, step=state.step + 1, params=params, optimizer=optimizer_state, average=average)


def _accumulate(
    model: Model,
    params: Params,
    micro_batches: tuple[Batch, ...],
    config: TrainConfig,
    rng: PRNGKey,
    mesh: jax.sharding.Mesh | None,
    place: Callable[[Params], Params],
) -> tuple[tuple[Float[Array, ''], Float[Array, '']], Params, dict[str, Array]]:
    """Loss, likelihood, gradients and counts, each summed over the micro-batches."""

    def one(batch: Batch, rng: PRNGKey) -> tuple:
        task = model.objective(batch, _row_keys(rng, batch.inputs.shape[0]))

        def loss(params: Params) -> tuple[Array, Array]:
            return loss_sum(model, params, task, config, dropout_rng=rng, mesh=mesh)

        (value, nll), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return (value, nll), place(gradients), count_slots(batch, model.task.sides) | count_targets(task)

    if len(micro_batches) == 1:
        return one(micro_batches[0], rng)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *micro_batches)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(one, micro_batches[0], rng))

    def add(total: tuple, batch_and_key: tuple[Batch, PRNGKey]) -> tuple[tuple, None]:
        return jax.tree.map(jnp.add, total, one(*batch_and_key)), None

    return jax.lax.scan(add, zeros, (stacked, jax.random.split(rng, len(micro_batches))))[0]


def _row_keys(rng: PRNGKey, num_rows: int) -> Key[Array, 'B']:
    """A key for each row of a batch, of the generator whose draws no sharding changes."""
    data = jax.random.bits(jax.random.fold_in(rng, 1), (2,), jnp.uint32)
    return jax.random.split(jax.random.wrap_key_data(data, impl='threefry2x32'), num_rows)
