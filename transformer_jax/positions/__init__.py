"""Position schemes. `SCHEMES` is the one table: what is added to the embeddings, given positions."""

import difflib
from collections.abc import Callable

import jax.numpy as jnp

from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.positions.sinusoidal import sinusoids
from transformer_jax.shapes import Array, Float, Int


def _sinusoidal(config: ModelConfig, positions: Int[Array, 'B T']) -> Float[Array, 'B T D']:
    table = jnp.asarray(sinusoids(config.max_length, config.d_model, config.sinusoid_layout))
    return table.at[positions].get(mode='promise_in_bounds')


def _none(config: ModelConfig, positions: Int[Array, 'B T']) -> Float[Array, '1 1 1']:
    return jnp.zeros((1, 1, 1))


SCHEMES: dict[str, Callable] = {'none': _none, 'sinusoidal': _sinusoidal}


def on_embedding(config: ModelConfig, positions: Int[Array, 'B T']) -> Array:
    """What the scheme adds to the embeddings at these positions. Positions must be below `max_length`."""
    return SCHEMES[config.positions](config, positions)


def check(config: ModelConfig) -> None:
    """Checks the scheme's name against the table."""
    if config.positions not in SCHEMES:
        nearest = difflib.get_close_matches(config.positions, SCHEMES, n=1)
        hint = f' (did you mean {nearest[0]!r}?)' if nearest else ''
        raise ConfigError(
            f'config.model.positions is {config.positions!r}; it must be one of {", ".join(map(repr, SCHEMES))}{hint}'
        )
