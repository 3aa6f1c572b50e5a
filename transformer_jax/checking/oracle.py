"""Each kind of attention as its equation says, in float64 and all at once: what every implementation is held against.

Written for reading: whole score matrices, no blocks, no sharing of code with `attention/` but for the directions that a
performer draws, which its equation is given. To be called inside `jax.enable_x64(True)`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.attention.performer import draw_directions
from transformer_jax.checking.position_oracle import Added
from transformer_jax.config import AttentionConfig
from transformer_jax.shapes import Array

# (q [B,T,N,H], k [B,S,N,H], v [B,S,N,U], visible [B,T,S], params, config) -> output [B,T,N,U]; heads are not grouped.
# Of kinds that take position schemes with terms also (..., added), where there are such.
Oracle = Callable[..., Array]
_Params = Mapping[str, Array]
_NOTHING = Added()


def to_float64(arrays: Any) -> Any:
    """The same numbers as the equations take them: a pytree."""
    return jax.tree.map(lambda array: jnp.asarray(np.asarray(array).astype(np.float64)), arrays)


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


def _weigh(scores: Array, v: Array, seen: Array, added: Added = _NOTHING) -> Array:
    """Softmax over what is seen, zeros where nothing is, times the values."""
    seen = seen[:, None]
    scores = scores if added.bias is None else scores + added.bias
    top = jax.lax.stop_gradient(jnp.where(seen, scores, -jnp.inf).max(axis=-1, keepdims=True))
    powers = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0)), 0)
    weights = _divide(powers, powers.sum(axis=-1, keepdims=True))
    output = jnp.einsum('BNTS,BSNU->BTNU', weights, v)
    return output if added.values is None else output + jnp.einsum('BNTS,BTSU->BTNU', weights, added.values)


def _divide(weights: Array, total: Array) -> Array:
    return weights / jnp.where(total == 0, 1, total)


def _scale(config: AttentionConfig) -> float:
    return 1.0 if config.scale is None else config.head_dim**-0.5


def _multiply(q: Array, k: Array, added: Added) -> Array:
    """The product of q with k and with what is added to it."""
    products = jnp.einsum('BTNH,BSNH->BNTS', q, k)
    return products if added.keys is None else products + jnp.einsum('BTNH,BTSH->BNTS', q, added.keys)


def dot(
    q: Array, k: Array, v: Array, seen: Array, params: _Params, config: AttentionConfig, added: Added = _NOTHING
) -> Array:
    """softmax(q k^T / sqrt(d_k)) v."""
    return _weigh(_multiply(q, k, added) * _scale(config), v, seen, added)


def additive(
    q: Array, k: Array, v: Array, seen: Array, params: _Params, config: AttentionConfig, added: Added = _NOTHING
) -> Array:
    """Scores v . tanh(W q + U k). What is added to keys is multiplied by q and scaled, as it is in `dot`."""
    hidden = jnp.tanh(
        jnp.einsum('BTNH,NHA->BTNA', q, params['query_map'])[:, :, None]
        + jnp.einsum('BSNH,NHA->BSNA', k, _of_query_heads(params['key_map'], q))[:, None]
    )
    scores = jnp.einsum('BTSNA,NA->BNTS', hidden, params['score'])
    return _weigh(scores + _multiply(q, 0 * k, added) * _scale(config), v, seen, added)


def concat(
    q: Array, k: Array, v: Array, seen: Array, params: _Params, config: AttentionConfig, added: Added = _NOTHING
) -> Array:
    """Scores v . tanh(W [q; k]). What is added to keys is multiplied by q and scaled, as it is in `dot`."""
    shape = (q.shape[0], q.shape[1], k.shape[1], *q.shape[2:])
    pairs = [jnp.broadcast_to(q[:, :, None], shape), jnp.broadcast_to(k[:, None], shape)]
    hidden = jnp.tanh(jnp.einsum('BTSNX,NXA->BTSNA', jnp.concatenate(pairs, axis=-1), params['joint_map']))
    scores = jnp.einsum('BTSNA,NA->BNTS', hidden, params['score'])
    return _weigh(scores + _multiply(q, 0 * k, added) * _scale(config), v, seen, added)


def general(
    q: Array, k: Array, v: Array, seen: Array, params: _Params, config: AttentionConfig, added: Added = _NOTHING
) -> Array:
    """Scores q W k, scaled."""
    moved = jnp.einsum('BTNH,NHG->BTNG', q, params['query_map'])
    return _weigh(_multiply(moved, k, added) * _scale(config), v, seen, added)


def _weigh_by_features(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """Weights q . k of features, divided by their sum over what is seen."""
    weights = jnp.einsum('BTNF,BSNF->BNTS', q, k) * seen[:, None]
    return jnp.einsum('BNTS,BSNU->BTNU', _divide(weights, weights.sum(axis=-1, keepdims=True)), v)


def linear(q: Array, k: Array, v: Array, seen: Array, params: _Params, config: AttentionConfig) -> Array:
    """Weights phi(q) . phi(k), phi = elu + 1, divided by their sum."""
    return _weigh_by_features(jax.nn.elu(q) + 1, jax.nn.elu(k) + 1, v, seen)


def performer(q: Array, k: Array, v: Array, seen: Array, params: _Params, config: AttentionConfig) -> Array:
    """The same with phi(x) = exp(w . x - |x|^2 / 2) for each direction w, of rows times the root of the scale.

    Choromanski et al. 2021, lemma 1: in the mean over directions phi(q) . phi(k) is exp(scale q k).
    """
    directions = draw_directions(config.num_features, config.head_dim, config.feature_seed)

    def features(rows: Array) -> Array:
        x = rows * _scale(config) ** 0.5
        return jnp.exp(jnp.einsum('BTNH,FH->BTNF', x, directions) - (x**2).sum(axis=-1, keepdims=True) / 2)

    return _weigh_by_features(features(q), features(k), v, seen)


def low_rank(q: Array, k: Array, v: Array, seen: Array, params: _Params, config: AttentionConfig) -> Array:
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
    'performer': performer,
}
