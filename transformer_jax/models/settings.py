"""What a family can't have in its config, or would ignore. Checked on the host before anything is traced."""

from collections.abc import Sequence

from transformer_jax import positions as position_schemes
from transformer_jax.config import ConfigError, ModelConfig, refuse_ignored


def refuse_inner_positions(config: ModelConfig, reason: str) -> None:
    """Raises `ConfigError` for a position scheme of self-attention alone, which `reason` says is absent."""
    scheme = position_schemes.SCHEMES.get(config.positions)
    if scheme is None or scheme.on_embedding is not None or config.positions == 'none':
        return
    fits = [repr(name) for name, one in position_schemes.SCHEMES.items() if one.on_embedding or name == 'none']
    raise ConfigError(
        f'config.model.positions is {config.positions!r}, which works inside self-attention, but {reason}; '
        f'it must be one of {", ".join(fits)}'
    )


def check_reach(config: ModelConfig, num_layers: int) -> None:
    """Refuses kernels that reach beyond the longest text, which is all that a decode keeps room for."""
    own = config.convolution
    dilation = own.dilation * own.dilation_growth ** (num_layers - 1)
    if (reach := (own.kernel_width - 1) * dilation) >= config.max_length:
        raise ConfigError(
            f'config.model.convolution has kernel_width {own.kernel_width} and, in layer {num_layers} of {num_layers}, '
            f'dilation {dilation:,}: it reaches over {reach:,} subwords, and must stay below config.model.max_length '
            f'{config.max_length:,}; lower kernel_width, dilation or dilation_growth'
        )


def check_mixing(config: ModelConfig, sides: Sequence[str]) -> None:
    """Checks the token mixing of a Transformer that has these sides, of 'encoder' and 'decoder'."""
    mixings = {side: getattr(config, f'{side}_mixing') for side in ('encoder', 'decoder')}
    for side, mixing in mixings.items():
        if side not in sides and mixing != 'attention':
            raise ConfigError(
                f'config.model.{side}_mixing is {mixing!r}, but family {config.family!r} has no {side}; '
                "leave it 'attention'"
            )
    ignored = dict.fromkeys(
        [f'recurrence.{name}' for name in ('attention', 'luong_score', 'input_feeding')], "it is of family 'recurrent'"
    )
    for kind in ('recurrence', 'convolution'):
        if kind not in mixings.values():
            ignored[kind] = f'neither config.model.encoder_mixing nor decoder_mixing is {kind!r}'
    if 'attention' not in [mixings[side] for side in sides]:
        names = ('window', 'window_right', 'num_global')
        ignored |= dict.fromkeys([f'attention.{name}' for name in names], 'no layer mixes tokens by attention')
    for side in sides:
        if mixings[side] == 'attention':
            continue
        reason = f'config.model.{side}_mixing is {mixings[side]!r}'
        ignored[f'{side}_self'] = reason
        refuse_inner_positions(config, reason)
        if mixings[side] == 'convolution':
            check_reach(config, getattr(config, f'num_{side}_layers'))
    refuse_ignored(config, 'config.model', ignored)
