"""Scaled dot-product attention as the paper writes it: the readable reference. Section 3.2.1."""

import jax
import jax.numpy as jnp

from transformer_jax.attention.mask import Mask
from transformer_jax.shapes import Array, Float, Int, PRNGKey


def dense_attention(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S N H'],
    v: Float[Array, 'B S N U'],
    mask: Mask,
    *,
    scale: float,
    dropout_rate: float = 0.0,
    dropout_rng: PRNGKey | None = None,
) -> tuple[Float[Array, 'B T N U'], Float[Array, 'B N T S']]:
    """softmax(q k^T scale) v, and the weights. O(T S) time and memory.

    The softmax is taken in float32 whatever the inputs. A query that may see nothing gets zeros, with finite gradients.
    """
    may_see = mask.materialize()[:, None]
    # Padding may hold anything, NaN included, and 0 * NaN is NaN: empty it before it is multiplied.
    q = _empty_padding(q, mask.q_segments)
    k, v = _empty_padding(k, mask.k_segments), _empty_padding(v, mask.k_segments)
    logits = jnp.einsum('BTNH,BSNH->BNTS', q, k).astype(jnp.float32) * scale
    logits = jnp.where(may_see, logits, jnp.finfo(jnp.float32).min)
    exponentials = jnp.where(may_see, jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))), 0.0)
    total = exponentials.sum(-1, keepdims=True)
    weights = exponentials / jnp.where(total > 0, total, 1.0)
    dropped = weights
    if dropout_rng is not None and dropout_rate > 0:
        keep = jax.random.bernoulli(dropout_rng, 1 - dropout_rate, weights.shape)
        dropped = jnp.where(keep, weights / (1 - dropout_rate), 0.0)
    return jnp.einsum('BNTS,BSNU->BTNU', dropped.astype(v.dtype), v), weights


def _empty_padding(rows: Float[Array, 'B T N H'], segments: Int[Array, 'B T']) -> Float[Array, 'B T N H']:
    return jnp.where((segments > 0)[:, :, None, None], rows, 0)
