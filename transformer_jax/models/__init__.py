"""Model families. `MODELS` is the one table; `build` makes one, `validate` checks a whole config before tracing."""

import difflib
from typing import Any

import jax

from transformer_jax import attention, data, positions
from transformer_jax import config as config_module
from transformer_jax.attention.variant import Use
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
    positions.check(model)
    for use in uses_of_attention(config):
        attention.check(use, f'config.model.{use.name}')
    data.check(config)


def uses_of_attention(config: Config) -> list[Use]:
    """Where the model of this config attends, and what it asks of its variants there."""
    model = config.model
    scheme = positions.SCHEMES[model.positions]
    return [
        Use(
            name=name,
            config=model.attention_of(name),
            causal=name == 'decoder_self',
            cross=name == 'cross',
            packed=config.data.batching == 'packing',
            terms=scheme.terms is not None and name != 'cross',
            compute_dtype=model.compute_dtype,
            platform=jax.default_backend(),
            decodes=name != 'encoder_self',
            max_length=model.max_length,
        )
        for name in ('encoder_self', 'decoder_self', 'cross')
    ]
