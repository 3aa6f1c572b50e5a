"""Relative bias of T5 (Raffel et al. 2020): a learned scalar for each head and bucket of offsets, added to the logits.

Near offsets have a bucket each, farther ones share buckets whose width grows with the distance.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import AttentionConfig, ModelConfig
from transformer_jax.parameters import Parameter
from transformer_jax.positions.offsets import clipped_offsets
from transformer_jax.shapes import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class T5Terms:
    """The biases of one stack, the same in all its layers. `max_distance` and `causal` say what the buckets mean."""

    table: Float[Array, 'buckets N']
    max_distance: int = dataclasses.field(metadata={'static': True})
    causal: bool = dataclasses.field(metadata={'static': True})

    def bias(self, q_positions: Int[Array, '#B T'], k_positions: Int[Array, '#B S']) -> Float[Array, '#B N T S']:
        """The bias of each offset, added to the scaled logits."""
        buckets = offset_buckets(len(self.table), self.max_distance, causal=self.causal)
        by_offset = self.table.astype(jnp.float32)[buckets]
        offsets = clipped_offsets(q_positions, k_positions, self.max_distance)
        rows = by_offset.at[offsets].get(mode='promise_in_bounds')
        return jnp.moveaxis(rows, -1, 1)

    def score_term(self, q: Array, q_positions: Array, k_positions: Array) -> None:
        """None: the bias does not depend on the query."""

    def output_term(self, weights: Array, q_positions: Array, k_positions: Array) -> None:
        """None: the values have no positions."""


@functools.cache
def offset_buckets(num_buckets: int, max_distance: int, *, causal: bool) -> np.ndarray:
    """The bucket of every offset from -`max_distance` to `max_distance`; beyond, that of the last.

    Causal: all buckets are for keys before the query, and later keys count as its own. Otherwise the second half is for
    later keys. In each half the first half of buckets are single distances; the rest grow as the logarithm does.
    """
    half = num_buckets if causal else num_buckets // 2
    distances = _distance_buckets(half, max_distance)
    later = np.zeros(max_distance, int) if causal else half + distances[1:]
    buckets = np.concatenate([distances[::-1], later])
    buckets.setflags(write=False)
    return buckets


def _distance_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
    """The bucket of each distance n from 0 to `max_distance`.

    min(e + floor(log(n / e) / log(max_distance / e) * (num_buckets - e)), num_buckets - 1) from e = num_buckets / 2 on.
    Computed in whole numbers: a float32 logarithm may fall to either side of a boundary, as the machine pleases.
    """
    exact = num_buckets // 2
    steps = num_buckets - exact
    buckets, step = np.arange(max_distance + 1), 0
    for n in range(exact, max_distance + 1):
        while step < steps - 1 and n**steps * exact ** (step + 1) >= max_distance ** (step + 1) * exact**steps:
            step += 1
        buckets[n] = exact + step
    return buckets


def parameters(config: ModelConfig, attention: AttentionConfig) -> dict[str, Parameter]:
    """The table of one stack: `t5_buckets` biases a head."""
    normal = jax.nn.initializers.normal(config.d_model**-0.5)
    return {'table': Parameter(normal, (config.t5_buckets, attention.num_heads), (None, 'heads'))}


def terms(config: ModelConfig, attention: AttentionConfig, params: Mapping[str, Array], causal: bool) -> T5Terms:
    """The terms of one stack from its table."""
    return T5Terms(params['table'], config.t5_max_distance, causal)


def check(config: ModelConfig, use: str) -> str | None:
    """Why these buckets can not be made, or None when they can."""
    buckets, distance = config.t5_buckets, config.t5_max_distance
    if buckets % 2:
        return (
            f'config.model.t5_buckets is {buckets}; it must be even, half of it for keys after the query: '
            f'{buckets - 1} or {buckets + 1}'
        )
    if distance <= buckets // 2:
        return (
            f'config.model.t5_max_distance is {distance}; it must be above {buckets // 2}, the distances that have one '
            f'of the {buckets} buckets (config.model.t5_buckets) each: {buckets // 2 + 1} or more, or fewer buckets'
        )
    return None
