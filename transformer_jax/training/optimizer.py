"""Optimizers by name, from optax. Adam with the constants of section 5.3 is the default."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from transformer_jax.config import ConfigError, OptimizerConfig, refuse_unread, require_choice
from transformer_jax.shapes import Params

_PATH = 'config.optimizer'

# The last part of the path of parameters that weight decay leaves alone: norm scales and biases.
NOT_DECAYED = ('scale', 'bias')


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The gradient transformation whose updates are added to the parameters.

    Clipping by the global norm, when on, comes first; a non-finite gradient must be kept out before it, because one NaN
    makes the norm, and so every update, NaN. Raises `ConfigError` for fields that make no sense together.
    """
    check_optimizer(config)
    optimizer = OPTIMIZERS[config.name].make(config, schedule)
    if config.clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)


def check_optimizer(config: OptimizerConfig) -> None:
    """Raises `ConfigError` for an unknown optimizer or a changed field that it does not read."""
    require_choice(f'{_PATH}.name', config.name, OPTIMIZERS)
    refuse_unread(config, _PATH, 'name', {name: optimizer.reads for name, optimizer in OPTIMIZERS.items()})
    if config.name == 'adamw' and config.weight_decay is None:
        raise ConfigError(f"{_PATH}.weight_decay is None; {_PATH}.name='adamw' needs one (0.01, say), or use 'adam'")


def decayed(params: Params) -> Params:
    """A tree of booleans, True where weight decay applies: everything but norm scales and biases."""

    def applies(path: tuple[Any, ...], _: Any) -> bool:
        return getattr(path[-1], 'key', None) not in NOT_DECAYED

    return jax.tree_util.tree_map_with_path(applies, params)


def _adam(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.adam(schedule, config.beta1, config.beta2, config.epsilon)


def _adamw(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    assert config.weight_decay is not None  # see check_optimizer
    return optax.adamw(
        schedule, config.beta1, config.beta2, config.epsilon, weight_decay=config.weight_decay, mask=decayed
    )


def _adafactor(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """As published: no first moment, updates clipped at RMS 1 and scaled by the RMS of the parameter itself.

    Its rates are therefore relative: 1e-2 where Adam takes 1e-3.
    """
    del config
    return optax.adafactor(schedule)


def _lion(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Sign of the momentum: takes a rate 3 to 10 times below Adam's, and a weight decay as many times above."""
    return optax.lion(schedule, config.beta1, config.beta2, weight_decay=config.weight_decay or 0.0, mask=decayed)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """How one optimizer is made, and the config fields that it alone decides to read."""

    make: Callable[[OptimizerConfig, optax.Schedule], optax.GradientTransformation]
    reads: tuple[str, ...]


OPTIMIZERS = {
    'adam': Optimizer(_adam, ('beta1', 'beta2', 'epsilon')),
    'adamw': Optimizer(_adamw, ('beta1', 'beta2', 'epsilon', 'weight_decay')),
    'adafactor': Optimizer(_adafactor, ()),
    'lion': Optimizer(_lion, ('beta1', 'beta2', 'weight_decay')),
}
