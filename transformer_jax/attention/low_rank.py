"""Low-rank attention: keys and values are projected along the length to a few rows. Linformer, Wang et al., 2020."""

import jax
import jax.numpy as jnp

from transformer_jax.attention.dense import dense_attention
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options, Use, Variant, refuse_unsupported
from transformer_jax.config import AttentionConfig
from transformer_jax.parameters import Parameter
from transformer_jax.shapes import Array, Float, Int

_SUPPORTS = frozenset('cross grouped_heads value_dim dropout cache cpu gpu tpu float32 bfloat16'.split())


def low_rank_attention(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    mask: Mask,
    options: Options,
) -> tuple[Float[Array, 'B T N U'], None]:
    """softmax(q (E^T k)^T scale) (F^T v): every query sees r mixtures of keys, of all positions. O((T + S) r).

    E and F, `[max_length, r]`, have a row for each key position and are shared by the heads of a layer (the paper's
    "headwise sharing"). Padding is emptied before it is projected, so that it adds nothing. Raises `ValueError` for a
    mask that hides one real key from one query but not from another, and for more keys than E has rows; a real key at
    a position beyond E's rows yields NaN.
    """
    advice = "a projected row mixes keys of all positions; use kind='dot'"
    refuse_unsupported(_SUPPORTS, mask, options, name='attention of kind low_rank', advice=advice)
    real = (mask.k_segments > 0) & (mask.q_segments > 0).any(axis=1, keepdims=True)  # a key that nobody sees is padding
    real_rows = real[:, :, None, None]

    def project(rows: Float[Array, 'B S K H'], name: str) -> Float[Array, 'B R K H']:
        by_key = _rows_of(options.params[name], mask.k_positions, real)
        emptied = jnp.where(real_rows, rows, 0)
        mixed = jnp.einsum('BSR,BSKH->BRKH', by_key, emptied.astype(by_key.dtype))
        return mixed.astype(rows.dtype)

    projected_k, projected_v = project(k, 'key_projection'), project(v, 'value_projection')
    some_key = jnp.broadcast_to(real.any(axis=1, keepdims=True), projected_k.shape[:2]).astype(jnp.int32)
    sees_all = Mask(
        q_segments=(mask.q_segments > 0).astype(jnp.int32),
        k_segments=some_key,
        q_positions=mask.q_positions,
        k_positions=jnp.zeros_like(some_key),
    )
    return dense_attention(q, projected_k, projected_v, sees_all, options)[0], None


def low_rank_parameters(config: AttentionConfig, max_length: int) -> dict[str, Parameter]:
    """E and F with the paper's variance 1 / r, so that products of projected rows keep their mean."""
    initializer = jax.nn.initializers.normal(config.rank**-0.5)
    projection = Parameter(initializer, (max_length, config.rank), (None, None))
    return {'key_projection': projection, 'value_projection': projection}


def _rows_of(projection: Float[Array, 'L R'], positions: Int[Array, 'B S'], real: Array) -> Float[Array, 'B S R']:
    max_length = projection.shape[0]
    if positions.shape[1] > max_length:
        raise ValueError(
            f'{positions.shape[1]} keys, but the learned projection of kind low_rank has rows for max_length '
            f'{max_length}; raise config.model.max_length before training, or use another kind'
        )
    rows = projection.at[positions].get(mode='fill', fill_value=jnp.nan)
    return jnp.where(real[:, :, None], rows, 0)


def _check(use: Use) -> str | None:
    if use.causal:
        return 'low_rank mixes keys of all positions and can not hide later ones: bidirectional and cross only'
    return None


LOW_RANK = Variant(
    low_rank_attention,
    _SUPPORTS,
    check=_check,
    parameters=low_rank_parameters,
    reads=frozenset({'scale', 'rank'}),
)
