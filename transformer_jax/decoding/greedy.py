"""Greedy decoding: always the most probable next subword."""

from dataclasses import dataclass

import jax.numpy as jnp

from transformer_jax.decoding.candidates import Specials, forbid, log_normalizer
from transformer_jax.decoding.hypotheses import Choice, Search
from transformer_jax.shapes import Array, Float


@dataclass(frozen=True)
class Greedy:
    """One hypothesis a sentence; of equally probable subwords the one with the lower id."""

    num_hypotheses: int = 1

    def choose(
        self, logits: Float[Array, 'B P V'], search: Search, live: Float[Array, 'B P'], specials: Specials
    ) -> Choice:
        """The largest logit; P = 1."""
        allowed = forbid(logits, specials, search.step >= search.min_lengths)
        tokens = allowed.argmax(axis=-1)
        chosen = jnp.take_along_axis(allowed, tokens[..., None], axis=-1)[..., 0]
        return Choice(chosen + (live - log_normalizer(logits)), jnp.zeros_like(tokens), tokens)
