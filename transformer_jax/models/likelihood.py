"""Log-probabilities of targets with the vocabulary projection in blocks of tokens: `[B, T, V]` never exists.

Padding is skipped: real tokens are moved together first, and only their blocks are computed. Sharded, each shard loops
over its own tokens and there is one reduction after the loop. Where the mesh axis `model` splits the vocabulary, a
device computes the logits of its own slice, and of each block a maximum and a sum a token cross the axis.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from transformer_jax.data.batch import Batch
from transformer_jax.models.interface import Model
from transformer_jax.parallel.mesh import FSDP, MODEL
from transformer_jax.parallel.platform import target_platform
from transformer_jax.parallel.rules import activation_spec, ambient_mesh
from transformer_jax.parallel.vocabulary import VocabularySlice
from transformer_jax.shapes import Array, Bool, Float, Int, Params


class Smoothing(NamedTuple):
    """The target distribution: `gold` extra on the right entry, `every` on each of the V real entries. Section 5.4."""

    gold: float
    every: float


def label_smoothing(epsilon: float, vocab_size: int, over: str = 'all') -> Smoothing:
    """Epsilon spread over all V entries (the paper), or over the V - 1 wrong ones (`over='others'`, as T2T does)."""
    every = epsilon / (vocab_size if over == 'all' else vocab_size - 1)
    return Smoothing(1 - epsilon - (0.0 if over == 'all' else every), every)


def cross_entropy(
    model: Model,
    params: Params,
    hidden: Float[Array, 'B T D'],
    targets: Int[Array, 'B T'],
    real: Bool[Array, 'B T'],
    *,
    smoothing: Smoothing,
    block_tokens: int,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Float[Array, ''], Float[Array, '']]:
    """Sums over the real tokens: the smoothed cross-entropy (differentiable), and the plain negative log-likelihood.

    Time of three products `[tokens, D] x [D, V]` with its gradient, which is made in the same pass; memory
    `block_tokens * V`.
    """
    table, bias = model.output_table(params)

    def sums(
        static: _Static, hidden: Array, targets: Array, real: Array, table: Array, bias: Array | None
    ) -> Float[Array, '2']:
        flat = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), real.reshape(-1))
        return _cross_entropy_sums(static, flat[0], table, bias, flat[1], flat[2])

    if mesh is None or mesh.size == 1:
        total = sums(_Static(model.vocab_size, smoothing, block_tokens), hidden, targets, real, table, bias)
    else:
        rows, row_axes = _row_axes(targets.shape, mesh)
        static = _Static(model.vocab_size, smoothing, block_tokens, row_axes)
        total = jax.shard_map(
            lambda *args: jax.lax.psum(sums(static, *args), (*row_axes, MODEL)),
            mesh=mesh, in_specs=(rows, rows, rows, P(MODEL, FSDP), P(MODEL)), out_specs=P(), check_vma=False,
        )(hidden, targets, real, table, bias)  # fmt: skip
    return total[0], jax.lax.stop_gradient(total[1])


def _row_axes(shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> tuple[P, tuple[str, ...]]:
    """Over which mesh axes tokens `[B, T]` lie, as a specification and as a list."""
    spec = activation_spec(shape, ('batch', 'length'), mesh)
    return spec, tuple(axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry))


class TokenScores(NamedTuple):
    """How each token to predict was predicted."""

    log_probabilities: Float[Array, 'B T']  # natural, no smoothing; 0 at padding
    correct: Bool[Array, 'B T']  # no other entry has a greater logit; False at padding


def token_log_probabilities(
    model: Model, params: Params, batch: Batch, *, block_tokens: int = 512
) -> Float[Array, 'B T']:
    """Natural log-probability of each target token, no smoothing; 0 at padding."""
    return score_tokens(model, params, batch, block_tokens=block_tokens).log_probabilities


def score_tokens(model: Model, params: Params, batch: Batch, *, block_tokens: int = 512) -> TokenScores:
    """The scores of the `targets` of a batch that `model.objective` made."""
    hidden = model.hidden(params, batch)
    real = batch.target_segment_ids > 0
    mesh = ambient_mesh()
    if mesh is None:
        own = VocabularySlice(model.vocab_size, model.vocab_size)
        return _score_blocks(block_tokens, hidden, batch.targets, real, lambda x: model.project(params, x), own)
    rows, row_axes = _row_axes(real.shape, mesh)

    def by_shard(hidden: Array, targets: Array, real: Array, table: Array, bias: Array | None) -> TokenScores:
        own = VocabularySlice(table.shape[0], model.vocab_size, is_split=True)
        project = _Projection.of(own, table, bias, hidden.dtype).logits
        return _score_blocks(block_tokens, hidden, targets, real, project, own, row_axes)

    return jax.shard_map(
        by_shard, in_specs=(rows, rows, rows, P(MODEL, FSDP), P(MODEL)), out_specs=rows, check_vma=False
    )(hidden, batch.targets, real, *model.output_table(params))


def _score_blocks(
    block_tokens: int,
    hidden: Float[Array, 'B T D'],
    targets: Int[Array, 'B T'],
    real: Bool[Array, 'B T'],
    project: Callable[[Array], Array],
    own: VocabularySlice,
    row_axes: tuple[str, ...] = (),
) -> TokenScores:
    batch_size, length, width = hidden.shape
    blocks = _Blocks.of(real.reshape(-1), block_tokens)
    rows, gold = blocks.gather(hidden.reshape(-1, width)), blocks.gather(targets.reshape(-1))

    def one_block(index: Array, scores: tuple[Array, Array]) -> tuple[Array, Array]:
        start = index * block_tokens
        logits = project(jax.lax.dynamic_slice_in_dim(rows, start, block_tokens))
        gold_logits = own.sum(own.pick(logits, jax.lax.dynamic_slice_in_dim(gold, start, block_tokens)))
        peak = own.max(logits.max(axis=1))
        log_total = jnp.log(own.sum(jnp.exp(logits - peak[:, None]).sum(axis=1))) + peak
        put = jax.lax.dynamic_update_slice_in_dim
        return put(scores[0], gold_logits - log_total, start, 0), put(scores[1], gold_logits >= peak, start, 0)

    nothing = jnp.zeros(gold.shape, jnp.float32), jnp.zeros(gold.shape, bool)
    in_blocks = jax.lax.fori_loop(0, _most(blocks.num_needed, row_axes), one_block, nothing)
    log_probabilities, correct = (blocks.scatter(scores).reshape(batch_size, length) for scores in in_blocks)
    return TokenScores(jnp.where(real, log_probabilities, 0.0), real & correct)


class _Blocks(NamedTuple):
    """Tokens reordered so that the real ones come first, padded to whole blocks."""

    order: Int[Array, 'tokens']
    inverse: Int[Array, 'tokens']
    num_padding: int
    num_needed: Int[Array, '']

    @classmethod
    def of(cls, real: Bool[Array, 'tokens'], block_tokens: int) -> '_Blocks':
        order = jnp.argsort(~real, stable=True)
        num_needed = (real.sum() + block_tokens - 1) // block_tokens
        return cls(order, jnp.argsort(order), -real.shape[0] % block_tokens, num_needed)

    def gather(self, tokens: Array) -> Array:
        """In block order, zeros behind."""
        return jnp.pad(tokens[self.order], [(0, self.num_padding)] + [(0, 0)] * (tokens.ndim - 1))

    def scatter(self, blocks: Array) -> Array:
        """Back in token order."""
        return blocks[self.inverse]


class _Static(NamedTuple):
    """What a program is compiled for."""

    vocab_size: int
    smoothing: Smoothing
    block_tokens: int
    row_axes: tuple[str, ...] | None = None  # the mesh axes over which tokens lie; None = on one device


class _Projection(NamedTuple):
    """The projection onto the entries that are on this device."""

    own: VocabularySlice
    matrix: Float[Array, 'V D']
    bias: Float[Array, 'V'] | None
    is_entry: Bool[Array, 'V']
    entries_sum: Float[Array, 'D']  # what a pass over the logits of all entries would sum is a product with this
    bias_sum: Any

    @classmethod
    def of(
        cls, own: VocabularySlice, table: Float[Array, 'V d'], bias: Float[Array, 'V'] | None, dtype: jnp.dtype
    ) -> '_Projection':
        matrix, is_entry = own.gather_width(table.astype(dtype)), own.is_entry()
        entries_sum = jnp.where(is_entry[:, None], matrix, 0).sum(axis=0, dtype=jnp.float32)
        bias_sum = 0.0 if bias is None else jnp.where(is_entry, bias, 0).sum()
        return cls(own, matrix, bias, is_entry, entries_sum, bias_sum)

    @property
    def has_padding(self) -> bool:
        """Whether some rows may be no entries."""
        return self.own.is_split or self.own.vocab_size < self.own.num_rows

    def logits(self, x: Float[Array, 'x D']) -> Float[Array, 'x V']:
        """In float32; of rows that are no entries -inf."""
        logits = jnp.einsum('xD,VD->xV', x, self.matrix, preferred_element_type=jnp.float32)
        if self.bias is not None:
            logits += self.bias[None]
        return jnp.where(self.is_entry[None], logits, -jnp.inf) if self.has_padding else logits

    def gold_logits(self, x: Float[Array, 'x D'], y: Int[Array, 'x']) -> Float[Array, 'x']:
        """The logit of each token's own target, on the device that has it; 0 on others."""
        row, is_own = self.own.locate(y)
        logits = (x.astype(jnp.float32) * self.matrix[row].astype(jnp.float32)).sum(axis=1)
        return jnp.where(is_own, logits if self.bias is None else logits + self.bias[row], 0)

    def logits_sum(self, x: Float[Array, 'x D']) -> Float[Array, 'x']:
        """The sum of the logits of each token."""
        return x.astype(jnp.float32) @ self.entries_sum + self.bias_sum

    def smoothed(self, y: Int[Array, 'x'], smoothing: Smoothing) -> Float[Array, 'x V']:
        """The target distribution."""
        is_gold = self.own.entries()[None] == y[:, None]
        every = smoothing.every * self.is_entry[None] if self.has_padding else smoothing.every
        return smoothing.gold * is_gold + every

    def pull(self, x: Float[Array, 'x D'], d_logits: Float[Array, 'x V']) -> tuple[Array, Array, Array | None]:
        """The gradients of x, of the matrix and of the bias."""
        d_x = jnp.einsum('xV,VD->xD', d_logits, self.matrix)
        d_matrix = jnp.einsum('xV,xD->VD', d_logits, x, preferred_element_type=jnp.float32)
        return d_x, d_matrix, None if self.bias is None else d_logits.astype(jnp.float32).sum(axis=0)


# In nats. A sum of exponentials of logits this far above their reference is finite for any vocabulary.
_MOST_ABOVE = 64.0


class _Carry(NamedTuple):
    """What a turn of the loop over blocks leaves to the next."""

    index: Int[Array, '']  # of the block that is next
    again: Bool[Array, '']  # the same block once more
    peak: Float[Array, 'block']  # its greatest logits, then
    sums: Float[Array, '2']
    rows: Float[Array, 'tokens D']  # hidden; with gradients, those of the blocks that are done in their place
    gradients: tuple[Any, Any]  # of table and bias; None where there is none


def _most(num_blocks: Int[Array, ''], row_axes: tuple[str, ...]) -> Int[Array, '']:
    """The blocks of the device that has most: all turn as often, because what is split crosses devices at each turn."""
    return jax.lax.pmax(num_blocks, row_axes) if row_axes else num_blocks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy_sums(
    static: _Static, hidden: Array, table: Array, bias: Array | None, targets: Array, real: Array
) -> Float[Array, '2']:
    return _run_blocks(static, hidden, table, bias, targets, real, with_gradient=False)[0]


def _forward(
    static: _Static, hidden: Array, table: Array, bias: Array | None, targets: Array, real: Array
) -> tuple[Float[Array, '2'], tuple[Array, Array, Array | None] | None]:
    return _run_blocks(static, hidden, table, bias, targets, real, with_gradient=True)


def _backward(static: _Static, gradients: tuple, cotangent: Float[Array, '2']) -> tuple[Array | None, ...]:
    return *(None if g is None else g * cotangent[0].astype(g.dtype) for g in gradients), None, None


_cross_entropy_sums.defvjp(_forward, _backward)


def _run_blocks(
    static: _Static,
    hidden: Float[Array, 'tokens D'],
    table: Float[Array, 'V d'],
    bias: Float[Array, 'V'] | None,
    targets: Int[Array, 'tokens'],
    real: Bool[Array, 'tokens'],
    *,
    with_gradient: bool,
) -> tuple[Float[Array, '2'], tuple[Array, Array, Array | None] | None]:
    """The sums, and the gradients of the first of them, block by block.

    The gradient of a sum of losses is known as soon as a block's logits are: making it here saves the third projection
    that recomputing them in a backward pass would take. Exponentials are taken of logits above the gold one, which is
    known first, so that one pass over the logits of a block is enough: their sum is at least 1. Where another logit is
    so far above that it would overflow, the block is taken again with the greatest logits, which the first pass found.
    """
    block_tokens = static.block_tokens
    own = VocabularySlice(table.shape[0], static.vocab_size, is_split=static.row_axes is not None)
    projection, blocks = _Projection.of(own, table, bias, hidden.dtype), _Blocks.of(real, block_tokens)
    hidden = jnp.where(real[:, None], hidden, 0)  # what padding holds must not count, NaN included
    rows, gold, weight = blocks.gather(hidden), blocks.gather(targets), blocks.gather(real.astype(jnp.float32))

    def one_block(carry: _Carry) -> _Carry:
        start = carry.index * block_tokens
        x = jax.lax.dynamic_slice_in_dim(carry.rows, start, block_tokens)
        y = jax.lax.dynamic_slice_in_dim(gold, start, block_tokens)
        w = jax.lax.dynamic_slice_in_dim(weight, start, block_tokens)
        gold_logits, logits = projection.gold_logits(x, y), projection.logits(x)
        peak = own.max(logits.max(axis=1))
        reference = jnp.where(carry.again, carry.peak, own.sum(gold_logits))
        exponentials = jnp.exp(logits - reference[:, None])
        total = own.sum(exponentials.sum(axis=1))
        # Comparing with NaN is False: such a block is taken again as well, and stands as it is then.
        stands = carry.again | jnp.all(peak - reference < _MOST_ABOVE)
        stands = jax.lax.pmin(stands.astype(jnp.int32), static.row_axes) > 0 if static.row_axes else stands
        if target_platform() == 'tpu':
            # Float32 logits of a block do not fit into fast memory, their exponentials in bfloat16 do. The barrier
            # keeps XLA from making them anew for each product.
            exponentials, total = jax.lax.optimization_barrier((exponentials.astype(x.dtype), total))
        log_total = own.once(jnp.log(total) + reference)
        loss = log_total - static.smoothing.gold * gold_logits - static.smoothing.every * projection.logits_sum(x)
        sums = carry.sums + jnp.stack([(w * loss).sum(), (w * (log_total - gold_logits)).sum()])
        left, gradients = carry.rows, carry.gradients
        if with_gradient:
            d_logits = exponentials * (w / total)[:, None] - projection.smoothed(y, static.smoothing) * w[:, None]
            d_x, *changes = projection.pull(x, d_logits.astype(hidden.dtype))
            left = jax.lax.dynamic_update_slice_in_dim(left, jnp.where(stands, d_x, x), start, 0)
            added = jax.tree.map(jnp.add, gradients, tuple(changes))
            gradients = jax.tree.map(functools.partial(jnp.where, stands), added, gradients)
        return _Carry(carry.index + stands, ~stands, peak, jnp.where(stands, sums, carry.sums), left, gradients)

    gradients = (None, None)
    if with_gradient:
        d_table = jnp.zeros(projection.matrix.shape, table.dtype)
        gradients = (d_table, None if bias is None else jnp.zeros_like(bias))
    num_needed = _most(blocks.num_needed, static.row_axes or ())
    first = _Carry(jnp.int32(0), jnp.bool(False), jnp.zeros(block_tokens, jnp.float32), jnp.zeros(2), rows, gradients)
    last = jax.lax.while_loop(lambda carry: carry.index < num_needed, one_block, first)
    if not with_gradient:
        return last.sums, None
    d_table, d_bias = last.gradients
    # Blocks that were not needed hold padding, whose hidden rows are zeros, as are its gradients.
    return last.sums, (blocks.scatter(last.rows), own.scatter_width(d_table), d_bias)
