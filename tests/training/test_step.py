"""One update: Adam on the mean gradient, however its batch is split, or nothing at all when it is not finite."""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import oracles
from tests.models.tiny import START, V, make_batch, make_model, make_params
from transformer_jax.config import OptimizerConfig, ScheduleConfig, TrainConfig
from transformer_jax.data.batch import Batch
from transformer_jax.models.interface import TRANSLATION
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.schedule import make_schedule
from transformer_jax.training.state import TrainState, make_state
from transformer_jax.training.step import make_train_step

RATES = ScheduleConfig(warmup_steps=3)
SCHEDULE = make_schedule(RATES, 14, 100)


@dataclass(frozen=True)
class Bigram:
    """Predicts each token from the one before it: compiled at once, with gradients that differ in every token."""

    vocab_size: int = V
    noise: float = 0.0
    prng: str = 'rbg'
    task = TRANSLATION

    def init(self, rng: Any = None) -> Any:
        draw = np.random.default_rng(3)
        return {name: jnp.float32(draw.normal(size=shape)) for name, shape in (('table', (V, 5)), ('mix', (5, 5)))}

    def objective(self, batch: Batch, rngs: Any) -> Batch:
        return batch

    def hidden(self, params: Any, batch: Batch, *, dropout_rng: Any = None) -> Any:
        assert str(jax.random.key_impl(dropout_rng)) == self.prng
        before = jnp.pad(batch.targets[:, :-1], ((0, 0), (1, 0)))
        hidden = jnp.tanh(params['table'][before] @ params['mix'])
        return hidden + self.noise * jax.random.normal(dropout_rng, hidden.shape)

    def output_table(self, params: Any) -> Any:
        return params['table'], None


def keep_gradient() -> optax.GradientTransformation:
    """Updates nothing; its state is the gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda gradients, state, params: (jax.tree.map(jnp.zeros_like, params), gradients),
    )


def adam(clip_norm: float | None = None) -> optax.GradientTransformation:
    return make_optimizer(OptimizerConfig(schedule=RATES, clip_norm=clip_norm), SCHEDULE)


@functools.cache
def start(
    make: Any = adam, *, model: Any = Bigram(), clip_norm: float | None = None, **options: Any
) -> tuple[TrainState, Any]:
    """The first state of a model, and its update, compiled once for each shape."""
    optimizer = make() if clip_norm is None else make(clip_norm)
    config = TrainConfig(loss_block_tokens=5, **options)
    step = jax.jit(make_train_step(model, optimizer, SCHEDULE, config, seed=11))
    return make_state(model.init(), optimizer, with_average=config.ema_decay is not None), step


def assert_unchanged(found: TrainState, before: TrainState) -> None:
    for name in ('step', 'params', 'optimizer', 'average'):
        jax.tree.map(np.testing.assert_array_equal, getattr(found, name), getattr(before, name))


def test_an_update_is_adam_on_the_gradient_of_the_loops() -> None:
    """Entries of every kind of parameter, by central differences of the loss that numpy loops compute."""
    model = make_model(num_encoder_layers=1, num_decoder_layers=1)
    batch = make_batch([4, 2, 3], [3, 5, 1], seed=2)
    params = make_params(model)
    optimizer = adam()
    step = jax.jit(make_train_step(model, optimizer, SCHEDULE, TrainConfig(loss_block_tokens=5), seed=0))
    state, metrics = step(make_state(params, optimizer, with_average=False), (batch,))

    def mean_loss(params: Any) -> float:
        logits = oracles.Transformer(params, model.config, START).logits(batch)
        real = batch.target_segment_ids > 0
        return oracles.cross_entropy(logits, batch.targets, real, 0.1)[0] / real.sum()

    assert float(metrics.loss_sum) == pytest.approx(mean_loss(params) * 9, rel=5e-6)
    memory = optax.tree.get(state.optimizer, 'mu'), optax.tree.get(state.optimizer, 'nu')
    rng = np.random.default_rng(5)
    wide = oracles.to_float64(params)
    leaves = jax.tree.leaves(wide)
    updated, first, second = (jax.tree.leaves(jax.device_get(tree)) for tree in (state.params, *memory))
    rate = 14**-0.5 * 3**-1.5
    checked = 0
    for number in range(0, len(leaves), 2):
        leaf = leaves[number]
        place = tuple(rng.integers(leaf.shape))
        kept, losses = leaf[place], []
        for shift in (1e-5, -1e-5):
            leaf[place] = kept + shift
            losses.append(mean_loss(wide))
        leaf[place] = kept
        gradient = (losses[0] - losses[1]) / 2e-5
        assert first[number][place] == pytest.approx(0.1 * gradient, rel=1e-4, abs=2e-7)
        assert second[number][place] == pytest.approx(0.02 * gradient**2, rel=2e-4, abs=1e-12)
        if abs(gradient) > 1e-4:
            corrected = 0.1 * gradient / (1 - 0.9), 0.02 * gradient**2 / (1 - 0.98)
            expected = kept - rate * corrected[0] / (np.sqrt(corrected[1]) + 1e-9)
            assert updated[number][place] == pytest.approx(expected, abs=1e-5 * rate)
            checked += 1
    assert checked >= 6


def test_an_update_in_bfloat16_with_whole_columns_of_padding_is_finite() -> None:
    """Its loss is near that of the loops."""
    model = make_model(num_encoder_layers=1, num_decoder_layers=1, compute_dtype='bfloat16')
    batch, params = make_batch([4, 2, 3], [3, 5, 1], seed=2, pads=(5, 3)), make_params(model)
    step = jax.jit(make_train_step(model, keep_gradient(), SCHEDULE, TrainConfig(loss_block_tokens=5), seed=0))
    state, metrics = step(make_state(params, keep_gradient(), with_average=False), (batch,))
    assert (int(metrics.bad_steps), int(metrics.target_tokens)) == (0, 9)
    logits = oracles.Transformer(params, model.config, START).logits(batch)
    expected = oracles.cross_entropy(logits, batch.targets, batch.target_segment_ids > 0, 0.1)
    assert (float(metrics.loss_sum), float(metrics.nll_sum)) == pytest.approx(expected, rel=2e-2)
    for gradient in jax.tree.leaves(state.optimizer):
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0


def split_rows(batch: Batch, parts: list[list[int]]) -> tuple[Batch, ...]:
    """Micro-batches of these rows, filled up with rows of padding to the size of the largest."""
    most = max(map(len, parts))
    return tuple(
        jax.tree.map(lambda rows: np.pad(rows[part], ((0, most - len(part)), (0, 0))), batch)  # noqa: B023
        for part in parts
    )


TARGETS = [9, 1, 7, 2, 1, 11, 3, 5]


@pytest.mark.parametrize(
    'parts',
    [
        [[0, 2, 5, 6, 7], [1, 3]],  # 35 and 3 tokens
        pytest.param([[4], [0, 1, 2, 3], [5, 6], [7]], marks=pytest.mark.slow),
        [[0, 1, 2, 3, 4, 5, 6, 7], []],  # a batch of padding alone
    ],
    ids=str,
)
def test_unequal_parts_give_the_gradient_of_the_whole(parts: list[list[int]]) -> None:
    batch = make_batch([3] * 8, TARGETS)
    rows = sorted(itertools.chain(*parts))
    whole = jax.tree.map(lambda array: array[rows], batch)
    state, step = start(keep_gradient)
    expected, expected_metrics = step(state, (whole,))
    found, metrics = step(state, split_rows(batch, parts))
    for name, gradient in found.optimizer.items():
        oracles.assert_close(gradient, expected.optimizer[name], 1e-6)
    assert float(metrics.loss_sum) == pytest.approx(float(expected_metrics.loss_sum), rel=1e-6)
    assert float(metrics.gradient_norm_sum) == pytest.approx(float(expected_metrics.gradient_norm_sum), rel=1e-6)
    assert int(metrics.target_tokens) == int(expected_metrics.target_tokens) == sum(TARGETS[row] for row in rows)


@pytest.mark.parametrize('accumulation', [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_rate_goes_by_updates_however_many_batches_each_takes(accumulation: int) -> None:
    batch = make_batch([3] * 4, [1, 5, 2, 3])
    parts = np.array_split(np.arange(4), accumulation)
    micro_batches = split_rows(batch, [list(part) for part in parts])
    state, step = start()
    rates = []
    for number in range(1, 6):
        state, metrics = step(state, micro_batches)
        rates.append(float(metrics.learning_rate))
        assert int(state.step) == int(optax.tree.get_all_with_path(state.optimizer, 'count')[0][1]) == number
    formula = [14**-0.5 * min(number**-0.5, number * 3**-1.5) for number in range(1, 6)]
    np.testing.assert_allclose(rates, formula, rtol=1e-6)


@pytest.mark.parametrize(
    ('where', 'value'),
    [('table', np.nan), ('table', np.inf), ('mix', np.nan), ('table', 1e30)],  # the last has a finite loss
)
def test_an_update_that_is_not_finite_leaves_all_as_it_was(where: str, value: float) -> None:
    state, step = start(clip_norm=1.0, ema_decay=0.9)
    batch = make_batch([3] * 4, [1, 5, 2, 3])
    state, _ = step(state, (batch,))
    poisoned = state.params | {where: state.params[where].at[0, 1].set(value)}
    before = dataclasses.replace(state, params=poisoned)
    after, metrics = step(before, (batch,))
    assert_unchanged(after, before)
    assert (int(after.bad_in_row), int(after.bad_total)) == (1, 1)
    assert (int(metrics.steps), int(metrics.bad_steps), int(metrics.target_tokens)) == (1, 1, 0)
    assert float(metrics.loss_sum) == float(metrics.gradient_norm_sum) == 0
    again, _ = step(after, (batch,))
    assert (int(again.bad_in_row), int(again.bad_total)) == (2, 2)
    good, _ = step(dataclasses.replace(again, params=state.params), (batch,))
    assert (int(good.bad_in_row), int(good.bad_total), int(good.step)) == (0, 2, 2)


def test_one_bad_part_skips_the_whole_update() -> None:
    state, step = start()
    # Token 22 stands in the second part alone.
    batch = make_batch([3] * 4, [1, 5, 2, 3])
    targets = np.minimum(batch.targets, 21)
    targets[3, 0] = 22
    poisoned = dataclasses.replace(state, params=state.params | {'table': state.params['table'].at[22].set(np.nan)})
    parts = split_rows(batch._replace(targets=targets), [[0, 1, 2], [3]])
    after, _ = step(poisoned, parts)
    assert_unchanged(after, poisoned)
    assert int(after.bad_total) == 1


def test_a_batch_of_padding_alone_is_no_update() -> None:
    state, step = start()
    before, _ = step(state, (make_batch([3] * 2, [1, 5]),))
    after, metrics = step(before, (jax.tree.map(np.zeros_like, make_batch([3] * 2, [1, 5])),))
    assert_unchanged(after, before)
    assert int(metrics.bad_steps) == 1


@pytest.mark.parametrize(
    'prng', ['rbg', *(pytest.param(name, marks=pytest.mark.slow) for name in ('threefry2x32', 'unsafe_rbg'))]
)
def test_each_update_and_each_part_of_it_has_its_own_key(prng: str) -> None:
    state, step = start(keep_gradient, model=Bigram(noise=0.5, prng=prng), prng=prng)
    batch = make_batch([3] * 4, [4, 5, 2, 3])

    def loss(number: int, *micro_batches: Batch) -> float:
        return float(step(dataclasses.replace(state, step=jnp.int32(number)), micro_batches)[1].loss_sum)

    assert loss(0, batch) == loss(0, batch)
    assert len({loss(number, batch) for number in range(5)}) == 5
    empty = jax.tree.map(np.zeros_like, batch)
    assert len({loss(0, batch, empty), loss(0, empty, batch), loss(0, batch)}) == 3


def test_the_moving_average_follows_the_new_parameters() -> None:
    state, step = start(ema_decay=0.15)
    batch = make_batch([3] * 4, [1, 5, 2, 3])
    average = jax.device_get(state.params)
    for number in range(1, 4):
        state, _ = step(state, (batch,))
        decay = min(0.15, number / (number + 9))
        average = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, average, jax.device_get(state.params))  # noqa: B023
        jax.tree.map(lambda a, b: oracles.assert_close(a, b, 1e-6), state.average, average)
