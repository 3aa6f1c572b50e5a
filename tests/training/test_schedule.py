"""The learning rate: values worked out by hand from the formulas, never by the code under test."""

import math

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.config import ConfigError, ScheduleConfig
from transformer_jax.training.schedule import make_schedule


def rates(config: ScheduleConfig, steps: list[int], d_model: int = 512, total_steps: int = 100_000) -> list[float]:
    """Rates of the updates numbered from 1."""
    schedule = make_schedule(config, d_model, total_steps)
    return [float(rate) for rate in schedule(np.array(steps) - 1)]


def test_the_papers_formula_at_known_steps() -> None:
    expected = [512**-0.5 * min(s**-0.5, s * 4000**-1.5) for s in (1, 2, 3999, 4000, 4001, 100_000)]
    np.testing.assert_allclose(rates(ScheduleConfig(), [1, 2, 3999, 4000, 4001, 100_000]), expected, rtol=2e-6)


@pytest.mark.parametrize(('d_model', 'peak'), [(512, 6.99e-4), (1024, 4.94e-4)])
def test_the_peak_of_base_and_big(d_model: int, peak: float) -> None:
    (rate,) = rates(ScheduleConfig(), [4000], d_model)
    assert float(f'{rate:.3g}') == peak


def test_the_first_update_has_a_rate_above_zero() -> None:
    for name in ('warmup', 'constant', 'inverse_sqrt'):
        (first,) = rates(ScheduleConfig(name=name), [1])
        assert first > 0


def test_factor_multiplies_the_whole_curve() -> None:
    steps = [1, 37, 4000, 9001]
    once, twice = rates(ScheduleConfig(), steps), rates(ScheduleConfig(factor=2.0), steps)
    np.testing.assert_allclose(twice, 2 * np.array(once), rtol=1e-6)


@settings(deadline=None)
@given(warmup=st.integers(2, 300), d_model=st.sampled_from([64, 512]))
def test_warmup_rises_to_its_peak_and_falls_after(warmup: int, d_model: int) -> None:
    values = rates(ScheduleConfig(warmup_steps=warmup), list(range(1, 400)), d_model)
    assert int(np.argmax(values)) + 1 == warmup
    assert np.all(np.diff(values[:warmup]) > 0)
    assert np.all(np.diff(values[warmup - 1 :]) < 0)


def test_constant_rises_in_a_line_and_stays() -> None:
    config = ScheduleConfig(name='constant', peak=0.01, warmup_steps=5)
    np.testing.assert_allclose(rates(config, [1, 2, 5, 6, 1000]), [0.002, 0.004, 0.01, 0.01, 0.01], rtol=1e-6)
    at_once = ScheduleConfig(name='constant', peak=0.01, warmup_steps=None)
    np.testing.assert_allclose(rates(at_once, [1, 7]), [0.01, 0.01], rtol=1e-6)


def test_cosine_ends_at_its_final_fraction_and_stays() -> None:
    config = ScheduleConfig(name='cosine', peak=0.2, warmup_steps=10, decay_steps=110, final_fraction=0.25)
    half_way = 0.2 * (0.25 + 0.75 / 2)
    quarter = 0.2 * (0.25 + 0.75 * (1 + math.cos(math.pi / 4)) / 2)
    np.testing.assert_allclose(
        rates(config, [5, 10, 35, 60, 110, 111, 5000]), [0.1, 0.2, quarter, half_way, 0.05, 0.05, 0.05], rtol=1e-5
    )


def test_cosine_without_decay_steps_ends_with_the_run() -> None:
    config = ScheduleConfig(name='cosine', peak=0.2, warmup_steps=None)
    last, middle = rates(config, [70, 35], total_steps=70)
    assert abs(last) < 1e-8
    assert middle == pytest.approx(0.1, rel=1e-5)


def test_inverse_sqrt_meets_its_peak_after_the_warmup() -> None:
    config = ScheduleConfig(name='inverse_sqrt', peak=0.3, warmup_steps=9)
    np.testing.assert_allclose(rates(config, [3, 9, 36, 81]), [0.1, 0.3, 0.15, 0.1], rtol=1e-6)
    at_once = ScheduleConfig(name='inverse_sqrt', peak=0.3, warmup_steps=None)
    np.testing.assert_allclose(rates(at_once, [1, 4, 9]), [0.3, 0.15, 0.1], rtol=1e-6)


@pytest.mark.parametrize('name', ['warmup', 'constant', 'cosine', 'inverse_sqrt'])
def test_a_traced_count_gives_the_same_rate(name: str) -> None:
    schedule = make_schedule(ScheduleConfig(name=name, warmup_steps=13), 64, 100)
    for count in (0, 12, 13, 60):
        np.testing.assert_allclose(jax.jit(schedule)(np.int32(count)), schedule(count), rtol=1e-6)


@pytest.mark.parametrize('name', ['warmup', 'constant', 'cosine', 'inverse_sqrt'])
def test_a_resumed_optimizer_goes_on_where_it_stopped(name: str) -> None:
    """The rate depends on the count in the optimizer state alone: a cut run applies the rates of an uncut one."""
    optimizer = optax.sgd(make_schedule(ScheduleConfig(name=name, warmup_steps=3), 16, 10))
    params = {'w': np.float32(0.0)}

    def run(state: optax.OptState, steps: int) -> tuple[list[float], optax.OptState]:
        applied = []
        for _ in range(steps):
            update, state = optimizer.update({'w': np.float32(-1.0)}, state, params)
            applied.append(float(update['w']))
        return applied, state

    uncut, _ = run(optimizer.init(params), 7)
    for cut in range(1, 7):
        before, state = run(optimizer.init(params), cut)
        after, _ = run(jax.tree.map(np.asarray, state), 7 - cut)
        assert before + after == uncut


@pytest.mark.parametrize(
    ('changes', 'field', 'hint'),
    [
        ({'name': 'warmup', 'peak': 1e-3}, 'peak', 'constant'),
        ({'name': 'warmup', 'decay_steps': 10}, 'decay_steps', 'cosine'),
        ({'name': 'constant', 'factor': 2.0}, 'factor', 'warmup'),
        ({'name': 'constant', 'final_fraction': 0.1}, 'final_fraction', 'cosine'),
        ({'name': 'inverse_sqrt', 'decay_steps': 10}, 'decay_steps', 'cosine'),
        ({'name': 'warmup', 'warmup_steps': None}, 'warmup_steps', 'formula'),
        ({'name': 'cosine', 'warmup_steps': 100}, 'warmup_steps', 'config.train.steps'),
        ({'name': 'cosine', 'warmup_steps': 50, 'decay_steps': 50}, 'warmup_steps', 'decay_steps'),
        ({'name': 'step'}, 'name', 'inverse_sqrt'),
    ],
)
def test_fields_that_make_no_sense_together_are_named(changes: dict, field: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf'config\.optimizer\.schedule\.{field} is .*{hint}'):
        make_schedule(ScheduleConfig(**changes), 512, 100)
