"""What one update reports, as sums and counts, and how a window of updates becomes figures.

Sums and counts merge exactly, so a figure never depends on how tokens were spread over updates, micro-batches or
devices: loss is the sum over all tokens of the window divided by their number, not a mean of means.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.data.batch import Batch


class Metrics(NamedTuple):
    """Scalars of one update (jax) or of several merged (numpy); a pytree. Of a skipped update only the steps count."""

    loss_sum: Any  # training loss with label smoothing, nats, summed over the tokens to predict
    nll_sum: Any  # plain negative log-likelihood, nats, summed over the same
    target_tokens: Any  # tokens to predict, eos included where it is one of them
    real_slots: Any  # slots of the global batch that hold a token, of the sides that the model reads
    slots: Any  # all slots of these sides, padding included
    gradient_norm_sum: Any  # global norm before clipping, summed over good updates
    learning_rate: Any  # of the last update
    steps: Any  # updates, skipped ones included
    bad_steps: Any  # updates skipped for a non-finite loss or gradient


def count_slots(batch: Batch, sides: Sequence[str] = ('source', 'target')) -> dict[str, Any]:
    """Slots of a batch as it was loaded, and those of them that hold a token, on these sides."""
    segments = {'source': batch.input_segment_ids, 'target': batch.target_segment_ids}
    return {
        'real_slots': sum((segments[side] > 0).sum() for side in sides),
        'slots': jnp.asarray(sum(segments[side].size for side in sides), jnp.int32),
    }


def count_targets(task: Batch) -> dict[str, Any]:
    """How many tokens of a batch that `Model.objective` made are to be predicted."""
    return {'target_tokens': (task.target_segment_ids > 0).sum()}


def step_metrics(
    *, loss_sum: Any, nll_sum: Any, counts: dict[str, Any], gradient_norm: Any, learning_rate: Any, good: Any
) -> Metrics:
    """The metrics of one update. `counts` are of `count_slots` and `count_targets`; `good` says that it was applied."""

    def keep(value: Any) -> Any:
        value = jnp.asarray(value)
        return jnp.where(good, value, jnp.zeros_like(value))

    return Metrics(
        loss_sum=keep(loss_sum),
        nll_sum=keep(nll_sum),
        **{name: keep(count) for name, count in counts.items()},
        gradient_norm_sum=keep(gradient_norm),
        learning_rate=jnp.asarray(learning_rate),
        steps=jnp.asarray(1, jnp.int32),
        bad_steps=jnp.where(good, 0, 1),
    )


def merge(first: Metrics, second: Metrics) -> Metrics:
    """Sums of both; the learning rate is that of `second`, the later one. Associative."""
    sums = {name: getattr(first, name) + getattr(second, name) for name in Metrics._fields}
    return Metrics(**sums | {'learning_rate': second.learning_rate})


def figures(metrics: Metrics) -> dict[str, float]:
    """What people read: loss and perplexity a token, padding as a fraction, counts. NaN where nothing was counted."""
    tokens = float(metrics.target_tokens)
    nll = _ratio(metrics.nll_sum, tokens)
    return {
        'loss': _ratio(metrics.loss_sum, tokens),
        'nll': nll,
        'perplexity': perplexity(nll),
        'learning_rate': float(metrics.learning_rate),
        'gradient_norm': _ratio(metrics.gradient_norm_sum, float(metrics.steps) - float(metrics.bad_steps)),
        'target_tokens': int(metrics.target_tokens),
        'padding': 1.0 - _ratio(metrics.real_slots, metrics.slots),
        'bad_steps': int(metrics.bad_steps),
    }


def perplexity(nll: float) -> float:
    """The exponential of the plain negative log-likelihood a token, in nats; inf beyond the range of a float."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def _ratio(total: Any, count: Any) -> float:
    return float(total) / float(count) if float(count) else math.nan


class Window:
    """The metrics since the last line of the log.

    `add` keeps device scalars as they are, so that it never waits for a step; `close` waits for all of them and adds in
    float64 and whole numbers, so that a long window loses no precision.
    """

    def __init__(self) -> None:
        self._pending: list[Metrics] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, metrics: Metrics) -> None:
        self._pending.append(metrics)

    def close(self) -> Metrics:
        """The merged metrics of the window, as numpy; the next window starts empty. An empty window raises."""
        if not self._pending:
            raise ValueError('no step was added to this window')
        fetched, self._pending = jax.device_get(self._pending), []
        merged = _widen(fetched[0])
        for metrics in fetched[1:]:
            merged = merge(merged, _widen(metrics))
        return merged


def _widen(metrics: Metrics) -> Metrics:
    def widen(value: Any) -> np.ndarray:
        value = np.asarray(value)
        return value.astype(np.int64 if np.issubdtype(value.dtype, np.integer) else np.float64)

    return Metrics(*(widen(value) for value in metrics))
