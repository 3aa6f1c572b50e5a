"""Attention over lengths that a mesh splits: queries stay on their device, keys and values travel round the ring.

Ring attention (Liu et al. 2023). Each of p devices holds a p-th of the queries and of the keys. In each of p hops it
attends to the keys at hand, merges the result by the online softmax and hands the keys on to its neighbour; in the
backward pass the gradients of keys and values travel along and are home after the last hop. Memory a device is
O((T + S) / p), forward and backward. Positions and segments travel with the keys, so every mask is exact; pairs of
blocks that it empties are skipped, whole hops among them.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from transformer_jax.attention.block_pairs import choose_blocks, find_seen_pairs, pad_to_blocks
from transformer_jax.attention.block_passes import (
    Context,
    Inputs,
    Origin,
    Outcome,
    Plan,
    Sums,
    add_gradients,
    attend_to,
    empty_gradients,
    group_heads,
    pad_axis,
    split_terms,
)
from transformer_jax.attention.mask import Mask
from transformer_jax.attention.variant import Options
from transformer_jax.parallel.mesh import MODEL, ROWS, SEQUENCE
from transformer_jax.parallel.rules import ambient_mesh
from transformer_jax.shapes import Array, Float


def num_sequence_shards() -> int:
    """How many ways the current mesh splits lengths; 1 where there is no mesh, or a region has split them by hand."""
    mesh = ambient_mesh()
    return 1 if mesh is None else mesh.shape.get(SEQUENCE, 1)


def ring_attention(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K U'],
    mask: Mask,
    options: Options,
) -> Float[Array, 'B T N U']:
    """softmax(q k^T scale + bias) v on the current mesh, which has an axis 'sequence'; memory a device O((T + S) / p).

    Equals `blockwise_attention`, dropout included. Rows lie over 'data' and 'fsdp', heads over 'model'. Rows and
    lengths that the mesh does not divide are padded and hidden; key-value heads are repeated as 'model' asks.
    A bias, or a mask key by key, is O(T S / p) memory a device. Raises `ValueError` when 'model' does not divide the
    query heads.
    """
    ways = _Ways.of_mesh()
    batch, length, num_heads, _ = q.shape
    if num_heads % ways.heads:
        fits = [n for n in range(1, ways.heads + 1) if num_heads % n == 0 and ways.heads % n == 0]
        raise ValueError(
            f'{num_heads} heads can not be split {ways.heads} ways, the size of mesh axis {MODEL!r}; '
            f'{" or ".join(map(str, fits))} ways fit, and so do multiples of {ways.heads} heads'
        )
    repeats = math.lcm(k.shape[2], ways.heads) // k.shape[2]
    k, v = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (k, v))
    kept_by = _Kept.of(options.bias, batch, num_heads)
    bias = options.bias
    if bias is not None:
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], length, k.shape[1]))
        bias = pad_axis(pad_axis(bias, 2, ways.length), 3, ways.length)
        bias = pad_axis(bias, 0, ways.rows) if kept_by.rows else bias
    q, k, v = (pad_axis(pad_axis(x, 0, ways.rows), 1, ways.length) for x in (q, k, v))
    mask = _pad_mask(mask, ways)
    structure, learned, fixed = split_terms(options.terms)
    seed = None if options.dropout_rng is None else jax.random.bits(options.dropout_rng, (2,), jnp.uint32)
    rows = q.shape[0] // ways.rows * num_heads // ways.heads
    shard = q.shape[1] // ways.length, k.shape[1] // ways.length
    few_scores = rows * shard[0] * q.shape[3] // 8  # so that they take little beside the queries
    blocks = choose_blocks(rows, *shard, mask, options.config.block_size, few_scores)
    plan = _RingPlan(Plan(blocks, options.scale, options.config.dropout_rate, structure, num_heads), ways, kept_by)
    grouped = group_heads(q.transpose(0, 2, 1, 3), k.shape[2])
    inputs = Inputs(grouped, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), bias, learned)
    output = _attend(plan, inputs, _Context(mask, fixed, seed))
    output = output[:batch, :, :, :length].reshape(batch, num_heads, length, v.shape[-1])
    return output.transpose(0, 2, 1, 3)


class _Ways(NamedTuple):
    """Into how many parts the mesh splits rows, heads and lengths, and the axes that do it."""

    rows: int
    heads: int
    length: int
    row_axes: tuple[str, ...]
    head_axis: str | None

    @classmethod
    def of_mesh(cls) -> '_Ways':
        sizes = jax.sharding.get_abstract_mesh().shape
        row_axes = tuple(axis for axis in ROWS if axis in sizes)
        rows = math.prod(sizes[axis] for axis in row_axes)
        return cls(rows, sizes.get(MODEL, 1), sizes[SEQUENCE], row_axes, MODEL if MODEL in sizes else None)


class _Kept(NamedTuple):
    """Whether a bias has rows and heads of its own; where it has not, devices of those axes share its gradient."""

    rows: bool = False
    heads: bool = False

    @classmethod
    def of(cls, bias: Array | None, batch: int, num_heads: int) -> '_Kept':
        return cls() if bias is None else cls(bias.shape[0] == batch > 1, bias.shape[1] == num_heads > 1)


class _RingPlan(NamedTuple):
    """What is known before tracing."""

    passes: Plan
    ways: _Ways
    bias: _Kept

    @property
    def queries(self) -> PartitionSpec:
        """Where arrays `[B, K, G, T, ...]` lie."""
        return PartitionSpec(self.ways.row_axes, self.ways.head_axis, None, SEQUENCE)

    def split_inputs(self, inputs: Inputs) -> Any:
        """Where each of the inputs lies."""
        rows, heads = self.ways.row_axes, self.ways.head_axis
        keys = PartitionSpec(rows, heads, SEQUENCE)
        bias = PartitionSpec(rows if self.bias.rows else None, heads if self.bias.heads else None, SEQUENCE)
        return Inputs(
            *(self.queries, keys, keys),  # type: ignore[arg-type]
            bias=None if inputs.bias is None else bias,  # type: ignore[arg-type]
            learned=jax.tree.map(lambda _: PartitionSpec(), inputs.learned),
        )

    def split_context(self, context: '_Context') -> Any:
        """Where each of the arrays without a gradient lies."""
        tokens = PartitionSpec(self.ways.row_axes, SEQUENCE)
        mask = jax.tree.map(lambda _: tokens, context.mask)
        return _Context(mask, *jax.tree.map(lambda _: PartitionSpec(), context[1:]))


class _Context(NamedTuple):
    """Arguments that have no gradient."""

    mask: Mask
    fixed: list[Any]  # leaves of the position terms
    seed: Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _RingPlan, inputs: Inputs, context: _Context) -> Float[Array, 'B K G T U']:
    return _forward(plan, inputs, context)[0]


def _forward(plan: _RingPlan, inputs: Inputs, context: _Context) -> tuple[Array, tuple[Any, ...]]:
    splits = plan.split_inputs(inputs)
    output, log_normalizer, k, v = jax.shard_map(
        functools.partial(_attend_on_shard, plan),
        in_specs=(splits, plan.split_context(context)),
        out_specs=(plan.queries, plan.queries, splits.k, splits.v),
        check_vma=False,
    )(inputs, context)
    # Keys and values as they came home, so that those which set out need not be kept beside those on their way.
    return output, (inputs._replace(k=k, v=v), context, output, log_normalizer)


def _backward(plan: _RingPlan, kept: tuple[Any, ...], d_output: Array) -> tuple[Inputs, None]:
    inputs, context, output, log_normalizer = kept
    splits = plan.split_inputs(inputs)
    gradients = jax.shard_map(
        functools.partial(_gradients_on_shard, plan),
        in_specs=(splits, plan.split_context(context), *[plan.queries] * 3),
        out_specs=splits,
        check_vma=False,
    )(inputs, context, output, log_normalizer, d_output)
    return gradients, None


_attend.defvjp(_forward, _backward)


class _Keys(NamedTuple):
    """What travels of the keys of one device."""

    k: Array
    v: Array
    segments: Array
    positions: Array
    prefix: Array | None


def _attend_on_shard(plan: _RingPlan, inputs: Inputs, context: _Context) -> tuple[Array, Array, Array, Array]:
    """The output, the logarithm of each row's normalizer, and the keys and values that are home again."""
    num_queries, num_keys = inputs.q.shape[3], inputs.k.shape[2]
    inputs, keys = _pad_to_blocks(plan, inputs, context.mask)

    def step(sums: Sums, keys: _Keys, owner: Array) -> tuple[Sums, _Keys]:
        inputs_there, context_there = _look_at(plan, inputs, context, keys, owner)
        pairs = find_seen_pairs(context_there.mask, plan.passes.blocks)
        return attend_to(plan.passes, pairs, sums, inputs_there, context_there), keys

    sums, keys = _go_round(plan, step, Sums.empty(inputs), keys)
    output, log_normalizer = (x[:, :, :, :num_queries] for x in sums.finish(inputs.v.dtype))
    return output, log_normalizer, keys.k[:, :, :num_keys], keys.v[:, :, :num_keys]


def _gradients_on_shard(
    plan: _RingPlan, inputs: Inputs, context: _Context, output: Array, log_normalizer: Array, d_output: Array
) -> Inputs:
    unpadded, (inputs, keys) = inputs, _pad_to_blocks(plan, inputs, context.mask)
    rows = [pad_axis(x, 3, plan.passes.blocks.num_queries) for x in (output, log_normalizer, d_output)]
    outcome = Outcome.of(*rows)
    d_q, d_k, d_v, d_bias, d_learned = empty_gradients(inputs)

    def step(carry: tuple[Any, ...], moving: tuple[Any, ...], owner: Array) -> tuple[Any, Any]:
        (d_q, d_bias, d_learned), (keys, d_k, d_v) = carry, moving
        inputs_there, context_there = _look_at(plan, inputs, context, keys, owner)
        pairs = find_seen_pairs(context_there.mask, plan.passes.blocks)
        before = Inputs(d_q, d_k, d_v, _cut_bias(plan, d_bias, context.mask, owner), d_learned)
        after = add_gradients(plan.passes, pairs, before, inputs_there, context_there, outcome)
        d_bias = _put_bias(d_bias, after.bias, context.mask, owner)
        return (after.q, d_bias, after.learned), (keys, after.k, after.v)

    (d_q, d_bias, d_learned), (_, d_k, d_v) = _go_round(plan, step, (d_q, d_bias, d_learned), (keys, d_k, d_v))
    gradients = Inputs(d_q, d_k, d_v, *_sum_over_devices(plan, d_bias, d_learned))

    def lower(gradient: Array, x: Array) -> Array:
        return gradient[tuple(map(slice, x.shape))].astype(x.dtype)

    return jax.tree.map(lower, gradients, unpadded)


def _go_round(plan: _RingPlan, step: Any, carry: Any, moving: Any) -> tuple[Any, Any]:
    """`carry, moving = step(carry, moving, owner)` for what each device had; after the last hop all is home again."""
    num_devices, here = plan.ways.length, jax.lax.axis_index(SEQUENCE)
    neighbours = [(device, (device + 1) % num_devices) for device in range(num_devices)]

    def send(x: Array) -> Array:
        if x.dtype != jnp.bfloat16:
            return jax.lax.ppermute(x, SEQUENCE, neighbours)
        # As bits: a backend that does not compute in bfloat16 would send twice as many.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
        return jax.lax.bitcast_convert_type(jax.lax.ppermute(bits, SEQUENCE, neighbours), x.dtype)

    def hop(index: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, moving = step(*state, (here - index) % num_devices)
        return carry, jax.tree.map(send, moving)

    return jax.lax.fori_loop(0, num_devices, hop, (carry, moving))


def _look_at(plan: _RingPlan, inputs: Inputs, context: _Context, keys: _Keys, owner: Array) -> tuple[Inputs, Context]:
    """What a pass over the keys at hand is given, which are those of device `owner`."""
    (batch, num_kv_heads, group, _, _), mask = inputs.q.shape, context.mask
    num_queries, num_keys = mask.q_segments.shape[1], mask.k_segments.shape[1]
    row = jax.lax.axis_index(plan.ways.row_axes) if plan.ways.row_axes else 0
    head = jax.lax.axis_index(plan.ways.head_axis) if plan.ways.head_axis else 0
    here = jax.lax.axis_index(SEQUENCE)
    origin = Origin(row * batch, head * num_kv_heads * group, here * num_queries, owner * num_keys)
    allowed = mask.allowed
    if allowed is not None:
        allowed = jax.lax.dynamic_slice_in_dim(allowed, owner * num_keys, num_keys, axis=2)
    mask = dataclasses.replace(
        mask, k_segments=keys.segments, k_positions=keys.positions, k_prefix=keys.prefix, allowed=allowed
    )
    bias = _cut_bias(plan, inputs.bias, context.mask, owner)
    mask = pad_to_blocks(mask, plan.passes.blocks)
    return inputs._replace(k=keys.k, v=keys.v, bias=bias), Context(mask, context.fixed, context.seed, origin)


def _pad_to_blocks(plan: _RingPlan, inputs: Inputs, mask: Mask) -> tuple[Inputs, _Keys]:
    """A device's inputs in whole blocks, and its keys ready to travel. A bias is padded where it is cut."""
    num_queries, num_keys = plan.passes.blocks
    k, v = (pad_axis(x, 2, num_keys) for x in (inputs.k, inputs.v))
    bias = None if inputs.bias is None else pad_axis(inputs.bias, 2, num_queries)
    padded = inputs._replace(q=pad_axis(inputs.q, 3, num_queries), k=k, v=v, bias=bias)
    return padded, _Keys(k, v, mask.k_segments, mask.k_positions, mask.k_prefix)


def _cut_bias(plan: _RingPlan, bias: Array | None, mask: Mask, owner: Array) -> Array | None:
    """Of a device's bias, the columns of the keys of `owner`."""
    if bias is None:
        return None
    num_keys = mask.k_segments.shape[1]
    own = jax.lax.dynamic_slice_in_dim(bias, owner * num_keys, num_keys, axis=3)
    return pad_axis(own, 3, plan.passes.blocks.num_keys)


def _put_bias(bias: Array | None, own: Array | None, mask: Mask, owner: Array) -> Array | None:
    if bias is None or own is None:
        return None
    num_keys = mask.k_segments.shape[1]
    return jax.lax.dynamic_update_slice_in_dim(bias, own[..., :num_keys], owner * num_keys, axis=3)


def _sum_over_devices(plan: _RingPlan, d_bias: Array | None, d_learned: list[Any]) -> tuple[Array | None, list[Any]]:
    """The gradients of what devices share."""
    rows, heads = plan.ways.row_axes, plan.ways.head_axis
    heads = () if heads is None else (heads,)
    sharing = (() if plan.bias.rows else rows) + (() if plan.bias.heads else heads)
    if d_bias is not None and sharing:
        d_bias = jax.lax.psum(d_bias, sharing)
    return d_bias, jax.tree.map(lambda gradient: jax.lax.psum(gradient, (*rows, *heads, SEQUENCE)), d_learned)


def _pad_mask(mask: Mask, ways: _Ways) -> Mask:
    """Rows and slots that the mesh divides; those behind are padding."""

    def pad(array: Array | None) -> Any:
        if array is None:
            return None
        for axis in range(array.ndim):
            array = pad_axis(array, axis, ways.length if axis else ways.rows)
        return array

    return jax.tree.map(pad, mask)
