"""Scaled dot-product attention as the paper writes it: the readable reference. Section 3.2.1."""

import jax
import jax.numpy as jnp

from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options, Variant
from transformer_jax.shapes import Array, Bool, Float


def dense_attention(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    mask: Mask,
    options: Options,
) -> tuple[Float[Array, 'B T N U'], Float[Array, 'B N T S']]:
    """softmax(q k^T scale + bias) v, and the weights. O(T S) time and memory.

    The softmax is taken in float32 whatever the inputs. A query that may see nothing gets zeros, with finite gradients.
    Query heads share key-value heads in groups of N / K.
    """
    may_see = mask.materialize()
    q = empty_unseen(q, may_see.any(axis=2))
    k = k if options.cached else empty_unseen(k, may_see.any(axis=1))
    terms, positions = options.terms, (mask.q_positions, mask.k_positions)
    logits = scores(q, k).astype(jnp.float32)
    if terms is not None and (own_scores := terms.score_term(q, *positions)) is not None:
        logits += own_scores
    logits *= options.scale
    for bias in (options.bias, None if terms is None else terms.bias(*positions)):
        if bias is not None:
            logits += jnp.broadcast_to(bias, logits.shape)
    weights = masked_softmax(logits, may_see[:, None])
    return weighted_values(weights, v, mask, options, may_see=may_see), weights


def scores(q: Float[Array, 'B T N H'], k: Float[Array, 'B S K H']) -> Float[Array, 'B N T S']:
    """The product of each query with each key; N / K query heads share a key head."""
    batch, length, num_heads, width = q.shape
    num_kv_heads = k.shape[2]
    if num_kv_heads == num_heads:
        return jnp.einsum('BTNH,BSNH->BNTS', q, k)
    grouped = q.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, width)
    return jnp.einsum('BTKGH,BSKH->BKGTS', grouped, k).reshape(batch, num_heads, length, k.shape[1])


def masked_softmax(logits: Float[Array, 'B N T S'], may_see: Bool[Array, '#B #N T S']) -> Float[Array, 'B N T S']:
    """Softmax over the keys that may be seen, in float32; zeros in a row that may see none."""
    least = jnp.finfo(jnp.float32).min
    logits = jnp.where(may_see, logits.astype(jnp.float32), least)
    top = jnp.maximum(jax.lax.stop_gradient(logits.max(-1, keepdims=True)), least)  # finite, whatever a bias hides
    exponentials = jnp.where(may_see, jnp.exp(logits - top), 0.0)
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / jnp.where(total > 0, total, 1.0)


def weighted_values(
    weights: Float[Array, 'B N T S'],
    v: Float[Array, 'B S K U'],
    mask: Mask,
    options: Options,
    *,
    may_see: Bool[Array, 'B T S'] | None = None,
) -> Float[Array, 'B T N U']:
    """The weighted sum of values, with dropout on the weights where the options ask for it."""
    may_see = mask.materialize() if may_see is None else may_see
    v = v if options.cached else empty_unseen(v, may_see.any(axis=1))
    rate = options.config.dropout_rate
    if options.dropout_rng is not None and rate > 0:
        keep = jax.random.bernoulli(options.dropout_rng, 1 - rate, weights.shape)
        weights = jnp.where(keep, weights / (1 - rate), 0.0)
    batch, num_heads, length, num_keys = weights.shape
    num_kv_heads = v.shape[2]
    lowered = weights.astype(v.dtype)
    if num_kv_heads == num_heads:
        output = jnp.einsum('BNTS,BSNU->BTNU', lowered, v)
    else:
        grouped = lowered.reshape(batch, num_kv_heads, num_heads // num_kv_heads, length, num_keys)
        output = jnp.einsum('BKGTS,BSKU->BTKGU', grouped, v).reshape(batch, length, num_heads, v.shape[-1])
    if options.terms is not None:
        own_output = options.terms.output_term(weights, mask.q_positions, mask.k_positions)
        if own_output is not None:
            output += own_output.astype(output.dtype)
    return output


def empty_unseen(rows: Float[Array, 'B T N H'], seen: Bool[Array, 'B T']) -> Float[Array, 'B T N H']:
    """Zeros where nobody looks: such a slot may hold anything, NaN included, and 0 * NaN is NaN."""
    return jnp.where(seen[:, :, None, None], rows, 0)


DENSE = Variant(
    dense_attention,
    frozenset(
        'causal cross segments window globals prefix key_masks grouped_heads value_dim bias positions rotary dropout '
        'weights cache cpu gpu tpu float32 bfloat16'.split()
    ),
    reads=frozenset({'scale'}),
)
