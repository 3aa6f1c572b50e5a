"""Hypotheses on the device: the live ones, the finished ones kept apart, and the rule by which a step moves them."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding.candidates import Specials
from transformer_jax.decoding.length_penalty import LengthPenalty
from transformer_jax.shapes import Array, Bool, Cache, Float, Int


class Finished(NamedTuple):
    """The best F hypotheses that have ended, best score first; -inf where there is none yet."""

    scores: Float[Array, 'B F']  # log probability over length penalty
    log_probabilities: Float[Array, 'B F']
    lengths: Int[Array, 'B F']  # scored subwords with eos
    parents: Int[Array, 'B F']  # which hypothesis of the step before eos it was


class Search(NamedTuple):
    """A search over B sentences with W hypotheses each, all of which have chosen `step` subwords.

    What they chose is held as a tree: `tokens[b, t, w]` was chosen at step t by hypothesis w, which continued what
    hypothesis `parents[b, t, w]` was at step t - 1. No step moves a history; `trace` on the host reads it backwards.
    """

    step: Int[Array, '']
    log_probabilities: Float[Array, 'B W']  # of the live hypotheses; -inf where there is none
    tokens: Int[Array, 'B H W']
    parents: Int[Array, 'B H W']
    finished: Finished
    is_done: Bool[Array, 'B']
    lengths: Int[Array, 'B']  # subwords that the live hypotheses of a sentence held when it was done
    limits: Int[Array, 'B']  # most scored subwords, eos included
    min_lengths: Int[Array, 'B']  # fewest scored subwords before eos
    keys: Array  # PRNG keys, [B]
    cache: Cache


class Choice(NamedTuple):
    """What the W hypotheses of each sentence become, best first: which ones are continued by which tokens."""

    log_probabilities: Float[Array, 'B W']  # sums, the new token included; -inf = nothing was left to choose
    parents: Int[Array, 'B W']
    tokens: Int[Array, 'B W']


@runtime_checkable
class Method(Protocol):
    """How the next subwords are chosen. Hashable: a compiled program is made for each."""

    @property
    def num_hypotheses(self) -> int:
        """W."""
        ...

    def choose(
        self, logits: Float[Array, 'B P V'], search: Search, live: Float[Array, 'B P'], specials: Specials
    ) -> Choice:
        """From the P live hypotheses (1 at the first step, then W) and the logits of what follows them."""
        ...


@dataclass(frozen=True)
class StopRule:
    """When the search for a sentence ends before its limit.

    `exact`: when no continuation of a live hypothesis can still beat the worst of the finished ones that are kept, so
    that stopping changes no result. A continuation's log probability is at most what it is now; its length is at least
    one more, and at most the limit. `heuristic` stops sooner, when no live hypothesis would beat it if it ended at its
    present length, which is what Hugging Face's `early_stopping=False` does with W of them kept.
    """

    kind: str

    def holds(
        self,
        live: Float[Array, 'B W'],
        finished: Finished,
        length: Int[Array, ''],
        limits: Int[Array, 'B'],
        penalty: LengthPenalty,
    ) -> Bool[Array, 'B']:
        """Whether to stop, all hypotheses being `length` subwords long."""
        if self.kind == 'exact':
            divisor = penalty.best(length + 1, jnp.maximum(limits, length + 1))
        else:
            divisor = penalty(length)
        return live.max(axis=1) / divisor <= finished.scores.min(axis=1)  # -inf <= anything: nothing is live


def start(
    limits: Int[Array, 'B'], min_lengths: Int[Array, 'B'], keys: Array, cache: Cache, *, width: int, num_finished: int,
    history: int,
) -> Search:  # fmt: skip
    """A search that has chosen nothing. A limit of 0 marks a row that only fills the batch."""
    B = limits.shape[0]
    finished = Finished(
        scores=jnp.full((B, num_finished), -jnp.inf),
        log_probabilities=jnp.full((B, num_finished), -jnp.inf),
        lengths=jnp.zeros((B, num_finished), jnp.int32),
        parents=jnp.zeros((B, num_finished), jnp.int32),
    )
    return Search(
        step=jnp.zeros((), jnp.int32),
        log_probabilities=jnp.full((B, width), -jnp.inf).at[:, 0].set(0.0),
        tokens=jnp.zeros((B, history, width), jnp.int32),
        parents=jnp.zeros((B, history, width), jnp.int32),
        finished=finished,
        is_done=limits <= 0,
        lengths=jnp.zeros((B,), jnp.int32),
        limits=limits,
        min_lengths=min_lengths,
        keys=keys,
        cache=cache,
    )


def take(search: Search, choice: Choice, eos_id: int, penalty: LengthPenalty, stop: StopRule) -> Search:
    """One step: choices that end go to the finished ones, the others live on. What is done stays as it is."""
    length = search.step + 1
    ends = choice.tokens == eos_id
    finished = _merge(search.finished, choice, ends, length, penalty)
    live = jnp.where(ends, -jnp.inf, choice.log_probabilities)
    is_done = (length >= search.limits) | stop.holds(live, finished, length, search.limits, penalty)
    old = search.is_done
    at_step = (0, search.step, 0)
    return search._replace(
        step=length,
        log_probabilities=jnp.where(old[:, None], search.log_probabilities, live),
        tokens=jax.lax.dynamic_update_slice(search.tokens, choice.tokens[:, None, :], at_step),
        parents=jax.lax.dynamic_update_slice(search.parents, choice.parents[:, None, :], at_step),
        finished=jax.tree.map(lambda before, now: jnp.where(old[:, None], before, now), search.finished, finished),
        is_done=old | is_done,
        lengths=jnp.where(old, search.lengths, length),
    )


def _merge(
    finished: Finished, choice: Choice, ends: Bool[Array, 'B W'], length: Array, penalty: LengthPenalty
) -> Finished:
    """The best F of the finished ones and those that end now; of equal scores the one that ended first."""
    log_probabilities = jnp.where(ends, choice.log_probabilities, -jnp.inf)
    new = Finished(
        scores=log_probabilities / penalty(length),
        log_probabilities=log_probabilities,
        lengths=jnp.full(ends.shape, length),
        parents=choice.parents,
    )
    both = jax.tree.map(lambda before, now: jnp.concatenate([before, now], axis=1), finished, new)
    kept = jax.lax.top_k(both.scores, finished.scores.shape[1])[1]
    return jax.tree.map(lambda leaf: jnp.take_along_axis(leaf, kept, axis=1), both)


class Traced(NamedTuple):
    """One hypothesis on the host: its subwords without eos, and its figures."""

    tokens: tuple[int, ...]
    log_probability: float
    length: int  # scored subwords with eos
    is_finished: bool


def trace(search: Search, sentence: int) -> list[Traced]:
    """The hypotheses of a sentence that is done (arrays on the host), best first: finished ones, then live ones."""
    finished = search.finished
    found = []
    for rank in range(finished.scores.shape[1]):
        if finished.log_probabilities[sentence, rank] == -np.inf:
            continue
        length = int(finished.lengths[sentence, rank])
        tokens = _walk_back(search, sentence, length - 2, int(finished.parents[sentence, rank]))
        found.append(Traced(tokens, float(finished.log_probabilities[sentence, rank]), length, True))
    live = search.log_probabilities[sentence]
    length = int(search.lengths[sentence])
    for hypothesis in np.argsort(-live, kind='stable'):
        if live[hypothesis] > -np.inf:
            tokens = _walk_back(search, sentence, length - 1, int(hypothesis))
            found.append(Traced(tokens, float(live[hypothesis]), length, False))
    return found


def _walk_back(search: Search, sentence: int, step: int, hypothesis: int) -> tuple[int, ...]:
    """What a hypothesis had chosen up to and with `step`."""
    tokens = []
    for t in range(step, -1, -1):
        tokens.append(int(search.tokens[sentence, t, hypothesis]))
        hypothesis = int(search.parents[sentence, t, hypothesis])
    return tuple(reversed(tokens))
