"""Exact attention in blocks of queries and keys: an online softmax whose backward pass recomputes the weights.

Scores exist for one pair of blocks at a time, so memory is O(T + S) in the lengths, forward and backward. Pairs of
blocks that the mask empties are skipped: a sliding window costs O(T W) time.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.attention.block_pairs import Blocks, find_pairs, pad_to_blocks
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options, Variant
from transformer_jax.position_terms import PositionTerms
from transformer_jax.shapes import Array, Bool, Float

_SCORES_AT_ONCE = 2**21  # of all rows and heads together: 8 MiB in float32
_LEAST_BLOCK, _GREATEST_BLOCK = 128, 256


def blockwise_attention(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    mask: Mask,
    options: Options,
) -> tuple[Float[Array, 'B T N U'], None]:
    """softmax(q k^T scale + bias) v. O(T S) time less what the mask lets skip, O(T + S) memory beside a bias.

    Sums and the softmax are in float32 whatever the inputs. Query heads share key-value heads in groups of N / K.
    Dropout hashes the indices of row, head, query and key, so that neither block size nor sharding changes it. Raises
    `ValueError` when weights are asked for: they never exist as a whole.
    """
    if options.return_weights:
        raise ValueError("impl='blockwise' has no weights to return; impl='dense' has")
    blocks = choose_blocks(q.shape[0] * q.shape[2], q.shape[1], k.shape[1], mask, options.config.block_size)
    leaves, structure = jax.tree.flatten(options.terms)
    learned = [leaf if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) else None for leaf in leaves]
    fixed = [leaf if other is None else None for leaf, other in zip(leaves, learned, strict=True)]
    seed = None if options.dropout_rng is None else jax.random.bits(options.dropout_rng, (2,), jnp.uint32)
    plan = _Plan(blocks, options.scale, options.config.dropout_rate, structure)
    context = _Context(pad_to_blocks(mask, blocks), fixed, seed)
    bias = options.bias
    if bias is not None:
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], q.shape[1], k.shape[1]))
        bias = _pad(_pad(bias, 2, blocks.num_queries), 3, blocks.num_keys)
    batch, length, num_heads, _ = q.shape
    grouped = _group_heads(q.transpose(0, 2, 1, 3), k.shape[2])
    keys, values = (_pad(x.transpose(0, 2, 1, 3), 2, blocks.num_keys) for x in (k, v))
    output = _attend(plan, _pad(grouped, 3, blocks.num_queries), keys, values, bias, learned, context)
    output = output[:, :, :, :length].reshape(batch, num_heads, length, v.shape[-1])
    return output.transpose(0, 2, 1, 3), None


def choose_blocks(rows: int, num_queries: int, num_keys: int, mask: Mask, block_size: int | None) -> Blocks:
    """Block sizes where `rows` rows and heads are computed together. `block_size` None = by what caches hold."""
    if block_size is None:
        block_size = _GREATEST_BLOCK
        while block_size > _LEAST_BLOCK and rows * block_size**2 > _SCORES_AT_ONCE:
            block_size //= 2
        if mask.window is not None:  # a block much wider than the window is mostly hidden
            while block_size > _LEAST_BLOCK and block_size > sum(mask.window) + 1:
                block_size //= 2
    return Blocks(min(block_size, num_queries), min(block_size, num_keys))


class _Plan(NamedTuple):
    """What is known before tracing."""

    blocks: Blocks
    scale: float
    dropout_rate: float
    terms: Any  # the structure of the position terms


class _Context(NamedTuple):
    """Arguments that have no gradient."""

    mask: Mask
    fixed: list[Any]  # leaves of the position terms
    seed: Array | None


class _Block(NamedTuple):
    """One pair of blocks: where it starts, and its part of the mask."""

    q_start: Any
    k_start: Any
    mask: Mask
    may_see: Bool[Array, 'B 1 1 T S']


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, q: Array, k: Array, v: Array, bias: Any, learned: list[Any], context: _Context) -> Array:
    """Q is [B, K, G, T, H], k and v are [B, K, S, H or U], whole blocks long; so is the output, [B, K, G, T, U]."""
    return _forward(plan, q, k, v, bias, learned, context)[0]


def _forward(
    plan: _Plan, q: Array, k: Array, v: Array, bias: Any, learned: list[Any], context: _Context
) -> tuple[Array, tuple[Any, ...]]:
    sums = jnp.promote_types(q.dtype, jnp.float32)
    terms = _join_terms(plan, learned, context)

    def body(carry: tuple[Array, Array, Array], q_block: Any, k_block: Any) -> tuple[Array, Array, Array]:
        block = _cut_block(plan, context.mask, q_block, k_block)
        q_rows, k_rows, v_rows = _cut_q(plan, block, q), _cut_k(plan, block, k), _cut_k(plan, block, v)
        v_rows = jnp.where(_keys_seen(block), v_rows, 0)
        total, top, normalizer = (_cut_q(plan, block, x) for x in carry)
        logits = _logits(plan, q_rows, k_rows, _extra(plan, block, terms, q_rows, _cut_bias(plan, block, bias)))
        logits = jnp.where(block.may_see, logits, -jnp.inf)
        new_top = jnp.maximum(top, logits.max(-1))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # of rows that have seen nothing so far
        weights = jnp.exp(logits - base[..., None])
        shrink = jnp.exp(top - base)
        normalizer = normalizer * shrink + weights.sum(-1)
        weights = _drop(plan, block, context.seed, weights)
        total = total * shrink[..., None] + jnp.einsum(
            'BKGTS,BKSU->BKGTU', weights.astype(v.dtype), v_rows, preferred_element_type=sums
        )
        if (own := _output_term(block, terms, weights)) is not None:
            total += own
        return tuple(_put_q(block, x, rows) for x, rows in zip(carry, (total, new_top, normalizer), strict=True))  # type: ignore[return-value]

    rows = q.shape[:-1]
    carry = jnp.zeros((*rows, v.shape[-1]), sums), jnp.full(rows, -jnp.inf, sums), jnp.zeros(rows, sums)
    total, top, normalizer = find_pairs(context.mask, plan.blocks).fold(body, carry)
    seen = normalizer > 0
    output = (total / jnp.where(seen, normalizer, 1.0)[..., None]).astype(v.dtype)
    log_normalizer = jnp.where(seen, top + jnp.log(jnp.where(seen, normalizer, 1.0)), jnp.inf)
    return output, (q, k, v, bias, learned, context, output, log_normalizer)


def _backward(plan: _Plan, kept: tuple[Any, ...], d_output: Array) -> tuple[Any, ...]:
    q, k, v, bias, learned, context, output, log_normalizer = kept
    sums = jnp.promote_types(q.dtype, jnp.float32)
    mean_change = (d_output.astype(sums) * output.astype(sums)).sum(-1)  # of the weights' gradient, under the weights

    def body(carry: tuple[Any, ...], q_block: Any, k_block: Any) -> tuple[Any, ...]:
        d_q, d_k, d_v, d_bias, d_learned = carry
        block = _cut_block(plan, context.mask, q_block, k_block)
        q_rows, d_rows = (jnp.where(_queries_see(block), _cut_q(plan, block, x), 0) for x in (q, d_output))
        k_rows, v_rows = (jnp.where(_keys_seen(block), _cut_k(plan, block, x), 0) for x in (k, v))

        def extra(q_rows: Array, bias_rows: Any, learned: list[Any]) -> Array | None:
            return _extra(plan, block, _join_terms(plan, learned, context), q_rows, bias_rows)

        own_logits, pull_logits = jax.vjp(extra, q_rows, _cut_bias(plan, block, bias), learned)
        logits = jnp.where(block.may_see, _logits(plan, q_rows, k_rows, own_logits), -jnp.inf)
        weights = jnp.exp(logits - _cut_q(plan, block, log_normalizer)[..., None])
        dropped = _drop(plan, block, context.seed, weights)
        d_v_rows = jnp.einsum('BKGTS,BKGTU->BKSU', dropped.astype(v.dtype), d_rows, preferred_element_type=sums)
        d_weights = jnp.einsum('BKGTU,BKSU->BKGTS', d_rows, v_rows, preferred_element_type=sums)

        def own_output(weights: Array, learned: list[Any]) -> Array | None:
            return _output_term(block, _join_terms(plan, learned, context), weights)

        own, pull_output = jax.vjp(own_output, dropped, learned)
        d_own_weights, d_output_learned = pull_output(None if own is None else d_rows.astype(own.dtype))
        d_weights = _drop(plan, block, context.seed, d_weights + d_own_weights)
        d_logits = weights * (d_weights - _cut_q(plan, block, mean_change)[..., None])
        d_logits = jnp.where(block.may_see, d_logits, 0.0)
        own_d_q, d_bias_rows, d_logits_learned = pull_logits(None if own_logits is None else d_logits)
        scaled = (d_logits * plan.scale).astype(q.dtype)
        d_q_rows = jnp.einsum('BKGTS,BKSH->BKGTH', scaled, k_rows, preferred_element_type=sums) + own_d_q
        d_k_rows = jnp.einsum('BKGTS,BKGTH->BKSH', scaled, q_rows, preferred_element_type=sums)
        return (
            _put_q(block, d_q, _cut_q(plan, block, d_q) + d_q_rows),
            _put_k(block, d_k, _cut_k(plan, block, d_k) + d_k_rows),
            _put_k(block, d_v, _cut_k(plan, block, d_v) + d_v_rows),
            _add_bias(plan, block, d_bias, d_bias_rows),
            jax.tree.map(lambda *parts: sum(parts), d_learned, d_logits_learned, d_output_learned),
        )

    zeros = [jax.tree.map(lambda x: jnp.zeros(x.shape, sums), tree) for tree in (q, k, v, bias, learned)]
    gradients = find_pairs(context.mask, plan.blocks).fold(body, tuple(zeros))
    lowered = jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, (q, k, v, bias, learned))
    return (*lowered, None)


_attend.defvjp(_forward, _backward)


def _logits(plan: _Plan, q: Array, k: Array, extra: Array | None) -> Float[Array, 'B K G T S']:
    products = jnp.einsum('BKGTH,BKSH->BKGTS', q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
    return products * plan.scale if extra is None else products * plan.scale + extra


def _extra(plan: _Plan, block: _Block, terms: PositionTerms | None, q: Array, bias: Array | None) -> Array | None:
    """What is added to the scaled products, `[B, K, G, T, S]`; None = nothing."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    parts = [] if bias is None else [bias]
    if terms is not None:
        places = block.mask.q_positions, block.mask.k_positions
        heads = q.reshape(q.shape[0], -1, *q.shape[3:]).transpose(0, 2, 1, 3)
        if (scores := terms.score_term(heads, *places)) is not None:
            parts.append(scores.astype(dtype) * plan.scale)
        if (own := terms.bias(*places)) is not None:
            parts.append(own)
    if not parts:
        return None
    shape = q.shape[0], q.shape[1] * q.shape[2], *block.may_see.shape[-2:]
    return _group_heads(sum(jnp.broadcast_to(part, shape).astype(dtype) for part in parts), q.shape[1])  # type: ignore[arg-type]


def _output_term(block: _Block, terms: PositionTerms | None, weights: Array) -> Array | None:
    """What the position scheme adds to the weighted values, `[B, K, G, T, U]`; None = nothing."""
    if terms is None:
        return None
    by_head = weights.reshape(weights.shape[0], -1, *weights.shape[3:])
    own = terms.output_term(by_head, block.mask.q_positions, block.mask.k_positions)
    return None if own is None else _group_heads(own.transpose(0, 2, 1, 3), weights.shape[1])


def _join_terms(plan: _Plan, learned: list[Any], context: _Context) -> PositionTerms | None:
    leaves = [fixed if leaf is None else leaf for leaf, fixed in zip(learned, context.fixed, strict=True)]
    return jax.tree.unflatten(plan.terms, leaves)


def _drop(plan: _Plan, block: _Block, seed: Array | None, weights: Float[Array, 'B K G T S']) -> Array:
    """Zeroes each weight with probability `dropout_rate`, chosen by a hash of its row, head, query and key."""
    if seed is None:
        return weights
    batch, num_kv_heads, group, num_queries, num_keys = weights.shape
    heads = jnp.arange(batch * num_kv_heads * group, dtype=jnp.uint32).reshape(batch, num_kv_heads, group, 1, 1)
    queries = (block.q_start + jnp.arange(num_queries)).astype(jnp.uint32)[None, None, None, :, None]
    keys = (block.k_start + jnp.arange(num_keys)).astype(jnp.uint32)[None, None, None, None, :]
    hashed = _mix(_mix(_mix(heads ^ seed[0]) + queries) ^ _mix(keys ^ seed[1]))
    threshold = round(plan.dropout_rate * 2**32)
    return jnp.where(hashed >= threshold, weights * (1 / (1 - threshold / 2**32)), 0.0)


def _mix(x: Array) -> Array:
    """A bijection of uint32 whose every output bit depends on every input bit (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _cut_block(plan: _Plan, mask: Mask, q_block: Any, k_block: Any) -> _Block:
    num_queries, num_keys = plan.blocks
    q_start, k_start = q_block * num_queries, k_block * num_keys
    part = mask.block(q_start, num_queries, k_start, num_keys)
    return _Block(q_start, k_start, part, part.materialize()[:, None, None])


def _queries_see(block: _Block) -> Bool[Array, 'B 1 1 T 1']:
    """Rows that see nothing are emptied: they may hold anything, NaN included, and 0 * NaN is NaN."""
    return block.may_see.any(-1)[..., None]


def _keys_seen(block: _Block) -> Bool[Array, 'B 1 S 1']:
    return block.may_see[:, 0].any(-2)[..., None]


def _cut_q(plan: _Plan, block: _Block, x: Array) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, block.q_start, plan.blocks.num_queries, axis=3)


def _cut_k(plan: _Plan, block: _Block, x: Array) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, block.k_start, plan.blocks.num_keys, axis=2)


def _cut_bias(plan: _Plan, block: _Block, bias: Array | None) -> Array | None:
    if bias is None:
        return None
    rows = jax.lax.dynamic_slice_in_dim(bias, block.q_start, plan.blocks.num_queries, axis=2)
    return jax.lax.dynamic_slice_in_dim(rows, block.k_start, plan.blocks.num_keys, axis=3)


def _put_q(block: _Block, x: Array, rows: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, rows, block.q_start, axis=3)


def _put_k(block: _Block, x: Array, rows: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, rows, block.k_start, axis=2)


def _add_bias(plan: _Plan, block: _Block, d_bias: Array | None, rows: Any) -> Array | None:
    if d_bias is None:
        return None
    rows = rows.astype(d_bias.dtype) + _cut_bias(plan, block, d_bias)
    return jax.lax.dynamic_update_slice(d_bias, rows, (0, 0, block.q_start, block.k_start))


def _pad(x: Array, axis: int, size: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, widths) if widths[axis][1] else x


def _group_heads(x: Array, num_kv_heads: int) -> Array:
    """[B, N, ...] as [B, K, N / K, ...]."""
    return x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])


BLOCKWISE = Variant(
    blockwise_attention,
    frozenset(
        'causal cross segments window globals prefix grouped_heads value_dim bias positions dropout cache '
        'cpu gpu tpu float32 bfloat16'.split()
    ),
)
