"""The Transformer in JAX and Flax, as a research codebase. Importing this package imports no jax."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_jax.config import Config, ConfigError
    from transformer_jax.decoding.generator import Generator
    from transformer_jax.decoding.opened_run import open_run
    from transformer_jax.decoding.translator import Translator
    from transformer_jax.overlay import load_config_file

__version__ = '0.1.0'

# What a notebook imports, by the module that holds it; loaded when first asked for.
_HOMES = {
    'Config': 'transformer_jax.config',
    'ConfigError': 'transformer_jax.config',
    'Generator': 'transformer_jax.decoding.generator',
    'Translator': 'transformer_jax.decoding.translator',
    'load_config_file': 'transformer_jax.overlay',
    'open_run': 'transformer_jax.decoding.opened_run',
}

__all__ = ['Config', 'ConfigError', 'Generator', 'Translator', '__version__', 'load_config_file', 'open_run']


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
