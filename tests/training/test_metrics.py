"""Metrics merge exactly, whatever the split, and figures are ratios of sums."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.data.batch import Batch
from transformer_jax.training.metrics import (
    Metrics,
    Window,
    count_slots,
    count_targets,
    figures,
    merge,
    perplexity,
    step_metrics,
)


def make_metrics(
    loss: float = 6.0, nll: float = 4.0, tokens: int = 3, *, good: bool = True, rate: float = 0.1
) -> Metrics:
    counts = {'target_tokens': jnp.int32(tokens), 'real_slots': jnp.int32(8), 'slots': jnp.int32(16)}
    return step_metrics(
        loss_sum=loss, nll_sum=nll, counts=counts, gradient_norm=2.0, learning_rate=rate, good=jnp.asarray(good)
    )


def test_count_slots_counts_what_is_real() -> None:
    inputs = np.array([[1, 1, 1, 0, 0], [1, 1, 2, 2, 0]])  # a packed row counts all its segments
    targets = np.array([[1, 1, 0], [1, 2, 0]])
    batch = Batch(inputs, targets, inputs, targets, inputs, targets)
    assert {name: int(count) for name, count in count_slots(batch).items()} == {'real_slots': 11, 'slots': 16}
    assert {name: int(count) for name, count in count_targets(batch).items()} == {'target_tokens': 4}


@pytest.mark.parametrize(('side', 'real', 'slots'), [('source', 7, 10), ('target', 4, 6)])
def test_slots_of_a_side_that_the_model_does_not_read_are_no_padding(side: str, real: int, slots: int) -> None:
    inputs, targets = np.array([[1, 1, 1, 0, 0], [1, 1, 2, 2, 0]]), np.array([[1, 1, 0], [1, 2, 0]])
    batch = Batch(inputs, targets, inputs, targets, inputs, targets)
    assert {name: int(n) for name, n in count_slots(batch, (side,)).items()} == {'real_slots': real, 'slots': slots}


def test_figures_of_one_step() -> None:
    assert figures(make_metrics()) == {
        'loss': 2.0,
        'nll': pytest.approx(4 / 3),
        'perplexity': pytest.approx(math.exp(4 / 3)),
        'learning_rate': pytest.approx(0.1),
        'gradient_norm': 2.0,
        'target_tokens': 3,
        'padding': 0.5,
        'bad_steps': 0,
    }


def test_perplexity_comes_from_the_plain_likelihood_not_from_the_smoothed_loss() -> None:
    assert figures(make_metrics(loss=300.0))['perplexity'] == figures(make_metrics(loss=3.0))['perplexity']


def test_unequal_steps_weigh_by_their_tokens() -> None:
    window = Window()
    window.add(make_metrics(loss=3.0, tokens=3))
    window.add(make_metrics(loss=970.0, tokens=97))
    assert figures(window.close())['loss'] == pytest.approx(9.73)  # a mean of means would be 5.5


@pytest.mark.parametrize('poison', [math.nan, math.inf])
def test_a_skipped_step_leaves_no_trace_but_its_count(poison: float) -> None:
    window = Window()
    window.add(make_metrics(rate=0.1))
    window.add(make_metrics(loss=poison, nll=poison, tokens=1000, good=False, rate=0.2))
    seen = figures(window.close())
    expected = figures(make_metrics()) | {'bad_steps': 1, 'learning_rate': pytest.approx(0.2)}
    assert seen == expected


def test_a_window_of_skipped_steps_has_no_loss() -> None:
    seen = figures(make_metrics(good=False))
    assert math.isnan(seen['loss'])
    assert math.isnan(seen['perplexity'])
    assert math.isnan(seen['gradient_norm'])
    assert seen['bad_steps'] == 1


sums = st.integers(-1000, 1000)
metrics_strategy = st.builds(Metrics, *[sums] * len(Metrics._fields))


@given(metrics_strategy, metrics_strategy, metrics_strategy)
def test_merge_is_associative(a: Metrics, b: Metrics, c: Metrics) -> None:
    assert merge(merge(a, b), c) == merge(a, merge(b, c))
    assert merge(a, b).learning_rate == b.learning_rate
    assert merge(a, b).target_tokens == a.target_tokens + b.target_tokens


def test_a_long_window_loses_no_precision() -> None:
    """Float32 sums would stand still at 2^24, and int32 counts turn negative at 2^31."""
    window = Window()
    big = Metrics(
        *[np.float32(2**24)] * 2, *[np.int32(2**31 - 1)] * 3, *[np.float32(0.5)] * 2, np.int32(1), np.int32(0)
    )
    for _ in range(3):
        window.add(big)
    window.add(big._replace(loss_sum=np.float32(1.0)))
    merged = window.close()
    assert float(merged.loss_sum) == 3 * 2**24 + 1
    assert int(merged.target_tokens) == 4 * (2**31 - 1)


def test_a_window_starts_again_after_it_closes() -> None:
    window = Window()
    window.add(make_metrics(loss=3.0))
    assert len(window) == 1
    window.close()
    assert len(window) == 0
    with pytest.raises(ValueError, match='no step'):
        window.close()


def test_perplexity_beyond_a_float_is_infinite() -> None:
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_step_metrics_are_the_same_under_jit() -> None:
    def make(loss: Any) -> Metrics:
        return make_metrics(loss)

    assert jax.tree.map(float, jax.jit(make)(jnp.float32(6.0))) == jax.tree.map(float, make_metrics(6.0))
