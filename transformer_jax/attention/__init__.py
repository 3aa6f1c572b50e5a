"""Attention: visibility (`mask`), kind and implementation, kept apart. `VARIANTS` is the one table of what exists."""

import importlib
from collections.abc import Iterator, Sequence

from transformer_jax.attention.additive import ADDITIVE, ADDITIVE_BLOCKWISE, CONCAT, CONCAT_BLOCKWISE
from transformer_jax.attention.blockwise import BLOCKWISE
from transformer_jax.attention.cudnn import CUDNN
from transformer_jax.attention.dense import DENSE
from transformer_jax.attention.general import GENERAL, GENERAL_BLOCKWISE
from transformer_jax.attention.linear import LINEAR
from transformer_jax.attention.low_rank import LOW_RANK
from transformer_jax.attention.pallas import PALLAS
from transformer_jax.attention.performer import PERFORMER
from transformer_jax.attention.preference import order_of_preference
from transformer_jax.attention.variant import FEATURES, OWN_FIELDS, Use, Variant
from transformer_jax.config import (
    AttentionConfig,
    AttentionOverlayConfig,
    ConfigError,
    ModelConfig,
    refuse_ignored,
    require_choice,
)

VARIANTS: dict[tuple[str, str], Variant] = {
    ('dot', 'dense'): DENSE,
    ('dot', 'blockwise'): BLOCKWISE,
    ('dot', 'cudnn'): CUDNN,
    ('dot', 'pallas'): PALLAS,
    ('linear', 'chunked'): LINEAR,
    ('performer', 'chunked'): PERFORMER,
    ('low_rank', 'dense'): LOW_RANK,
    ('additive', 'blockwise'): ADDITIVE_BLOCKWISE,
    ('additive', 'dense'): ADDITIVE,
    ('general', 'dense'): GENERAL,
    ('general', 'blockwise'): GENERAL_BLOCKWISE,
    ('concat', 'blockwise'): CONCAT_BLOCKWISE,
    ('concat', 'dense'): CONCAT,
}

_PREFERRED = ('dot', 'general')  # whose best implementation depends on lengths; of the others the first that works


def variants_of(kind: str, path: str = 'kind') -> dict[str, Variant]:
    """The implementations of a kind by name. `module:name` imports a `Variant` of the user's own.

    Raises `ConfigError`, which names `path`, for a kind that there is not.
    """
    own = {impl: variant for (known, impl), variant in VARIANTS.items() if known == kind}
    if own:
        return own
    if ':' in kind:
        return {'own': _import(kind, path)}
    require_choice(path, kind, sorted({known for known, _ in VARIANTS}), also=', or module:name of one of your own')
    raise AssertionError(kind)  # never: it is none of them


def choose(use: Use) -> str:
    """The implementation that a use runs with: the named one, or what 'auto' stands for here."""
    if use.config.impl != 'auto':
        return use.config.impl
    own = variants_of(use.config.kind)
    preferred = [impl for impl in order_of_preference(use) if impl in own] if use.config.kind in _PREFERRED else own
    return next((impl for impl in preferred if why_not(own[impl], use) is None), next(iter(own)))


def needs(use: Use) -> Iterator[str]:
    """The features of `FEATURES` that a use asks of its variant."""
    config = use.config
    asked = {
        'causal': use.causal,
        'cross': use.cross,
        'segments': use.packed,
        'window': config.window is not None,
        'globals': config.num_global is not None,
        'prefix': use.prefix,
        'grouped_heads': config.num_kv_heads not in (None, config.num_heads),
        'value_dim': config.value_dim not in (None, config.head_dim),
        'positions': use.terms,
        'rotary': use.turned,
        'dropout': config.dropout_rate > 0,
        'sequence': use.sequence_shards > 1,
        # Cached steps take the dense form of a kind that has one.
        'cache': use.decodes and 'dense' not in variants_of(config.kind),
        use.platform: True,
        use.compute_dtype: True,
    }
    return (feature for feature, is_asked in asked.items() if is_asked)


def why_not(variant: Variant, use: Use) -> str | None:
    """Why a variant can't serve a use, or None when it can."""
    reasons = []
    if variant.check and (reason := variant.check(use)):  # first: it says what would work
        reasons.append(reason)
    if missing := [feature for feature in needs(use) if feature not in variant.supports]:
        words = ', '.join(f'{feature} ({FEATURES[feature]})' for feature in missing)
        reasons.append(f'it does not support {words}')
    return '; '.join(reasons) or None


def check(use: Use, path: str, overlay: AttentionOverlayConfig | None = None) -> None:
    """Checks one use of attention against the table, on the host. Raises `ConfigError`.

    `path` is that of the use, such as config.model.cross. A field that its `overlay` leaves to the common settings is
    named in errors where it was set: in config.model.attention.
    """
    config = use.config

    def path_of(field: str) -> str:
        is_common = overlay is not None and getattr(overlay, field) is None
        return f'{path.rpartition(".")[0]}.attention.{field}' if is_common else f'{path}.{field}'

    own = variants_of(config.kind, path_of('kind'))
    require_choice(path_of('impl'), config.impl, ['auto', *sorted(own)], also=f', which are those of {config.kind!r}')
    _check_heads(config, path_of('num_kv_heads'))
    if use.cross and config.window is not None:
        raise ConfigError(f'{path_of("window")} is {config.window}; a window is of self-attention only, leave it None')
    if config.window is None and (config.num_global is not None or config.window_right is not None):
        name = 'num_global' if config.num_global is not None else 'window_right'
        value, needed = getattr(config, name), path_of('window')
        raise ConfigError(f'{path_of(name)} is {value}, but {needed} is None; set a window as well')
    impl = choose(use)
    reason = why_not(own[impl], use)
    if reason is None:
        return
    working = [f'{kind}/{name}' for (kind, name), variant in VARIANTS.items() if why_not(variant, use) is None]
    working.sort(key=lambda name: not name.startswith(f'{config.kind}/'))
    raise ConfigError(
        f'{path} is kind {config.kind!r}, impl {config.impl!r}, which can not do this: {reason}; '
        f'{"working here: " + ", ".join(working) if working else "no other variant can either"}'
    )


def check_own_fields(config: ModelConfig, uses: Sequence[Use]) -> None:
    """Refuses a changed field of `OWN_FIELDS` that no variant reads where the model attends."""
    reads = {use.name: frozenset().union(*(one.reads for one in variants_of(use.config.kind).values())) for use in uses}
    kinds = ', '.join(dict.fromkeys(repr(use.config.kind) for use in uses))
    of_all = frozenset().union(*reads.values())
    ignored = {f'attention.{name}': _unread_by(kinds, name) for name in OWN_FIELDS if name not in of_all}
    for use in uses:
        own = set(OWN_FIELDS) - reads[use.name]
        ignored |= {f'{use.name}.{name}': _unread_by(repr(use.config.kind), name) for name in own}
        if use.causal and not use.prefix:
            ignored[f'{use.name}.window_right'] = 'it is causal and sees nothing to its right'
    if all(use.causal and not use.prefix for use in uses if not use.cross):
        ignored['attention.window_right'] = 'all self-attention is causal and sees nothing to its right'
    refuse_ignored(config, 'config.model', ignored)


def _unread_by(kinds: str, field: str) -> str:
    readers = dict.fromkeys(repr(kind) for (kind, _), variant in VARIANTS.items() if field in variant.reads)
    return f'kind {kinds} does not read it (read by {", ".join(readers)})'


def _check_heads(config: AttentionConfig, path: str) -> None:
    if config.num_kv_heads is not None and config.num_heads % config.num_kv_heads:
        fits = [heads for heads in range(1, config.num_heads + 1) if config.num_heads % heads == 0]
        raise ConfigError(
            f'{path} is {config.num_kv_heads}, which does not divide num_heads {config.num_heads}; '
            f'it must be one of {", ".join(map(str, fits))}'
        )


def _import(kind: str, path: str) -> Variant:
    module, _, name = kind.partition(':')
    try:
        variant = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a user's own module raises
        raise ConfigError(
            f'{path} is {kind!r}, which can not be imported: {type(error).__name__}: {error} (modules are looked for '
            'in the current folder, in PYTHONPATH and among installed packages)'
        ) from error
    if not isinstance(variant, Variant):
        raise ConfigError(
            f'{path} is {kind!r}, a {type(variant).__name__}; it must be a transformer_jax.attention.variant.Variant'
        )
    return variant
