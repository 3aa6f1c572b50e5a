"""Log-probabilities of targets with the vocabulary projection in blocks of tokens: `[B, T, V]` never exists.

Padding is skipped: real tokens are moved together first, and only their blocks are computed. Sharded, each shard loops
over its own tokens and there is one reduction after the loop.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from transformer_jax.data.batch import Batch
from transformer_jax.models.interface import Model
from transformer_jax.parallel.mesh import ROWS, SEQUENCE, num_data_shards
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

    def sums(hidden: Array, targets: Array, real: Array, table: Array, bias: Array | None) -> Array:
        flat = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), real.reshape(-1))
        return _cross_entropy_sums((model.vocab_size, smoothing, block_tokens), flat[0], table, bias, flat[1], flat[2])

    if mesh is None or num_data_shards(mesh) * mesh.shape[SEQUENCE] == 1:
        total = sums(hidden, targets, real, table, bias)
    else:
        rows, whole = P(ROWS, SEQUENCE), P()
        total = jax.shard_map(
            lambda *args: jax.lax.psum(sums(*args), (*ROWS, SEQUENCE)),
            mesh=mesh, in_specs=(rows, rows, rows, whole, whole), out_specs=whole, check_vma=False,
        )(hidden, targets, real, table, bias)  # fmt: skip
    return total[0], jax.lax.stop_gradient(total[1])


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
    batch_size, length, width = hidden.shape
    blocks = _Blocks.of(real.reshape(-1), block_tokens)
    rows, gold = blocks.gather(hidden.reshape(-1, width)), blocks.gather(batch.targets.reshape(-1))

    def one_block(index: Array, scores: tuple[Array, Array]) -> tuple[Array, Array]:
        start = index * block_tokens
        logits = model.project(params, jax.lax.dynamic_slice_in_dim(rows, start, block_tokens))
        chosen = jax.lax.dynamic_slice_in_dim(gold, start, block_tokens)
        gold_logits = jnp.take_along_axis(logits, chosen[:, None], axis=1)[:, 0]
        new = gold_logits - jax.nn.logsumexp(logits, axis=1), gold_logits >= logits.max(axis=1)
        put = jax.lax.dynamic_update_slice_in_dim
        return put(scores[0], new[0], start, 0), put(scores[1], new[1], start, 0)

    nothing = jnp.zeros(gold.shape, jnp.float32), jnp.zeros(gold.shape, bool)
    in_blocks = jax.lax.fori_loop(0, blocks.num_needed, one_block, nothing)
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


_Static = tuple[int, Smoothing, int]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy_sums(
    static: _Static, hidden: Array, table: Array, bias: Array | None, targets: Array, real: Array
) -> Float[Array, '2']:
    return _run_blocks(static, hidden, table, bias, targets, real, with_gradient=False)[0]


def _forward(static: _Static, hidden: Array, table: Array, bias: Array | None, targets: Array, real: Array):
    return _run_blocks(static, hidden, table, bias, targets, real, with_gradient=True)


def _backward(static: _Static, gradients: tuple, cotangent: Float[Array, '2']):
    return *(None if g is None else g * cotangent[0].astype(g.dtype) for g in gradients), None, None


_cross_entropy_sums.defvjp(_forward, _backward)


def _run_blocks(
    static: _Static,
    hidden: Float[Array, 'tokens D'],
    table: Float[Array, 'V D'],
    bias: Float[Array, 'V'] | None,
    targets: Int[Array, 'tokens'],
    real: Bool[Array, 'tokens'],
    *,
    with_gradient: bool,
) -> tuple[Float[Array, '2'], tuple[Array, Array, Array | None] | None]:
    """The sums, and the gradients of the first of them, block by block.

    The gradient of a sum of losses is known as soon as a block's logits are: making it here saves the third projection
    that recomputing them in a backward pass would take.
    """
    vocab_size, smoothing, block_tokens = static
    blocks = _Blocks.of(real, block_tokens)
    hidden = jnp.where(real[:, None], hidden, 0)  # what padding holds must not count, NaN included
    rows, gold, weight = blocks.gather(hidden), blocks.gather(targets), blocks.gather(real.astype(jnp.float32))
    matrix = table.astype(hidden.dtype)
    is_entry = jnp.arange(table.shape[0]) < vocab_size

    def one_block(index: Array, carry: tuple) -> tuple:
        sums, d_rows, d_table, d_bias = carry
        start = index * block_tokens
        x = jax.lax.dynamic_slice_in_dim(rows, start, block_tokens)
        y = jax.lax.dynamic_slice_in_dim(gold, start, block_tokens)
        w = jax.lax.dynamic_slice_in_dim(weight, start, block_tokens)
        logits = jnp.einsum('xD,VD->xV', x, matrix, preferred_element_type=jnp.float32)
        if bias is not None:
            logits += bias[None]
        if vocab_size < table.shape[0]:
            logits = jnp.where(is_entry[None], logits, -jnp.inf)
        peak = logits.max(axis=1, keepdims=True)
        exponentials = jnp.exp(logits - peak)
        total = exponentials.sum(axis=1, keepdims=True)
        log_total = (jnp.log(total) + peak)[:, 0]
        gold_logits = jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
        logits_sum = jnp.where(is_entry[None], logits, 0.0).sum(axis=1)
        loss = log_total - smoothing.gold * gold_logits - smoothing.every * logits_sum
        sums += jnp.stack([(w * loss).sum(), (w * (log_total - gold_logits)).sum()])
        if with_gradient:
            is_gold = jnp.arange(table.shape[0])[None] == y[:, None]
            d_logits = exponentials / total - smoothing.gold * is_gold - smoothing.every * is_entry[None]
            d_logits = (d_logits * w[:, None]).astype(hidden.dtype)
            d_x = jnp.einsum('xV,VD->xD', d_logits, matrix)
            d_rows = jax.lax.dynamic_update_slice_in_dim(d_rows, d_x, start, 0)
            d_table += jnp.einsum('xV,xD->VD', d_logits, x, preferred_element_type=jnp.float32)
            d_bias = None if d_bias is None else d_bias + d_logits.astype(jnp.float32).sum(axis=0)
        return sums, d_rows, d_table, d_bias

    gradients = (None, None, None)
    if with_gradient:
        gradients = (jnp.zeros_like(rows), jnp.zeros_like(table), None if bias is None else jnp.zeros_like(bias))
    sums, *gradients = jax.lax.fori_loop(0, blocks.num_needed, one_block, (jnp.zeros(2), *gradients))
    if not with_gradient:
        return sums, None
    d_rows, d_table, d_bias = gradients
    return sums, (blocks.scatter(d_rows), d_table, d_bias)
