"""Linear attention: a feature map of queries and keys in place of the softmax. Katharopoulos et al., 2020.

The sum over keys is taken once and read by every query, so that time and memory grow as the length, and decoding needs
a state of constant size. What is here serves every feature map; `performer` brings another.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options, Running, Variant
from transformer_jax.config import AttentionConfig
from transformer_jax.shapes import Array, Bool, Float, Int

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
    _refuse_what_is_not_supported(mask, options)
    q_segments, k_segments = mask.q_segments, mask.k_segments
    if mask.causal and mask.aligned and q.shape[1] == k.shape[1]:
        rows = _empty_padding(Rows(q, k, v, q_segments, k_segments))
        return _pass_over(_no_sums_for(rows, feature_map, options), rows, feature_map, options)[0], None
    if mask.causal:
        return _attend_sorted(q, k, v, mask, options, feature_map), None
    segment = jnp.maximum(q_segments.max(axis=1), k_segments.max(axis=1))[:, None]
    unpacked = jnp.all((q_segments == segment) | (q_segments == 0)) & jnp.all(
        (k_segments == segment) | (k_segments == 0)
    )
    output = jax.lax.cond(
        unpacked,
        lambda: _attend_to_all(q, k, v, mask, options, feature_map),
        lambda: _attend_sorted(q, k, v, mask, options, feature_map),
    )
    return output, None


def feature_variant(feature_map: FeatureMap, width: Callable[[AttentionConfig], int], *, exact: bool) -> Variant:
    """The variant of a feature map, whose features have the width `width(config)`."""

    def init(batch: int, config: AttentionConfig, dtype: Any) -> Sums:
        num_kv_heads, value_dim = config.num_kv_heads or config.num_heads, config.value_dim or config.head_dim
        sums = _no_sums(batch, num_kv_heads, width(config), value_dim, dtype)
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
        return _pass_over(state, _empty_padding(Rows(q, k, v, segments, segments)), feature_map, options)

    return Variant(
        functools.partial(attend, feature_map=feature_map),
        frozenset('causal cross segments grouped_heads value_dim cache cpu gpu tpu float32 bfloat16'.split()),
        running=Running(init, extend),
        exact=exact,
    )


def _refuse_what_is_not_supported(mask: Mask, options: Options) -> None:
    asked = {
        'a window': mask.window is not None,
        'a prefix': mask.k_prefix is not None,
        'a mask key by key': mask.allowed is not None,
        'a bias': options.bias is not None,
        'a position scheme inside attention': options.terms is not None,
        'dropout on the weights': options.dropout_rng is not None and options.config.dropout_rate > 0,
        'weights to return': options.return_weights,
    }
    if refused := [what for what, present in asked.items() if present]:
        raise ValueError(
            f'attention of kind {options.config.kind!r} has no place for {" or ".join(refused)}: it never holds the '
            "weights of single keys; use kind='dot'"
        )


def _accumulator(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _empty_padding(rows: Rows) -> Rows:
    """Zeros in slots without query or key, which may hold anything, NaN included: 0 * NaN is NaN."""
    is_query, is_key = (rows.q_segments > 0)[:, :, None, None], (rows.k_segments > 0)[:, :, None, None]
    return rows._replace(
        q=jnp.where(is_query, rows.q, 0), k=jnp.where(is_key, rows.k, 0), v=jnp.where(is_key, rows.v, 0)
    )


def _no_sums(batch: int, num_kv_heads: int, num_features: int, value_dim: int, dtype: Any) -> Sums:
    accumulator = _accumulator(dtype)
    return Sums(
        jnp.zeros((batch, num_kv_heads, num_features, value_dim + 1), accumulator),
        jnp.full((batch, num_kv_heads), jnp.finfo(accumulator).min, accumulator),
        jnp.zeros((batch,), jnp.int32),
    )


def _no_sums_for(rows: Rows, feature_map: FeatureMap, options: Options) -> Sums:
    features, _ = jax.eval_shape(lambda k: feature_map(k, options), rows.k)
    batch, _, num_kv_heads, value_dim = rows.v.shape
    return _no_sums(batch, num_kv_heads, features.shape[-1], value_dim, rows.v.dtype)


def _attend_to_all(
    q: Array, k: Array, v: Array, mask: Mask, options: Options, feature_map: FeatureMap
) -> Float[Array, 'B T N U']:
    """Every query sees every key: two sums. At most one segment a row."""
    # Where one side is all padding nobody is seen, or nobody looks.
    q_segments = jnp.where((mask.k_segments > 0).any(axis=1, keepdims=True), mask.q_segments, 0)
    k_segments = jnp.where((mask.q_segments > 0).any(axis=1, keepdims=True), mask.k_segments, 0)
    rows = _empty_padding(Rows(q, k, v, q_segments, k_segments))

    @jax.checkpoint
    def attend_to_all(rows: Rows) -> Array:
        k_features, k_scales, v_and_one = _keys(rows, feature_map, options)
        sums = _add(_no_sums_for(rows, feature_map, options), k_features, k_scales, v_and_one, rows.k_segments)
        q_features = _queries(rows, feature_map, options)
        seen = _read(sums, q_features, rows.q_segments, sums.log_scale[:, None])
        return _divide(seen, q.shape, v.dtype)

    return attend_to_all(rows)


def _attend_sorted(
    q: Array, k: Array, v: Array, mask: Mask, options: Options, feature_map: FeatureMap
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
    rows = _empty_padding(picked)
    output, _ = _pass_over(_no_sums_for(rows, feature_map, options), rows, feature_map, options)
    return pick(output, jnp.argsort(order, axis=1)[:, num_keys:])


def _pass_over(
    sums: Sums, rows: Rows, feature_map: FeatureMap, options: Options
) -> tuple[Float[Array, 'B L N U'], Sums]:
    """The rows chunk by chunk, each with the sums of those before. Keeps one `Sums` a chunk for the backward pass."""
    length = rows.q.shape[1]
    size = min(options.config.block_size or CHUNK, length)
    read_and_add = functools.partial(_read_and_add, feature_map=feature_map, options=options)
    if size == length:
        sums, output = read_and_add(sums, rows)
        return output, sums
    num_chunks = -(-length // size)

    def split(array: Array) -> Array:
        padding = [(0, 0), (0, num_chunks * size - length)] + [(0, 0)] * (array.ndim - 2)
        chunks = jnp.pad(array, padding).reshape(array.shape[0], num_chunks, size, *array.shape[2:])
        return jnp.moveaxis(chunks, 1, 0)

    sums, outputs = jax.lax.scan(jax.checkpoint(read_and_add), sums, Rows(*map(split, rows)))
    output = jnp.moveaxis(outputs, 0, 1)
    return output.reshape(output.shape[0], num_chunks * size, *output.shape[3:])[:, :length], sums


def _read_and_add(
    sums: Sums, rows: Rows, *, feature_map: FeatureMap, options: Options
) -> tuple[Sums, Float[Array, 'B C N U']]:
    """One chunk: its queries read the sums and the chunk's own keys; then those keys are added to the sums."""
    q_features = _queries(rows, feature_map, options)
    k_features, k_scales, v_and_one = _keys(rows, feature_map, options)
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
    seen = jnp.einsum('BKGTS,BSKU->BTKGU', products, v_and_one) + _read(sums, q_features, rows.q_segments, largest)
    output = _divide(seen, rows.q.shape, rows.v.dtype)
    return _add(sums, k_features, k_scales, v_and_one, rows.k_segments), output


def _queries(rows: Rows, feature_map: FeatureMap, options: Options) -> Float[Array, 'B T K G F']:
    """Features by key-value head and member of its group. A query's own scale cancels in its quotient."""
    batch, length, num_heads, _ = rows.q.shape
    features, _ = feature_map(rows.q.astype(_accumulator(rows.q.dtype)), options)
    num_kv_heads = rows.k.shape[2]
    return features.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, features.shape[-1])


def _keys(rows: Rows, feature_map: FeatureMap, options: Options) -> tuple[Array, Array, Float[Array, 'B S K U1']]:
    """Features, log scales, and values with a one at their end, whose sum is what the sum of values is divided by."""
    accumulator = _accumulator(rows.k.dtype)
    features, scales = feature_map(rows.k.astype(accumulator), options)
    v = rows.v.astype(accumulator)
    return features, jax.lax.stop_gradient(scales), jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)


def _read(
    sums: Sums, q_features: Float[Array, 'B T K G F'], q_segments: Int[Array, 'B T'], log_scale: Float[Array, 'B #T K']
) -> Float[Array, 'B T K G U1']:
    """What each query reads from the sums of its segment, divided by exp(log_scale)."""
    continues = ((q_segments == sums.segment[:, None]) & (q_segments > 0))[:, :, None]
    scale = jnp.where(continues, jnp.exp(jnp.where(continues, sums.log_scale[:, None, :] - log_scale, 0)), 0)
    return jnp.einsum('BTKGF,BKFU->BTKGU', q_features, sums.values) * scale[..., None, None]


def _add(
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


def _divide(seen: Float[Array, 'B T K G U1'], shape: tuple[int, ...], dtype: Any) -> Float[Array, 'B T N U']:
    """Weighted sums over sums of weights; zeros where nothing was seen."""
    total = seen[..., -1:]
    return (seen[..., :-1] / jnp.where(total > 0, total, 1)).reshape(*shape[:3], -1).astype(dtype)


LINEAR = feature_variant(elu_features, lambda config: config.head_dim, exact=True)
