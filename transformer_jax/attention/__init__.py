"""Attention: visibility (`mask`), kind and implementation, kept apart. `VARIANTS` is the one table of what exists."""

import difflib
from collections.abc import Callable
from typing import NamedTuple

from transformer_jax.attention.dense import dense_attention
from transformer_jax.config import AttentionConfig, ConfigError


class Variant(NamedTuple):
    """One (kind, impl): its function, and what it supports."""

    function: Callable
    supports: frozenset[str]


VARIANTS: dict[tuple[str, str], Variant] = {
    ('dot', 'dense'): Variant(
        dense_attention, frozenset({'causal', 'cross', 'segments', 'value_dim', 'weights', 'cache', 'dropout'})
    ),
}


def check(config: AttentionConfig, path: str) -> None:
    """Checks one use of attention against the table. `path` is the config path named in the error."""
    kinds = sorted({kind for kind, _ in VARIANTS})
    if config.kind not in kinds:
        raise ConfigError(f'{path}.kind is {config.kind!r}; it must be {_choices(config.kind, kinds)}')
    impls = ['auto', *sorted(impl for kind, impl in VARIANTS if kind == config.kind)]
    if config.impl not in impls:
        raise ConfigError(
            f'{path}.impl is {config.impl!r}; for kind {config.kind!r} it must be {_choices(config.impl, impls)}'
        )


def _choices(value: str, names: list[str]) -> str:
    nearest = difflib.get_close_matches(value, names, n=1)
    return 'one of ' + ', '.join(map(repr, names)) + (f' (did you mean {nearest[0]!r}?)' if nearest else '')
