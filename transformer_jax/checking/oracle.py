"""Each kind of attention as its equation says, in float64 and all at once: what every implementation is held against.

Written for reading: whole score matrices, no blocks, no sharing of code with `attention/`. To be called inside
`jax.enable_x64(True)`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.config import AttentionConfig
from transformer_jax.shapes import Array

# (q [B,T,N,H], k [B,S,N,H], v [B,S,N,U], visible [B,T,S], params, config) -> output [B,T,N,U]; heads are not grouped
Oracle = Callable[[Array, Array, Array, Array, Mapping[str, Array], AttentionConfig], Array]


def visible(mask: Any) -> Array:
    """Which query may see which key, `[B, T, S]`, by the rules in the docstring of `Mask`."""
    q_segments, k_segments = mask.q_segments[:, :, None], mask.k_segments[:, None, :]
    offset = mask.k_positions[:, None, :] - mask.q_positions[:, :, None]
    seen = (q_segments == k_segments) & (q_segments != 0)
    if mask.causal:
        late = offset > 0
        if mask.k_prefix is not None:
            late &= ~mask.k_prefix[:, None, :]
        seen &= ~late
    if mask.window is not None:
        far = (offset < -mask.window[0]) | (offset > mask.window[1])
        is_global = (mask.q_positions[:, :, None] < mask.num_global) | (mask.k_positions[:, None, :] < mask.num_global)
        seen &= ~far | is_global
    return seen if mask.allowed is None else seen & mask.allowed


def _weigh(scores: Array, v: Array, seen: Array) -> Array:
    """Softmax over what is seen, zeros where nothing is, times the values."""
    powers = jnp.where(seen[:, None], jnp.exp(scores - jnp.where(seen[:, None], scores, -jnp.inf).max()), 0)
    total = powers.sum(axis=-1, keepdims=True)
    return jnp.einsum('BNTS,BSNU->BTNU', powers / jnp.where(total == 0, 1, total), v)


def _scale(config: AttentionConfig) -> float:
    return 1.0 if config.scale is None else config.head_dim**-0.5


def dot(q: Array, k: Array, v: Array, seen: Array, params: Mapping[str, Array], config: AttentionConfig) -> Array:
    """softmax(q k^T / sqrt(d_k)) v."""
    return _weigh(jnp.einsum('BTNH,BSNH->BNTS', q, k) * _scale(config), v, seen)


def additive(q: Array, k: Array, v: Array, seen: Array, params: Mapping[str, Array], config: AttentionConfig) -> Array:
    """Scores v . tanh(W q + U k)."""
    hidden = jnp.tanh(
        jnp.einsum('BTNH,NHA->BTNA', q, params['query_map'])[:, :, None]
        + jnp.einsum('BSNH,NHA->BSNA', k, _of_query_heads(params['key_map'], q))[:, None]
    )
    return _weigh(jnp.einsum('BTSNA,NA->BNTS', hidden, params['score']), v, seen)


def concat(q: Array, k: Array, v: Array, seen: Array, params: Mapping[str, Array], config: AttentionConfig) -> Array:
    """Scores v . tanh(W [q; k])."""
    shape = (q.shape[0], q.shape[1], k.shape[1], *q.shape[2:])
    pairs = [jnp.broadcast_to(q[:, :, None], shape), jnp.broadcast_to(k[:, None], shape)]
    hidden = jnp.tanh(jnp.einsum('BTSNX,NXA->BTSNA', jnp.concatenate(pairs, axis=-1), params['joint_map']))
    return _weigh(jnp.einsum('BTSNA,NA->BNTS', hidden, params['score']), v, seen)


def general(q: Array, k: Array, v: Array, seen: Array, params: Mapping[str, Array], config: AttentionConfig) -> Array:
    """Scores q W k, scaled."""
    scores = jnp.einsum('BTNH,NHG,BSNG->BNTS', q, params['query_map'], k)
    return _weigh(scores * _scale(config), v, seen)


def linear(q: Array, k: Array, v: Array, seen: Array, params: Mapping[str, Array], config: AttentionConfig) -> Array:
    """Weights phi(q) . phi(k), phi = elu + 1, divided by their sum."""
    weights = jnp.einsum('BTNH,BSNH->BNTS', jax.nn.elu(q) + 1, jax.nn.elu(k) + 1) * seen[:, None]
    total = weights.sum(axis=-1, keepdims=True)
    return jnp.einsum('BNTS,BSNU->BTNU', weights / jnp.where(total == 0, 1, total), v)


def low_rank(q: Array, k: Array, v: Array, seen: Array, params: Mapping[str, Array], config: AttentionConfig) -> Array:
    """softmax(q (E k)^T / sqrt(d_k)) (F v), with keys that nobody sees left out; positions are 0, 1, 2, ..."""
    real = seen.any(axis=1)
    e, f = (params[name][: k.shape[1]] for name in ('key_projection', 'value_projection'))
    k = jnp.einsum('SR,BSNH->BRNH', e, k * real[:, :, None, None])
    v = jnp.einsum('SR,BSNU->BRNU', f, v * real[:, :, None, None])
    rows = jnp.broadcast_to(seen.any(axis=2)[:, :, None], (*seen.shape[:2], k.shape[1]))
    return _weigh(jnp.einsum('BTNH,BRNH->BNTR', q, k) * _scale(config), v, rows)


def _of_query_heads(per_kv_head: Array, q: Array) -> Array:
    return jnp.repeat(per_kv_head, q.shape[2] // per_kv_head.shape[0], axis=0)


ORACLES: dict[str, Oracle] = {
    'dot': dot,
    'additive': additive,
    'concat': concat,
    'general': general,
    'linear': linear,
    'low_rank': low_rank,
    'performer': dot,  # which it approximates
}
