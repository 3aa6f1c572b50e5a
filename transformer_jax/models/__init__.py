"""Model families. `MODELS` is the one table; `build` makes one, `validate` checks a whole config before tracing."""

import difflib
from typing import Any

from transformer_jax import attention, data, positions
from transformer_jax import config as config_module
from transformer_jax.config import Config, ConfigError, ExecutionConfig, ModelConfig
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.interface import Model

MODELS: dict[str, Any] = {'encoder_decoder': EncoderDecoder}


def build(config: ModelConfig, *, vocab_size: int, start_id: int, execution: ExecutionConfig | None = None) -> Model:
    """The model a config describes. It holds no arrays."""
    return MODELS[config.family](config, vocab_size, start_id, execution or ExecutionConfig())


def validate(config: Config) -> None:
    """Checks the whole config on the host. Raises `ConfigError`."""
    config_module.check(config)
    model = config.model
    if model.family not in MODELS:
        nearest = difflib.get_close_matches(model.family, MODELS, n=1)
        hint = f' (did you mean {nearest[0]!r}?)' if nearest else ''
        raise ConfigError(
            f'config.model.family is {model.family!r}; it must be one of {", ".join(map(repr, MODELS))}{hint}'
        )
    for use in ('encoder_self', 'decoder_self', 'cross'):
        attention.check(getattr(model, use).over(model.attention), f'config.model.{use}')
    positions.check(model)
    data.check(config)
