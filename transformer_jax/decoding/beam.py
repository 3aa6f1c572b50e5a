"""Beam search with a length penalty. Paper section 6.1."""

from dataclasses import dataclass

from transformer_jax.decoding.candidates import Specials, forbid, log_normalizer, top_candidates
from transformer_jax.decoding.hypotheses import Choice, Search
from transformer_jax.shapes import Array, Float


@dataclass(frozen=True)
class Beam:
    """The W most probable of all continuations of the live hypotheses.

    Those of the W that end are finished and leave; the others are what the next step continues, so a beam of 1 is
    greedy decoding and a beam as wide as the space of outputs is exhaustive search. Hypotheses of one step all have the
    same length, so they compete by log probability; the length penalty ranks finished ones, and decides when to stop.
    """

    num_hypotheses: int

    def choose(
        self, logits: Float[Array, 'B P V'], search: Search, live: Float[Array, 'B P'], specials: Specials
    ) -> Choice:
        """The best W of P * V continuations; equal ones by lower hypothesis, then lower id."""
        allowed = forbid(logits, specials, search.step >= search.min_lengths)
        values, parents, tokens = top_candidates(allowed, live - log_normalizer(logits), self.num_hypotheses)
        return Choice(values, parents, tokens)
