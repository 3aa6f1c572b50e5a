"""Two models on the same parameters: how far the output distribution of one is from that of the other."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from transformer_jax.config import ConfigError
from transformer_jax.data.batch import Batch, HostBatch
from transformer_jax.evaluation.evaluator import Result
from transformer_jax.models.interface import Model, abstract_params
from transformer_jax.parameters import shapes_by_name
from transformer_jax.shapes import Array, Float, Params

_BLOCK_TOKENS = 512  # tokens whose distributions exist at once


@dataclass(frozen=True)
class Comparison:
    """What changed between a trained model and the same parameters under other attention."""

    trained: Result
    other: Result
    divergence: float  # KL(trained || other) in nats a target subword, teacher-forced

    def format(self) -> str:
        """A few lines to read."""
        change = self.other.loss - self.trained.loss
        lines = [
            'the same parameters under other attention, beside the model as it was trained:',
            f'  NLL: {self.other.loss:.6f} - {self.trained.loss:.6f} = {change:+.6f} nats a subword',
            f'  KL of the output distribution: {self.divergence:.3e} nats a subword',
        ]
        for before, after in zip(self.trained.scores, self.other.scores, strict=True):
            lines.append(f'  {after.name}: {after.value:.2f} - {before.value:.2f} = {after.value - before.value:+.2f}')
        if self.trained.match is not None and self.other.match is not None:
            before, after = self.trained.match.value, self.other.match.value
            lines.append(f'  exact match: {after:.1f} - {before:.1f} = {after - before:+.1f} %')
        return '\n'.join(lines)


def require_same_parameters(trained: Model, other: Model) -> None:
    """Raises `ConfigError` unless parameters of the one are parameters of the other."""
    shapes = [shapes_by_name(abstract_params(model)) for model in (trained, other)]
    if shapes[0] == shapes[1]:
        return
    differing = sorted(
        name for name in shapes[0].keys() | shapes[1].keys() if shapes[0].get(name) != shapes[1].get(name)
    )
    name = differing[0]
    raise ConfigError(
        f'config.model is changed so that it needs other parameters than were trained: {len(differing)} differ, such '
        f'as {name}, trained {shapes[0].get(name, "not at all")}, now {shapes[1].get(name, "not needed")}. Only '
        'attention with the same parameters can be swapped: impl, window, num_global, scale, or a kind without '
        'parameters of its own'
    )


def divergence(trained: Model, other: Model, params: Params, batches: Iterable[HostBatch]) -> float:
    """KL(trained || other) in nats, the mean over all that is to be predicted in these batches.

    The batches are as `objective` poses them, and both models have room for the longest (see `Evaluator.batches` and
    `Evaluator.model`).
    """
    total, count = 0.0, 0
    for one in batches:
        divergences, tokens = _batch_divergence(trained, other, params, one.batch)
        total += float(divergences)
        count += int(tokens)
    return total / count


@functools.partial(jax.jit, static_argnums=(0, 1))
def _batch_divergence(trained: Model, other: Model, params: Params, batch: Batch) -> tuple[Float[Array, ''], Array]:
    hidden = [model.hidden(params, batch) for model in (trained, other)]
    real = (batch.target_segment_ids > 0).reshape(-1)
    width = hidden[0].shape[-1]
    missing = -real.size % _BLOCK_TOKENS
    rows = [jnp.pad(h.reshape(-1, width), ((0, missing), (0, 0))).reshape(-1, _BLOCK_TOKENS, width) for h in hidden]
    counts = jnp.pad(real, (0, missing)).reshape(-1, _BLOCK_TOKENS)

    def one_block(block: tuple[Array, Array, Array]) -> Array:
        p, q = (
            jax.nn.log_softmax(model.project(params, h)) for model, h in zip((trained, other), block[:2], strict=True)
        )
        return (jnp.exp(p) * (p - q)).sum(axis=-1) @ block[2].astype(jnp.float32)

    return jax.lax.map(one_block, (*rows, counts)).sum(), real.sum()
