"""Attention of whole rows as one kernel on a TPU, for texts so short that all scores of a head fit into fast memory.

A program takes one row of the batch with all its heads, side by side in the lanes as the projections leave them, so
nothing is transposed on the way in or out. Scores and weights never leave the chip's fast memory: the backward pass
makes them again from queries and keys. Heads narrower than the 128 lanes share a lane group: the others' lanes are set
to zero before a product over lanes, and left out of what a product makes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from transformer_jax.shapes import Array, Float, Int

Ref = Any  # memory of the chip that a kernel reads and writes
_LANES = 128
_UNROLLED = 256  # the longest rows whose groups of lanes are unrolled
_HIDDEN = -1e30  # a hidden logit
_LEAST_PEAK = -1e29  # of a row: the logits of one that sees nothing still come to exp(...) = 0


class RowKernel(NamedTuple):
    """What is known before tracing."""

    num_heads: int
    scale: float
    left: int | None  # how many positions before it a query sees; None = all
    right: int | None
    interpret: bool


def row_attention(
    kernel: RowKernel,
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S N H'],
    v: Float[Array, 'B S N H'],
    q_segments: Int[Array, 'B T'],
    k_segments: Int[Array, 'B S'],
) -> Float[Array, 'B T N H']:
    """softmax(q k^T scale) v where segments are equal; rows of q with an id no key has, and of k with none, are empty.

    Ids of empty slots must be below 1, and different on the two sides.
    """
    flat = [x.reshape(*x.shape[:2], -1) for x in (q, k, v)]
    return _attend(kernel, *flat, q_segments, k_segments).reshape(q.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel: RowKernel, q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array) -> Array:
    return _call(kernel, _forward_kernel, (q, k, v), (q_segments, k_segments), (q,), num_products=2)[0]


def _forward(kernel: RowKernel, *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    return _attend(kernel, *arrays), arrays


def _backward(kernel: RowKernel, kept: tuple[Array, ...], d_output: Array) -> tuple[Array | None, ...]:
    q, k, v, q_segments, k_segments = kept
    segments = q_segments, k_segments
    gradients = _call(kernel, _backward_kernel, (q, k, v, d_output), segments, (q, k, v), num_products=5)
    return *gradients, None, None


_attend.defvjp(_forward, _backward)


def _call(
    kernel: RowKernel,
    body: Callable[..., None],
    inputs: tuple[Array, ...],
    segments: tuple[Array, Array],
    like: tuple[Array, ...],
    *,
    num_products: int,
) -> tuple[Array, ...]:
    """Runs a kernel over the rows of the batch; `like` has the shapes of what it makes."""
    q_segments, k_segments = segments
    ids = q_segments[:, :, None], k_segments[:, :, None], k_segments[:, None, :]
    (batch, length, width), num_keys = inputs[0].shape, inputs[1].shape[1]
    moved = sum(x.size * x.dtype.itemsize for x in (*inputs, *segments, *like))

    def row(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda index: (index, 0, 0))

    run: Any = pl.pallas_call(
        functools.partial(body, kernel),
        grid=(batch,),
        in_specs=[row(x) for x in (*inputs, *ids)],
        out_specs=[row(x) for x in like],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel',), vmem_limit_bytes=64 * 2**20),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_products * batch * length * num_keys * width,
            bytes_accessed=moved,
            transcendentals=batch * kernel.num_heads * length * num_keys,
        ),
        interpret=kernel.interpret,
        name='row_attention' if num_products == 2 else 'row_attention_backward',
    )
    return tuple(run(*inputs, *ids))


def _forward_kernel(
    kernel: RowKernel, q_ref: Ref, k_ref: Ref, v_ref: Ref, q_ids: Ref, k_ids: Ref, k_row: Ref, o_ref: Ref
) -> None:
    may_see = _may_see(kernel, q_ids[...], k_row[...])
    q_real, k_real = q_ids[...] > 0, k_ids[...] > 0

    def attend(lanes: Any, heads: Sequence[Array | None]) -> None:
        q, k, v = _real(q_ref, lanes, q_real), _real(k_ref, lanes, k_real), _real(v_ref, lanes, k_real)
        output = jnp.zeros(q.shape, jnp.float32)
        for own in heads:
            weights = _weights(kernel, _only(own, q), k, may_see)
            output = _choose(own, _product(weights.astype(v.dtype), v, (1, 0)), output)
        o_ref[:, lanes] = output.astype(o_ref.dtype)

    _for_lane_groups(kernel, q_ref.shape, attend)


def _backward_kernel(
    kernel: RowKernel,
    q_ref: Ref, k_ref: Ref, v_ref: Ref, d_o_ref: Ref, q_ids: Ref, k_ids: Ref, k_row: Ref,
    d_q_ref: Ref, d_k_ref: Ref, d_v_ref: Ref,
) -> None:  # fmt: skip
    may_see = _may_see(kernel, q_ids[...], k_row[...])
    q_real, k_real = q_ids[...] > 0, k_ids[...] > 0

    def differentiate(lanes: Any, heads: Sequence[Array | None]) -> None:
        q, k, v = _real(q_ref, lanes, q_real), _real(k_ref, lanes, k_real), _real(v_ref, lanes, k_real)
        d_o = _real(d_o_ref, lanes, q_real)
        d_q = jnp.zeros(q.shape, jnp.float32)
        d_k, d_v = jnp.zeros(k.shape, jnp.float32), jnp.zeros(k.shape, jnp.float32)
        for own in heads:
            weights = _weights(kernel, _only(own, q), k, may_see)
            d_v = _choose(own, _product(weights.astype(v.dtype), d_o, (0, 0)), d_v)
            d_weights = _product(_only(own, d_o), v, (1, 1))
            mean = (weights * d_weights).sum(1, keepdims=True)
            d_logits = (weights * (d_weights - mean) * kernel.scale).astype(q.dtype)
            d_q = _choose(own, _product(d_logits, k, (1, 0)), d_q)
            d_k = _choose(own, _product(d_logits, q, (0, 0)), d_k)
        for ref, gradient in ((d_q_ref, d_q), (d_k_ref, d_k), (d_v_ref, d_v)):
            ref[:, lanes] = gradient.astype(ref.dtype)

    _for_lane_groups(kernel, q_ref.shape, differentiate)


def _for_lane_groups(
    kernel: RowKernel, shape: tuple[int, ...], body: Callable[[Any, Sequence[Array | None]], None]
) -> None:
    """Calls `body` for each group of lanes, with which of these lanes each head in it owns (None = all).

    Short rows are unrolled, so that one group's products overlap another's softmax; long ones would compile longer.
    """
    length, width = shape
    head_width = width // kernel.num_heads
    group = max(head_width, _LANES)
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, group), 1)
    firsts = range(0, group, head_width)
    heads = [None] if head_width == group else [(lane >= first) & (lane < first + head_width) for first in firsts]

    def one(index: Any, _: None) -> None:
        body(pl.ds(pl.multiple_of(index * group, group), group), heads)

    jax.lax.fori_loop(0, width // group, one, None, unroll=length <= _UNROLLED)


def _may_see(kernel: RowKernel, q_ids: Array, k_row: Array) -> Array:
    """Bool [T, S], positions counted by index."""
    may_see = q_ids == k_row
    if kernel.left is not None or kernel.right is not None:
        ahead = jax.lax.broadcasted_iota(jnp.int32, may_see.shape, 1)
        ahead -= jax.lax.broadcasted_iota(jnp.int32, may_see.shape, 0)
        if kernel.right is not None:
            may_see &= ahead <= kernel.right
        if kernel.left is not None:
            may_see &= ahead >= -kernel.left
    return may_see


def _weights(kernel: RowKernel, q: Array, k: Array, may_see: Array) -> Array:
    logits = jnp.where(may_see, _product(q, k, (1, 1)) * kernel.scale, _HIDDEN)
    weights = jnp.exp(logits - jnp.maximum(logits.max(1, keepdims=True), _LEAST_PEAK))
    total = weights.sum(1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0)


def _product(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """The product over these axes, summed in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _real(ref: Ref, lanes: Any, is_real: Array) -> Array:
    """Zeros in empty slots, which may hold anything, NaN included."""
    return jnp.where(is_real, ref[:, lanes], 0)


def _only(own: Array | None, x: Array) -> Array:
    return x if own is None else jnp.where(own, x, 0)


def _choose(own: Array | None, new: Array, old: Array) -> Array:
    return new if own is None else jnp.where(own, new, old)
