"""Linear attention: a feature map of queries and keys in place of the softmax. Katharopoulos et al., 2020.

The sum over keys is taken once and read by every query, so that time and memory grow as the length, and decoding needs
a state of constant size. What is here serves every feature map; `performer` brings another.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.attention.mask import Mask
from transformer_jax.attention.prefix_sums import (
    FeatureMap,
    Rows,
    Sums,
    add,
    divide,
    empty_padding,
    key_features,
    no_sums,
    no_sums_for,
    over_chunks,
    pass_over,
    query_features,
    read,
)
from transformer_jax.attention.variant import Options, Running, Variant, refuse_unsupported
from transformer_jax.config import AttentionConfig
from transformer_jax.shapes import Array, Bool, Float

_SUPPORTS = frozenset('causal cross segments grouped_heads value_dim cache cpu gpu tpu float32 bfloat16'.split())


def elu_features(
    rows: Float[Array, 'B T N H'], options: Options
) -> tuple[Float[Array, 'B T N H'], Float[Array, 'B T N']]:
    """elu(x) + 1, which is x + 1 above zero and exp(x) below. There is no 1 / sqrt(d_k) here: nothing to be scaled."""
    positive = rows > 0
    features = jnp.where(positive, rows + 1, jnp.exp(jnp.where(positive, 0, rows)))
    largest = jax.lax.stop_gradient(features.max(axis=-1))
    largest = jnp.where(largest > 0, largest, 1)
    return features / largest[..., None], jnp.log(largest)


def attend(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    mask: Mask,
    options: Options,
    *,
    feature_map: FeatureMap,
) -> tuple[Float[Array, 'B T N U'], None]:
    """phi(q) (sum of phi(k) v^T) / phi(q) (sum of phi(k)) over the keys that each query sees. O(T + S) time and memory.

    Sums are float32 whatever the inputs. A causal pass goes chunk by chunk with the sums of what came before, and a
    packed one likewise after its rows are sorted by segment. Each chunk is computed again in the backward pass.
    """
    advice = "it never holds the weights of single keys; use kind='dot'"
    refuse_unsupported(_SUPPORTS, mask, options, name=f'attention of kind {options.config.kind!r}', advice=advice)
    q_segments, k_segments = mask.q_segments, mask.k_segments
    if mask.causal and mask.aligned and q.shape[1] == k.shape[1]:
        rows = empty_padding(Rows(q, k, v, q_segments, k_segments))
        return pass_over(no_sums_for(rows, feature_map, options), rows, feature_map, options)[0], None
    if mask.causal:
        return _attend_sorted(mask, q, k, v, options=options, feature_map=feature_map), None
    segment = jnp.maximum(q_segments.max(axis=1), k_segments.max(axis=1))[:, None]
    unpacked = jnp.all((q_segments == segment) | (q_segments == 0)) & jnp.all(
        (k_segments == segment) | (k_segments == 0)
    )
    to_all = functools.partial(_attend_to_all, options=options, feature_map=feature_map)
    by_segment = functools.partial(_attend_sorted, options=options, feature_map=feature_map)
    return _either(unpacked, to_all, by_segment, mask, q, k, v), None


def feature_variant(
    feature_map: FeatureMap,
    width: Callable[[AttentionConfig], int],
    *,
    exact: bool,
    further: frozenset[str] = frozenset(),
    reads: frozenset[str] = frozenset(),
) -> Variant:
    """The variant of a feature map, whose features have the width `width(config)`.

    `further` = what it supports, and `reads` = the fields of its own that it reads, beyond what all of them do.

    Rotary positions are among that where products of features estimate a function of q k, which knows offsets alone.
    """

    def init(batch: int, config: AttentionConfig, dtype: Any) -> Sums:
        num_kv_heads, value_dim = config.num_kv_heads or config.num_heads, config.value_dim or config.head_dim
        sums = no_sums(batch, num_kv_heads, width(config), value_dim, dtype)
        return sums._replace(segment=jnp.ones((batch,), jnp.int32))

    def extend(
        state: Sums,
        q: Float[Array, 'B T N H'],
        k: Float[Array, 'B T K H'],
        v: Float[Array, 'B T K U'],
        holds: Bool[Array, 'B T'],
        options: Options,
    ) -> tuple[Float[Array, 'B T N U'], Sums]:
        segments = holds.astype(jnp.int32)
        return pass_over(state, empty_padding(Rows(q, k, v, segments, segments)), feature_map, options)

    return Variant(
        functools.partial(attend, feature_map=feature_map),
        further | _SUPPORTS,
        running=Running(init, extend),
        exact=exact,
        reads=reads | {'block_size'},
    )


def _either(
    condition: Bool[Array, ''], first: Callable[..., Array], second: Callable[..., Array], mask: Mask, *arrays: Array
) -> Array:
    """`first` or `second` of mask and arrays. The backward pass keeps nothing of the other one, as a `cond` would."""

    @jax.custom_vjp
    def run(condition: Array, mask: Mask, *arrays: Array) -> Array:
        return jax.lax.cond(condition, first, second, mask, *arrays)

    def forward(condition: Array, mask: Mask, *arrays: Array) -> tuple[Array, Any]:
        return run(condition, mask, *arrays), (condition, mask, arrays)

    def backward(kept: Any, change: Array) -> tuple[Any, ...]:
        condition, mask, arrays = kept

        def pull(function: Callable[..., Array], change: Array) -> tuple[Array, ...]:
            return jax.vjp(functools.partial(function, mask), *arrays)[1](change)

        pulls = (functools.partial(pull, function) for function in (first, second))
        return (None, None, *jax.lax.cond(condition, *pulls, change))

    run.defvjp(forward, backward)
    return run(condition, mask, *arrays)


def _attend_to_all(
    mask: Mask, q: Array, k: Array, v: Array, *, options: Options, feature_map: FeatureMap
) -> Float[Array, 'B T N U']:
    """Every query sees every key: two sums. At most one segment a row."""
    # Where one side is all padding nobody is seen, or nobody looks.
    q_segments = jnp.where((mask.k_segments > 0).any(axis=1, keepdims=True), mask.q_segments, 0)
    k_segments = jnp.where((mask.q_segments > 0).any(axis=1, keepdims=True), mask.k_segments, 0)
    rows = empty_padding(Rows(q, k, v, q_segments, k_segments))

    def add_keys(sums: Sums, keys: tuple[Array, Array, Array]) -> tuple[Sums, None]:
        k, v, segments = keys
        return add(sums, *key_features(k, v, feature_map, options), segments), None

    def read_queries(nothing: None, queries: tuple[Array, Array]) -> tuple[None, Array]:
        q, segments = queries
        seen = read(sums, query_features(q, k.shape[2], feature_map, options), segments, sums.log_scale[:, None])
        return None, divide(seen, q.shape, v.dtype)

    sums, _ = over_chunks(add_keys, no_sums_for(rows, feature_map, options), (rows.k, rows.v, k_segments), options)
    return over_chunks(read_queries, None, (rows.q, q_segments), options)[1]


def _attend_sorted(
    mask: Mask, q: Array, k: Array, v: Array, *, options: Options, feature_map: FeatureMap
) -> Float[Array, 'B T N U']:
    """Keys and queries in one row, sorted by segment, then by position if causal, keys first: then all is causal."""
    num_keys, num_queries = k.shape[1], q.shape[1]
    segments = jnp.concatenate([mask.k_segments, mask.q_segments], axis=1)
    positions = jnp.concatenate([mask.k_positions, mask.q_positions], axis=1)
    indices = jnp.broadcast_to(jnp.arange(num_keys + num_queries, dtype=jnp.int32), segments.shape)
    positions = positions if mask.causal else jnp.zeros_like(positions)
    queries = (indices >= num_keys).astype(jnp.int32)
    segments, _, queries, order = jax.lax.sort((segments, positions, queries, indices), dimension=1, num_keys=3)
    is_query = queries > 0
    q_segments, k_segments = jnp.where(is_query, segments, 0), jnp.where(is_query, 0, segments)
    # Nobody looks at a key behind the last query of its segment, and a query before the first key sees nothing.
    newest_key = jax.lax.cummax(k_segments, axis=1)
    next_query = jax.lax.cummin(jnp.where(q_segments > 0, q_segments, jnp.iinfo(jnp.int32).max), axis=1, reverse=True)
    q_segments = jnp.where(q_segments == newest_key, q_segments, 0)
    k_segments = jnp.where(k_segments == next_query, k_segments, 0)

    def pick(rows: Array, places: Array) -> Array:
        return jnp.take_along_axis(rows, jnp.clip(places, 0, rows.shape[1] - 1)[:, :, None, None], axis=1)

    picked = Rows(pick(q, order - num_keys), pick(k, order), pick(v, order), q_segments, k_segments)
    rows = empty_padding(picked)
    output, _ = pass_over(no_sums_for(rows, feature_map, options), rows, feature_map, options)
    return pick(output, jnp.argsort(order, axis=1)[:, num_keys:])


LINEAR = feature_variant(elu_features, lambda config: config.head_dim, exact=True)
