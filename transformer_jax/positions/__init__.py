"""Position schemes. `SCHEMES` is the one table: which hooks each scheme has, and the functions that call them.

A hook is given the positions of one block of rows, never array indices, so that a cached one-row query, a packed row
and a full forward pass agree.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from transformer_jax.config import AttentionConfig, ConfigError, ModelConfig, refuse_unread, require_choice
from transformer_jax.parameters import Parameter
from transformer_jax.position_terms import PositionTerms
from transformer_jax.positions import alibi, learned, rope, shaw, sinusoidal, t5
from transformer_jax.shapes import Array, Float, Int


class Scheme(NamedTuple):
    """The hooks of a scheme; None = it has none. Parameters are by the names in the matching `..._parameters`."""

    # (config, params, positions [B, T]) -> [B, T, D], added to the embeddings; one set of parameters a side
    on_embedding: Callable[[ModelConfig, Mapping[str, Array], Array], Array] | None = None
    embedding_parameters: Callable[[ModelConfig], dict[str, Parameter]] | None = None
    # (config, x [B, T, N, H], positions [B, T]) -> the same shape: queries and keys of self-attention, before the cache
    on_heads: Callable[[ModelConfig, Array, Array], Array] | None = None
    # (config, attention, params, causal) -> what self-attention adds to its logits and to its output
    terms: Callable[[ModelConfig, AttentionConfig, Mapping[str, Array], bool], PositionTerms] | None = None
    terms_parameters: Callable[[ModelConfig, AttentionConfig], dict[str, Parameter]] | None = None
    shared: bool = False  # `terms_parameters` are held once a stack; otherwise once a self-attention layer
    # What positions must stay below: 'table' = config.max_length, for as many were trained; 'config' = it too, but the
    # same parameters serve a config with a greater one, also when a trained run is opened; None = nothing.
    max_length: str | None = None
    # (config, use) -> why 'encoder_self' or 'decoder_self' can't have the scheme, or None when it can
    check: Callable[[ModelConfig, str], str | None] | None = None
    reads: tuple[str, ...] = ()  # the fields of `ModelConfig` that are of this scheme alone


SCHEMES: dict[str, Scheme] = {
    'none': Scheme(),
    'sinusoidal': Scheme(on_embedding=sinusoidal.on_embedding, max_length='config'),
    'learned': Scheme(on_embedding=learned.on_embedding, embedding_parameters=learned.parameters, max_length='table'),
    'shaw': Scheme(terms=shaw.terms, terms_parameters=shaw.parameters, reads=('relative_clip',)),
    'rope': Scheme(on_heads=rope.on_heads, check=rope.check, reads=('rope_base', 'rope_scaling')),
    't5': Scheme(
        terms=t5.terms,
        terms_parameters=t5.parameters,
        shared=True,
        check=t5.check,
        reads=('t5_buckets', 't5_max_distance'),
    ),
    'alibi': Scheme(terms=alibi.terms),
}


def on_embedding(
    config: ModelConfig, params: Mapping[str, Array], positions: Int[Array, 'B T']
) -> Float[Array, '#B #T #D']:
    """What is added to the embeddings at these positions; zeros `[1, 1, 1]` where the scheme adds nothing there."""
    hook = SCHEMES[config.positions].on_embedding
    return jnp.zeros((1, 1, 1)) if hook is None else hook(config, params, positions)


def on_heads(config: ModelConfig, x: Float[Array, 'B T N H'], positions: Int[Array, '#B T']) -> Float[Array, 'B T N H']:
    """The queries or keys of self-attention as the scheme wants them at these positions."""
    hook = SCHEMES[config.positions].on_heads
    return x if hook is None else hook(config, x, positions)


def make_terms(
    config: ModelConfig, attention: AttentionConfig, params: Mapping[str, Array], *, causal: bool
) -> PositionTerms | None:
    """What self-attention adds to its logits and to its output, or None where the scheme adds nothing there."""
    hook = SCHEMES[config.positions].terms
    return None if hook is None else hook(config, attention, params, causal)


def check(config: ModelConfig, uses: Sequence[str] = ('encoder_self', 'decoder_self')) -> None:
    """Checks the scheme's name, and what it needs of each use of self-attention that the model has."""
    require_choice('config.model.positions', config.positions, SCHEMES)
    refuse_unread(config, 'config.model', 'positions', {name: scheme.reads for name, scheme in SCHEMES.items()})
    rule = SCHEMES[config.positions].check
    for use in uses:
        if rule is not None and (reason := rule(config, use)) is not None:
            raise ConfigError(reason)
