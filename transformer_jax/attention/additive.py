"""Additive attention, v . tanh(W q + U k): Bahdanau et al., 2015, section 3.1; and Luong et al.'s `concat`, 2015.

Both are one thing: `concat` writes W and U as one matrix over [q; k]. Parameters are per head. Neither divides by
sqrt(d_k): tanh bounds the score by the sum of |v|, whatever the width.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.attention.dense import DENSE, empty_unseen, masked_softmax, weighted_values
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options, Variant
from transformer_jax.config import AttentionConfig
from transformer_jax.parameters import Parameter, heads_axis
from transformer_jax.shapes import Array, Float

BLOCK = 64  # queries and keys at a time, unless `block_size` says otherwise

_glorot = jax.nn.initializers.glorot_uniform(in_axis=1, out_axis=2, batch_axis=0)
_score_vector = jax.nn.initializers.variance_scaling(1.0, 'fan_in', 'normal', in_axis=1, out_axis=(), batch_axis=0)

# From q, k and the parameters to W q `[B, T, N, A]` and U k `[B, S, K or N, A]`.
Maps = Callable[[Array, Array, Mapping[str, Array]], tuple[Array, Array]]


def attend(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    mask: Mask,
    options: Options,
    *,
    maps: Maps,
    in_blocks: bool,
) -> tuple[Float[Array, 'B T N U'], Float[Array, 'B N T S']]:
    """softmax(v . tanh(W q + U k) + bias) v, and the weights. O(T S d_a) time.

    What a position scheme adds to q k^T is scaled as it is in dot-product attention, since it is a product. Rotary
    positions have no place here: tanh of turned rows depends on both positions, not on their offset alone.
    """
    may_see = mask.materialize()
    q = empty_unseen(q, may_see.any(axis=2))
    k = k if options.cached else empty_unseen(k, may_see.any(axis=1))
    mapped_q, mapped_k = maps(q, k, options.params)
    vector = options.params['score']
    if in_blocks:
        logits = scores_in_blocks(mapped_q, mapped_k, vector, options.config.block_size or BLOCK)
    else:
        logits = scores_at_once(mapped_q, mapped_k, vector)
    terms, positions = options.terms, (mask.q_positions, mask.k_positions)
    if terms is not None and (own_scores := terms.score_term(q, *positions)) is not None:
        logits += own_scores * options.scale
    for bias in (options.bias, None if terms is None else terms.bias(*positions)):
        if bias is not None:
            logits += jnp.broadcast_to(bias, logits.shape)
    weights = masked_softmax(logits, may_see[:, None])
    return weighted_values(weights, v, mask, options, may_see=may_see), weights


def additive_maps(
    q: Float[Array, 'B T N H'], k: Float[Array, 'B S K H'], params: Mapping[str, Array]
) -> tuple[Float[Array, 'B T N A'], Float[Array, 'B S K A']]:
    """W q of each query head, and U k of each key head, in float32 whatever the inputs: sums are rounded once."""
    return _map('BTNH,NHA->BTNA', q, params['query_map']), _map('BSKH,KHA->BSKA', k, params['key_map'])


def concat_maps(
    q: Float[Array, 'B T N H'], k: Float[Array, 'B S K H'], params: Mapping[str, Array]
) -> tuple[Float[Array, 'B T N A'], Float[Array, 'B S N A']]:
    """The two halves of W [q; k], both of each query head."""
    w = params['joint_map']
    width, (num_heads, _, score_dim), num_kv_heads = q.shape[-1], w.shape, k.shape[2]
    of_q, of_k = w[:, :width], w[:, width:].reshape(num_kv_heads, num_heads // num_kv_heads, width, score_dim)
    mapped_k = _map('BSKH,KGHA->BSKGA', k, of_k).reshape(*k.shape[:2], num_heads, score_dim)
    return _map('BTNH,NHA->BTNA', q, of_q), mapped_k


def _map(letters: str, rows: Array, matrix: Array) -> Array:
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    return jnp.einsum(letters, rows.astype(dtype), matrix.astype(dtype))


def additive_parameters(config: AttentionConfig, max_length: int) -> dict[str, Parameter]:
    """W `[N, H, A]`, U `[K, H, A]` and v `[N, A]`: 2 d_k d_a + d_a a head where K = N, d_a = `score_dim`.

    Deviation: Glorot's initialisation in place of the paper's, where v starts at zero.
    """
    width = config.score_dim or config.head_dim
    num_kv_heads = config.num_kv_heads or config.num_heads
    heads, kv_heads = heads_axis(config.num_heads), heads_axis(num_kv_heads)
    return {
        'query_map': Parameter(_glorot, (config.num_heads, config.head_dim, width), (heads, 'head_dim', None)),
        'key_map': Parameter(_glorot, (num_kv_heads, config.head_dim, width), (kv_heads, 'head_dim', None)),
        'score': Parameter(_score_vector, (config.num_heads, width), (heads, None)),
    }


def concat_parameters(config: AttentionConfig, max_length: int) -> dict[str, Parameter]:
    """W `[N, 2 H, A]` over [q; k], and v `[N, A]`: 2 d_k d_a + d_a a head."""
    width = config.score_dim or config.head_dim
    joint, heads = (config.num_heads, 2 * config.head_dim, width), heads_axis(config.num_heads)
    return {
        'joint_map': Parameter(_glorot, joint, (heads, 'head_dim', None)),
        'score': Parameter(_score_vector, (config.num_heads, width), (heads, None)),
    }


def scores_at_once(
    mapped_q: Float[Array, 'B T N A'], mapped_k: Float[Array, 'B S K A'], vector: Float[Array, 'N A']
) -> Float[Array, 'B N T S']:
    """The score of every pair, in float32. Makes `[B, T, S, N, A]`."""
    (batch, num_queries, num_heads, width), (_, num_keys, num_kv_heads, _) = mapped_q.shape, mapped_k.shape
    dtype = jnp.promote_types(mapped_q.dtype, jnp.float32)
    groups = (num_kv_heads, num_heads // num_kv_heads, width)
    q = mapped_q.astype(dtype).reshape(batch, num_queries, 1, *groups)
    k = mapped_k.astype(dtype).reshape(batch, 1, num_keys, num_kv_heads, 1, width)
    scores = (jnp.tanh(q + k) * vector.astype(dtype).reshape(1, 1, 1, *groups)).sum(axis=-1)
    return jnp.moveaxis(scores.reshape(batch, num_queries, num_keys, num_heads), 3, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def scores_in_blocks(
    mapped_q: Float[Array, 'B T N A'], mapped_k: Float[Array, 'B S K A'], vector: Float[Array, 'N A'], size: int
) -> Float[Array, 'B N T S']:
    """The same from `size` queries and keys at a time; the backward pass computes each block's tanh again."""
    q_blocks, k_blocks = _split(mapped_q, size), _split(mapped_k, size)

    def of_queries(q: Array) -> Array:
        return jax.lax.map(lambda k: scores_at_once(q, k, vector), k_blocks)

    blocks = jax.lax.map(of_queries, q_blocks)  # [T / size, S / size, B, N, size, size]
    joined = jnp.transpose(blocks, (2, 3, 0, 4, 1, 5))
    batch, num_heads = joined.shape[:2]
    whole = joined.reshape(batch, num_heads, len(q_blocks) * q_blocks.shape[2], len(k_blocks) * k_blocks.shape[2])
    return whole[:, :, : mapped_q.shape[1], : mapped_k.shape[1]]


def _forward(mapped_q: Array, mapped_k: Array, vector: Array, size: int) -> tuple[Array, tuple[Array, Array, Array]]:
    return scores_in_blocks(mapped_q, mapped_k, vector, size), (mapped_q, mapped_k, vector)


def _backward(size: int, kept: tuple[Array, Array, Array], change: Array) -> tuple[Array, Array, Array]:
    mapped_q, mapped_k, vector = kept
    dtype = change.dtype
    q_blocks, k_blocks = _split(mapped_q.astype(dtype), size), _split(mapped_k.astype(dtype), size)
    by_query = _split(jnp.moveaxis(change, 1, 3), size)  # [T / size, B, size, S, N]

    def of_queries(sums: tuple[Array, Array], block: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        q, changes = block
        by_key = _split(jnp.moveaxis(changes, 2, 1), size)  # [S / size, B, size, size of queries, N]

        def of_keys(inner: tuple[Array, Array], block: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
            k, changes = block
            _, pull = jax.vjp(scores_at_once, q, k, vector.astype(dtype))
            of_q, of_k, of_vector = pull(jnp.transpose(changes, (0, 3, 2, 1)))
            return (inner[0] + of_q, inner[1] + of_vector), of_k

        start = (jnp.zeros_like(q), sums[1])
        (of_q, of_vector), of_k = jax.lax.scan(of_keys, start, (k_blocks, by_key))
        return (sums[0] + of_k, of_vector), of_q

    start = (jnp.zeros_like(k_blocks), jnp.zeros_like(vector, dtype))
    (of_k, of_vector), of_q = jax.lax.scan(of_queries, start, (q_blocks, by_query))
    return (
        _join(of_q, mapped_q.shape[1]).astype(mapped_q.dtype),
        _join(of_k, mapped_k.shape[1]).astype(mapped_k.dtype),
        of_vector.astype(vector.dtype),
    )


scores_in_blocks.defvjp(_forward, _backward)


def _split(array: Array, size: int) -> Array:
    """Axis 1 in blocks, which become the first axis; the last block is filled up with zeros."""
    length = array.shape[1]
    size = min(size, length)
    num_blocks = -(-length // size)
    padding = [(0, 0), (0, num_blocks * size - length)] + [(0, 0)] * (array.ndim - 2)
    blocks = jnp.pad(array, padding).reshape(array.shape[0], num_blocks, size, *array.shape[2:])
    return jnp.moveaxis(blocks, 1, 0)


def _join(blocks: Array, length: int) -> Array:
    whole = jnp.moveaxis(blocks, 0, 1)
    return whole.reshape(whole.shape[0], -1, *whole.shape[3:])[:, :length]


def _variant(maps: Maps, parameters: Any, *, in_blocks: bool) -> Variant:
    return Variant(
        functools.partial(attend, maps=maps, in_blocks=in_blocks),
        DENSE.supports - {'rotary'},
        parameters=parameters,
        reads=frozenset({'scale', 'score_dim'} | ({'block_size'} if in_blocks else set())),
    )


ADDITIVE = _variant(additive_maps, additive_parameters, in_blocks=False)
ADDITIVE_BLOCKWISE = _variant(additive_maps, additive_parameters, in_blocks=True)
CONCAT = _variant(concat_maps, concat_parameters, in_blocks=False)
CONCAT_BLOCKWISE = _variant(concat_maps, concat_parameters, in_blocks=True)
