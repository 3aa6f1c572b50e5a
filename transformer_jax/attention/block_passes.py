"""The two passes of attention in blocks: the online softmax, and the gradients that recompute its weights.

A pass goes over pairs of blocks of the queries and keys that it is given and adds to what earlier passes over other
keys have summed up. One pass over all keys is `blockwise`; one for each device's keys is `ring`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.attention.block_pairs import Blocks, Pairs
from transformer_jax.attention.mask import Mask
from transformer_jax.position_terms import PositionTerms
from transformer_jax.shapes import Array, Bool, Float


class Plan(NamedTuple):
    """What is known before tracing."""

    blocks: Blocks
    scale: float
    dropout_rate: float
    terms: Any  # the structure of the position terms
    num_heads: int  # of the whole call, maybe more than a pass is given


class Origin(NamedTuple):
    """Where in the whole call the arrays of a pass begin, maybe traced."""

    row: Any = 0
    head: Any = 0
    query: Any = 0
    key: Any = 0


class Context(NamedTuple):
    """Arguments that have no gradient."""

    mask: Mask
    fixed: list[Any]  # leaves of the position terms
    seed: Array | None
    origin: Origin = Origin()


class Inputs(NamedTuple):
    """What has a gradient; whole blocks long. The gradients themselves come in the same form."""

    q: Array  # [B, K, G, T, H]
    k: Array  # [B, K, S, H]
    v: Array  # [B, K, S, U]
    bias: Array | None  # [#B, #N, T, S]
    learned: list[Any]  # leaves of the position terms


class Sums(NamedTuple):
    """The online softmax of the keys seen so far, for each query."""

    total: Float[Array, 'B K G T U']  # of the values, by weights e^(logit - top)
    top: Float[Array, 'B K G T']
    normalizer: Float[Array, 'B K G T']

    @classmethod
    def empty(cls, inputs: Inputs) -> 'Sums':
        """Before any key. Sums are in float32 whatever the inputs."""
        rows, dtype = inputs.q.shape[:-1], jnp.promote_types(inputs.q.dtype, jnp.float32)
        total = jnp.zeros((*rows, inputs.v.shape[-1]), dtype)
        return cls(total, jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype))

    def finish(self, dtype: jnp.dtype) -> tuple[Float[Array, 'B K G T U'], Float[Array, 'B K G T']]:
        """The output, and log of the sum of e^logit: infinite for a row that sees nothing, whose output is 0."""
        seen = self.normalizer > 0
        output = (self.total / jnp.where(seen, self.normalizer, 1.0)[..., None]).astype(dtype)
        return output, jnp.where(seen, self.top + jnp.log(jnp.where(seen, self.normalizer, 1.0)), jnp.inf)


class Outcome(NamedTuple):
    """What the gradients need of the finished forward passes, and of what follows them."""

    log_normalizer: Float[Array, 'B K G T']
    mean_change: Float[Array, 'B K G T']  # of the weights' gradient, under the weights
    d_output: Float[Array, 'B K G T U']

    @classmethod
    def of(cls, output: Array, log_normalizer: Array, d_output: Array) -> 'Outcome':
        """From the output and its gradient."""
        sums = log_normalizer.dtype
        return cls(log_normalizer, (d_output.astype(sums) * output.astype(sums)).sum(-1), d_output)


class _Block(NamedTuple):
    """One pair of blocks: where it starts, and its part of the mask."""

    q_start: Any
    k_start: Any
    mask: Mask
    may_see: Bool[Array, 'B 1 1 T S']


def attend_to(plan: Plan, pairs: Pairs, sums: Sums, inputs: Inputs, context: Context) -> Sums:
    """The sums with these keys added."""
    q, k, v, bias, learned = inputs
    terms = _join_terms(plan, learned, context)

    def body(carry: Sums, q_block: Any, k_block: Any) -> Sums:
        block = _cut_block(plan, context.mask, q_block, k_block)
        q_rows, k_rows, v_rows = _cut_q(plan, block, q), _cut_k(plan, block, k), _cut_k(plan, block, v)
        v_rows = jnp.where(_keys_seen(block), v_rows, 0)
        total, top, normalizer = (_cut_q(plan, block, x) for x in carry)
        extra = _extra(plan, block, context.origin, terms, q_rows, _cut_bias(plan, block, bias))
        logits = jnp.where(block.may_see, _logits(plan, q_rows, k_rows, extra), -jnp.inf)
        new_top = jnp.maximum(top, logits.max(-1))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # of rows that have seen nothing so far
        weights = jnp.exp(logits - base[..., None])
        shrink = jnp.exp(top - base)
        normalizer = normalizer * shrink + weights.sum(-1)
        weights = _drop(plan, block, context, weights)
        total = total * shrink[..., None] + jnp.einsum(
            'BKGTS,BKSU->BKGTU', weights.astype(v.dtype), v_rows, preferred_element_type=total.dtype
        )
        if (own := _output_term(block, terms, weights)) is not None:
            total += own
        return Sums(*(_put_q(block, x, rows) for x, rows in zip(carry, (total, new_top, normalizer), strict=True)))

    return pairs.fold(body, sums)


def empty_gradients(inputs: Inputs) -> Inputs:
    """Before any key."""
    dtype = jnp.promote_types(inputs.q.dtype, jnp.float32)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), inputs)


def add_gradients(
    plan: Plan, pairs: Pairs, gradients: Inputs, inputs: Inputs, context: Context, outcome: Outcome
) -> Inputs:
    """The gradients with what comes of these keys added."""
    q, k, v, bias, learned = inputs
    sums = outcome.log_normalizer.dtype

    def body(carry: Inputs, q_block: Any, k_block: Any) -> Inputs:
        d_q, d_k, d_v, d_bias, d_learned = carry
        block = _cut_block(plan, context.mask, q_block, k_block)
        q_rows, d_rows = (jnp.where(_queries_see(block), _cut_q(plan, block, x), 0) for x in (q, outcome.d_output))
        k_rows, v_rows = (jnp.where(_keys_seen(block), _cut_k(plan, block, x), 0) for x in (k, v))

        def extra(q_rows: Array, bias_rows: Any, learned: list[Any]) -> Array | None:
            terms = _join_terms(plan, learned, context)
            return _extra(plan, block, context.origin, terms, q_rows, bias_rows)

        own_logits, pull_logits = jax.vjp(extra, q_rows, _cut_bias(plan, block, bias), learned)
        logits = jnp.where(block.may_see, _logits(plan, q_rows, k_rows, own_logits), -jnp.inf)
        weights = jnp.exp(logits - _cut_q(plan, block, outcome.log_normalizer)[..., None])
        dropped = _drop(plan, block, context, weights)
        d_v_rows = jnp.einsum('BKGTS,BKGTU->BKSU', dropped.astype(v.dtype), d_rows, preferred_element_type=sums)
        d_weights = jnp.einsum('BKGTU,BKSU->BKGTS', d_rows, v_rows, preferred_element_type=sums)

        def own_output(weights: Array, learned: list[Any]) -> Array | None:
            return _output_term(block, _join_terms(plan, learned, context), weights)

        own, pull_output = jax.vjp(own_output, dropped, learned)
        d_own_weights, d_output_learned = pull_output(None if own is None else d_rows.astype(own.dtype))
        d_weights = _drop(plan, block, context, d_weights + d_own_weights)
        d_logits = weights * (d_weights - _cut_q(plan, block, outcome.mean_change)[..., None])
        d_logits = jnp.where(block.may_see, d_logits, 0.0)
        own_d_q, d_bias_rows, d_logits_learned = pull_logits(None if own_logits is None else d_logits)
        scaled = (d_logits * plan.scale).astype(q.dtype)
        d_q_rows = jnp.einsum('BKGTS,BKSH->BKGTH', scaled, k_rows, preferred_element_type=sums) + own_d_q
        d_k_rows = jnp.einsum('BKGTS,BKGTH->BKSH', scaled, q_rows, preferred_element_type=sums)
        return Inputs(
            _put_q(block, d_q, _cut_q(plan, block, d_q) + d_q_rows),
            _put_k(block, d_k, _cut_k(plan, block, d_k) + d_k_rows),
            _put_k(block, d_v, _cut_k(plan, block, d_v) + d_v_rows),
            _add_bias(plan, block, d_bias, d_bias_rows),
            jax.tree.map(lambda *parts: sum(parts), d_learned, d_logits_learned, d_output_learned),
        )

    return pairs.fold(body, gradients)


def split_terms(terms: PositionTerms | None) -> tuple[Any, list[Any], list[Any]]:
    """The structure of position terms, their leaves that have gradients, and the others; None in the others' places."""
    leaves, structure = jax.tree.flatten(terms)
    learned = [leaf if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) else None for leaf in leaves]
    return structure, learned, [leaf if other is None else None for leaf, other in zip(leaves, learned, strict=True)]


def _logits(plan: Plan, q: Array, k: Array, extra: Array | None) -> Float[Array, 'B K G T S']:
    products = jnp.einsum('BKGTH,BKSH->BKGTS', q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
    return products * plan.scale if extra is None else products * plan.scale + extra


def _extra(
    plan: Plan, block: _Block, origin: Origin, terms: PositionTerms | None, q: Array, bias: Array | None
) -> Array | None:
    """What is added to the scaled products, `[B, K, G, T, S]`; None = nothing."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    parts = [] if bias is None else [bias]
    if terms is not None:
        places = block.mask.q_positions, block.mask.k_positions
        heads = q.reshape(q.shape[0], -1, *q.shape[3:]).transpose(0, 2, 1, 3)
        if (scores := terms.score_term(heads, *places)) is not None:
            parts.append(scores.astype(dtype) * plan.scale)
        if (own := terms.bias(*places)) is not None:
            parts.append(_own_heads(plan, own, origin.head, heads.shape[2]))
    if not parts:
        return None
    shape = q.shape[0], q.shape[1] * q.shape[2], *block.may_see.shape[-2:]
    return group_heads(sum(jnp.broadcast_to(part, shape).astype(dtype) for part in parts), q.shape[1])  # type: ignore[arg-type]


def _own_heads(plan: Plan, bias: Array, start: Any, num_heads: int) -> Float[Array, '#B #n T S']:
    """A scheme's bias is of all heads; a pass may have a part of them."""
    if bias.shape[1] != plan.num_heads or plan.num_heads == num_heads:
        return bias
    return jax.lax.dynamic_slice_in_dim(bias, start, num_heads, axis=1)


def _output_term(block: _Block, terms: PositionTerms | None, weights: Array) -> Array | None:
    """What the position scheme adds to the weighted values, `[B, K, G, T, U]`; None = nothing."""
    if terms is None:
        return None
    by_head = weights.reshape(weights.shape[0], -1, *weights.shape[3:])
    own = terms.output_term(by_head, block.mask.q_positions, block.mask.k_positions)
    return None if own is None else group_heads(own.transpose(0, 2, 1, 3), weights.shape[1])


def _join_terms(plan: Plan, learned: list[Any], context: Context) -> PositionTerms | None:
    leaves = [fixed if leaf is None else leaf for leaf, fixed in zip(learned, context.fixed, strict=True)]
    return jax.tree.unflatten(plan.terms, leaves)


def _drop(plan: Plan, block: _Block, context: Context, weights: Float[Array, 'B K G T S']) -> Array:
    """Zeroes each weight with probability `dropout_rate`, chosen by a hash of its row, head, query and key."""
    seed, origin = context.seed, context.origin
    if seed is None:
        return weights
    batch, num_kv_heads, group, num_queries, num_keys = weights.shape
    rows = (origin.row + jnp.arange(batch))[:, None] * plan.num_heads
    heads = (rows + origin.head + jnp.arange(num_kv_heads * group)[None]).astype(jnp.uint32)
    heads = heads.reshape(batch, num_kv_heads, group, 1, 1)
    queries = (origin.query + block.q_start + jnp.arange(num_queries)).astype(jnp.uint32)[None, None, None, :, None]
    keys = (origin.key + block.k_start + jnp.arange(num_keys)).astype(jnp.uint32)[None, None, None, None, :]
    hashed = _mix(_mix(_mix(heads ^ seed[0]) + queries) ^ _mix(keys ^ seed[1]))
    threshold = round(plan.dropout_rate * 2**32)
    return jnp.where(hashed >= threshold, weights * (1 / (1 - threshold / 2**32)), 0.0)


def _mix(x: Array) -> Array:
    """A bijection of uint32 whose every output bit depends on every input bit (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _cut_block(plan: Plan, mask: Mask, q_block: Any, k_block: Any) -> _Block:
    num_queries, num_keys = plan.blocks
    q_start, k_start = q_block * num_queries, k_block * num_keys
    part = mask.block(q_start, num_queries, k_start, num_keys)
    return _Block(q_start, k_start, part, part.materialize()[:, None, None])


def _queries_see(block: _Block) -> Bool[Array, 'B 1 1 T 1']:
    """Rows that see nothing are emptied: they may hold anything, NaN included, and 0 * NaN is NaN."""
    return block.may_see.any(-1)[..., None]


def _keys_seen(block: _Block) -> Bool[Array, 'B 1 S 1']:
    return block.may_see[:, 0].any(-2)[..., None]


def _cut_q(plan: Plan, block: _Block, x: Array) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, block.q_start, plan.blocks.num_queries, axis=3)


def _cut_k(plan: Plan, block: _Block, x: Array) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, block.k_start, plan.blocks.num_keys, axis=2)


def _cut_bias(plan: Plan, block: _Block, bias: Array | None) -> Array | None:
    if bias is None:
        return None
    rows = jax.lax.dynamic_slice_in_dim(bias, block.q_start, plan.blocks.num_queries, axis=2)
    return jax.lax.dynamic_slice_in_dim(rows, block.k_start, plan.blocks.num_keys, axis=3)


def _put_q(block: _Block, x: Array, rows: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, rows, block.q_start, axis=3)


def _put_k(block: _Block, x: Array, rows: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, rows, block.k_start, axis=2)


def _add_bias(plan: Plan, block: _Block, d_bias: Array | None, rows: Any) -> Array | None:
    if d_bias is None:
        return None
    rows = rows.astype(d_bias.dtype) + _cut_bias(plan, block, d_bias)
    return jax.lax.dynamic_update_slice(d_bias, rows, (0, 0, block.q_start, block.k_start))


def pad_axis(x: Array, axis: int, size: int) -> Array:
    """Zeros behind, so that the axis is a whole multiple of `size`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, widths) if widths[axis][1] else x


def group_heads(x: Array, num_kv_heads: int) -> Array:
    """[B, N, ...] as [B, K, N / K, ...]."""
    return x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])
