"""Model families. `MODELS` is the one table; `build` makes one, `validate` checks a whole config before tracing."""

import dataclasses
from typing import Any

from transformer_jax import attention, data, positions
from transformer_jax import config as config_module
from transformer_jax.attention.variant import Use
from transformer_jax.config import (
    ATTENTION_USES,
    Config,
    ConfigError,
    ExecutionConfig,
    ModelConfig,
    refuse_ignored,
    require_choice,
)
from transformer_jax.models.convolutional import Convolutional
from transformer_jax.models.decoder_only import DecoderOnly
from transformer_jax.models.encoder_decoder import EncoderDecoder
from transformer_jax.models.encoder_only import EncoderOnly
from transformer_jax.models.interface import Model, Task
from transformer_jax.models.recurrent import Recurrent
from transformer_jax.models.settings import check_mixing
from transformer_jax.parallel.platform import target_platform

MODELS: dict[str, Any] = {
    'encoder_decoder': EncoderDecoder,
    'encoder_only': EncoderOnly,
    'decoder_only': DecoderOnly,
    'recurrent': Recurrent,
    'convolutional': Convolutional,
}


def build(config: ModelConfig, *, vocab_size: int, start_id: int, execution: ExecutionConfig | None = None) -> Model:
    """The model a config describes. It holds no arrays."""
    return MODELS[config.family](config, vocab_size, start_id, execution or ExecutionConfig())


def validate(config: Config) -> None:
    """Checks the whole config on the host. Raises `ConfigError`."""
    config_module.check(config)
    model = config.model
    require_choice('config.model.family', model.family, MODELS)
    family = MODELS[model.family]
    family.check(model)
    _refuse_what_is_of_other_families(model)
    if sides := [name.removesuffix('_self') for name in family.attention_uses(model) if name != 'cross']:
        check_mixing(model, sides)
    positions.check(model, [name for name in _attention_uses(model) if name != 'cross'])
    uses = uses_of_attention(config)
    for use in uses:
        attention.check(use, f'config.model.{use.name}', getattr(model, use.name))
    if uses:
        attention.check_own_fields(model, uses)
    _check_sequence(config)
    _check_task(config)
    data.check(config)


def task_of(config: ModelConfig) -> Task:
    """What a model of this config is for."""
    return MODELS[config.family].task_of(config)


def _refuse_what_is_of_other_families(model: ModelConfig) -> None:
    """Raises `ConfigError` for a changed section of the config that this family does not read."""
    why = f'config.model.family is {model.family!r}'
    sections = set(MODELS) & {field.name for field in dataclasses.fields(model)} - {model.family}
    ignored = {name: f'it is of family {name!r}, and {why}' for name in sections}
    uses = MODELS[model.family].attention_uses(model)
    ignored |= {use: f'{why}, which has no such attention' for use in ATTENTION_USES if use not in uses}
    refuse_ignored(model, 'config.model', ignored)


def _check_sequence(config: Config) -> None:
    """Refuses to split lengths where tokens are mixed by something that runs over them."""
    ways, model = config.execution.mesh.sequence, config.model
    mixings = {f'config.model.{side}_mixing': getattr(model, f'{side}_mixing') for side in ('encoder', 'decoder')}
    if model.family in ('recurrent', 'convolutional'):
        mixings = {'config.model.family': model.family}
    for path, mixing in mixings.items():
        if ways > 1 and mixing != 'attention':
            raise ConfigError(
                f'config.execution.mesh.sequence is {ways}, but {path} is {mixing!r}: lengths are split for attention '
                'alone; leave it 1 and split rows (data, fsdp) or heads and widths (model)'
            )


def _check_task(config: Config) -> None:
    task = task_of(config.model)
    if not task.translates and config.evaluation.bleu:
        raise ConfigError(
            f'config.evaluation.bleu is True, but family {config.model.family!r} is here for {task.name}, which '
            "translates nothing; set it to False, and config.evaluation.score to 'loss'"
        )


def uses_of_attention(config: Config, lengths: tuple[int, int] | None = None) -> list[Use]:
    """Where the model of this config attends, and what it asks of its variants there.

    `lengths` are those of the sources and the targets at hand; None = the longest that the model takes.
    """
    model = config.model
    family, scheme = MODELS[model.family], positions.SCHEMES[model.positions]
    source_length, target_length = lengths or (model.max_length, model.max_length)

    def make_use(name: str, *, causal: bool = False, cross: bool = False, decodes: bool = True, **more: Any) -> Use:
        return Use(
            name=name,
            config=family.attention_config(model, name),
            causal=causal,
            cross=cross,
            packed=config.data.batching == 'packing',
            terms=scheme.terms is not None and not cross,
            turned=scheme.on_heads is not None and not cross,
            compute_dtype=model.compute_dtype,
            platform=target_platform(),
            decodes=decodes,
            max_length=family.attention_length(model, name, source_length, target_length),
            sequence_shards=config.execution.mesh.sequence,
            **more,
        )

    return [make_use(name, **facts) for name, facts in _attention_uses(model).items()]


def _attention_uses(model: ModelConfig) -> dict[str, dict[str, Any]]:
    """Those of the family, without the stacks that mix tokens by something else."""
    others = {f'{side}_self' for side in ('encoder', 'decoder') if getattr(model, f'{side}_mixing') != 'attention'}
    return {name: facts for name, facts in MODELS[model.family].attention_uses(model).items() if name not in others}
