"""Parameters that attention variants and position schemes describe, made those of a Flax module."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from transformer_jax import positions as position_schemes
from transformer_jax.config import AttentionConfig, ModelConfig
from transformer_jax.parameters import Parameter
from transformer_jax.position_terms import PositionTerms
from transformer_jax.shapes import Array


def declare(module: nn.Module, parameters: Mapping[str, Parameter]) -> dict[str, Array]:
    """Makes these parameters those of a Flax module, with their logical axes."""
    partitioned: Any = nn.with_logical_partitioning
    return {
        name: module.param(name, partitioned(one.initializer, one.logical_axes), one.shape, jnp.float32)
        for name, one in parameters.items()
    }


def declare_terms(
    module: nn.Module, scheme: ModelConfig, config: AttentionConfig, *, causal: bool
) -> PositionTerms | None:
    """What the position scheme adds inside attention, its parameters those of the module; None = nothing."""
    own = position_schemes.SCHEMES[scheme.positions]
    params = declare(module, own.terms_parameters(scheme, config)) if own.terms_parameters else {}
    return position_schemes.make_terms(scheme, config, params, causal=causal)
