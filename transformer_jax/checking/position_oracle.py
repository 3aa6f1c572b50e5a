"""What each position scheme does inside attention, pair by pair as its paper writes it, in float64.

Written for reading: a vector or a scalar for every pair of a query and a key, and no sharing of code with `positions/`.
To be called inside `jax.enable_x64(True)`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.shapes import Array

_ROUNDING = 1e-9  # of a logarithm that should be a whole number


class Added(NamedTuple):
    """What a scheme adds for every pair of a query and a key; `None` = nothing."""

    bias: Array | None = None  # [B, N, T, S], to the scaled logits
    keys: Array | None = None  # [B, T, S, H], to the key as this query sees it
    values: Array | None = None  # [B, T, S, U], to the value


def turn(config: ModelConfig, x: Array, positions: Any) -> Array:
    """RoPE, Su et al. 2021, equation 34 with the pairs (x[i], x[i + H/2]): each is turned by position * base^(-2i/H).

    As a product of complex numbers: `x` is `[B, T, N, H]`, `positions` `[B, T]`.
    """
    half = x.shape[-1] // 2
    rates = jnp.array([config.rope_base ** (-2 * i / (2 * half)) / config.rope_scaling for i in range(half)])
    angles = positions[:, :, None, None] * rates[None, None, None]
    turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angles)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def shaw(config: ModelConfig, params: Mapping[str, Array], offsets: Any, num_heads: int, causal: bool) -> Added:
    """Shaw et al. 2018, equations 3 and 4: a_ij = w[max(-k, min(k, j - i))], one table for keys and one for values."""
    clip = config.relative_clip
    rows = jnp.maximum(-clip, jnp.minimum(clip, offsets)) + clip
    return Added(keys=params['relative_keys'][rows], values=params['relative_values'][rows])


def t5(config: ModelConfig, params: Mapping[str, Array], offsets: Any, num_heads: int, causal: bool) -> Added:
    """Raffel et al. 2020, section 2.1: a scalar for each head and bucket of offsets."""
    distance = int(np.abs(np.asarray(offsets)).max())
    buckets = [_bucket(j, config.t5_buckets, config.t5_max_distance, causal) for j in range(-distance, distance + 1)]
    return Added(bias=jnp.moveaxis(params['table'][np.array(buckets)[offsets + distance]], -1, 1))


def _bucket(offset: int, num_buckets: int, max_distance: int, causal: bool) -> int:
    """As `_relative_position_bucket` of the published code has it: the nearer half is exact, the rest logarithmic.

    Keys after the query have the upper half of all buckets; or, if causal, count as the query itself.
    """
    first, distance = 0, max(-offset, 0) if causal else abs(offset)
    if not causal:
        num_buckets //= 2
        first = num_buckets if offset > 0 else 0
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return first + min(exact + math.floor(share * (num_buckets - exact) + _ROUNDING), num_buckets - 1)


def alibi(config: ModelConfig, params: Mapping[str, Array], offsets: Any, num_heads: int, causal: bool) -> Added:
    """Press et al. 2022, section 3: -m |i - j| with the slopes m = 2^(-8/n), 2^(-16/n), ... of n heads.

    Where n is no power of two, the slopes of the power below it, then every second one of twice that power.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-8 * (2 * head + 1) / (2 * power)) for head in range(num_heads - power)]
    return Added(bias=-jnp.array(slopes)[None, :, None, None] * jnp.abs(offsets)[:, None])


# (model, the scheme's params, positions of keys minus those of queries [B, T, S], N, causal) -> what is added
ADDED: dict[str, Callable[[ModelConfig, Mapping[str, Array], Any, int, bool], Added]] = {
    'shaw': shaw,
    't5': t5,
    'alibi': alibi,
}
TURNED = {'rope': turn}
