"""Exact attention in blocks of queries and keys: an online softmax whose backward pass recomputes the weights.

Scores exist for one pair of blocks at a time, so memory is O(T + S) in the lengths, forward and backward. Pairs of
blocks that the mask empties are skipped: a sliding window costs O(T W) time. Where a mesh splits lengths over devices,
keys and values travel round them (`ring`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.attention.block_pairs import choose_blocks, find_pairs, pad_to_blocks
from transformer_jax.attention.block_passes import (
    Context,
    Inputs,
    Outcome,
    Plan,
    Sums,
    add_gradients,
    attend_to,
    empty_gradients,
    group_heads,
    pad_axis,
    split_terms,
)
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.ring import num_sequence_shards, ring_attention
from transformer_jax.attention.variant import Options, Variant
from transformer_jax.shapes import Array, Float


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
    if num_sequence_shards() > 1:
        return ring_attention(q, k, v, mask, options), None
    blocks = choose_blocks(q.shape[0] * q.shape[2], q.shape[1], k.shape[1], mask, options.config.block_size)
    structure, learned, fixed = split_terms(options.terms)
    seed = None if options.dropout_rng is None else jax.random.bits(options.dropout_rng, (2,), jnp.uint32)
    plan = Plan(blocks, options.scale, options.config.dropout_rate, structure, q.shape[2])
    context = Context(pad_to_blocks(mask, blocks), fixed, seed)
    bias = options.bias
    if bias is not None:
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], q.shape[1], k.shape[1]))
        bias = pad_axis(pad_axis(bias, 2, blocks.num_queries), 3, blocks.num_keys)
    batch, length, num_heads, _ = q.shape
    grouped = pad_axis(group_heads(q.transpose(0, 2, 1, 3), k.shape[2]), 3, blocks.num_queries)
    keys, values = (pad_axis(x.transpose(0, 2, 1, 3), 2, blocks.num_keys) for x in (k, v))
    output = _attend(plan, Inputs(grouped, keys, values, bias, learned), context)
    output = output[:, :, :, :length].reshape(batch, num_heads, length, v.shape[-1])
    return output.transpose(0, 2, 1, 3), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, inputs: Inputs, context: Context) -> Float[Array, 'B K G T U']:
    return _forward(plan, inputs, context)[0]


def _forward(plan: Plan, inputs: Inputs, context: Context) -> tuple[Array, tuple[Any, ...]]:
    pairs = find_pairs(context.mask, plan.blocks)
    output, log_normalizer = attend_to(plan, pairs, Sums.empty(inputs), inputs, context).finish(inputs.v.dtype)
    return output, (inputs, context, output, log_normalizer)


def _backward(plan: Plan, kept: tuple[Any, ...], d_output: Array) -> tuple[Inputs, None]:
    inputs, context, output, log_normalizer = kept
    outcome = Outcome.of(output, log_normalizer, d_output)
    pairs = find_pairs(context.mask, plan.blocks)
    gradients = add_gradients(plan, pairs, empty_gradients(inputs), inputs, context, outcome)
    return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, inputs), None


_attend.defvjp(_forward, _backward)


BLOCKWISE = Variant(
    blockwise_attention,
    frozenset(
        'causal cross segments window globals prefix key_masks grouped_heads value_dim bias positions rotary dropout '
        'sequence cache cpu gpu tpu float32 bfloat16'.split()
    ),
    reads=frozenset({'scale', 'block_size'}),
)
