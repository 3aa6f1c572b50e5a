"""Attention by Pallas kernels.

On TPU our own for short texts (`pallas_tpu`) and the splash kernels shipped with JAX for others; on NVIDIA GPUs our own
(`pallas_gpu`). On CPU the GPU kernels are interpreted, which is exact and slow: for tests, not for runs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer_jax.attention.dense import empty_unseen
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options, Use, Variant, project, refuse_unsupported
from transformer_jax.parallel.rules import activation_spec, ambient_mesh
from transformer_jax.shapes import Array, Bool, Float, Int

Reach = tuple[int | None, int | None]
_LANES = 128  # what lengths on a TPU must be whole multiples of
_SHORT = 512  # the longest text whose scores, of one head, stay in a TPU's fast memory whole
_SUPPORTS = frozenset('causal cross segments window grouped_heads value_dim rotary gpu tpu float32 bfloat16'.split())
_SINK = -1e30  # far below every logit and far above the kernels' value of a hidden one


def pallas_attention(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    mask: Mask,
    options: Options,
) -> tuple[Float[Array, 'B T N U'] | Float[Array, 'B T D'], None]:
    """softmax(q k^T scale) v, times the options' projection if they have one.

    O(T S) time, half of it if causal, O(T W) with a window; O(T + S) memory.

    Rows of a sharded batch stay where they are: the kernels run shard by shard, of rows and of heads. Raises
    `ValueError` for what the kernels have no room for: weights, dropout, biases, globals, prefixes, and causal masks or
    windows that are not aligned.
    """
    advice = "impl='blockwise' or 'dense' does"
    refuse_unsupported(_SUPPORTS, mask, options, name="impl='pallas'", advice=advice)
    if not mask.aligned and (mask.causal or mask.window is not None):
        raise ValueError(f"impl='pallas' does not support a causal mask or a window that is not aligned: {advice}")
    left, right = mask.window or (None, None)
    reach = left, 0 if mask.causal else right
    sees, seen = _meetings(mask, reach)
    # What nobody looks at is padding too. That of the two sides gets unlike ids, so that it does not see itself.
    q_segments = checkpoint_name(jnp.where(sees, mask.q_segments, 0), 'segments')
    k_segments = checkpoint_name(jnp.where(seen, mask.k_segments, -1), 'segments')
    if options.projection is not None and ambient_mesh() is not None:  # a shard has but some of the heads
        heads, _ = pallas_attention(q, k, v, mask, options._replace(projection=None))
        return project(heads, options.projection), None
    if options.packed is not None and fits_rows(q, k, v):
        return _packed(options.packed, q.shape, q_segments, k_segments, reach=reach, options=options), None
    on_tpu = by_rows if fits_rows(q, k, v) else _then_project(splash)

    def attend(*arrays: Array) -> Array:
        return jax.lax.platform_dependent(
            *arrays,
            tpu=functools.partial(on_tpu, reach=reach, options=options),
            cuda=functools.partial(_then_project(flash), reach=reach, options=options),
            cpu=functools.partial(_then_project(flash), reach=reach, options=options, interpret=True),
        )

    return _by_shard(attend)(q, k, v, q_segments, k_segments), None


def _then_project(attend: Any) -> Any:
    """The same with the product that follows, where the options have it."""

    def projected(*arrays: Array, options: Options, **rest: Any) -> Array:
        return project(attend(*arrays, options=options, **rest), options.projection)

    return projected


def _packed(
    qkv: Float[Array, 'B T E'],
    shape: tuple[int, ...],
    q_segments: Int[Array, 'B T'],
    k_segments: Int[Array, 'B T'],
    *,
    reach: Reach,
    options: Options,
) -> Float[Array, 'B T N H'] | Float[Array, 'B T D']:
    """Of queries, keys and values side by side, each of which has this shape by itself."""

    def by_packed_rows(qkv: Array, q_segments: Array, k_segments: Array) -> Array:
        from transformer_jax.attention.pallas_tpu import RowKernel, packed_attention

        kernel = RowKernel(shape[2], options.scale, *reach, False)
        outputs = packed_attention(kernel, qkv, q_segments, k_segments, options.projection)
        return outputs.reshape(shape) if options.projection is None else outputs

    def elsewhere(qkv: Array, *segments: Array, interpret: bool = False) -> Array:
        parts = (part.reshape(shape) for part in jnp.split(qkv, 3, axis=-1))
        return _then_project(flash)(*parts, *segments, reach=reach, options=options, interpret=interpret)

    arrays = qkv, q_segments, k_segments
    on_cpu = functools.partial(elsewhere, interpret=True)
    return jax.lax.platform_dependent(*arrays, tpu=by_packed_rows, cuda=elsewhere, cpu=on_cpu)


def fits_rows(q: Float[Array, 'B T N H'], k: Float[Array, 'B S K H'], v: Float[Array, 'B S K U']) -> bool:
    """Whether `by_rows` can take these: short, with equal heads on both sides that fill whole groups of lanes."""
    num_heads, width = q.shape[2:]
    fills_lanes = (num_heads * width) % _LANES == 0 and (_LANES % width == 0 or width % _LANES == 0)
    return k.shape[2:] == v.shape[2:] == (num_heads, width) and fills_lanes and max(q.shape[1], k.shape[1]) <= _SHORT


def by_rows(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S N H'],
    v: Float[Array, 'B S N H'],
    q_segments: Int[Array, 'B T'],
    k_segments: Int[Array, 'B S'],
    *,
    reach: Reach,
    options: Options,
    interpret: bool = False,
) -> Float[Array, 'B T N H'] | Float[Array, 'B T D']:
    """By our own TPU kernels for short texts."""
    from transformer_jax.attention.pallas_tpu import RowKernel, row_attention

    kernel = RowKernel(q.shape[2], options.scale, *reach, interpret)
    return row_attention(kernel, q, k, v, q_segments, k_segments, options.projection)


def splash(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    q_segments: Int[Array, 'B T'],
    k_segments: Int[Array, 'B S'],
    *,
    reach: Reach,
    options: Options,
    interpret: bool = False,
) -> Float[Array, 'B T N U']:
    """By the TPU kernels shipped with JAX. A sink of no weight in every row keeps rows that see nothing at zero."""
    from jax.experimental.pallas.ops.tpu import splash_attention as shipped

    length, num_heads = q.shape[1:3]
    q, k, v = _empty_padding(q, k, v, q_segments, k_segments)
    q = (q.astype(jnp.float32) * options.scale).astype(q.dtype)
    q, q_segments = _pad(q, _LANES), _pad(q_segments, _LANES)
    k, v, k_segments = _pad(k, _LANES), _pad(v, _LANES), _pad(k_segments, _LANES, -1)
    shape = q.shape[1], k.shape[1]
    q_block, k_block = (_fitting_block(size, options.config.block_size) for size in shape)
    make_kernel: Any = shipped.make_splash_mha_single_device  # a partial of a partial, whose stub says mqa
    kernel = make_kernel(
        shipped.MultiHeadMask(
            [shipped.FullMask(shape) if reach == (None, None) else shipped.LocalMask(shape, reach, 0)] * num_heads
        ),
        block_sizes=shipped.BlockSizes(
            block_q=q_block, block_kv=k_block, block_q_dkv=q_block, block_kv_dkv=k_block, block_q_dq=q_block,
            block_kv_dq=k_block,
        ),
        interpret=interpret,
    )  # fmt: skip
    sinks = jnp.full((num_heads,), _SINK, jnp.float32)

    def attend_row(q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array) -> Any:
        return kernel(q, k, v, segment_ids=shipped.SegmentIds(q_segments, k_segments), sinks=sinks)

    q, k, v = q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    return jax.vmap(attend_row)(q, k, v, q_segments, k_segments).transpose(0, 2, 1, 3)[:, :length].astype(v.dtype)


def flash(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    q_segments: Int[Array, 'B T'],
    k_segments: Int[Array, 'B S'],
    *,
    reach: Reach,
    options: Options,
    interpret: bool = False,
) -> Float[Array, 'B T N U']:
    """By our own kernels."""
    from transformer_jax.attention.pallas_gpu import Kernel, flash_attention

    length, value_width = q.shape[1], v.shape[-1]
    q, k, v = _empty_padding(q, k, v, q_segments, k_segments)
    q, k, v = _pad_width(q), _pad_width(k), _pad_width(v)
    # Both sides of a block of each array fit into the shared memory of one multiprocessor.
    block = options.config.block_size or (64 if max(q.shape[-1], v.shape[-1]) * q.dtype.itemsize <= 256 else 32)
    kernel = Kernel(options.scale, reach, block, block, interpret)
    q, q_segments = _pad(q, block), _pad(q_segments, block)
    k, v, k_segments = _pad(k, block), _pad(v, block), _pad(k_segments, block, -1)
    return flash_attention(kernel, q, k, v, q_segments, k_segments)[:, :length, :, :value_width]


def check(use: Use) -> str | None:
    """Why the kernels can't serve a use, or None when they can."""
    if use.platform == 'cpu':
        return "the kernels run on TPU and GPU; on CPU impl='blockwise' computes the same"
    if not use.by_index:
        return "the kernels count positions by index, which this mask does not allow; impl='blockwise' does"
    size = use.config.block_size
    if use.platform == 'tpu' and size is not None and size % _LANES:
        return f'block_size is {size}; on TPU it must be a multiple of {_LANES}, or None'
    if use.platform == 'gpu' and size is not None and size not in (16, 32, 64, 128):
        return f'block_size is {size}; on GPU it must be 16, 32, 64 or 128, or None'
    return None


def _meetings(mask: Mask, reach: Reach) -> tuple[Bool[Array, 'B T'], Bool[Array, 'B S']]:
    """Which queries see some key, and which keys some query sees.

    With a reach the two sides are one sequence, and every real token sees itself.
    """
    if reach != (None, None):
        return mask.q_segments > 0, mask.k_segments > 0
    meet = (mask.q_segments[:, :, None] == mask.k_segments[:, None, :]) & (mask.k_segments > 0)[:, None, :]
    return meet.any(2), meet.any(1)


def _empty_padding(q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array) -> tuple[Array, Array, Array]:
    return empty_unseen(q, q_segments > 0), empty_unseen(k, k_segments > 0), empty_unseen(v, k_segments > 0)


def _by_shard(attend: Any) -> Any:
    """`attend` on each shard's own rows and heads on a mesh of several devices: a compiler can not split a kernel."""
    mesh = ambient_mesh()
    if mesh is None:
        return attend

    def attend_by_shard(q: Array, k: Array, v: Array, q_segments: Array, k_segments: Array) -> Array:
        # Key-value heads decide for both, so that a group of query heads stays with the one that it shares.
        heads = activation_spec(k.shape, ('batch', None, 'kv_heads', None), mesh)
        rows = activation_spec(k_segments.shape, ('batch', None), mesh)
        split = jax.shard_map(attend, in_specs=(heads, heads, heads, rows, rows), out_specs=heads, check_vma=False)
        return split(q, k, v, q_segments, k_segments)

    return attend_by_shard


def _pad(x: Array, multiple: int, value: int = 0) -> Array:
    """Padding behind the rows, axis 1."""
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, -x.shape[1] % multiple)
    return jnp.pad(x, widths, constant_values=value)


def _pad_width(x: Array) -> Array:
    width = max(16, 1 << (x.shape[-1] - 1).bit_length())
    return jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])


def _fitting_block(length: int, block_size: int | None) -> int:
    """The greatest block up to `block_size` that divides a length, both multiples of `_LANES`."""
    return max(size for size in range(_LANES, max(block_size or 512, _LANES) + 1, _LANES) if length % size == 0)


PALLAS = Variant(
    pallas_attention,
    _SUPPORTS,
    check,
    projects=True,
    reads=frozenset({'scale', 'block_size'}),
)
