"""Flash attention as three small Pallas kernels: output, gradient of the queries, gradient of the keys and values.

Each program of a kernel holds one block of rows and walks over the blocks of the other side that a row can reach by
index, so that a causal mask costs half and a window O(T W). Lowered through Triton on NVIDIA GPUs; interpreted on CPU.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from transformer_jax.shapes import Array, Bool, Float, Int

_LOWEST = -1e30  # of a logit that is hidden


class Kernel(NamedTuple):
    """What is known before tracing. `reach` (before, after) is how many indices a query sees to each side."""

    scale: float
    reach: tuple[int | None, int | None]
    q_block: int
    k_block: int
    interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash_attention(
    kernel: Kernel,
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    q_segments: Int[Array, 'B T'],
    k_segments: Int[Array, 'B S'],
) -> Float[Array, 'B T N U']:
    """Attends inside equal segments; give padding of the two sides unequal ids. A row that sees nothing yields zeros.

    T and S must be whole blocks, and blocks, H and U powers of two, 16 at least.
    """
    return _forward(kernel, q, k, v, q_segments, k_segments)[0]


def _forward(
    kernel: Kernel, q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array
) -> tuple[Array, tuple[Array, ...]]:
    batch, length, num_heads, width = q.shape
    group = num_heads // k.shape[2]
    rows, keys = functools.partial(_rows, kernel.q_block), functools.partial(_whole, k.shape[1], group)
    output, log_normalizer = pl.pallas_call(
        functools.partial(_output_kernel, kernel=kernel),
        grid=(length // kernel.q_block, batch, num_heads),
        in_specs=[
            rows(width), keys(width), keys(v.shape[-1]),
            pl.BlockSpec((None, kernel.q_block), lambda i, b, n: (b, i)),
            pl.BlockSpec((None, k.shape[1]), lambda i, b, n: (b, 0)),
        ],
        out_specs=[
            rows(v.shape[-1]),
            pl.BlockSpec((None, None, kernel.q_block), lambda i, b, n: (b, n, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, length, num_heads, v.shape[-1]), v.dtype),
            jax.ShapeDtypeStruct((batch, num_heads, length), jnp.float32),
        ],
        **_compile_options(kernel, 'attention_output'),
    )(q, k, v, q_segments, k_segments)  # fmt: skip
    return output, (q, k, v, q_segments, k_segments, output, log_normalizer)


def _backward(kernel: Kernel, kept: tuple[Array, ...], d_output: Array) -> tuple[Any, ...]:
    q, k, v, q_segments, k_segments, output, log_normalizer = kept
    batch, length, num_heads, width = q.shape
    num_keys, num_kv_heads, value_width = v.shape[1:]
    group = num_heads // num_kv_heads
    products = d_output.astype(jnp.float32) * output.astype(jnp.float32)
    mean_change = products.sum(-1).transpose(0, 2, 1)  # of the weights' gradient, under the weights
    arrays = q, k, v, q_segments, k_segments, d_output, log_normalizer, mean_change
    rows, keys = functools.partial(_rows, kernel.q_block), functools.partial(_whole, num_keys, group)
    row_statistic = pl.BlockSpec((None, None, kernel.q_block), lambda i, b, n: (b, n, i))
    d_q = pl.pallas_call(
        functools.partial(_d_queries_kernel, kernel=kernel),
        grid=(length // kernel.q_block, batch, num_heads),
        in_specs=[
            rows(width), keys(width), keys(value_width),
            pl.BlockSpec((None, kernel.q_block), lambda i, b, n: (b, i)),
            pl.BlockSpec((None, num_keys), lambda i, b, n: (b, 0)),
            rows(value_width), row_statistic, row_statistic,
        ],
        out_specs=rows(width),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        **_compile_options(kernel, 'attention_d_queries'),
    )(*arrays)  # fmt: skip
    queries, whole_statistic = functools.partial(_whole, length, 1), _whole_statistic(length)
    block = functools.partial(_rows, kernel.k_block)
    d_k, d_v = pl.pallas_call(  # of each query head by itself, summed over its group below
        functools.partial(_d_keys_kernel, kernel=kernel),
        grid=(num_keys // kernel.k_block, batch, num_heads),
        in_specs=[
            queries(width), block(width, group), block(value_width, group),
            pl.BlockSpec((None, length), lambda j, b, n: (b, 0)),
            pl.BlockSpec((None, kernel.k_block), lambda j, b, n: (b, j)),
            queries(value_width), whole_statistic, whole_statistic,
        ],
        out_specs=[block(width), block(value_width)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_keys, num_heads, size), jnp.float32) for size in (width, value_width)
        ],
        **_compile_options(kernel, 'attention_d_keys'),
    )(*arrays)  # fmt: skip
    grouped = (batch, num_keys, num_kv_heads, group, -1)
    return d_q, d_k.reshape(grouped).sum(3).astype(k.dtype), d_v.reshape(grouped).sum(3).astype(v.dtype), None, None


flash_attention.defvjp(_forward, _backward)


def _output_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, q_segments_ref: Any, k_segments_ref: Any, output_ref: Any, log_ref: Any,
    *, kernel: Kernel,
) -> None:  # fmt: skip
    q, q_segments, q_start = q_ref[...], q_segments_ref[...], pl.program_id(0) * kernel.q_block

    def body(j: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        total, top, normalizer = carry
        at = pl.ds(j * kernel.k_block, kernel.k_block)
        may_see = _may_see(kernel, q_start, j * kernel.k_block, q_segments, k_segments_ref[at])
        logits = jnp.where(may_see, _dot(q, k_ref[at, :], 1, 1) * kernel.scale, _LOWEST)
        new_top = jnp.maximum(top, logits.max(1))
        weights = jnp.where(may_see, jnp.exp(logits - new_top[:, None]), 0.0)
        shrink = jnp.exp(top - new_top)
        v = v_ref[at, :]
        total = total * shrink[:, None] + _dot(weights.astype(v.dtype), v, 1, 0)
        return total, new_top, normalizer * shrink + weights.sum(1)

    carry = (
        jnp.zeros((kernel.q_block, v_ref.shape[-1]), jnp.float32),
        jnp.full((kernel.q_block,), _LOWEST, jnp.float32),
        jnp.zeros((kernel.q_block,), jnp.float32),
    )
    before, after = kernel.reach
    first, last = _blocks_within(q_start, kernel.q_block, before, after, kernel.k_block, k_ref.shape[0])
    total, top, normalizer = jax.lax.fori_loop(first, last, body, carry)
    divisor = jnp.where(normalizer > 0, normalizer, 1.0)
    output_ref[...] = (total / divisor[:, None]).astype(output_ref.dtype)
    log_ref[...] = top + jnp.log(divisor)


def _d_queries_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, q_segments_ref: Any, k_segments_ref: Any, d_ref: Any, log_ref: Any,
    mean_ref: Any, d_q_ref: Any, *, kernel: Kernel,
) -> None:  # fmt: skip
    q, d_rows, q_segments, q_start = q_ref[...], d_ref[...], q_segments_ref[...], pl.program_id(0) * kernel.q_block
    log_normalizer, mean_change = log_ref[...], mean_ref[...]

    def body(j: Any, d_q: Array) -> Array:
        at = pl.ds(j * kernel.k_block, kernel.k_block)
        k = k_ref[at, :]
        may_see = _may_see(kernel, q_start, j * kernel.k_block, q_segments, k_segments_ref[at])
        weights = _weights(kernel, q, k, may_see, log_normalizer)
        d_logits = weights * (_dot(d_rows, v_ref[at, :], 1, 1) - mean_change[:, None]) * kernel.scale
        return d_q + _dot(jnp.where(may_see, d_logits, 0.0).astype(k.dtype), k, 1, 0)

    before, after = kernel.reach
    first, last = _blocks_within(q_start, kernel.q_block, before, after, kernel.k_block, k_ref.shape[0])
    d_q = jax.lax.fori_loop(first, last, body, jnp.zeros(q_ref.shape, jnp.float32))
    d_q_ref[...] = d_q.astype(d_q_ref.dtype)


def _d_keys_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, q_segments_ref: Any, k_segments_ref: Any, d_ref: Any, log_ref: Any,
    mean_ref: Any, d_k_ref: Any, d_v_ref: Any, *, kernel: Kernel,
) -> None:  # fmt: skip
    k, v, k_segments, k_start = k_ref[...], v_ref[...], k_segments_ref[...], pl.program_id(0) * kernel.k_block

    def body(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        d_k, d_v = carry
        at = pl.ds(i * kernel.q_block, kernel.q_block)
        q, d_rows = q_ref[at, :], d_ref[at, :]
        may_see = _may_see(kernel, i * kernel.q_block, k_start, q_segments_ref[at], k_segments)
        weights = _weights(kernel, q, k, may_see, log_ref[at])
        d_v += _dot(weights.astype(d_rows.dtype), d_rows, 0, 0)
        d_logits = weights * (_dot(d_rows, v, 1, 1) - mean_ref[at][:, None]) * kernel.scale
        d_k += _dot(jnp.where(may_see, d_logits, 0.0).astype(q.dtype), q, 0, 0)
        return d_k, d_v

    before, after = kernel.reach
    first, last = _blocks_within(k_start, kernel.k_block, after, before, kernel.q_block, q_ref.shape[0])
    zeros = jnp.zeros(k_ref.shape, jnp.float32), jnp.zeros(v_ref.shape, jnp.float32)
    d_k_ref[...], d_v_ref[...] = jax.lax.fori_loop(first, last, body, zeros)


def _weights(kernel: Kernel, q: Array, k: Array, may_see: Array, log_normalizer: Array) -> Float[Array, 'T S']:
    logits = jnp.where(may_see, _dot(q, k, 1, 1) * kernel.scale, _LOWEST)
    return jnp.where(may_see, jnp.exp(logits - log_normalizer[:, None]), 0.0)


def _may_see(kernel: Kernel, q_start: Any, k_start: Any, q_segments: Array, k_segments: Array) -> Bool[Array, 'T S']:
    may_see = q_segments[:, None] == k_segments[None, :]
    before, after = kernel.reach
    queries, keys = jnp.arange(kernel.q_block, dtype=jnp.int32), jnp.arange(kernel.k_block, dtype=jnp.int32)
    distance = (q_start + queries)[:, None] - (k_start + keys)[None, :]
    if before is not None:
        may_see &= distance <= before
    if after is not None:
        may_see &= distance >= -after
    return may_see


def _blocks_within(
    start: Any, size: int, before: int | None, after: int | None, block: int, length: int
) -> tuple[Any, Any]:
    """The first block of the other side that one of `size` rows from `start` reaches, and one more than the last."""
    first, last = 0, length // block
    if before is not None:
        first = jnp.minimum(jax.lax.div(jnp.maximum(start - before, 0), block), last)
    if after is not None:
        last = jnp.minimum(jax.lax.div(start + (size - 1 + after), block) + 1, last)
    return first, last


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None  # no TF32 where float32 was asked for
    return jax.lax.dot_general(
        a, b, (((a_axis,), (b_axis,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
    )


def _rows(size: int, width: int, group: int = 1) -> pl.BlockSpec:
    """One block of rows of one head, or of the head that a group of `group` heads shares."""
    return pl.BlockSpec((None, size, None, width), lambda i, b, n: (b, i, jax.lax.div(n, group), 0))


def _whole(length: int, group: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, length, None, width), lambda i, b, n: (b, 0, jax.lax.div(n, group), 0))


def _whole_statistic(length: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, length), lambda i, b, n: (b, n, 0))


def _compile_options(kernel: Kernel, name: str) -> dict[str, Any]:
    return {
        'interpret': kernel.interpret,
        'compiler_params': triton.CompilerParams(num_warps=4, num_stages=2),
        'name': name,
    }
