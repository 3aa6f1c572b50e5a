"""Attention of whole rows as one kernel on a TPU, for texts so short that all scores of a head fit into fast memory.

A program takes one row of the batch with all its heads, side by side in the lanes as the projections leave them, so
nothing is transposed on the way in or out. Scores and weights never leave the chip's fast memory: the backward pass
makes them again from queries and keys. Heads narrower than the 128 lanes share a lane group, which is read and written
whole.
"""

import functools
from collections.abc import Callable, Iterator
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
    projection: Float[Array, 'E D'] | None = None,
) -> Float[Array, 'B T N H'] | Float[Array, 'B T D']:
    """softmax(q k^T scale) v where segments are equal; rows of q with an id no key has, and of k with none, are empty.

    Ids of empty slots must be below 1, and different on the two sides. With a `projection`, E = N H, the heads' outputs
    side by side times it: its gradient takes what the backward pass makes anyway, and no output is kept or made again.
    """
    flat = tuple(x.reshape(*x.shape[:2], -1) for x in (q, k, v))
    outputs = _attend(kernel, flat, (q_segments, k_segments), projection)
    return outputs.reshape(q.shape) if projection is None else outputs


def packed_attention(
    kernel: RowKernel,
    qkv: Float[Array, 'B T E'],
    q_segments: Int[Array, 'B T'],
    k_segments: Int[Array, 'B T'],
    projection: Float[Array, 'F D'] | None = None,
) -> Float[Array, 'B T F'] | Float[Array, 'B T D']:
    """The same of queries, keys and values side by side, E = 3 F, and so of their gradients: one product makes each."""
    return _attend(kernel, (qkv,), (q_segments, k_segments), projection)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    kernel: RowKernel, inputs: tuple[Array, ...], segments: tuple[Array, Array], projection: Array | None
) -> Array:
    """`inputs` are queries, keys and values, or one array of all three."""
    body = _forward_kernel if len(inputs) > 1 else _packed_forward_kernel
    (outputs,) = _call(kernel, body, inputs, segments, (_like_outputs(inputs),), num_products=2)
    return outputs if projection is None else outputs @ projection


def _forward(kernel: RowKernel, *arrays: Any) -> tuple[Array, tuple[Any, ...]]:
    return _attend(kernel, *arrays), arrays


def _backward(kernel: RowKernel, kept: tuple[Any, ...], d_outputs: Array) -> tuple[Any, ...]:
    inputs, segments, projection = kept
    body = _backward_kernel if len(inputs) > 1 else _packed_backward_kernel
    if projection is None:
        return _call(kernel, body, (*inputs, d_outputs), segments, inputs, num_products=5), (None, None), None
    arrays, like = (*inputs, d_outputs @ projection.T), (*inputs, _like_outputs(inputs))
    *gradients, outputs = _call(kernel, body, arrays, segments, like, num_products=6)
    return tuple(gradients), (None, None), jnp.einsum('BTE,BTD->ED', outputs, d_outputs)


_attend.defvjp(_forward, _backward)


def _like_outputs(inputs: tuple[Array, ...]) -> jax.ShapeDtypeStruct:
    first = inputs[0]
    width = first.shape[2] if len(inputs) > 1 else first.shape[2] // 3
    return jax.ShapeDtypeStruct((*first.shape[:2], width), first.dtype)


def _call(
    kernel: RowKernel,
    body: Callable[..., None],
    inputs: tuple[Array, ...],
    segments: tuple[Array, ...],
    like: tuple[Array | jax.ShapeDtypeStruct, ...],
    *,
    num_products: int,
) -> tuple[Array, ...]:
    """Runs a kernel over the rows of the batch; `like` has the shapes of what it makes."""
    q_segments, k_segments = segments
    ids = q_segments[:, None, :], k_segments[:, None, :]  # along the lanes: columns would fill one lane of each 128
    (batch, length), num_keys = q_segments.shape, k_segments.shape[1]
    width = like[0].shape[2] if num_products == 2 else inputs[-1].shape[2]
    moved = sum(x.size * x.dtype.itemsize for x in (*inputs, *segments, *like))

    def row(x: Any) -> pl.BlockSpec:
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


def _forward_kernel(kernel: RowKernel, q_ref: Ref, k_ref: Ref, v_ref: Ref, q_ids: Ref, k_ids: Ref, o_ref: Ref) -> None:
    q_column, k_column = _column(q_ids[...]), _column(k_ids[...])
    may_see = _may_see(kernel, q_column, k_ids[...])

    def attend(lanes: Any) -> None:
        groups = _real(q_ref, lanes, q_column > 0), *(_real(ref, lanes, k_column > 0) for ref in (k_ref, v_ref))
        outputs = []
        for q, k, v in _heads(kernel, q_ref.shape[1], *groups):
            weights = _weights(kernel, q, k, may_see)
            outputs.append(_product(weights.astype(v.dtype), v, (1, 0)))
        o_ref[:, lanes] = jnp.concatenate(outputs, axis=1).astype(o_ref.dtype)

    _for_lane_groups(kernel, q_ref.shape, attend)


def _backward_kernel(
    kernel: RowKernel,
    q_ref: Ref, k_ref: Ref, v_ref: Ref, d_o_ref: Ref, q_ids: Ref, k_ids: Ref,
    d_q_ref: Ref, d_k_ref: Ref, d_v_ref: Ref, o_ref: Ref | None = None,
) -> None:  # fmt: skip
    """With `o_ref` the outputs as well."""
    q_column, k_column = _column(q_ids[...]), _column(k_ids[...])
    may_see = _may_see(kernel, q_column, k_ids[...])

    def differentiate(lanes: Any) -> None:
        groups = [_real(ref, lanes, q_column > 0) for ref in (q_ref, d_o_ref)]
        groups += [_real(ref, lanes, k_column > 0) for ref in (k_ref, v_ref)]
        gradients, outputs = [], []
        for q, d_o, k, v in _heads(kernel, q_ref.shape[1], *groups):
            weights = _weights(kernel, q, k, may_see)
            lowered = weights.astype(v.dtype)
            if o_ref is not None:
                outputs.append(_product(lowered, v, (1, 0)))
            d_v = _product(lowered, d_o, (0, 0))
            d_weights = _product(d_o, v, (1, 1))
            mean = (weights * d_weights).sum(1, keepdims=True)
            d_logits = (weights * (d_weights - mean) * kernel.scale).astype(q.dtype)
            gradients.append((_product(d_logits, k, (1, 0)), _product(d_logits, q, (0, 0)), d_v))
        for ref, own in zip((d_q_ref, d_k_ref, d_v_ref), zip(*gradients, strict=True), strict=True):
            ref[:, lanes] = jnp.concatenate(own, axis=1).astype(ref.dtype)
        if o_ref is not None:
            o_ref[:, lanes] = jnp.concatenate(outputs, axis=1).astype(o_ref.dtype)

    _for_lane_groups(kernel, q_ref.shape, differentiate)


def _packed_forward_kernel(kernel: RowKernel, qkv_ref: Ref, q_ids: Ref, k_ids: Ref, o_ref: Ref) -> None:
    q_ref, k_ref, v_ref = _thirds(qkv_ref)
    _forward_kernel(kernel, q_ref, k_ref, v_ref, q_ids, k_ids, o_ref)


def _packed_backward_kernel(
    kernel: RowKernel,
    qkv_ref: Ref, d_o_ref: Ref, q_ids: Ref, k_ids: Ref,
    gradients_ref: Ref, o_ref: Ref | None = None,
) -> None:  # fmt: skip
    q_ref, k_ref, v_ref = _thirds(qkv_ref)
    d_q_ref, d_k_ref, d_v_ref = _thirds(gradients_ref)
    _backward_kernel(kernel, q_ref, k_ref, v_ref, d_o_ref, q_ids, k_ids, d_q_ref, d_k_ref, d_v_ref, o_ref)


def _thirds(ref: Ref) -> tuple[Ref, Ref, Ref]:
    """Views of what lies side by side along the lanes."""
    width = ref.shape[1] // 3
    first, second, third = (ref.at[:, pl.ds(part * width, width)] for part in range(3))
    return first, second, third


def _for_lane_groups(kernel: RowKernel, shape: tuple[int, ...], body: Callable[[Any], None]) -> None:
    """Calls `body` for each group of lanes, which one or several heads fill.

    Short rows are unrolled, so that one group's products overlap another's softmax; long ones would compile longer.
    """
    length, width = shape
    group = max(width // kernel.num_heads, _LANES)

    def one(index: Any, _: None) -> None:
        body(pl.ds(pl.multiple_of(index * group, group), group))

    jax.lax.fori_loop(0, width // group, one, None, unroll=length <= _UNROLLED)


def _heads(kernel: RowKernel, width: int, *groups: Array) -> Iterator[tuple[Array, ...]]:
    """These groups of lanes, head by head."""
    head_width = width // kernel.num_heads
    for first in range(0, groups[0].shape[1], head_width):
        yield tuple(group[:, first : first + head_width] for group in groups)


def _column(row: Array) -> Array:
    """`[1, T]` as `[T, 1]`."""
    length = row.shape[1]
    is_own = jax.lax.broadcasted_iota(jnp.int32, (length, length), 0) == jax.lax.broadcasted_iota(
        jnp.int32, (length, length), 1
    )
    return jnp.where(is_own, row.astype(jnp.float32), 0.0).sum(1, keepdims=True).astype(jnp.int32)


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
