"""Learning rate by update: the paper's warm-up formula (section 5.3) and three schedules in common use."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import optax

from transformer_jax.config import ConfigError, ScheduleConfig, refuse_unread, require_choice

_PATH = 'config.optimizer.schedule'


def make_schedule(config: ScheduleConfig, d_model: int, total_steps: int) -> optax.Schedule:
    """The rate as a function of the optimizer's count: `schedule(0)` is the rate of the first update, step 1.

    `warmup` is `factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)`. The others rise in a line to `peak`
    at step `warmup_steps` (at once if that is None) and then stay (`constant`), fall as half a cosine to
    `peak * final_fraction` at step `decay_steps` and stay there (`cosine`), or fall as
    `peak * sqrt(warmup_steps / step)` (`inverse_sqrt`). `decay_steps=None` means `total_steps`: a run that is given
    more steps then follows another curve. Raises `ConfigError` for fields that make no sense together.
    """
    check_schedule(config, total_steps)
    rate = SCHEDULES[config.name].make(config, d_model, total_steps)
    return lambda count: rate(jnp.asarray(count, jnp.float32) + 1.0)


def check_schedule(config: ScheduleConfig, total_steps: int) -> None:
    """Raises `ConfigError` for an unknown schedule, a changed field that it does not read, or an empty decay."""
    require_choice(f'{_PATH}.name', config.name, SCHEDULES)
    refuse_unread(config, _PATH, 'name', {name: schedule.reads for name, schedule in SCHEDULES.items()})
    if config.name == 'warmup' and config.warmup_steps is None:
        raise ConfigError(f"{_PATH}.warmup_steps is None, but the formula of {_PATH}.name='warmup' needs it")
    decay_steps = total_steps if config.decay_steps is None else config.decay_steps
    if config.name == 'cosine' and (config.warmup_steps or 0) >= decay_steps:
        source = 'config.train.steps' if config.decay_steps is None else f'{_PATH}.decay_steps'
        raise ConfigError(
            f'{_PATH}.warmup_steps is {config.warmup_steps}; the cosine ends at step {decay_steps} ({source}), '
            f'so it must be below {decay_steps}, or None for no warm-up'
        )


# A rate takes the step (from 1, float32) and is traced by jit.
Rate = Callable[[jnp.ndarray], jnp.ndarray]


def _warmup(config: ScheduleConfig, d_model: int, total_steps: int) -> Rate:
    del total_steps
    assert config.warmup_steps is not None  # see check_schedule
    height, slope = config.factor * d_model**-0.5, config.warmup_steps**-1.5
    return lambda step: height * jnp.minimum(step**-0.5, step * slope)


def _rise(config: ScheduleConfig, step: jnp.ndarray) -> jnp.ndarray:
    return jnp.minimum(step / (config.warmup_steps or 1), 1.0)


def _constant(config: ScheduleConfig, d_model: int, total_steps: int) -> Rate:
    del d_model, total_steps
    return lambda step: config.peak * _rise(config, step)


def _cosine(config: ScheduleConfig, d_model: int, total_steps: int) -> Rate:
    del d_model
    start = config.warmup_steps or 0
    length = (total_steps if config.decay_steps is None else config.decay_steps) - start

    def rate(step: jnp.ndarray) -> jnp.ndarray:
        progress = jnp.clip((step - start) / length, 0.0, 1.0)
        fall = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        return config.peak * _rise(config, step) * (config.final_fraction + (1.0 - config.final_fraction) * fall)

    return rate


def _inverse_sqrt(config: ScheduleConfig, d_model: int, total_steps: int) -> Rate:
    del d_model, total_steps
    warmup = config.warmup_steps or 1
    return lambda step: config.peak * jnp.minimum(step / warmup, (warmup / step) ** 0.5)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How one schedule is made from `(config, d_model, total_steps)`, and the config fields that it reads."""

    make: Callable[[ScheduleConfig, int, int], Rate]
    reads: tuple[str, ...]


SCHEDULES = {
    'warmup': Schedule(_warmup, ('factor', 'warmup_steps')),
    'constant': Schedule(_constant, ('peak', 'warmup_steps')),
    'cosine': Schedule(_cosine, ('peak', 'warmup_steps', 'decay_steps', 'final_fraction')),
    'inverse_sqrt': Schedule(_inverse_sqrt, ('peak', 'warmup_steps')),
}
