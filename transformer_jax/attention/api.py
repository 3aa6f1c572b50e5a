"""The one attention function: three uses (encoder self, causal self, cross), every variant."""

from collections.abc import Mapping

from transformer_jax.attention import VARIANTS, choose, variants_of
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.ring import num_sequence_shards
from transformer_jax.attention.variant import Options, Use, Variant, project
from transformer_jax.config import AttentionConfig
from transformer_jax.parallel.platform import target_platform
from transformer_jax.position_terms import PositionTerms
from transformer_jax.shapes import Array, Float, PRNGKey


def attention(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    mask: Mask,
    config: AttentionConfig,
    *,
    params: Mapping[str, Array] | None = None,
    bias: Float[Array, '#B #N #T #S'] | None = None,
    terms: PositionTerms | None = None,
    dropout_rng: PRNGKey | None = None,
    cached: bool = False,
    packed: Float[Array, 'B T E'] | None = None,
    projection: Float[Array, 'F D'] | None = None,
) -> Float[Array, 'B T N U'] | Float[Array, 'B T D']:
    """Attends from `q` to `k` and `v` where `mask`, narrowed to the config's window, allows.

    `params` are the variant's own parameters, `terms` what the position scheme adds. Dropout on the weights is on when
    `dropout_rng` is given. `cached` says that the queries are a few new rows that attend to a cache, which holds zeros
    where it holds no token; `packed` are q, k and v once more, side by side. With a `projection`, F = N U, the outputs
    of the heads side by side times it. Raises `ValueError` for what a call asks of a variant that does not have it,
    such as a bias of `linear`.
    """
    options = make_options(q, config, params=params, bias=bias, terms=terms, dropout_rng=dropout_rng)
    mask = mask.within(config.window, config.window_right, config.num_global)
    variant = find(q, k, mask, config, terms=terms, cached=cached)
    options = options._replace(packed=packed, cached=cached, projection=projection if variant.projects else None)
    output = variant.function(q, k, v, mask, options)[0]
    return output if variant.projects else project(output, projection)


def attention_and_weights(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    mask: Mask,
    config: AttentionConfig,
    *,
    params: Mapping[str, Array] | None = None,
    terms: PositionTerms | None = None,
) -> tuple[Float[Array, 'B T N U'], Float[Array, 'B N T S']]:
    """The same without dropout, with the weights. Raises `ValueError` for a named implementation that has none.

    Of `impl='auto'` it is one that has them.
    """
    options = make_options(q, config, params=params, terms=terms)._replace(return_weights=True)
    mask = mask.within(config.window, config.window_right, config.num_global)
    with_weights = {impl: one for impl, one in variants_of(config.kind).items() if 'weights' in one.supports}
    if not with_weights:
        kinds = dict.fromkeys(kind for (kind, _), variant in VARIANTS.items() if 'weights' in variant.supports)
        raise ValueError(
            f'attention of kind {config.kind!r} has no weights over keys to return; these have: {", ".join(kinds)}'
        )
    if config.impl not in ('auto', *with_weights):
        raise ValueError(
            f'impl {config.impl!r} of kind {config.kind!r} never holds the weights; these return them: '
            f'{", ".join(with_weights)}'
        )
    variant = with_weights.get(config.impl) or next(iter(with_weights.values()))
    output, weights = variant.function(q, k, v, mask, options)
    assert weights is not None
    return output, weights


def make_options(
    q: Float[Array, 'B T N H'],
    config: AttentionConfig,
    *,
    params: Mapping[str, Array] | None = None,
    bias: Float[Array, '#B #N #T #S'] | None = None,
    terms: PositionTerms | None = None,
    dropout_rng: PRNGKey | None = None,
) -> Options:
    """What a variant is given besides q, k, v and the mask."""
    return Options(
        config,
        scale=1.0 if config.scale is None else q.shape[-1] ** -0.5,
        params=params or {},
        bias=bias,
        terms=terms,
        dropout_rng=dropout_rng if config.dropout_rate > 0 else None,
    )


def find(
    q: Array, k: Array, mask: Mask, config: AttentionConfig, *, terms: PositionTerms | None, cached: bool
) -> Variant:
    """The variant of a call: a few queries against a cache take the dense form of the kind, where it has one."""
    own = variants_of(config.kind)
    if cached and 'dense' in own:
        return own['dense']
    use = Use(
        name='call',
        config=config,
        causal=mask.causal,
        cross=q.shape[1] != k.shape[1],
        packed=False,  # the config has been checked for that
        terms=terms is not None,
        compute_dtype=str(q.dtype),
        platform=target_platform(),
        decodes=cached,
        max_length=max(q.shape[1], k.shape[1]),
        prefix=mask.k_prefix is not None,
        sequence_shards=num_sequence_shards(),
        by_index=mask.aligned or not (mask.causal or mask.window is not None),
    )
    return own[choose(use)]
