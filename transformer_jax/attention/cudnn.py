"""Attention by cuDNN's fused kernels, through `jax.nn.dot_product_attention`: NVIDIA GPUs, 16 bits."""

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.attention.dense import empty_unseen
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options, Use, Variant, refuse_unsupported
from transformer_jax.shapes import Array, Float

_TILE = 128  # lengths are padded to whole tiles of the kernels, whose tails have had faults
_GREATEST_HEAD = 128
_SUPPORTS = frozenset(
    'causal cross segments window globals prefix key_masks grouped_heads bias rotary gpu bfloat16'.split()
)


def cudnn_attention(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    mask: Mask,
    options: Options,
) -> tuple[Float[Array, 'B T N U'], None]:
    """softmax(q k^T scale + bias) v. The scores never exist, but the mask does: O(T S) memory, shared by the heads."""
    return attend(q, k, v, mask, options, 'cudnn'), None


def attend(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    mask: Mask,
    options: Options,
    implementation: Any,
) -> Float[Array, 'B T N U']:
    """The call of `jax.nn.dot_product_attention` that means the same as our mask and options.

    A causal mask by index is said natively, so that the kernels skip what it hides; padding, segments and all else are
    a mask. Rows that see nothing are given the whole mask, for no kernel promises what it makes of them, and zeroed.
    """
    refuse_unsupported(_SUPPORTS, mask, options, name="impl='cudnn'", advice="impl='dense' does")
    may_see = mask.materialize()
    sees = may_see.any(2)
    length, bias = q.shape[1], options.bias
    if bias is not None:
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], *may_see.shape[1:]))
    q = _pad(empty_unseen(q, sees), 1)
    k, v = (_pad(empty_unseen(x, may_see.any(1)), 1) for x in (k, v))
    whole = _pad(_pad((may_see | ~sees[:, :, None])[:, None], 2), 3)
    output = jax.nn.dot_product_attention(
        q,
        k,
        v,
        # in the queries' own 16 bits: a wider one beside them has made gradients NaN
        None if bias is None else _pad(_pad(bias, 2), 3).astype(q.dtype),
        whole,
        scale=options.scale,
        is_causal=mask.aligned and mask.causal and mask.k_prefix is None,
        implementation=implementation,
    )
    return jnp.where(sees[:, :, None, None], output[:, :length], 0)


def check(use: Use) -> str | None:
    """Why cuDNN can't serve a use, or None when it can."""
    config = use.config
    if use.platform != 'gpu':
        return f"cuDNN runs on NVIDIA GPUs, not on {use.platform}; impl='blockwise' computes the same anywhere"
    if use.compute_dtype != 'bfloat16':
        return (
            f"cuDNN computes in 16 bits, not in {use.compute_dtype}; set compute_dtype='bfloat16' or impl='blockwise'"
        )
    if config.value_dim not in (None, config.head_dim):
        return (
            f'cuDNN needs value_dim equal to head_dim, and they are {config.value_dim} and {config.head_dim}; '
            f"set value_dim=None or impl='blockwise'"
        )
    if config.head_dim % 8 or config.head_dim > _GREATEST_HEAD:
        return (
            f'cuDNN needs a head_dim of at most {_GREATEST_HEAD} that is a multiple of 8, and it is {config.head_dim}; '
            "impl='blockwise' takes any"
        )
    return None


def _pad(x: Array, axis: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % _TILE)
    return jnp.pad(x, widths)


CUDNN = Variant(
    cudnn_attention,
    _SUPPORTS,
    check,
    reads=frozenset({'scale'}),
)
