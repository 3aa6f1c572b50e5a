"""Prefix sums of features times values, chunk by chunk: what attention by feature maps reads in place of all keys."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.attention.variant import Options
from transformer_jax.shapes import Array, Float, Int

CHUNK = 128  # rows at a time, unless `block_size` says otherwise

# Of rows `[B, T, N, H]`: features `[B, T, N, F]`, not negative, and the logarithm `[B, T, N]` of what they were divided
# by so that they neither overflow nor vanish. A row's own scale, never a sequence's: the past must not hang on the
# future, and a step of decoding must give what the full pass gives.
FeatureMap = Callable[[Array, Options], tuple[Array, Array]]


class Sums(NamedTuple):
    """All that a query must know of the keys before it; the size does not depend on their number."""

    values: Float[Array, 'B K F U1']  # sum of features times (value, 1), divided by exp(log_scale)
    log_scale: Float[Array, 'B K']  # the largest of the keys that were added
    segment: Int[Array, 'B']  # whose keys were added


class Rows(NamedTuple):
    """Queries and keys in one order: a query sees the keys of its segment that stand no later than it."""

    q: Float[Array, 'B L N H']
    k: Float[Array, 'B L K H']
    v: Float[Array, 'B L K U']
    q_segments: Int[Array, 'B L']  # 0 = no query here
    k_segments: Int[Array, 'B L']  # 0 = no key here


def empty_padding(rows: Rows) -> Rows:
    """Zeros in slots without query or key, which may hold anything, NaN included: 0 * NaN is NaN."""
    is_query, is_key = (rows.q_segments > 0)[:, :, None, None], (rows.k_segments > 0)[:, :, None, None]
    return rows._replace(
        q=jnp.where(is_query, rows.q, 0), k=jnp.where(is_key, rows.k, 0), v=jnp.where(is_key, rows.v, 0)
    )


def no_sums(batch: int, num_kv_heads: int, num_features: int, value_dim: int, dtype: Any) -> Sums:
    """The sums of no keys."""
    accumulator = accumulator_of(dtype)
    return Sums(
        jnp.zeros((batch, num_kv_heads, num_features, value_dim + 1), accumulator),
        jnp.full((batch, num_kv_heads), jnp.finfo(accumulator).min, accumulator),
        jnp.zeros((batch,), jnp.int32),
    )


def no_sums_for(rows: Rows, feature_map: FeatureMap, options: Options) -> Sums:
    """The sums of no keys, in the sizes of these rows."""
    features, _ = jax.eval_shape(lambda k: feature_map(k, options), rows.k)
    batch, _, num_kv_heads, value_dim = rows.v.shape
    return no_sums(batch, num_kv_heads, features.shape[-1], value_dim, rows.v.dtype)


def pass_over(
    sums: Sums, rows: Rows, feature_map: FeatureMap, options: Options
) -> tuple[Float[Array, 'B L N U'], Sums]:
    """The rows chunk by chunk, each with the sums of those before.

    Segments must lie in one piece each, apart from padding: sums are kept of one segment at a time.
    """
    read_and_add = functools.partial(_read_and_add, feature_map=feature_map, options=options)
    sums, output = over_chunks(read_and_add, sums, rows, options)
    return output, sums


def over_chunks(step: Callable, carry: Any, rows: Any, options: Options) -> tuple[Any, Any]:
    """Scans `step` over chunks of the rows, a pytree of `[B, L, ...]`.

    The backward pass keeps one carry a chunk and computes the rest again.
    """
    leaves = jax.tree.leaves(rows)
    batch, length = leaves[0].shape[:2]
    size = min(options.config.block_size or CHUNK, length)
    if size == length:
        return step(carry, rows)
    num_chunks = -(-length // size)

    def split(array: Array) -> Array:
        padding = [(0, 0), (0, num_chunks * size - length)] + [(0, 0)] * (array.ndim - 2)
        chunks = jnp.pad(array, padding).reshape(batch, num_chunks, size, *array.shape[2:])
        return jnp.moveaxis(chunks, 1, 0)

    def join(chunks: Array) -> Array:
        whole = jnp.moveaxis(chunks, 0, 1)
        return whole.reshape(batch, num_chunks * size, *whole.shape[3:])[:, :length]

    carry, outputs = jax.lax.scan(jax.checkpoint(step), carry, jax.tree.map(split, rows))
    return carry, jax.tree.map(join, outputs)


def _read_and_add(
    sums: Sums, rows: Rows, *, feature_map: FeatureMap, options: Options
) -> tuple[Sums, Float[Array, 'B C N U']]:
    """One chunk: its queries read the sums and the chunk's own keys; then those keys are added to the sums."""
    q_features = query_features(rows.q, rows.k.shape[2], feature_map, options)
    k_features, k_scales, v_and_one = key_features(rows.k, rows.v, feature_map, options)
    lowest = jnp.finfo(k_scales.dtype).min
    in_order = jnp.tril(jnp.ones((rows.q.shape[1],) * 2, bool))[None]
    sees = (rows.q_segments[:, :, None] == rows.k_segments[:, None, :]) & (rows.k_segments > 0)[:, None, :] & in_order
    sees = sees[:, None]  # B 1 T S
    by_key = jnp.moveaxis(k_scales, 1, 2)[:, :, None, :]  # B K 1 S
    continues = ((rows.q_segments == sums.segment[:, None]) & (rows.q_segments > 0))[:, :, None]
    before = jnp.where(continues, sums.log_scale[:, None, :], lowest)  # B T K
    # Each query divides by the largest scale that it sees, which cancels in its quotient.
    largest = jnp.maximum(jnp.moveaxis(jnp.where(sees, by_key, lowest).max(axis=-1), 1, 2), before)
    scales = jnp.where(sees, jnp.exp(jnp.where(sees, by_key - jnp.moveaxis(largest, 1, 2)[..., None], 0)), 0)
    products = jnp.einsum('BTKGF,BSKF->BKGTS', q_features, k_features)
    products = jnp.where(sees[:, :, None], products, 0) * scales[:, :, None]
    seen = jnp.einsum('BKGTS,BSKU->BTKGU', products, v_and_one) + read(sums, q_features, rows.q_segments, largest)
    output = divide(seen, rows.q.shape, rows.v.dtype)
    return add(sums, k_features, k_scales, v_and_one, rows.k_segments), output


def query_features(
    q: Float[Array, 'B T N H'], num_kv_heads: int, feature_map: FeatureMap, options: Options
) -> Float[Array, 'B T K G F']:
    """Features by key-value head and member of its group. A query's own scale cancels in its quotient."""
    batch, length, num_heads, _ = q.shape
    features, _ = feature_map(q.astype(accumulator_of(q.dtype)), options)
    return features.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, features.shape[-1])


def key_features(
    k: Float[Array, 'B S K H'], v: Float[Array, 'B S K U'], feature_map: FeatureMap, options: Options
) -> tuple[Array, Array, Float[Array, 'B S K U1']]:
    """Features, log scales, and values with a one at their end, whose sum is what the sum of values is divided by."""
    features, scales = feature_map(k.astype(accumulator_of(k.dtype)), options)
    v = v.astype(features.dtype)
    return features, jax.lax.stop_gradient(scales), jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)


def read(
    sums: Sums, q_features: Float[Array, 'B T K G F'], q_segments: Int[Array, 'B T'], log_scale: Float[Array, 'B #T K']
) -> Float[Array, 'B T K G U1']:
    """What each query reads from the sums of its segment, divided by exp(log_scale)."""
    continues = ((q_segments == sums.segment[:, None]) & (q_segments > 0))[:, :, None]
    scale = jnp.where(continues, jnp.exp(jnp.where(continues, sums.log_scale[:, None, :] - log_scale, 0)), 0)
    return jnp.einsum('BTKGF,BKFU->BTKGU', q_features, sums.values) * scale[..., None, None]


def add(
    sums: Sums,
    k_features: Float[Array, 'B S K F'],
    k_scales: Float[Array, 'B S K'],
    v_and_one: Float[Array, 'B S K U1'],
    k_segments: Int[Array, 'B S'],
) -> Sums:
    """The sums with these keys: those of the last segment here; the sums of an earlier segment are given up."""
    places = jnp.where(k_segments > 0, jnp.arange(1, k_segments.shape[1] + 1)[None], 0)
    last = jnp.take_along_axis(k_segments, jnp.maximum(places.max(axis=1, keepdims=True) - 1, 0), axis=1)[:, 0]
    last = jnp.where(last > 0, last, sums.segment)
    continues = (sums.segment == last)[:, None]
    belongs = ((k_segments == last[:, None]) & (k_segments > 0))[:, :, None]
    lowest = jnp.finfo(k_scales.dtype).min
    kept = jnp.where(continues, sums.log_scale, lowest)
    largest = jnp.maximum(kept, jnp.where(belongs, k_scales, lowest).max(axis=1))
    scales = jnp.where(belongs, jnp.exp(jnp.where(belongs, k_scales - largest[:, None], 0)), 0)
    added = jnp.einsum('BSKF,BSKU->BKFU', k_features * scales[..., None], v_and_one)
    decay = jnp.where(continues, jnp.exp(kept - largest), 0)
    return Sums(sums.values * decay[..., None, None] + added, largest, last)


def divide(seen: Float[Array, 'B T K G U1'], shape: tuple[int, ...], dtype: Any) -> Float[Array, 'B T N U']:
    """Weighted sums over sums of weights; zeros where nothing was seen."""
    total = seen[..., -1:]
    return (seen[..., :-1] / jnp.where(total > 0, total, 1)).reshape(*shape[:3], -1).astype(dtype)


def accumulator_of(dtype: Any) -> Any:
    """What sums of this dtype are kept in."""
    return jnp.promote_types(dtype, jnp.float32)
